"""A stack of distinct layers of one kind, run by itself as a pipeline stage runs its layers.

The layers are the live model's own, the arguments those of a real forward. All that is not the hidden state (tables of
positions, masks) is given to each layer alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.checkpoint import checkpoint

from mm_autoparallel.profilers.clock import Stopwatch
from mm_autoparallel.profilers.meter import KeptActivations
from mm_autoparallel.profilers.torch_releases import parted_backward, tree_leaves

Pass = Literal["forward", "backward"]


@dataclass(frozen=True)
class LayerCall:
    """How a real forward called a layer.

    taken_at, given_at: where the hidden state is among the flattened arguments and outputs. requires_grad: whether that
    one does. autocast: the type that it ran under; None for no autocast.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    taken_at: int
    given_at: int
    requires_grad: bool
    autocast: torch.dtype | None


class LayerStack:
    """`layers`, each of which takes what the one before gave, called as `call` was."""

    def __init__(self, layers: Sequence[nn.Module], call: LayerCall, device: torch.device) -> None:
        self.layers = layers
        self._call = call
        self._device = device
        self._stopwatch = Stopwatch(device)
        self._leaves, self._structure = pytree.tree_flatten((call.args, dict(call.kwargs)))
        self.state: Tensor = self._leaves[call.taken_at].detach()
        self._gradient = torch.randn_like(self.state)
        given = self._leaves[call.taken_at]
        self._position = next((at for at, argument in enumerate(call.args) if argument is given), None)

    @property
    def has_backward(self) -> bool:
        """Whether a gradient flows through its layers."""
        return self._call.requires_grad or any(
            parameter.requires_grad for layer in self.layers for parameter in layer.parameters()
        )

    def forward(self, num_layers: int, checkpointed: bool = False) -> tuple[Tensor, Tensor]:
        """The input leaf and the output of the first `num_layers` layers, each one under checkpoint if asked."""
        leaf = self.state.detach().requires_grad_(self._call.requires_grad)
        state = leaf
        with self._autocast():
            for layer in self.layers[:num_layers]:
                state = self._run_layer(layer, state, checkpointed)
        return leaf, state

    def backward(self, leaf: Tensor, output: Tensor, inputs_only: bool = False) -> bool:
        """Gradients of `leaf` and of the parameters, or of `leaf` alone; False where no gradient flows."""
        if not output.requires_grad or (inputs_only and not leaf.requires_grad):
            return False
        torch.autograd.backward(output, self._gradient, inputs=[leaf] if inputs_only else None)
        return True

    def time(self, num_layers: int, checkpointed: bool = False, inputs_only: bool = False) -> dict[Pass, float]:
        """Milliseconds of one forward and one backward of the first `num_layers` layers."""
        start = self._stopwatch.mark()
        leaf, output = self.forward(num_layers, checkpointed)
        middle = self._stopwatch.mark()
        has_run = self.backward(leaf, output, inputs_only)
        end = self._stopwatch.mark()
        self._stopwatch.settle()
        return {
            "forward": self._stopwatch.between_ms(start, middle),
            "backward": self._stopwatch.between_ms(middle, end) if has_run else 0.0,
        }

    @property
    def may_split(self) -> bool:
        """Whether torch's pipeline can part its backward: a gradient goes on to its input, and weights that are plain
        tensors have one."""
        trained = [each for layer in self.layers for each in layer.parameters() if each.requires_grad]
        is_plain = not any(is_traceable_wrapper_subclass(each) for each in trained)
        return self._call.requires_grad and bool(trained) and is_plain and parted_backward() is not None

    def time_split(self, num_layers: int) -> float:
        """Milliseconds of the gradients of the input, and then of the parameters, of the first `num_layers` layers."""
        leaf, output = self.forward(num_layers)
        start = self._stopwatch.mark()
        self._run_weights(self._run_inputs(num_layers, leaf, output))
        end = self._stopwatch.mark()
        self._stopwatch.settle()
        return self._stopwatch.between_ms(start, end)

    def count_bytes_for_weights(self, kept: KeptActivations) -> float:
        """What one layer more keeps when the gradient of its input has run: what was saved for its weights' gradients,
        and the gradients of outputs that these take, each storage once. kept: that knows the layers' parameters."""
        short, long = len(self.layers) // 2, len(self.layers)
        found = []
        for num_layers in (short, long):
            with kept:
                leaf, output = self.forward(num_layers)
            left = self._run_inputs(num_layers, leaf, output) if num_layers else None
            found.append(kept.kept_bytes + (kept.count_beside(_waiting(left[1])) if left is not None else 0))
            if left is not None:
                self._run_weights(left)
            del leaf, output, left
        return (found[1] - found[0]) / (long - short)

    def _run_inputs(self, num_layers: int, leaf: Tensor, output: Tensor) -> tuple[list[nn.Parameter], Any]:
        """The gradient of the leaf; parameters that wait for theirs, and how to go on."""
        parted = parted_backward()
        assert parted is not None
        parameters = [each for layer in self.layers[:num_layers] for each in layer.parameters() if each.requires_grad]
        _, groups = parted[0]([output], [self._gradient], [leaf], iter(parameters))
        return parameters, groups

    @staticmethod
    def _run_weights(left: tuple[list[nn.Parameter], Any]) -> None:
        parted = parted_backward()
        assert parted is not None
        parted[1](iter(left[0]), left[1])

    def count_checkpoint_bytes(self, kept: KeptActivations) -> int:
        """What one layer more keeps where every layer is recomputed. kept: that knows the layers' parameters."""
        short, long = len(self.layers) // 2, len(self.layers)
        found = []
        for num_layers in (short, long):
            with kept:
                graph = self.forward(num_layers, checkpointed=True)
            found.append(kept.kept_bytes)
            del graph
        return round((found[1] - found[0]) / (long - short))

    def _run_layer(self, layer: nn.Module, state: Tensor, checkpointed: bool) -> Tensor:
        args, kwargs = self._with_state(state)
        run: Callable[..., Any] = layer
        output = checkpoint(run, *args, use_reentrant=False, **kwargs) if checkpointed else run(*args, **kwargs)
        given = output if isinstance(output, Tensor) else tree_leaves(output)[self._call.given_at]
        assert isinstance(given, Tensor)
        return given

    def _with_state(self, state: Tensor) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """The call's arguments with another hidden state; in the usual case without a walk through all of them."""
        if self._position is not None:
            args = self._call.args
            return (*args[: self._position], state, *args[self._position + 1 :]), self._call.kwargs
        leaves = list(self._leaves)
        leaves[self._call.taken_at] = state
        args, kwargs = pytree.tree_unflatten(leaves, self._structure)
        return args, kwargs

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._call.autocast is None:
            return nullcontext()
        return torch.autocast(self._device.type, self._call.autocast)


def _waiting(groups: Sequence[Mapping[str, Any]]) -> Iterator[Tensor]:
    """The gradients that torch's groups of parameters hold until the weights have theirs."""
    for group in groups:
        for gradients in group.get("grads") or ():
            yield from (each for each in gradients or () if isinstance(each, Tensor))
