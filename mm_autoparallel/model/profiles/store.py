"""Profile files: versioned JSON with a manifest, read and checked against the model and device they claim.

Schema "mm-autoparallel/profile/1". One entry is one block kind under one division of the work:

    {"schema": "mm-autoparallel/profile/1",
     "model": {"name": "qwen2vl-7b", "sha256": "…"}, "device": "h200-141g",
     "software": {"torch": "2.13.0"}, "date": "2025-11-21", "command": "mm-autoparallel profile job.yaml --device cuda",
     "workload": {"seq_length": 8192, "image_tokens_per_sample": 4096, …, "attention": "flash"},
     "entries": [{"kind": "text_layer", "tp": 1, "cp": 1, "mbs": 1, "tokens": 8192, "spans": 1,
                  "forward_ms": {"median_ms": 9.1, "mad_ms": 0.02, "num_samples": 20}, "backward_input_ms": …,
                  "backward_weight_ms": …, "activation_bytes": …, "checkpoint_bytes": …, "transient_bytes": …}]}

What profilers write lies in one folder, the store:

    <root>/<device>/network.json                                              model/profiles/network.py
    <root>/<device>/<model>-<hash>/tp2-cp1-mbs1-seq4096-image1024x1.json      one configuration

A file appears whole or not at all, so a killed run continues with what is not there yet; two runs in one folder may
measure one configuration twice. Temporary files of killed runs are cleared away.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, TypeVar

from pydantic import Field, model_validator

from mm_autoparallel.errors import ProfileError
from mm_autoparallel.files import is_folder, is_there
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.model.profiles.disk import check_writable, clear_strays, read_file, read_once, write_measurements
from mm_autoparallel.records import (
    Bytes,
    BytesEach,
    Computed,
    Count,
    Flag,
    Name,
    Noun,
    Number,
    PositiveBytesEach,
    Time,
)
from mm_autoparallel.validation import parse_record

PROFILE_SCHEMA = "mm-autoparallel/profile/1"
NETWORK_SCHEMA = "mm-autoparallel/network/1"
TRACE_SCHEMA = "mm-autoparallel/trace/1"

FIGURES = (
    "forward_ms",
    "backward_input_ms",
    "backward_weight_ms",
    "activation_bytes",
    "checkpoint_bytes",
    "transient_bytes",
)
"""What every entry holds that did not run out of memory."""


class Timing(Noun):
    """Median of `num_samples` timings after warm-up, and their median absolute deviation."""

    median_ms: Time
    mad_ms: Computed
    num_samples: Count


class ProfileEntry(Noun):
    """One block of a kind on one device; bytes as in BlockCost.

    tokens: of one sample, through the layers of the block's modality, before context parallelism divides them; spans:
    images or recordings among which they divide.

    May be left out: recompute_ms, what recomputing the block adds to its backward. optimizer_ms: one optimizer step
    over all parameters this device holds of the block, nothing sharded by ZeRO. parameter_count: those parameters.
    split_extra_ms: what its gradients take more, of inputs and then of weights, than together. kept_for_weight_bytes:
    what is kept between the two, gradients that wait included; activation_bytes where that is less. output_bytes: what
    is handed on. arrangement: `group` of real ranks, or one rank's `shard` with its collectives added by formula.
    out_of_memory: it took too much; no figures.
    """

    kind: Name
    tp: Count
    cp: Count = 1
    mbs: Count
    tokens: Count
    spans: Count = 1
    forward_ms: Timing | None = None
    backward_input_ms: Timing | None = None
    backward_weight_ms: Timing | None = None
    activation_bytes: Bytes | None = None
    checkpoint_bytes: Bytes | None = None
    transient_bytes: Bytes | None = None
    recompute_ms: Timing | None = None
    optimizer_ms: Timing | None = None
    split_extra_ms: Timing | None = None
    kept_for_weight_bytes: Bytes | None = None
    parameter_count: Number | None = None
    output_bytes: Bytes | None = None
    arrangement: Literal["group", "shard"] | None = None
    out_of_memory: Flag = False

    @model_validator(mode="after")
    def _check_figures(self) -> ProfileEntry:
        given = [name for name in FIGURES if getattr(self, name) is not None]
        if self.out_of_memory and given:
            raise ValueError(f"it is out_of_memory and gives {', '.join(given)}; leave either out")
        if not self.out_of_memory and len(given) < len(FIGURES):
            missing = [name for name in FIGURES if name not in given]
            verb = "is" if len(missing) == 1 else "are"
            raise ValueError(f"{', '.join(missing)} {verb} missing; only an entry that is out_of_memory has no figures")
        return self


class ProfiledModel(Noun):
    """The model that was profiled; `sha256` as `hash_model` makes it."""

    name: Name
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class ProfiledWorkload(Noun):
    """What of a workload has a say in the figures of a block; as in Workload."""

    seq_length: Count
    image_tokens_per_sample: Number
    images_per_sample: Count
    audio_tokens_per_sample: Number
    audios_per_sample: Count
    weight_bytes: PositiveBytesEach
    gradient_bytes: BytesEach
    optimizer_bytes: BytesEach
    attention: Literal["flash", "unfused"]

    @property
    def precision(self) -> str:
        """What its operators compute with, whatever their sizes."""
        sizes = (self.weight_bytes, self.gradient_bytes, self.optimizer_bytes)
        weight, gradient, optimizer = (f"{size:g}" for size in sizes)
        return f"{weight} + {gradient} + {optimizer} bytes a parameter and {self.attention} attention"


class Origin(Noun):
    """How a file of measurements came to be. software: the versions its figures depend on, by name."""

    device: Name
    software: dict[str, str]
    date: Name
    command: Annotated[str, Field(strict=True, min_length=1, max_length=10_000)]


class Manifest(Origin):
    """How a profile came to be. workload None: not said, so it is taken for any."""

    model: ProfiledModel
    workload: ProfiledWorkload | None = None


class ProfileFile(Manifest):
    """A whole profile file: what was measured, on what, when and by which command."""

    schema_name: Literal["mm-autoparallel/profile/1"] = Field(alias="schema")
    entries: Annotated[tuple[ProfileEntry, ...], Field(min_length=1)]


def hash_model(model: Model) -> str:
    """SHA-256 of the model's sizes and of what is frozen in it; its name does not count.

    Nor does what is at its default, so that a key that the form of a model gains later changes no hash.
    """
    content = model.model_dump(mode="json", exclude={"name"}, exclude_defaults=True)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def profiled_workload(workload: Workload) -> ProfiledWorkload:
    """The part of `workload` that a profile is bound to."""
    return ProfiledWorkload(**workload.model_dump(include=set(ProfiledWorkload.model_fields)))


def read_profile_files(
    paths: Sequence[Path], model: Model, device_name: str, workload: Workload | None = None
) -> list[tuple[Path, ProfileFile]]:
    """The profiles at `paths` (files, or folders of *.json files); files of the network and of traces are left out.

    A folder may hold profiles of several precisions: those of another than `workload` has are left out, and of the
    others those of its very sizes come first. Raises ProfileError where one is missing, malformed, of another model or
    device, or where none has the precision.
    """
    profiles = [
        (path, _parse_profile(path, document, model, device_name))
        for path, document in read_documents(paths)
        if document.get("schema") not in (NETWORK_SCHEMA, TRACE_SCHEMA)
    ]
    if workload is None:
        return profiles
    asked = profiled_workload(workload)
    fitting = [item for item in profiles if item[1].workload is None or item[1].workload.precision == asked.precision]
    if profiles and not fitting:
        path, profile = profiles[0]
        assert profile.workload is not None
        raise ProfileError(
            f"it was measured with {profile.workload.precision}, and the job's workload has "
            f"{asked.precision}; measure that too (this one was made by `{profile.command}`), or leave it out of the "
            "job's `profiles`",
            where=f"profile file {path}",
        )
    return sorted(fitting, key=lambda item: item[1].workload != asked)


def read_documents(paths: Sequence[Path]) -> list[tuple[Path, dict[str, Any]]]:
    """The documents at `paths`, files or folders of *.json files, unchecked but for being mappings.

    Raises ProfileError where one cannot be read, or a folder holds none.
    """
    return [(path, read_once(path, read_file)) for given in paths for path in _files_at(given)]


def _files_at(path: Path) -> list[Path]:
    if not is_folder(path):
        return [path]
    files = sorted(path.glob("*.json"))
    if not files:
        raise ProfileError(
            "it holds no *.json file; name a folder of profiles or leave it out", where=f"profile folder {path}"
        )
    return files


def _parse_profile(path: Path, document: dict[str, Any], model: Model, device_name: str) -> ProfileFile:
    profile = parse_record(ProfileFile, document, "profile file", path, ProfileError)
    if profile.device != device_name:
        raise ProfileError(
            f"device is {profile.device} and the job's cluster has {device_name}; profile there, "
            "or leave this file out of the job's `profiles`",
            where=f"profile file {path}",
        )
    expected = hash_model(model)
    if profile.model.sha256 != expected:
        raise ProfileError(
            f"model.sha256 is {profile.model.sha256[:12]}… ({profile.model.name}) and the job's "
            f"model {model.name} has {expected[:12]}…, so this is a profile of another model, or of other frozen "
            f"parts; renew it ({profile.command}), or leave it out of the job's `profiles`",
            where=f"profile file {path}",
        )
    return profile


_PLAIN_PRECISION = profiled_workload(Workload(global_batch_size=1, seq_length=1)).precision


class Division(Protocol):
    """How one measured micro-batch is divided: tensor and context parallel sizes, and its samples."""

    @property
    def tp(self) -> int: ...

    @property
    def cp(self) -> int: ...

    @property
    def mbs(self) -> int: ...


AnyDivision = TypeVar("AnyDivision", bound=Division)


def device_folder(root: Path, device_name: str) -> Path:
    """Where everything that was measured on a device lies."""
    return root / _slug(device_name)


def profile_folder(root: Path, device_name: str, model: Model) -> Path:
    """Where profiles of `model` lie; models of other sizes or frozen parts have folders of their own."""
    return model_folder(device_folder(root, device_name), model)


def model_folder(parent: Path, model: Model) -> Path:
    """Where under `parent` files of `model` lie."""
    return parent / f"{_slug(model.name)}-{hash_model(model)[:8]}"


def file_name(tp: int, cp: int, mbs: int, workload: Workload) -> str:
    """The name of the file of one configuration: `tp2-cp1-mbs1-seq4096-image1024x1.json`."""
    parts = [f"tp{tp}", f"cp{cp}", f"mbs{mbs}", f"seq{workload.seq_length}"]
    if workload.image_tokens_per_sample:
        parts.append(f"image{workload.image_tokens_per_sample}x{workload.images_per_sample}")
    if workload.audio_tokens_per_sample:
        parts.append(f"audio{workload.audio_tokens_per_sample}x{workload.audios_per_sample}")
    if profiled_workload(workload).precision != _PLAIN_PRECISION:
        sizes = (workload.weight_bytes, workload.gradient_bytes, workload.optimizer_bytes)
        parts += ["bytes" + "_".join(f"{size:g}" for size in sizes), workload.attention]
    return "-".join(parts) + ".json"


def make_manifest(
    model: Model, workload: Workload, device_name: str, software: Mapping[str, str], command: str
) -> Manifest:
    """The manifest of what is measured today. command: what a person types to have it measured (again)."""
    return Manifest(
        model=ProfiledModel(name=model.name, sha256=hash_model(model)),
        device=device_name,
        software=dict(software),
        date=today(),
        command=command,
        workload=profiled_workload(workload),
    )


def today() -> str:
    """The date in UTC, as manifests have it: 2025-11-21."""
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()


def write_profile(path: Path, manifest: Manifest, entries: Iterable[ProfileEntry]) -> None:
    """Writes one profile file, whole or not at all. Raises ProfileError where the folder cannot be written."""
    document: dict[str, Any] = {"schema": PROFILE_SCHEMA}
    document |= manifest.model_dump(mode="json", include=set(Manifest.model_fields), exclude_none=True)
    document["entries"] = [
        entry.model_dump(mode="json", exclude_none=True, exclude=None if entry.out_of_memory else {"out_of_memory"})
        for entry in entries
    ]
    parse_record(ProfileFile, document, "profile file", path, ProfileError)
    write_measurements(path, document)


def check_fresh(path: Path, found: Origin, now: Origin) -> None:
    """Raises ProfileError, with the command that renews it, where `found`, read from `path`, does not hold for `now`.

    It does not where model, device or the first two numbers of the version of a software differ that both name.
    """
    stale = ""
    if found.device != now.device:
        stale = f"it was measured on {found.device}, and this is {now.device}"
    elif isinstance(found, Manifest) and isinstance(now, Manifest) and found.model.sha256 != now.model.sha256:
        stale = (
            f"it is of the model {found.model.name} ({found.model.sha256[:12]}…), and this is {now.model.name} "
            f"({now.model.sha256[:12]}…), of other sizes or frozen parts"
        )
    else:
        versions = stale_software(found.software, now.software)
        stale = f"it was measured with {versions}" if versions else ""
    if stale:
        raise ProfileError(
            f"{stale}, so its figures may no longer hold; remove it and renew it with "
            f"`{now.command}`, or keep it and name another folder for profiles",
            where=f"profile file {path}",
        )


def stale_software(found: Mapping[str, str], now: Mapping[str, str]) -> str:
    """The first version of `found` that differs from that of `now` in its first two numbers, and both; else empty."""
    for name, version in found.items():
        if name in now and _release(version) != _release(now[name]):
            return f"{name} {version}, and this is {name} {now[name]}"
    return ""


def missing_configurations(
    folder: Path, manifest: Manifest, configurations: Sequence[AnyDivision], workload: Workload
) -> list[AnyDivision]:
    """Those of `configurations` that have no file in `folder` yet, in their order.

    Clears away what killed runs left half-written. Raises ProfileError where a file that is there cannot be read or
    does not hold for `manifest` any more, and where one that is missing could not be written.
    """
    clear_strays(folder)
    missing = []
    for configuration in configurations:
        path = folder / file_name(configuration.tp, configuration.cp, configuration.mbs, workload)
        if is_there(path):
            check_fresh(path, read_profile(path), manifest)
        else:
            missing.append(configuration)
    if missing:
        check_writable(folder)
    return missing


def read_profile(path: Path) -> ProfileFile:
    """The profile at `path`, whatever its model and device. Raises ProfileError where it is missing or malformed."""
    return parse_record(ProfileFile, read_file(path), "profile file", path, ProfileError)


def _release(version: str) -> str:
    """`2.13.0+cpu` → `2.13`."""
    return ".".join(version.split("+")[0].split(".")[:2])


def _slug(name: str) -> str:
    """Lower case letters, digits, dots, underscores and hyphens; never hidden, never empty."""
    return re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-.") or "unnamed"
