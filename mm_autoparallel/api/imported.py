"""import: what a team runs today as a job and a plan, read from its launch files without executing them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from mm_autoparallel.errors import JobError
from mm_autoparallel.integrations.catalog import find_launch, frameworks
from mm_autoparallel.integrations.described import Given
from mm_autoparallel.integrations.export import write_files
from mm_autoparallel.integrations.framework import LaunchKind
from mm_autoparallel.model.job.cluster import USUAL_DEVICES_PER_NODE
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.model.readers.job_file import parse_job
from mm_autoparallel.planner.evaluate import Estimate, evaluate
from mm_autoparallel.planner.plan import format_document
from mm_autoparallel.validation import nearest

SCHEMA = "mm-autoparallel/import/1"
JOB_FILE, PLAN_FILE = "job.yaml", "plan.json"
NOTHING = Given()
OUT = Path("imported")
"""Where both are written, unless somebody says otherwise."""


@dataclass(frozen=True)
class ImportResult:
    """A training that was read. notes: a sentence for each thing that was assumed or is not searched. keeps_less: flags
    by which it holds less than is simulated."""

    framework: str
    source: Path
    job: Job
    job_document: Mapping[str, Any]
    estimate: Estimate
    notes: tuple[str, ...]
    keeps_less: tuple[str, ...] = ()

    def document(self, files: tuple[Path, ...]) -> dict[str, Any]:
        """As `import --json` prints it."""
        return {
            "schema": SCHEMA,
            "framework": self.framework,
            "source": str(self.source),
            "files": [str(path) for path in files],
            "notes": [*self.notes],
            "fits": self.estimate.fits,
            "plan": self.estimate.plan_document(),
        }

    def write(self, out: Path) -> tuple[Path, ...]:
        """Write job and plan into the folder `out`, both or none. Raises JobError where others are there already,
        OSError where they cannot be written."""
        head = (
            f"# A job, read from {self.source.name} by `mm-autoparallel import`; {PLAN_FILE} beside it is its plan.\n"
        )
        texts = {
            out / JOB_FILE: head + yaml.safe_dump(dict(self.job_document), sort_keys=False, width=116),
            out / PLAN_FILE: format_document(self.estimate.plan_document()),
        }
        write_files(texts, overwrite=False)
        return (*texts,)


def find_kind(path: Path, name: str | None) -> tuple[str, LaunchKind]:
    """The framework `name`, or the one that knows the file at `path`, and which of its launches that is.

    Raises JobError where no such framework is registered, it reads no launches, or nobody knows the file.
    """
    known = {key: kinds for key, one in frameworks().items() if (kinds := tuple(one.launches()))}
    if name is None:
        kind = find_launch(path)
        return next((key for key, kinds in known.items() if kind.title in [one.title for one in kinds]), ""), kind
    if name not in known:
        raise JobError(
            f"--from {name}: no framework whose launch files are read{nearest(name, list(known))}; known are "
            f"{', '.join(sorted(known))}"
        )
    kinds = known[name]
    found = kinds[0] if len(kinds) == 1 else next((kind for kind in kinds if kind.is_one(path)), None)
    if found is None:
        raise JobError(f"{path} is none of {', '.join(kind.title for kind in kinds)}")
    return name, found


def import_launch(
    path: Path,
    *,
    framework: str | None = None,
    device: str | None = None,
    cluster: Mapping[str, Any] | None = None,
    given: Given = NOTHING,
) -> ImportResult:
    """The training that the file at `path` starts, with the plan that it runs under by itself, simulated.

    device: by its name in the catalog, for nodes as the file starts them; cluster: the section of a job in its place.
    given: what a person says beside the file; its world size in the place of the file's own.
    Raises JobError or PlanError naming file, flag and line where something is missing, contradicts or is not planned.
    """
    name, kind = find_kind(path, framework)
    _check_taken(kind, given)
    nodes, per_node = kind.find_devices(path)
    world_size = given.world_size or (nodes * per_node if nodes and per_node else None)
    notes: tuple[str, ...] = ()
    if cluster is None:
        cluster, notes = _find_cluster(path, device, world_size, per_node)
    described = kind.describe(path, replace(given, world_size=world_size))
    _check_vocabulary(name, described.model, given)
    plan = kind.read_plan(path, replace(given, world_size=world_size))
    model: Any = described.model
    document = {
        "model": _inline(model) if isinstance(model, Model) else str(model.resolve()),
        "cluster": dict(cluster),
        "workload": dict(described.workload),
        "search": dict(described.search),
        **({"adapters": dict(described.adapters)} if described.adapters else {}),
    }
    job = parse_job(document, path).with_modes(plan.modes_used)
    notes += described.notes
    if described.not_searched:
        notes += (f"not searched: {'; '.join(described.not_searched)}",)
    return ImportResult(name, path, job, document, evaluate(job, plan), notes, described.keeps_less)


def _inline(model: Model) -> dict[str, Any]:
    """The model as a job's file has it: what somebody set, and the kinds of stems, which files always name."""
    document = model.model_dump(mode="json", exclude_unset=True)
    for written, encoder in zip(document.get("encoders", ()), model.encoders, strict=False):
        written["stem"]["type"] = encoder.stem.type
    return document


def _check_taken(kind: LaunchKind, given: Given) -> None:
    """Raises JobError for what a person says and this kind of launch does not read."""
    for field in ("beside", "entry", "seq_length", "global_batch_size", "micro_batch_size"):
        said = getattr(given, field)
        if said and field not in kind.takes:
            word = f"{said[0]} beside it" if field == "beside" else f"--{field.replace('_', '-')} {said}"
            raise JobError(f"{word}: {kind.title} says it by itself; leave it out")


def _check_vocabulary(name: str, model: Any, given: Given) -> None:
    """Raises JobError where the model has another vocabulary than the one that a person says."""
    if given.vocab_size is not None and (not isinstance(model, Model) or model.text.vocab_size < given.vocab_size):
        raise JobError(f"--vocab-size {given.vocab_size}: of {name} the model's own file says it; leave it out")


def _find_cluster(
    path: Path, device: str | None, world_size: int | None, per_node: int | None
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The cluster section of equal nodes, and a sentence where their size was assumed."""
    if world_size is None:
        raise JobError(f"{path}: how many devices it starts is known only on the machine; say it with --world-size")
    notes: tuple[str, ...] = ()
    if per_node is None:
        per_node = USUAL_DEVICES_PER_NODE
        notes = (f"how many devices a node has is not said: {per_node} are assumed",)
    per_node = min(per_node, world_size)
    if world_size % per_node:
        raise JobError(f"{path}: {world_size} devices are no whole number of nodes of {per_node}; give --cluster FILE")
    return {"num_nodes": world_size // per_node, "devices_per_node": per_node, "device": device}, notes
