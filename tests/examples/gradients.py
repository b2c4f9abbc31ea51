"""Gradients of one step of the training script, of one process and of several, written by write_gradients.py."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from forked_ranks import ForkedRanks

WRITE_GRADIENTS = Path(__file__).with_name("write_gradients.py")


def start(ranks: ForkedRanks, folder: Path, groups: Mapping[int, Mapping[str, str]], files: Mapping[str, str]) -> str:
    """Write the gradients of every line of flags to a folder of its name; what was printed.

    groups: lines by the number of processes that run them. files: that flags name.
    """
    for name, content in files.items():
        (folder / name).write_text(content, encoding="utf-8")
    told = []
    for number, runs in groups.items():
        lines = [f"{flags} --save {name}" for name, flags in runs.items()]
        (folder / "flags.txt").write_text("\n".join(lines), encoding="utf-8")
        told.append(ranks.run(WRITE_GRADIENTS, ["flags.txt"], number, folder, []))
    return "".join(told)


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
