"""Products of a small operator base, and all of one read, for tests of this room."""

from __future__ import annotations

from pathlib import Path

from mm_autoparallel.model.profiles.operators.base import OperatorBase, Sampled
from mm_autoparallel.model.profiles.operators.form import OperatorForm, TensorForm
from mm_autoparallel.model.profiles.operators.platform import Platform

__all__ = ["HERE", "OperatorBase", "Sampled", "product", "read_all"]

HERE = Platform("cpu-a", {"torch": "2.6.0"})


def product(rows: int = 4, transposed: bool = False, dtype: str = "bf16") -> OperatorForm:
    left = TensorForm(shape=(rows, 8), dtype=dtype)
    right = TensorForm(shape=(8, 2), dtype=dtype, strides=(1, 8) if transposed else None)
    result = TensorForm(shape=(rows, 2), dtype=dtype)
    sizes = {"flops": 2 * rows * 8 * 2, "moved_bytes": 2 * (rows * 8 + 16 + rows * 2)}
    return OperatorForm(operator="aten::mm", inputs=(left, right), outputs=(result,), **sizes)


def read_all(path: Path) -> None:
    with OperatorBase.open(path) as base:
        for place in base.list_platforms():
            list(base.list_timed(place))
