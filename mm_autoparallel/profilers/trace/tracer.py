"""The figures of every block kind of a job for one configuration, from one fake step of the live model and its layers.

What is kept is what `observe` finds, as when profiling. A layer's operators and its working set are those of one layer
run by itself with gradients that are there already, as in the midst of a stage; those of the ends come from a step of
the whole model whose layers hand on their input. What a backward runs more than one to the inputs alone is the weight
gradient; what a recomputed backward runs more than a plain one is the recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from mm_autoparallel.model.blocks.parameters import count_parameters
from mm_autoparallel.model.profiles.traced import TracedOperator
from mm_autoparallel.profilers.blocks import LiveModel
from mm_autoparallel.profilers.kinds import EndKind, Kinds, LayerKind
from mm_autoparallel.profilers.meter import KeptActivations, count_bytes
from mm_autoparallel.profilers.observe import Observation, middle_bytes, observe, owned_parameters
from mm_autoparallel.profilers.split import Part, backward_parts, run_cut
from mm_autoparallel.profilers.stack import LayerCall, LayerStack
from mm_autoparallel.profilers.trace.fakes import choose_as_accelerator
from mm_autoparallel.profilers.trace.recorder import Recorder
from mm_autoparallel.profilers.trace.tally import Tally

NUM_LAYERS = 3
"""Layers of a kind to build: the first, which may keep more than others, and two whose difference is one layer."""


@dataclass(frozen=True)
class Figures:
    """What one block of a kind costs; fields as in TracedEntry."""

    parameter_count: int
    parameter_bytes: int
    gradient_bytes: int
    activation_bytes: int
    checkpoint_bytes: int
    output_bytes: int | None
    forward_transient_bytes: int
    backward_transient_bytes: int
    recompute_transient_bytes: int | None
    operators: tuple[TracedOperator, ...]


def trace_blocks(
    live: LiveModel, kinds: Kinds, step: Callable[[], Tensor], tp: int, recompute: bool
) -> dict[str, Figures]:
    """Figures by kind. step: one forward of the live model. recompute: trace recomputed layers as well."""
    seen = observe(live.model, live.layout, live.split, step, live.device, check=False)
    kept_bytes = middle_bytes(kinds, seen.kept_bytes)
    owned = owned_parameters(live.split.parts)
    found = {}
    for kind in kinds.layers:
        found[kind.block.kind] = _trace_layer(live, kind, seen, round(kept_bytes[kind.block.kind]), recompute)
    recorder, gradient_bytes = _trace_ends(live, step)
    for end in kinds.ends:
        name = end.part_name
        layer = found[next(kind.block.kind for kind in kinds.layers if kind.block.modality == end.block.modality)]
        whole = Figures(
            parameter_count=seen.parameter_count[name],
            parameter_bytes=count_bytes(owned[name]),
            gradient_bytes=gradient_bytes[name],
            activation_bytes=round(kept_bytes[end.block.kind]),
            checkpoint_bytes=round(kept_bytes[end.block.kind]),
            output_bytes=layer.output_bytes if end.block.role == "pre" else seen.output_bytes.get(name),
            forward_transient_bytes=recorder.passing_bytes(f"{name} forward"),
            backward_transient_bytes=recorder.passing_bytes(f"{name} backward"),
            recompute_transient_bytes=None,
            operators=list_phases(
                recorder.tally(f"{name} forward"), recorder.tally(f"{name} backward"), recorder.tally(f"{name} inputs")
            ),
        )
        found |= _part_merged(end, whole, tp)
    return found


def _trace_layer(
    live: LiveModel, kind: LayerKind, seen: Observation, activation_bytes: int, recompute: bool
) -> Figures:
    modality = kind.block.modality
    # the very first layer of a modality may take its input in another form than it hands it on: all ranks' tokens
    indices = kind.indices[1:] or kind.indices
    layers = [_OnAccelerator(live.layers[modality][index]) for index in indices]
    part_name = f"{modality}_layer_{indices[0]}"
    stack, output_bytes = LayerStack(layers, seen.calls[part_name], live.device), seen.output_bytes[part_name]
    if not kind.indices[1:]:
        _, handed_on = stack.forward(1)
        output_bytes = count_bytes([handed_on])
        if handed_on.shape != stack.state.shape:
            stack = LayerStack(layers, _of_fewer(seen.calls[part_name], handed_on.shape[-2]), live.device)
    return trace_stack(
        stack,
        KeptActivations(live.model),
        parameter_count=seen.parameter_count[part_name],
        activation_bytes=activation_bytes,
        output_bytes=output_bytes,
        recompute=recompute,
    )


def _of_fewer(call: LayerCall, num_tokens: int) -> LayerCall:
    """The same call with the first tokens alone."""
    leaves, structure = pytree.tree_flatten((call.args, dict(call.kwargs)))
    leaves[call.taken_at] = leaves[call.taken_at][..., :num_tokens, :].clone()
    args, kwargs = pytree.tree_unflatten(leaves, structure)
    return replace(call, args=args, kwargs=kwargs)


class _OnAccelerator(nn.Module):
    """A layer that is recomputed with the operators that it ran with first."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the layer gives."""
        with choose_as_accelerator():
            return self.layer(*args, **kwargs)


