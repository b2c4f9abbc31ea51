"""Gradients of one step of the training script, of one process and of several, written by write_gradients.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

WRITE_GRADIENTS = Path(__file__).with_name("write_gradients.py")


def start(folder: Path, groups: Mapping[int, Mapping[str, str]], files: Mapping[str, str]) -> str:
    """Write the gradients of every line of flags to a folder of its name; what was printed.

    groups: lines by the number of processes that run them. files: that flags name.
    """
    for name, content in files.items():
        (folder / name).write_text(content, encoding="utf-8")
    lines = [(number, [f"{flags} --save {name}" for name, flags in runs.items()]) for number, runs in groups.items()]
    (folder / "groups.json").write_text(json.dumps(lines), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(WRITE_GRADIENTS), "groups.json"],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def check(folder: Path, name: str, expected_name: str, tolerance_fraction: float = 1e-6) -> None:
    """The loss, and each weight's gradient, are those of one process to that part of its norm."""
    from safetensors.torch import load_file

    loss, expected_loss = (float((folder / each / "loss.txt").read_text()) for each in (name, expected_name))
    assert loss == pytest.approx(expected_loss, rel=tolerance_fraction)
    found, expected = {}, {}
    for each, tensors in ((name, found), (expected_name, expected)):
        for file in (folder / each).glob("*.safetensors"):
            tensors.update(load_file(file))
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        # attention ignores its keys' biases: their gradients are rounding alone
        if not key.endswith("k_proj.bias"):
            assert (found[key] - tensor).norm() <= tolerance_fraction * tensor.norm(), key
    trained = {key for key, tensor in expected.items() if tensor.norm()}
    tower = {key for key in expected if "visual" in key and "merger" not in key}
    assert trained == expected.keys() - (tower if "frozen" in name else set())
