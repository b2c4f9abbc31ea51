"""Jobs without a file: from Python, or from flags of the command line, in the words that a job file has."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from mm_autoparallel.errors import JobError
from mm_autoparallel.files import is_folder, is_there, read_document
from mm_autoparallel.integrations.huggingface.hub_cache import find_config
from mm_autoparallel.model.job.cluster import USUAL_DEVICES_PER_NODE
from mm_autoparallel.model.job.job import Job as _Job
from mm_autoparallel.model.readers.job_file import parse_job
from mm_autoparallel.model.readers.job_file import read_job as _read_job

if TYPE_CHECKING:
    from pydantic import BaseModel

OF_PYTHON = Path("of Job()")
"""What messages call a job that was never a file; other files are looked up from the working directory."""


@dataclass(frozen=True)
class JobWords:
    """A job in the words of a job file. assumed: key → what was taken because nobody said it, a sentence each."""

    document: Mapping[str, Any]
    assumed: Mapping[str, str]

    def parse(self, path: Path) -> _Job:
        """The job. path: what messages call it. Raises JobError as read_job does."""
        job = parse_job(dict(self.document), path)
        return replace(job, warnings=(*self.assumed.values(), *job.warnings))


def describe_job(
    model: str | Path | Mapping[str, Any] | BaseModel,
    cluster: str | Mapping[str, Any] | BaseModel,
    workload: Mapping[str, Any] | BaseModel,
    search: Mapping[str, Any] | BaseModel | None = None,
    path: Path = OF_PYTHON,
    **more: Any,
) -> JobWords:
    """The job of these sections, as `Job` takes them, with what they leave out. more: other keys of a job file.

    path: what messages call it, and where the files lie that it names. Raises JobError where a model is not known.
    """
    document: dict[str, Any] = {
        "model": _describe_model(model, path),
        "cluster": {"device": cluster, "num_nodes": 1} if isinstance(cluster, str) else _plain(cluster),
        "workload": _plain(workload),
        "search": _plain(search or {}),
        **{key: _plain(value) for key, value in more.items() if value},
    }
    assumed = {}
    place = document["cluster"]
    if isinstance(place, dict) and "devices_per_node" not in place:
        document["cluster"] = place | {"devices_per_node": USUAL_DEVICES_PER_NODE}
        assumed["cluster.devices_per_node"] = (
            f"cluster.devices_per_node is not said: nodes of {USUAL_DEVICES_PER_NODE} are assumed"
        )
    limits = document["search"]
    if isinstance(limits, dict) and "ep" not in limits:
        sizes = _expert_sizes(parse_job(document, path))
        if len(sizes) > 1:
            document["search"] = limits | {"ep": sizes}
            assumed["search.ep"] = f"search.ep is not said: {', '.join(map(str, sizes))} are tried"
    return JobWords({key: value for key, value in document.items() if value != {}}, assumed)


def _plain(value: Any) -> Any:
    """Records and mappings as a file has them."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json", exclude_unset=True)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _describe_model(model: str | Path | Mapping[str, Any] | BaseModel, path: Path) -> Any:
    """A job's `model`: the file or the mapping that it is, or the sizes of one that is known by its name, or the
    config.json of what was downloaded from Hugging Face's hub under that name."""
    if not isinstance(model, (str, Path)):
        return _plain(model)
    named = path.parent / model
    if is_folder(named):
        named, model = named / "config.json", f"{model}/config.json"
    if is_there(named) or isinstance(model, Path) or Path(model).suffix in (".json", ".yaml", ".yml"):
        return str(model)
    from mm_autoparallel.measurements.models import find_model
    from mm_autoparallel.measurements.table import Unrepresentable

    try:
        return find_model(model.rpartition("/")[2])
    except Unrepresentable as failure:
        cached = find_config(model)
        if cached is not None:
            return str(cached)
        raise JobError(
            f"no file is called {model!r}, and {failure}; of any other give its Hugging Face config.json, or download "
            "it into the hub's cache",
            where=f"job file {path}",
        ) from None


def _expert_sizes(job: _Job) -> list[int]:
    """Expert parallel sizes to try where nobody says: powers of two that divide all numbers of experts."""
    counts = [m.layers.experts.num_experts for m in job.model.modalities if m.layers.experts]
    sizes = [1]
    while counts and sizes[-1] * 2 <= job.cluster.num_devices and not any(count % (sizes[-1] * 2) for count in counts):
        sizes.append(sizes[-1] * 2)
    return sizes


