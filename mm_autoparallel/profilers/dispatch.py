"""What all modes that watch operators ask of a call: its tensors, whose turn it is, whether anything is computed.

They are asked hundreds of thousands of times for one traced model, so nothing here walks more than it must.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor


def tensors_in(*trees: object) -> list[Tensor]:
    """The tensors among arguments or results of an operator: lists, tuples and dictionaries, in order."""
    found: list[Tensor] = []
    for tree in trees:
        if isinstance(tree, Tensor):
            found.append(tree)
        elif isinstance(tree, (list, tuple)):
            found += tensors_in(*tree)
        elif isinstance(tree, dict):
            found += tensors_in(*tree.values())
    return found


@cache
def is_of_wrappers(types: tuple[type, ...]) -> bool:
    """Whether a tensor subclass takes part that makes other operators of this one: it goes first, and they come by."""
    return any(hasattr(kind, "__tensor_flatten__") for kind in types)


def asks_for_device(func: Any) -> bool:
    """Whether it only asks where a tensor lies: PyTorch asks every fake one, more often than it computes with it."""
    return bool(func._schema.name == "prim::device")
