"""Pipeline: one training step of this rank's stages over the micro-batches, by PyTorch's schedules.

Where PyTorch's own class runs the order that was planned it is used; the other orders that mm-autoparallel plans (fewer
micro-batches than stages, interleaved with a remainder or with less memory, backwards in two parts, V-shapes, an order
from a file) run as actions in PyTorch's own runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import (
    _Action,
    _PipelineSchedule,
    _PipelineScheduleRuntime,
)
from transformers import Qwen2VLConfig

from data import Batch, SampleShape
from failures import TrainingError
from mm_autoparallel.integrations.torch.schedule_csv import join_recomputed, join_untrained
from mm_autoparallel.pipeline.schedules.catalog import check_rounds, find_schedule
from mm_autoparallel.pipeline.schedules.torch_csv import Orders, write_rows
from mm_autoparallel.pipeline.schedules.virtual_stages import virtual_stage
from model import Held, Stage, output_of
from parallel import Ranks, with_reduction, without_reduction


@dataclass(frozen=True)
class Layout:
    """How a step is laid out: what every virtual stage holds, over how many micro-batches, in which order.

    pieces: per virtual stage, in the order data flows. order: in the place of the schedule's own. num_frozen: virtual
    stages in front that train nothing. num_behind: stages that follow on ranks of another pipeline. num_rounds: a step
    is so many runs.
    """

    pieces: tuple[tuple[Held, ...], ...]
    num_microbatches: int
    micro_batch_size: int
    schedule: str
    order: Orders | None = None
    num_frozen: int = 0
    num_behind: int = 0
    num_rounds: int = 1


class Pipeline:
    """Runs forwards and backwards of one step. stages: this rank's virtual stages, replicated as they train.

    bare: the same stages without the wrapper of data parallelism. arrive: where an encoder of sizes of its own runs
    elsewhere, returns the next features for the first stage. depart: in such an encoder on ranks of its own, sends
    features, and returns a loss that waits for their gradient.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        bare: Sequence[Stage],
        layout: Layout,
        ranks: Ranks,
        config: Qwen2VLConfig,
        shape: SampleShape,
        dtype: torch.dtype,
        arrive: Callable[[], Tensor] | None = None,
        depart: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._stages, self._layout, self._device, self._depart = stages, layout, ranks.device, depart
        self._wanted = {name for stage in bare for name in stage.wanted}
        if arrive is not None and ranks.place("pp") == 0:
            bare[0].register_forward_pre_hook(
                lambda _, args, batch: (args, batch | {"hidden": arrive()}), with_kwargs=True
            )
        self._before: Callable[[int], None] | None = None
        self._num_begun = 0
        self._schedule: _PipelineSchedule | None = None
        if ranks.size("pp") > 1 or depart is not None:
            self._schedule = self._make_schedule(ranks, config, shape, dtype)

    @property
    def num_microbatches(self) -> int:
        """Of a run."""
        return self._layout.num_microbatches

    @property
    def needs_pixels(self) -> bool:
        """Whether a stage of this rank reads images."""
        return "pixel_values" in self._wanted

    def run(self, batch: Batch, before: Callable[[int], None] | None = None) -> float | None:
        """Accumulate the gradients of the batch's mean loss; that loss where this rank holds the last stage.

        before: called in front of each forward and backward of this rank, with its number among them; of a schedule of
        whole backwards on several stages.
        """
        self._before, self._num_begun = before, 0
        tensors = {name: self._move(name, tensor) for name, tensor in batch.tensors().items() if name in self._wanted}
        losses: list[Tensor] = []
        if self._schedule is None:
            self._accumulate(tensors, losses)
        elif self._depart is not None:
            self._schedule.step(target=batch.image_grid, return_outputs=False, **tensors)
        else:
            target = tensors.get("labels")
            self._schedule.step(target=target, losses=losses, return_outputs=False, **tensors)
        return float(torch.stack([loss.detach() for loss in losses]).sum()) if losses else None

    def run_samples(self, micro_batches: Sequence[Sequence[tuple[Batch, float]]]) -> list[float]:
        """Accumulate the gradients of weighted losses of single samples, micro-batch by micro-batch; their losses.

        Of one stage alone, whose samples may differ in shape. The last micro-batch's last sample is reduced with.
        """
        (stage,) = self._stages
        losses: list[Tensor] = []
        left = sum(map(len, micro_batches))
        for batch, weight in (one for micro_batch in micro_batches for one in micro_batch):
            left -= 1
            tensors = {name: self._move(name, each) for name, each in batch.tensors().items() if name in self._wanted}
            if not left:
                with_reduction(stage)
            with without_reduction(stage) if left else nullcontext():
                loss = stage(**tensors)
                (loss * weight).backward()
            losses.append(loss.detach())
        return torch.stack(losses).tolist()

    def _announce(self) -> None:
        """A forward or backward begins."""
        if self._before is not None:
            self._before(self._num_begun)
        self._num_begun += 1

    def _move(self, name: str, tensor: Tensor) -> Tensor:
        # Where images end is read on the CPU by every layer; on the device, each would wait for it.
        return tensor if name == "image_grid" else tensor.to(self._device, non_blocking=True)

    def _accumulate(self, tensors: dict[str, Tensor], losses: list[Tensor]) -> None:
        """The only stage: forward and backward of one micro-batch after the other."""
        (stage,), count = self._stages, self._layout.num_microbatches
        share = count * self._layout.num_rounds
        chunks = {name: tensor.chunk(count) for name, tensor in tensors.items()}
        for index in range(count):
            micro_batch = {name: parts[index] for name, parts in chunks.items()}
            if index == count - 1:
                with_reduction(stage)
                loss = stage(**micro_batch) / share
                loss.backward()
            else:
                with without_reduction(stage):
                    loss = stage(**micro_batch) / share
                    loss.backward()
            losses.append(loss)

    def _make_schedule(
        self, ranks: Ranks, config: Qwen2VLConfig, shape: SampleShape, dtype: torch.dtype
    ) -> _PipelineSchedule:
        layout, num_ranks = self._layout, ranks.size("pp")
        order = find_order(layout, num_ranks)
        cuts = [
            output_of(pieces[-1], config, layout.micro_batch_size, shape, dtype, trains=k >= layout.num_frozen)
            for k, pieces in enumerate(layout.pieces[:-1])
        ]
        loss = torch.empty((), device="meta", requires_grad=True)
        stages = []
        for chunk, stage in enumerate(self._stages):
            index = virtual_stage(chunk, ranks.place("pp"), num_ranks, order.v_shaped)
            stages.append(
                _Announced(
                    self._announce,
                    stage,
                    index,
                    len(layout.pieces),
                    ranks.device,
                    input_args=(cuts[index - 1],) if index else (),
                    output_args=(cuts[index],) if index < len(cuts) else (loss,),
                    group=ranks.group("pp"),
                )
            )
        count = layout.num_microbatches

        def mean_share(output: Tensor, _: Tensor) -> Tensor:
            """A stage's output is its loss already; micro-batches share the mean equally."""
            return output / count if self._depart is None else self._depart(output)

        name, whole_rounds = layout.schedule, count % num_ranks == 0
        if layout.order is not None or layout.num_behind:
            return _Planned(stages, count, mean_share, order)
        if name == "interleaved_1f1b" and whole_rounds:
            return ScheduleInterleaved1F1B(stages, count, mean_share, scale_grads=False)
        if name == "1f1b" and count >= num_ranks:
            return Schedule1F1B(stages[0], count, mean_share, scale_grads=False)
        if name == "gpipe":
            return ScheduleGPipe(stages[0], count, mean_share, scale_grads=False)
        return _Planned(stages, count, mean_share, order)


