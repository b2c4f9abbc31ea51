"""An action is one pass of one chunk on one micro-batch; a stage's order is an array of them.

Text form, for people and golden files: `2F0` is the forward of micro-batch 2 through chunk 0, `2B0` its whole backward,
`2I0` the part of it that hands the gradient on and `2W0` the part for the weights. `(2F0;1B1)` is a forward and a whole
backward that run together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

FORWARD = 0
BACKWARD = 1
INPUT = 2
"""The gradient of a virtual stage's input."""
WEIGHT = 3
"""The gradient of its weights."""
PAIRED = 4
"""A forward that runs together with the backward in the next row."""

KINDS = "FBIW"
"""The letter of each kind."""

#: int64 [num_actions, 3]: columns kind, chunk, micro-batch; in the order the stage runs them.
StageOrder = NDArray[np.int64]

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
_PAIR = re.compile(r"\((\d+F\d+);(\d+B\d+)\)")


def format_action(kind: int, chunk: int, micro_batch: int) -> str:
    """`2F0`; a paired forward by itself."""
    return f"{micro_batch}{KINDS[kind % PAIRED]}{chunk}"


def format_order(order: StageOrder) -> str:
    """`0F0 1F0 0B0 …`; `parse_order` reads it back."""
    return " ".join(_words(order))


def _words(order: StageOrder) -> Iterator[str]:
    forward = ""
    for kind, chunk, micro_batch in order.tolist():
        word = format_action(kind, chunk, micro_batch)
        if kind == PAIRED:
            forward = word
        else:
            yield f"({forward};{word})" if forward else word
            forward = ""


def parse_order(text: str) -> StageOrder:
    """The order that `format_order` printed. Raises ValueError on anything else."""
    rows = []
    for word in text.split():
        pair = _PAIR.fullmatch(word)
        for part in pair.groups() if pair else (word,):
            match = _ACTION.fullmatch(part)
            if match is None:
                raise ValueError(f"{word!r} is not an action such as 2F0")
            micro_batch, letter, chunk = match.groups()
            kind = PAIRED if pair and letter == "F" else KINDS.index(letter)
            rows.append((kind, int(chunk), int(micro_batch)))
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def one_forward_one_backward(forward: StageOrder, backward: StageOrder, num_warmup: int) -> StageOrder:
    """`num_warmup` forwards, then one forward and one backward in turn, then the backwards that are left.

    Schedules whose backwards are whole have this form; they differ in the two orders and in the warm-up.
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
