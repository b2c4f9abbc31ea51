"""Lists of layers in a model that nobody described: the outermost module lists, and what makes two members alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

_TELLING = (
    "window_size",
    "attention_type",
    "layer_type",
    "is_sliding",
    "sliding_window",
    "is_cross_attention",
    "use_rope",
    "is_moe_layer",
    "is_kv_shared_layer",
)
"""Attributes by which members of equal parameters differ in work (transformers 5)."""

_SMALL_COUNT = 4096
"""Assumed: integers of an argument whose values are looked at: where windows and images begin, not masks."""


def find_lists(model: nn.Module) -> dict[str, nn.ModuleList]:
    """Path → each list of two members or more with parameters that lies in no other such list."""
    found: dict[str, nn.ModuleList] = {}
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer in found)
        if not isinstance(module, nn.ModuleList) or inside or len(module) < 2:
            continue
        if all(any(True for _ in member.parameters()) for member in module):
            found[path] = module
    return found


def form_of(member: nn.Module) -> tuple[Any, ...]:
    """What is equal for members that are one kind, as far as they tell by themselves."""
    shapes = tuple((name, tuple(each.shape), each.requires_grad) for name, each in member.named_parameters())
    telling = tuple(
        (path, name, _plain(vars(module)[name]))
        for path, module in member.named_modules()
        for name in _TELLING
        if name in vars(module)
    )
    return (type(member).__name__, shapes, telling)


def form_of_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The same of how a member was called: shapes, and the values of short lists of integers."""
    leaves, structure = pytree.tree_flatten((args, dict(kwargs)))
    return (str(structure), tuple(_form_of_leaf(leaf) for leaf in leaves))


def _form_of_leaf(leaf: object) -> Any:
    if not isinstance(leaf, Tensor):
        return _plain(leaf) if isinstance(leaf, (bool, str, float)) else type(leaf).__name__
    real = not isinstance(leaf, FakeTensor) and not leaf.is_floating_point() and leaf.numel() <= _SMALL_COUNT
    return (tuple(leaf.shape), str(leaf.dtype), tuple(leaf.flatten().tolist()) if real else ())


def _plain(value: object) -> Any:
    return value if isinstance(value, (int, float, str, bool, type(None))) else str(value)