def find_order(layout: Layout, num_stages: int) -> Orders:
    """What each stage runs, with whole backwards where PyTorch cannot part them, which is told.

    Raises TrainingError where the order is of other micro-batches than a step has.
    """
    num_chunks, count = len(layout.pieces) // num_stages, layout.num_microbatches
    order = layout.order
    if order is None:
        schedule = find_schedule(layout.schedule, num_chunks)
        check_rounds(schedule, num_stages, count)
        length = num_stages + layout.num_behind
        stages = tuple(schedule.order(length, num_chunks, count, stage) for stage in range(num_stages))
        order = Orders(stages, num_chunks, count, schedule.v_shaped)
    if order.num_microbatches != count:
        raise TrainingError(
            f"--pipeline-order is of {order.num_microbatches} micro-batches, and a step has {count}: "
            "--global-batch-size by replicas and --micro-batch-size"
        )
    order, untrained = join_untrained(order, layout.num_frozen)
    recomputing = [k for k, pieces in enumerate(layout.pieces) if any(piece.recomputed for piece in pieces)]
    order, recomputed = join_recomputed(order, recomputing)
    for told in (untrained, recomputed):
        if told and not dist.get_rank():
            print(f"note: {told}", flush=True)
    return order


class _Announced(PipelineStage):
    """A stage that calls `announce` in front of each forward and whole backward."""

    def __init__(self, announce: Callable[[], None], *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._announce = announce

    def forward_one_chunk(self, *given: Any, **named: Any) -> Any:
        """PyTorch's own, announced."""
        self._announce()
        return super().forward_one_chunk(*given, **named)

    def backward_one_chunk(self, *given: Any, **named: Any) -> Any:
        """PyTorch's own, announced."""
        self._announce()
        return super().backward_one_chunk(*given, **named)


class _Planned(_PipelineScheduleRuntime):
    """Any order, action for action."""

    def __init__(self, stages: list[PipelineStage], num_microbatches: int, loss_fn: object, order: Orders) -> None:
        super().__init__(stages, n_microbatches=num_microbatches, loss_fn=loss_fn, scale_grads=False)
        rows = write_rows(order.stages, order.v_shaped).splitlines()
        self.pipeline_order = {
            rank: [_Action.from_str(cell) for cell in row.split(",")] for rank, row in enumerate(rows)
        }
        self._prepare_schedule_with_comms(self.pipeline_order)