def trace_stack(
    stack: LayerStack,
    kept: KeptActivations,
    parameter_count: int,
    activation_bytes: int,
    output_bytes: int,
    recompute: bool,
) -> Figures:
    """The figures of one layer of `stack`, run by itself. kept: that knows the layers' parameters."""
    parameters = list(stack.layers[0].parameters())
    with Recorder() as recorder:
        stack.backward(*stack.forward(1))  # gradients that are there, as after the first micro-batch
        gradient_bytes = gradient_bytes_of(parameters)
        _run_layer(stack, recorder, "")
        if stack.has_backward:
            _run_layer(stack, recorder, "inputs ", inputs_only=True)
        if stack.has_backward and recompute:
            _run_layer(stack, recorder, "recomputed ", checkpointed=True)
    backward = recorder.tally("backward")
    recomputed = recorder.tally("recomputed backward")
    return Figures(
        parameter_count=parameter_count,
        parameter_bytes=count_bytes(parameters),
        gradient_bytes=gradient_bytes,
        activation_bytes=activation_bytes,
        checkpoint_bytes=stack.count_checkpoint_bytes(kept),
        output_bytes=output_bytes,
        forward_transient_bytes=recorder.passing_bytes("forward"),
        backward_transient_bytes=recorder.passing_bytes("backward"),
        recompute_transient_bytes=recorder.passing_bytes("recomputed backward") if recomputed else None,
        operators=list_phases(
            recorder.tally("forward"), backward, recorder.tally("inputs backward"), recomputed.beyond(backward)
        ),
    )


def _run_layer(
    stack: LayerStack, recorder: Recorder, prefix: str, inputs_only: bool = False, checkpointed: bool = False
) -> None:
    recorder.open(f"{prefix}forward")
    leaf, output = stack.forward(1, checkpointed)
    recorder.close()
    recorder.open(f"{prefix}backward")
    stack.backward(leaf, output, inputs_only)
    recorder.close()


def _trace_ends(live: LiveModel, step: Callable[[], Tensor]) -> tuple[Recorder, Mapping[str, int]]:
    """Windows `NAME forward`, `NAME backward` and `NAME inputs` of each part; bytes of its gradients."""

    def run(recorder: Recorder, inputs_only: bool = False) -> None:
        def entering(window: str) -> Callable[[Part], None]:
            return lambda part: recorder.open(f"{part.name} {window}")

        def leave(_: Part) -> None:
            recorder.close()

        forward = "again" if inputs_only else "forward"
        runs = run_cut(live.model, live.layout, step, entering(forward), leave, stub_layers=True, split=live.split)
        backward_parts(runs, entering("inputs" if inputs_only else "backward"), leave, inputs_only)

    with Recorder() as warm_up:
        run(warm_up)
    gradient_bytes = {name: gradient_bytes_of(own) for name, own in owned_parameters(live.split.parts).items()}
    with Recorder() as recorder:
        run(recorder)
        run(recorder, inputs_only=True)
    return recorder, gradient_bytes


def list_phases(
    forward: Tally, backward: Tally, to_inputs: Tally, recomputed: Tally | None = None
) -> tuple[TracedOperator, ...]:
    """Records of what ran: what a backward runs more than one to the inputs alone is for the weights."""
    return (
        *forward.operators("forward"),
        *to_inputs.operators("backward_input"),
        *backward.beyond(to_inputs).operators("backward_weight"),
        *(recomputed or Tally()).operators("recompute"),
    )


def gradient_bytes_of(parameters: Sequence[nn.Parameter]) -> int:
    """Of the gradients that are there."""
    return count_bytes([parameter.grad for parameter in parameters if parameter.grad is not None])


def _part_merged(end: EndKind, whole: Figures, tp: int) -> dict[str, Figures]:
    """`whole` as the figures of the end's own block; blocks merged with it get their parameters and nothing else."""
    found, left = {}, whole
    for block in end.merged:
        own_count = min(left.parameter_count, count_parameters(block.structure, tp))
        part = own_count / whole.parameter_count if whole.parameter_count else 0.0
        own_bytes, own_gradient_bytes = round(part * whole.parameter_bytes), round(part * whole.gradient_bytes)
        found[block.kind] = Figures(own_count, own_bytes, own_gradient_bytes, 0, 0, None, 0, 0, None, ())
        left = replace(
            left,
            parameter_count=left.parameter_count - own_count,
            parameter_bytes=left.parameter_bytes - own_bytes,
            gradient_bytes=left.gradient_bytes - own_gradient_bytes,
        )
    found[end.block.kind] = left
    return found
