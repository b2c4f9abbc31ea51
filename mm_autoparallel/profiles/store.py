"""Profile files: versioned JSON with a manifest, read and checked against the model and device they claim.

Schema "mm-autoparallel/profile/1". One entry is one block kind under one division of the work:

    {"schema": "mm-autoparallel/profile/1",
     "model": {"name": "qwen2vl-7b", "sha256": "…"}, "device": "h200-141g",
     "software": {"torch": "2.13.0"}, "date": "2025-11-21", "command": "mm-autoparallel profile job.yaml --device cuda",
     "entries": [{"kind": "text_layer", "tp": 1, "cp": 1, "mbs": 1, "tokens": 8192, "spans": 1,
                  "forward_ms": {"median_ms": 9.1, "mad_ms": 0.02, "num_samples": 20}, "backward_input_ms": …,
                  "backward_weight_ms": …, "activation_bytes": …, "checkpoint_bytes": …, "transient_bytes": …}]}
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from mm_autoparallel.errors import ProfileError
from mm_autoparallel.files import read_document
from mm_autoparallel.job.fields import Bytes, Count, Name, NonNegative, Noun
from mm_autoparallel.job.model import Model
from mm_autoparallel.validation import parse_record


class Timing(Noun):
    """Median of `num_samples` timings after warm-up, and their median absolute deviation."""

    median_ms: NonNegative
    mad_ms: NonNegative
    num_samples: Count


class ProfileEntry(Noun):
    """One block of a kind on one device; bytes as in BlockCost.

    tokens: of one sample, through the layers of the block's modality, before context parallelism divides them; spans:
    images or recordings among which they divide.
    """

    kind: Name
    tp: Count
    cp: Count = 1
    mbs: Count
    tokens: Count
    spans: Count = 1
    forward_ms: Timing
    backward_input_ms: Timing
    backward_weight_ms: Timing
    activation_bytes: Bytes
    checkpoint_bytes: Bytes
    transient_bytes: Bytes


class ProfiledModel(Noun):
    """The model that was profiled; `sha256` as `hash_model` makes it."""

    name: Name
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class ProfileFile(Noun):
    """A whole profile file: what was measured, on what, when and by which command."""

    schema_name: Literal["mm-autoparallel/profile/1"] = Field(alias="schema")
    model: ProfiledModel
    device: Name
    software: dict[str, str]
    date: Name
    command: Name
    entries: Annotated[tuple[ProfileEntry, ...], Field(min_length=1)]


def hash_model(model: Model) -> str:
    """SHA-256 of the model's sizes and of what is frozen in it; its name does not count."""
    content = model.model_dump(mode="json", exclude={"name"})
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_profile_files(paths: Sequence[Path], model: Model, device_name: str) -> list[tuple[Path, ProfileFile]]:
    """The profiles at `paths` (files, or folders whose *.json files are all profiles).

    Raises ProfileError where one is missing, malformed, or of another model or device.
    """
    return [(path, _read_profile(path, model, device_name)) for given in paths for path in _files_at(given)]


def _files_at(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(path.glob("*.json"))
    if not files:
        raise ProfileError(f"profile folder {path}: it holds no *.json file; name a folder of profiles or leave it out")
    return files


def _read_profile(path: Path, model: Model, device_name: str) -> ProfileFile:
    document = read_document(path, "profile file", ProfileError)
    profile = parse_record(ProfileFile, document, "profile file", path, ProfileError)
    if profile.device != device_name:
        raise ProfileError(
            f"profile file {path}: device is {profile.device} and the job's cluster has {device_name}; profile there, "
            "or leave this file out of the job's `profiles`"
        )
    expected = hash_model(model)
    if profile.model.sha256 != expected:
        raise ProfileError(
            f"profile file {path}: model.sha256 is {profile.model.sha256[:12]}… ({profile.model.name}) and the job's "
            f"model {model.name} has {expected[:12]}…, so this is a profile of another model, or of other frozen "
            f"parts; renew it ({profile.command}), or leave it out of the job's `profiles`"
        )
    return profile
