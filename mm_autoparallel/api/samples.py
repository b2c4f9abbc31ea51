"""Data sets counted: what `data stats` does, files of any known kind into figures and one compact sample file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm_autoparallel.errors import JobError
from mm_autoparallel.files import describe_value
from mm_autoparallel.samples.content import TEXTS
from mm_autoparallel.samples.image_size import read_size
from mm_autoparallel.samples.opened import MOST_RECORD, name_file, open_samples
from mm_autoparallel.samples.record import KNOWN, read_record, write_record
from mm_autoparallel.samples.rules import SampleRules
from mm_autoparallel.samples.sample import Sample, SampleCost
from mm_autoparallel.samples.sources import list_samples
from mm_autoparallel.samples.statistics import Spread, describe_table
from mm_autoparallel.samples.table import SampleTable, keep_samples

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mm_autoparallel.model.job.job import Job
    from mm_autoparallel.model.job.model import Model
    from mm_autoparallel.model.job.sample_source import SampleSource

_CONFIGURATION = "dataset_param"
"""What MindSpeed-MM's data file has, and no list of samples."""
_COLUMNS = ("images", "videos", "audios", "messages")
"""Of a record, that such a file may name otherwise."""
_TAGS = ("content", "value", "text")
"""Keys of a turn that may hold its text."""


