"""Data sets counted: what `data stats` does, files of any known kind into figures and one compact sample file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm_autoparallel.errors import JobError
from mm_autoparallel.files import describe_value
from mm_autoparallel.samples.image_size import read_size
from mm_autoparallel.samples.opened import name_file, open_samples
from mm_autoparallel.samples.record import SampleRules, read_record, write_record
from mm_autoparallel.samples.sample import Sample, SampleCost
from mm_autoparallel.samples.sources import list_samples
from mm_autoparallel.samples.statistics import Spread, describe_table
from mm_autoparallel.samples.table import SampleTable, keep_samples

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mm_autoparallel.model.job.job import Job

_CONFIGURATION = "dataset_param"
"""What MindSpeed-MM's data file has, and no list of samples."""


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
    """Figures of the samples in `paths`. rules: what is said of pixels and text; the job's model says the rest. images:
    the folder that named images lie in. Raises JobError naming file and place of what is malformed."""
    if job is not None:
        from mm_autoparallel.model.readers.sample_source import check_sharing, rules_of

        check_sharing(job.model, f"the model {job.model.name}")
        of_model = rules_of(job.model, rules)
        rules = of_model if rules.patch_size is None else replace(of_model, patch_size=rules.patch_size)
    if images is not None:
        rules = replace(rules, find_size=lambda name: _find_size(images, name))
    table = keep_samples(one for path in paths for one in _list_samples(path, rules))
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
    for name in named.split(","):
        near = Path(name) if Path(name).exists() else path.parent / name
        if not near.exists():
            raise JobError(
                f"it names {name}, which lies neither in the folder that this runs in nor beside the file; run this "
                "where the training runs",
                where=name_file(path),
            )
        yield from list_samples(near, lambda record: read_record(record, rules))


def _read_configuration(path: Path) -> dict[str, Any] | None:
    """The content of MindSpeed-MM's data file; None where the file is another."""
    if path.suffix.lower() != ".json":
        return None
    with open_samples(path) as stream:
        if not stream.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
            return None
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