def read_job(path: str | Path, changes: Mapping[str, Any] | None = None) -> Job:
    """The job in the YAML or JSON file at `path`; files it names are looked up beside it.

    changes: key of the file → another value, such as `{"cluster.num_nodes": 8}`.
    Raises JobError, one paragraph naming file, key, value and what would be right.
    """
    path = Path(path)
    if not changes:
        return cast("Job", _read_job(path))
    return cast("Job", parse_job(change_document(read_document(path, "job file"), changes, path), path))


def change_document(document: Mapping[str, Any], changes: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """A job file's content with other values of some keys; `document` stays as it is.

    changes: key → value; parts of a key stand between dots, and of a list its place. Of a device that is named by its
    name single figures may be changed. Raises JobError where a key leads through what holds no keys.
    """
    changed: dict[str, Any] = copy.deepcopy(dict(document))
    for key in sorted(changes, key=lambda key: key.count(".")):
        *parents, last = key.split(".")
        holder: Any = changed
        for depth, name in enumerate(parents, start=1):
            inner = _child(holder, name, key, path) if _has(holder, name) else {}
            if isinstance(inner, str) and parents[:depth] == ["cluster", "device"]:
                inner = {"based_on": inner}
            if depth == len(_LINK_OF) and parents[:2] == _LINK_OF[:2] and not inner:
                inner = _link_of(holder, name)
            _put(holder, name, inner, key, path)
            holder = inner
        _put(holder, last, changes[key], key, path)
    return changed


_LINK_OF = ["cluster", "device", "node_link"]
"""A link is changed as a whole under a device that is based on another: its other figures come from there."""


def _link_of(device: Any, name: str) -> dict[str, Any]:
    from mm_autoparallel.model.job.devices import DEVICES

    base = DEVICES.get(device.get("based_on", "")) if isinstance(device, dict) else None
    return dict(base.model_dump(mode="json").get(name) or {}) if base else {}


def _has(holder: Any, name: str) -> bool:
    return name in holder if isinstance(holder, dict) else True


def _child(holder: Any, name: str, key: str, path: Path) -> Any:
    if isinstance(holder, list):
        return holder[_place(holder, name, key, path)]
    if not isinstance(holder, dict):
        raise JobError(
            f"{key}: what {name} would stand in holds no keys; give the whole of it", where=f"job file {path}"
        )
    return holder[name]


def _put(holder: Any, name: str, value: Any, key: str, path: Path) -> None:
    if isinstance(holder, list):
        holder[_place(holder, name, key, path)] = value
    elif isinstance(holder, dict):
        holder[name] = value
    else:
        raise JobError(
            f"{key}: what {name} would stand in holds no keys; give the whole of it", where=f"job file {path}"
        )


def _place(holder: list[Any], name: str, key: str, path: Path) -> int:
    if not (name.isascii() and name.isdigit() and int(name) < len(holder)):
        raise JobError(f"{key}: {name} is no place of a list of {len(holder)}, from 0 on", where=f"job file {path}")
    return int(name)


class _AnyJob(type):
    """Jobs that were read are jobs too."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _Job)


class Job(_Job, metaclass=_AnyJob):
    """A job: a model on a cluster with a workload, in the words of a job file, or as `read_job` returns it.

    model: a Hugging Face config.json (its path, its folder or its content), a model file of another kind that a job
    file may name, or the name of a published model (`llama3-70b`; an unknown one is answered with all of them).
    cluster: `{"device": "h100-80g", "num_nodes": 8}`, with all keys of a job file; the name of a device is one node of
    it. workload: `{"global_batch_size": 512, "seq_length": 8192}` and more (job/workload.py). search: limits of the
    search; experts are divided by every power of two, where it does not say `ep`. freeze: part → frozen or not.
    adapters, profiles, calibration: as a job file has them. Raises JobError as read_job does.
    """

    def __new__(
        cls,
        model: str | Path | Mapping[str, Any] | BaseModel,
        cluster: str | Mapping[str, Any] | BaseModel,
        workload: Mapping[str, Any] | BaseModel,
        *,
        search: Mapping[str, Any] | BaseModel | None = None,
        freeze: Mapping[str, bool] | None = None,
        adapters: Mapping[str, Any] | BaseModel | None = None,
        profiles: Sequence[str | Path] = (),
        calibration: str | None = None,
    ) -> Job:
        more: dict[str, Any] = {
            "freeze": freeze,
            "adapters": adapters,
            "profiles": profiles,
            "calibration": calibration,
        }
        return cast("Job", describe_job(model, cluster, workload, search, **more).parse(OF_PYTHON))  # as read_job does