@dataclass(frozen=True, eq=False)
class DataStatistics:
    """Of all samples of some files. table: those that were kept of them. spreads: a row for each quantity. on_device:
    what loads are of, in words; empty without a job. cost: of a sample of the job, as BatchBalancer takes it."""

    table: SampleTable
    spreads: tuple[Spread, ...]
    on_device: str = ""
    cost: SampleCost | None = None

    def document(self) -> dict[str, Any]:
        """What `data stats --json` prints."""
        return {
            "num_samples": self.table.num_read,
            "num_kept": len(self.table),
            "sha256": self.table.sha256,
            "statistics": {row.of: row.document() for row in self.spreads},
            "sample_cost": asdict(self.cost) if self.cost else None,
        }

    def renderables(self) -> list[RenderableType]:
        """A table and a line, for rich's consoles."""
        from rich import box
        from rich.table import Table

        shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        shown.add_column("of a sample", no_wrap=True)
        for heading in ("mean", "p50", "p95", "p99", "most", "deviation / mean"):
            shown.add_column(heading, justify="right", no_wrap=True)
        for row in self.spreads:
            figures = (row.mean_count, row.p50_count, row.p95_count, row.p99_count, row.most_count)
            name = row.of.replace("_", " ")
            shown.add_row(name, *(f"{figure:,.1f}" for figure in figures), f"{row.spread_fraction:.2f}")
        kept = "" if len(self.table) == self.table.num_read else f", figures of {len(self.table):,} drawn from them"
        lines = [f"{self.table.num_read:,} samples{kept}{self.on_device}"]
        return [shown, *lines, *([f"to deal them: {self.cost}"] if self.cost else [])]

    def write(self, path: Path) -> None:
        """Write the samples as a compact sample file, JSONL, in one step. Raises OSError."""
        from mm_autoparallel.files import write_text_atomically

        lines = (write_record(self.table.sample(index)) for index in range(len(self.table)))
        write_text_atomically(path, "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))


def count_samples(
    paths: Sequence[Path], rules: SampleRules, job: Job | None = None, images: Path | None = None
) -> DataStatistics:
    """Figures of the samples in `paths`. rules: what is said of pixels and text; the job's own samples and its model
    say the rest. images: the folder that named images lie in. Raises JobError naming file and place of what is wrong.
    """
    if job is not None:
        rules = _rules_of(job.model, job.workload.samples, rules)
    return _describe(_read_samples(paths, rules, images), rules, job)


def is_waiting(job_path: Path, out: Path) -> bool:
    """Whether the job at `job_path` names a model, and `out` as the file of its samples. Raises JobError."""
    from mm_autoparallel.files import read_document

    document = read_document(job_path, "job file")
    file, model = _source_document(document).get("file"), document.get("model")
    if not isinstance(file, str) or not isinstance(model, (str, dict)):
        return False
    return (job_path.parent / file).resolve() == out.resolve()


def count_for(
    job_path: Path, out: Path, paths: Sequence[Path], rules: SampleRules, images: Path | None = None
) -> DataStatistics:
    """Figures as of `count_samples`, of a job that waits for its sample file `out`, which is written. Raises JobError;
    where the job is at fault, `out` is not there afterwards. Raises OSError where it cannot be written."""
    from mm_autoparallel.api.jobs import read_job
    from mm_autoparallel.files import read_document
    from mm_autoparallel.model.job.sample_source import SampleSource
    from mm_autoparallel.model.readers.model_file import parse_inline_model, read_model
    from mm_autoparallel.validation import parse_record

    document = read_document(job_path, "job file")
    named = document.get("model")
    model = parse_inline_model(named, job_path) if isinstance(named, dict) else read_model(job_path.parent / f"{named}")
    source = parse_record(SampleSource, _source_document(document), "job file", job_path)
    rules = _rules_of(model, source, rules)
    table = _read_samples(paths, rules, images)
    DataStatistics(table, ()).write(out)
    try:
        job = read_job(job_path)
        return _describe(table, rules, job)
    except JobError:
        out.unlink(missing_ok=True)
        raise


def _source_document(document: Mapping[str, Any]) -> dict[str, Any]:
    """A job's workload.samples, of which a plain name is the file's; empty where it is neither."""
    workload = document.get("workload")
    source = workload.get("samples") if isinstance(workload, Mapping) else None
    return {"file": source} if isinstance(source, str) else dict(source) if isinstance(source, Mapping) else {}


def _rules_of(model: Model, source: SampleSource | None, rules: SampleRules) -> SampleRules:
    """`rules`, which hold before those of a job's samples, which hold before those of its model."""
    from mm_autoparallel.model.readers.sample_source import check_sharing, rules_of

    check_sharing(model, f"the model {model.name}")
    if source is not None:
        rules = replace(
            rules,
            patch_size=rules.patch_size or source.patch_size,
            least_pixels=source.least_pixels,
            most_pixels=rules.most_pixels or source.most_pixels,
            characters_count_per_token=rules.characters_count_per_token or source.characters_per_token,
        )
    of_model = rules_of(model, rules)
    return of_model if rules.patch_size is None else replace(of_model, patch_size=rules.patch_size)


def _read_samples(paths: Sequence[Path], rules: SampleRules, images: Path | None) -> SampleTable:
    if images is not None:
        rules = replace(rules, find_size=lambda name: _find_size(images, name))
    return keep_samples(one for path in paths for one in _list_samples(path, rules))


def _describe(table: SampleTable, rules: SampleRules, job: Job | None) -> DataStatistics:
    """Figures of a table, with a job also what its samples take."""
    if job is None:
        rows = describe_table(table, rules.merge_side**2)
        return DataStatistics(table, tuple(rows))
    from mm_autoparallel.model.costs.cost_model import CostModel
    from mm_autoparallel.model.costs.sample_loads import loads_ms, sample_cost, sample_laws
    from mm_autoparallel.model.readers.sample_source import check_media

    check_media(table, job.model, f"the model {job.model.name}")
    laws = sample_laws(CostModel(job), table)
    loads = {name: loads_ms(table, law, job.model) for name, law in laws.items()}
    rows = describe_table(table, job.model.merge_tokens, job.model.audio_tokens_per_s, loads)
    told = f"; loads: forward and backward on one {job.cluster.device.name}, analytic"
    return DataStatistics(table, tuple(rows), told, sample_cost(laws, job.model) if "text" in laws else None)


def _find_size(folder: Path, name: str) -> tuple[int, int] | None:
    try:
        with open_samples(folder / name) as stream:
            return read_size(stream)
    except JobError:  # the record that names it says that it is not there
        return None


def _list_samples(path: Path, rules: SampleRules) -> Iterator[Sample]:
    """Those of one file; where it is MindSpeed-MM's data file, those of the files that it names."""
    content = _read_configuration(path)
    if content is None:
        yield from list_samples(path, lambda record: read_record(record, rules))
        return
    parameters = content[_CONFIGURATION]
    basic, preprocess = (_section(parameters, name) for name in ("basic_parameters", "preprocess_parameters"))
    named = basic.get("dataset", basic.get("data_path"))
    if not isinstance(named, str) or not named:
        raise JobError(
            f"{_CONFIGURATION}.basic_parameters names no dataset and no data_path; give the file of its samples itself",
            where=name_file(path),
        )
    pixels = preprocess.get("image_max_pixels", preprocess.get("image_resolution"))
    if pixels is not None and (isinstance(pixels, bool) or not isinstance(pixels, int) or pixels < 1):
        raise JobError(
            f"{_CONFIGURATION}.preprocess_parameters says images of at most {describe_value(pixels)} pixels; a whole "
            "number, at least 1, is expected",
            where=name_file(path),
        )
    if rules.most_pixels is None and pixels is not None:
        rules = replace(rules, most_pixels=pixels)
    columns = _list_columns(parameters, path)
    for name in filter(None, map(str.strip, named.split(","))):
        near = Path(name) if Path(name).exists() else path.parent / name
        if not near.exists():
            raise JobError(
                f"it names {name}, which lies neither in the folder that this runs in nor beside the file; run this "
                "where the training runs",
                where=name_file(path),
            )
        yield from list_samples(near, lambda record: read_record(_rename(record, columns), rules))


def _list_columns(parameters: Mapping[str, Any], path: Path) -> dict[str, str]:
    """Key of a record → the column that MindSpeed-MM's data file has it in. Raises JobError."""
    attributes = _section(parameters, "attr")
    columns = {key: attributes[key] for key in _COLUMNS if attributes.get(key) is not None}
    wrong = next((key for key, column in columns.items() if not isinstance(column, str)), None)
    if wrong:
        raise JobError(
            f"{_CONFIGURATION}.attr.{wrong} is {describe_value(columns[wrong])}; the name of a column is expected",
            where=name_file(path),
        )
    tag = attributes.get("content_tag")
    if tag not in (None, *_TAGS):
        raise JobError(
            f"{_CONFIGURATION}.attr.content_tag is {describe_value(tag)}, and text of turns is read from "
            f"{', '.join(_TAGS)}; name the key of the turns so",
            where=name_file(path),
        )
    return columns


def _rename(record: Mapping[str, Any], columns: Mapping[str, str]) -> Mapping[str, Any]:
    """The record by the keys that are known; where messages are named, no other text counts."""
    others = {*columns.values(), *(TEXTS if "messages" in columns else ())}
    return {key: value for key, value in record.items() if key not in others} | {
        key: record.get(column) for key, column in columns.items()
    }


def _read_configuration(path: Path) -> dict[str, Any] | None:
    """The content of MindSpeed-MM's data file; None where the file is another."""
    if path.suffix.lower() != ".json":
        return None
    with open_samples(path) as stream:
        head = stream.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n")
        if not head.startswith(b"{"):
            return None
        line = (head + stream.readline(MOST_RECORD)).split(b"\n")[0]
    with suppress(ValueError, RecursionError):
        if not {*KNOWN}.isdisjoint(json.loads(line)):
            raise JobError(
                "it begins with a record in a line of its own; name it .jsonl, or give a list of samples",
                where=name_file(path),
            )
    from mm_autoparallel.files import read_document

    content = read_document(path, "sample file")
    if not isinstance(content.get(_CONFIGURATION), Mapping):
        raise JobError(
            f"it is a mapping without {_CONFIGURATION}, so it is no data file of MindSpeed-MM; a list of samples is "
            "expected otherwise",
            where=name_file(path),
        )
    return content


def _section(parameters: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = parameters.get(name, {})
    return found if isinstance(found, Mapping) else {}
