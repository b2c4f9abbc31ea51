"""Every name of PyTorch that the package uses is there from 2.1 on, or a branch of one file does without.

Names come from the syntax tree, and from records of the wheels (torch_names.py makes them anew).
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from torch_names import DEVICE, ROOT, package_uses, uses

RECORDS = ROOT / "tests" / "fixtures" / "torch_names"
RELEASES = ("2.1.0", "2.6.0", "2.7.1", "2.13.0")

BRANCHES = "profilers/torch_releases.py"
"""The one file where a name may be missing: each has a branch, which test_torch_releases.py takes."""

TRACING = "profilers/trace/"
"""`trace` is no part of the hooks; it refuses a PyTorch that lacks what it needs."""
TRACING_FROM = "2.7.1"

SHIPPED = "integrations/torch/shipped/"
"""`export --to torch` ships this code, for releases that it names (integrations/torch/written.py)."""
SHIPPED_FROM = "2.7.1"

NOT_OF_CUDA = {f"{DEVICE}.is_autocast_enabled", f"{DEVICE}.get_autocast_dtype"}
"""Functions that `torch.npu` alone is asked for."""


def record(kind: str, release: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RECORDS / f"{kind}-{release}.json").read_text())
    return found


def missing(release: str) -> set[tuple[str, str]]:
    """(file, name) of what `release` lacks, and of keywords that its functions do not take."""
    found, names = set(), record("torch", release)
    for use in package_uses():
        name = use.name.replace(DEVICE, "torch.cuda", 1) if use.name.startswith(f"{DEVICE}.") else use.name
        parent, _, last = name.rpartition(".")
        if use.name in NOT_OF_CUDA or not parent:
            continue
        if last not in names["names"].get(parent, ()):
            found.add((use.path, name))
        elif (known := names["parameters"].get(name)) and not use.keywords <= set(known):
            found.add((use.path, f"{name}({', '.join(sorted(use.keywords - set(known)))}=)"))
    return found


@pytest.mark.parametrize("release", RELEASES)
def test_names_are_there_or_a_branch_does_without(release: str) -> None:
    newer = {
        folder
        for folder, first in ((TRACING, TRACING_FROM), (SHIPPED, SHIPPED_FROM))
        if RELEASES.index(release) < RELEASES.index(first)
    }
    wrong = {(path, name) for path, name in missing(release) if path != BRANCHES and not path.startswith(tuple(newer))}
    assert not wrong, f"torch {release} lacks these; if they are new, record them anew (torch_names.py): {wrong}"


def test_what_has_branches_is_known() -> None:
    """A name that joins these needs a branch and its test."""
    lacking = {name for release in RELEASES for path, name in missing(release) if path == BRANCHES}
    assert lacking == {
        "torch.accelerator",
        "torch.accelerator.current_accelerator",
        "torch.accelerator.is_available",
        "torch.distributed.device_mesh.DeviceMesh",
        "torch.distributed.device_mesh.init_device_mesh",
        "torch.get_autocast_dtype",
    }


@pytest.mark.parametrize("release", ["2.1.0", "2.6.0", "2.7.1"])
def test_torch_npu_has_every_function_of_a_device(release: str) -> None:
    used = {use.name.split(".")[1] for use in package_uses() if use.name.startswith(f"{DEVICE}.")}
    assert used == set(record("torch_npu", release)["names"]["torch_npu.npu"])


def test_names_are_found_however_they_are_imported() -> None:
    text = """
import torch.distributed as dist
from torch import nn
from mm_autoparallel.profilers.torch_releases import device_module
def use(kind):
    dist.send(nn.Linear(1, 1), dst=0)
    memory = device_module(kind)
    memory.empty_cache()
    device_module(kind).Event(enable_timing=True).record()
"""
    found = {(use.name, tuple(use.keywords)) for use in uses("a.py", ast.parse(text))}
    assert {
        ("torch.distributed.send", ("dst",)),
        ("torch.nn.Linear", ()),
        ("device.empty_cache", ()),
        ("device.Event", ("enable_timing",)),
    } <= found


def test_older_names_are_recorded_beside_newer_ones() -> None:
    """A record shows what a release has in place of a name that it lacks."""
    assert "all_gather_into_tensor" in record("torch", "2.1.0")["names"]["torch.distributed"]
    assert "all_gather_single" not in record("torch", "2.7.1")["names"]["torch.distributed"]
    assert sum(path.stat().st_size for path in Path(RECORDS).iterdir()) < 60_000
