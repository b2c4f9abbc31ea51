"""An action is one forward or backward of one chunk on one micro-batch; a stage's order is an array of them.

Text form, for people and golden files: `2F0` is the forward of micro-batch 2 through chunk 0, `2B0` its backward.
"""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

FORWARD = 0
BACKWARD = 1

#: int64 [num_actions, 3]: columns kind (FORWARD or BACKWARD), chunk, micro-batch; in the order the stage runs them.
StageOrder = NDArray[np.int64]

_ACTION = re.compile(r"(\d+)([FB])(\d+)")


def format_order(order: StageOrder) -> str:
    """`0F0 1F0 0B0 …`; `parse_order` reads it back."""
    return " ".join(f"{micro_batch}{'FB'[kind]}{chunk}" for kind, chunk, micro_batch in order.tolist())


def parse_order(text: str) -> StageOrder:
    """The order that `format_order` printed. Raises ValueError on anything else."""
    rows = []
    for word in text.split():
        match = _ACTION.fullmatch(word)
        if match is None:
            raise ValueError(f"{word!r} is not an action such as 2F0")
        micro_batch, kind, chunk = match.groups()
        rows.append(("FB".index(kind), int(chunk), int(micro_batch)))
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def one_forward_one_backward(forward: StageOrder, backward: StageOrder, num_warmup: int) -> StageOrder:
    """`num_warmup` forwards, then one forward and one backward in turn, then the backwards that are left.

    Every schedule here has this form; they differ in the two orders and in the warm-up.
    forward, backward: [n, 3], of equal length; num_warmup: 0 to n.
    """
    num_pairs = len(forward) - num_warmup
    steady = np.empty((2 * num_pairs, 3), dtype=np.int64)
    steady[0::2] = forward[num_warmup:]
    steady[1::2] = backward[:num_pairs]
    return np.concatenate([forward[:num_warmup], steady, backward[num_pairs:]])


def actions(kind: int, chunks: NDArray[np.int64], micro_batches: NDArray[np.int64]) -> StageOrder:
    """[n, 3] actions of one kind from their chunks and micro-batches, each [n]."""
    return np.stack([np.full_like(chunks, kind), chunks, micro_batches], axis=1)
