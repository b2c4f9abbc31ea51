"""The figures of every block kind of a job for one configuration, on the devices at hand.

A middle layer is the difference of two stacks of distinct layers of the live model, run as a pipeline stage runs them:
forward with gradients on, then one backward for inputs and weights together, which adds to gradients that are there
already. Ends come from forwards of the whole model whose layers hand on their input. A round takes one sample of
everything, so that whatever disturbs the machine disturbs all figures alike, and all ranks go through it together, so
that they disturb each other as training does. A weight gradient is what a whole backward takes more than one for the
inputs alone; splitting a backward costs what these two take more one after the other, as torch's pipeline runs them;
recomputing is what forward and backward take more under torch.utils.checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mm_autoparallel.model.blocks.parameters import count_parameters
from mm_autoparallel.model.profiles.operators.base import Sampled
from mm_autoparallel.model.profiles.store import Timing
from mm_autoparallel.profilers.clock import Effort, Stopwatch, collect_samples, summarize
from mm_autoparallel.profilers.ends import Ends
from mm_autoparallel.profilers.kinds import EndKind, Kinds
from mm_autoparallel.profilers.lockstep import Lockstep
from mm_autoparallel.profilers.meter import AllocationTrace, KeptActivations
from mm_autoparallel.profilers.observe import Observation, middle_bytes
from mm_autoparallel.profilers.operators.clock import OperatorClock
from mm_autoparallel.profilers.shard import Collective, record_collectives
from mm_autoparallel.profilers.split import Split
from mm_autoparallel.profilers.stack import LayerStack
from mm_autoparallel.profilers.subject import Layout

INPUTS_EVERY = 3
"""Assumed: of so many rounds one measures gradients of inputs alone. They only divide a backward in two."""

OPERATOR_ROUNDS = 5
"""Assumed: runs in which every operator is timed by itself."""

Price = Callable[[Sequence[Collective]], float]
"""Milliseconds that collectives take by a model of the network."""


OnRound = Callable[[float], None]
"""Told how many ms this rank took for the samples that are alike in every round; waiting between them is left out."""


@dataclass(frozen=True)
class Figures:
    """What one block of a kind costs; fields as in ProfileEntry. recompute_ms None: nothing to recompute;
    split_extra_ms and kept_for_weight_bytes None: its backward was not parted."""

    forward_ms: Timing
    backward_input_ms: Timing
    backward_weight_ms: Timing
    recompute_ms: Timing | None
    split_extra_ms: Timing | None
    kept_for_weight_bytes: int | None
    activation_bytes: int
    checkpoint_bytes: int
    transient_bytes: int
    parameter_count: int
    output_bytes: int | None


@dataclass(frozen=True)
class LiveModel:
    """A model that was built and taken apart, and the device it is on."""

    model: nn.Module
    layout: Layout
    split: Split
    layers: Mapping[str, Sequence[nn.Module]]
    device: torch.device


class Blocks:
    """Every block kind of a job in one live model, on one size of micro-batch.

    step: one forward on it. seen: what `observe` found in one.
    """

    def __init__(
        self, live: LiveModel, kinds: Kinds, step: Callable[[], Tensor], seen: Observation, lockstep: Lockstep
    ) -> None:
        self._kinds, self._seen, self._lockstep, self._device = kinds, seen, lockstep, live.device
        self._ends = Ends(live.model, live.layout, live.split, step, live.device)
        self._kept = KeptActivations(live.model)
        self._stacks = {
            kind.block.kind: LayerStack(
                [live.layers[kind.block.modality][index] for index in kind.indices],
                seen.calls[f"{kind.block.modality}_layer_{kind.indices[0]}"],
                live.device,
            )
            for kind in kinds.layers
        }
        self._num_rounds = 0
        self._round_ms = 0.0

    def measure(
        self, effort: Effort, tp: int, price: Price | None = None, on_round: OnRound | None = None
    ) -> dict[str, Figures]:
        """Figures by kind. price: given where collectives did not take place and their time is to be added.

        on_round: called in every rank after each round; what it does takes place between two rounds.
        """
        checkpoint_bytes = {kind: stack.count_checkpoint_bytes(self._kept) for kind, stack in self._stacks.items()}
        transient_bytes = {kind: self._trace_passing_bytes(stack) for kind, stack in self._stacks.items()}
        left_bytes = {
            kind: round(stack.count_bytes_for_weights(self._kept))
            for kind, stack in self._stacks.items()
            if stack.may_split
        }
        end_transient_bytes = self._ends.trace_passing_bytes()
        added_ms = self._price_collectives(price) if price else {}

        def run_round() -> dict[str, float]:
            found = self._run_round()
            if on_round:
                on_round(self._round_ms)
            return found

        samples = collect_samples(run_round, effort, self._lockstep)
        kept_bytes = middle_bytes(self._kinds, self._seen.kept_bytes)
        left_bytes = {kind: min(found, round(kept_bytes[kind])) for kind, found in left_bytes.items()}

        def timing(kind: str, name: str) -> Timing:
            found = summarize(samples[f"{kind} {name}"], self._lockstep)
            return _more(found, 1.0, added_ms.get(f"{kind} {name}", 0.0))

        def extra_ms(kind: str, backward: Timing) -> Timing | None:
            if f"{kind} split fraction" not in samples:
                return None
            return _more(backward, summarize(samples[f"{kind} split fraction"], self._lockstep).median_ms, 0.0)

        def figures(kind: str, part_name: str, checkpoint: int, transient: int) -> Figures:
            backward = summarize(samples[f"{kind} backward"], self._lockstep)
            weight_fraction = summarize(samples[f"{kind} weight fraction"], self._lockstep).median_ms
            weight_ms = added_ms.get(f"{kind} weight", 0.0)
            input_ms = added_ms.get(f"{kind} backward", 0.0) - weight_ms
            return Figures(
                forward_ms=timing(kind, "forward"),
                backward_input_ms=_more(backward, 1.0 - weight_fraction, input_ms),
                backward_weight_ms=_more(backward, weight_fraction, weight_ms),
                recompute_ms=timing(kind, "recompute") if f"{kind} recompute" in samples else None,
                split_extra_ms=extra_ms(kind, backward),
                kept_for_weight_bytes=left_bytes.get(kind),
                activation_bytes=round(kept_bytes[kind]),
                checkpoint_bytes=checkpoint,
                transient_bytes=transient,
                parameter_count=self._seen.parameter_count[part_name],
                output_bytes=self._seen.output_bytes.get(part_name),
            )

        found = {}
        for layer_kind in self._kinds.layers:
            kind = layer_kind.block.kind
            part_name = f"{layer_kind.block.modality}_layer_{layer_kind.indices[0]}"
            found[kind] = figures(kind, part_name, checkpoint_bytes[kind], transient_bytes[kind])
        for end in self._kinds.ends:
            kind, part_name = end.block.kind, end.part_name
            whole = figures(kind, part_name, round(kept_bytes[kind]), end_transient_bytes.get(part_name, 0))
            found |= _part_merged(end, whole, tp)
        return found

    def clock_operators(self) -> list[Sampled]:
        """How long each operator takes inside its block; nothing on an accelerator (operators/clock.py)."""
        if self._device.type != "cpu":
            return []
        with OperatorClock() as clock:
            for _ in range(OPERATOR_ROUNDS):
                for stack in self._stacks.values():
                    stack.backward(*stack.forward(1))
                self._ends.time()
        found: list[Sampled] = clock.found
        return found

    # ------------------------------------------------------------------------------------------------------ times

    def _run_round(self) -> dict[str, float]:
        """One sample of everything, by kind and name: forward, backward, recompute, at times `weight fraction`."""
        inputs_too = self._num_rounds % INPUTS_EVERY == 0
        self._num_rounds += 1
        self._round_ms = 0.0
        found: dict[str, float] = {}
        for kind, stack in self._stacks.items():
            found |= {f"{kind} {name}": time_ms for name, time_ms in self._time_stack(stack, inputs_too).items()}
        self._lockstep.wait()
        times = self._ends.time()
        self._round_ms += sum(times.forward.values()) + sum(times.backward.values())
        self._lockstep.wait()
        to_inputs = self._ends.time(inputs_only=True) if inputs_too else None
        for end in self._kinds.ends:
            kind, part_name = end.block.kind, end.part_name
            found[f"{kind} forward"] = times.forward.get(part_name, 0.0)
            found[f"{kind} backward"] = times.backward.get(part_name, 0.0)
            if to_inputs:
                to_inputs_ms = to_inputs.backward.get(part_name, 0.0)
                found[f"{kind} weight fraction"] = _fraction_beyond(to_inputs_ms, found[f"{kind} backward"])
        return found

    def _time_stack(self, stack: LayerStack, inputs_too: bool) -> dict[str, float]:
        """One sample of a middle layer: the long stack less the short one, over the layers between."""
        short, long = _depths(stack)
        times = {}
        for num_layers in (long, short) if self._num_rounds % 2 else (short, long):
            self._lockstep.wait()
            times[num_layers] = stack.time(num_layers)
            self._round_ms += sum(times[num_layers].values())
        of_long, of_short = times[long], times[short]
        found = {name: (of_long[name] - of_short[name]) / (long - short) for name in ("forward", "backward")}
        self._lockstep.wait()
        if stack.has_backward:
            some = short or long
            checkpointed = stack.time(some, checkpointed=True)
            self._round_ms += sum(checkpointed.values())
            found["recompute"] = (sum(checkpointed.values()) - sum(times[some].values())) / some
        if inputs_too:
            self._lockstep.wait()
            to_inputs_ms = stack.time(long, inputs_only=True)["backward"]
            found["weight fraction"] = _fraction_beyond(to_inputs_ms, of_long["backward"])
            if stack.may_split:
                self._lockstep.wait()
                found["split fraction"] = stack.time_split(long) / max(of_long["backward"], 1e-9) - 1.0
        return found

    # ------------------------------------------------------------------------------------------------------ bytes

    def _trace_passing_bytes(self, stack: LayerStack) -> int:
        """Beyond what one layer keeps, in its forward or its backward. Leaves gradients allocated."""
        stack.backward(*stack.forward(len(stack.layers)))
        with AllocationTrace(self._device) as trace:
            trace.mark("forward")
            leaf, output = stack.forward(1)
            trace.mark("backward")
            stack.backward(leaf, output)
        return max(segment.passing_bytes for segment in trace.segments.values())

    # ------------------------------------------------------------------------------------------------ collectives

    def _price_collectives(self, price: Price) -> dict[str, float]:
        """Milliseconds by kind and name, as in a round, of the collectives that a sample there would wait for."""
        found: dict[str, float] = {}
        for kind, stack in self._stacks.items():
            short, long = _depths(stack)
            more = long - short
            of_long, of_short = _record_stack(stack, long), _record_stack(stack, short)
            forward_ms = (price(of_long.forward) - price(of_short.forward)) / more
            backward_ms = (price(of_long.backward) - price(of_short.backward)) / more
            to_inputs_ms = price(_record_stack(stack, long, inputs_only=True).backward) / long
            checkpointed = _record_stack(stack, long, checkpointed=True)
            again_ms = price([*checkpointed.forward, *checkpointed.backward])
            again_ms -= price([*of_long.forward, *of_long.backward])
            found |= {
                f"{kind} forward": forward_ms,
                f"{kind} backward": backward_ms,
                f"{kind} weight": max(0.0, backward_ms - to_inputs_ms),
                f"{kind} recompute": again_ms / long,
            }
        whole, to_inputs = self._ends.record_collectives(), self._ends.record_collectives(inputs_only=True)
        for end in self._kinds.ends:
            kind, part_name = end.block.kind, end.part_name
            backward_ms = price(whole.backward.get(part_name, []))
            found |= {
                f"{kind} forward": price(whole.forward.get(part_name, [])),
                f"{kind} backward": backward_ms,
                f"{kind} weight": backward_ms - price(to_inputs.backward.get(part_name, [])),
            }
        return found


@dataclass(frozen=True)
class _Issued:
    forward: Sequence[Collective]
    backward: Sequence[Collective]


def _record_stack(stack: LayerStack, num_layers: int, checkpointed: bool = False, inputs_only: bool = False) -> _Issued:
    graph, forward = record_collectives(lambda: stack.forward(num_layers, checkpointed))
    _, backward = record_collectives(lambda: stack.backward(*graph, inputs_only=inputs_only))
    return _Issued(forward, backward)


def _fraction_beyond(part_ms: float, whole_ms: float) -> float:
    """What fraction of `whole_ms` is not `part_ms`."""
    return min(1.0, max(0.0, 1.0 - part_ms / whole_ms)) if whole_ms > 0 else 0.0


def _more(timing: Timing, fraction: float, more_ms: float) -> Timing:
    """A fraction of `timing`, and `more_ms`; no less than nothing."""
    median_ms = max(0.0, timing.median_ms * fraction + more_ms)
    return timing.model_copy(update={"median_ms": median_ms, "mad_ms": timing.mad_ms * fraction})


def _depths(stack: LayerStack) -> tuple[int, int]:
    """Layers of the short and of the long stack: half of them and all; a lone layer is compared with nothing."""
    num_layers = len(stack.layers)
    return num_layers // 2, num_layers


def _part_merged(end: EndKind, whole: Figures, tp: int) -> dict[str, Figures]:
    """`whole` as the figures of the end's own block; blocks merged with it get their parameters and nothing else."""
    nothing = Timing(median_ms=0.0, mad_ms=0.0, num_samples=whole.forward_ms.num_samples)
    found, left_count = {}, whole.parameter_count
    for block in end.merged:
        own_count = min(left_count, count_parameters(block.structure, tp))
        left_count -= own_count
        found[block.kind] = Figures(nothing, nothing, nothing, None, None, None, 0, 0, 0, own_count, None)
    found[end.block.kind] = Figures(**(vars(whole) | {"parameter_count": left_count}))
    return found


def measure_optimizer(
    build_optimizer: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer],
    more: Sequence[nn.Parameter],
    fewer: Sequence[nn.Parameter],
    num_blocks: int,
    device: torch.device,
    effort: Effort,
    lockstep: Lockstep,
) -> Timing | None:
    """An optimizer step and zero_grad over one block: over `more` parameters less over `fewer`, over `num_blocks`.

    Gradients stay allocated. None where none of them trains.
    """
    stopwatch = Stopwatch(device)
    sets = [[parameter for parameter in parameters if parameter.requires_grad] for parameters in (more, fewer)]
    if not sets[0]:
        return None
    for parameter in sets[0]:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    optimizers = [build_optimizer(parameters) if parameters else None for parameters in sets]

    def time_ms(optimizer: torch.optim.Optimizer | None) -> float:
        if optimizer is None:
            return 0.0
        lockstep.wait()
        return stopwatch.time_ms(lambda: (optimizer.step(), optimizer.zero_grad(set_to_none=False)))

    def run_round() -> dict[str, float]:
        of_more, of_fewer = (time_ms(optimizer) for optimizer in optimizers)
        return {"step": (of_more - of_fewer) / num_blocks}

    return summarize(collect_samples(run_round, effort, lockstep)["step"], lockstep)
