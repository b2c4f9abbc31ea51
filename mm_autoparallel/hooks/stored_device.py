"""The device at hand as the store knows it: identified once, so that a job is the same job in every run."""

from __future__ import annotations

import json
from pathlib import Path

from mm_autoparallel.errors import ProfileError
from mm_autoparallel.files import read_document, write_text_atomically
from mm_autoparallel.model.job.cluster import Device
from mm_autoparallel.model.profiles.shipped import STORE, shipped_store
from mm_autoparallel.model.profiles.store import device_folder
from mm_autoparallel.reports.terminal import say, writing
from mm_autoparallel.validation import parse_record

SAME_MEMORY_FRACTION = 0.05
"""A device whose memory is this close to the stored one's is the same: systems report a little more or less after an
update. Assumed."""


def stored_device(root: Path) -> Device:
    """The device at hand, from `<root>/<device>/device.json`, which is written where there is none yet.

    In the default store it is the shipped one where that is the same device, so that shipped profiles are of it. One of
    the same name whose memory is another is another device, and takes the place of the stored one. Raises JobError
    where the store cannot be written, ProfileError where the file is malformed.
    """
    from mm_autoparallel.profilers.device import identify_device

    found = identify_device()
    path = _path(root, found.name)
    if path.exists():
        stored = _read(path)
        if _is_same(stored, found):
            return stored
        say(f"{path} is of a device with {stored.memory_bytes} bytes of memory, and this one has {found.memory_bytes}")
    shipped = _path(shipped_store(), found.name)
    if root == STORE and shipped.exists() and _is_same(_read(shipped), found):
        found = _read(shipped)
    with writing(path):
        write_text_atomically(path, json.dumps(found.model_dump(mode="json"), indent=1) + "\n")
    return found


def is_shipped_device(device: Device) -> bool:
    """Whether shipped profiles are of `device`, to its last figure."""
    path = _path(shipped_store(), device.name)
    return path.exists() and _read(path) == device


def _path(root: Path, name: str) -> Path:
    return device_folder(root, name) / "device.json"


def _read(path: Path) -> Device:
    return parse_record(Device, read_document(path, "device file", ProfileError), "device file", path, ProfileError)


def _is_same(stored: Device, found: Device) -> bool:
    return abs(stored.memory_bytes / found.memory_bytes - 1.0) <= SAME_MEMORY_FRACTION
