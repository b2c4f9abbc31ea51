"""Pipeline: one training step of this rank's stages over the micro-batches, by PyTorch's schedules.

Where PyTorch's own class runs the order that was planned it is used; the other orders that mm-autoparallel plans (fewer
micro-batches than stages, interleaved with a remainder or with less memory) run as actions in PyTorch's own runtime.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import (
    _Action,
    _ComputationType,
    _PipelineSchedule,
    _PipelineScheduleRuntime,
)
from transformers import Qwen2VLConfig

from data import Batch, SampleShape
from mm_autoparallel.pipeline.schedules.action import FORWARD
from mm_autoparallel.pipeline.schedules.catalog import find_schedule
from model import Held, Stage, output_of
from parallel import Ranks, with_reduction, without_reduction


@dataclass(frozen=True)
class Layout:
    """How a step is laid out: what every virtual stage holds, over how many micro-batches, in which order.

    pieces: per virtual stage k, which lies on pipeline rank k modulo the stages' number.
    """

    pieces: tuple[tuple[Held, ...], ...]
    num_microbatches: int
    micro_batch_size: int
    schedule: str


class Pipeline:
    """Runs forwards and backwards of one step. stages: this rank's virtual stages, replicated as they train.

    bare: the same stages without the wrapper of data parallelism.
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
    ) -> None:
        self._stages, self._layout, self._device = stages, layout, ranks.device
        self._wanted = {name for stage in bare for name in stage.wanted}
        self._schedule: _PipelineSchedule | None = None
        if ranks.size("pp") > 1:
            self._schedule = self._make_schedule(ranks, config, shape, dtype)

    @property
    def needs_pixels(self) -> bool:
        """Whether a stage of this rank reads images."""
        return "pixel_values" in self._wanted

    def run(self, batch: Batch) -> float | None:
        """Accumulate the gradients of the batch's mean loss; that loss where this rank holds the last stage."""
        tensors = {name: self._move(name, tensor) for name, tensor in batch.tensors().items() if name in self._wanted}
        losses: list[Tensor] = []
        if self._schedule is None:
            self._accumulate(tensors, losses)
        else:
            target = tensors.get("labels")
            self._schedule.step(target=target, losses=losses, return_outputs=False, **tensors)
        return float(torch.stack([loss.detach() for loss in losses]).sum()) if losses else None

    def _move(self, name: str, tensor: Tensor) -> Tensor:
        # Where images end is read on the CPU by every layer; on the device, each would wait for it.
        return tensor if name == "image_grid" else tensor.to(self._device, non_blocking=True)

    def _accumulate(self, tensors: dict[str, Tensor], losses: list[Tensor]) -> None:
        """The only stage: forward and backward of one micro-batch after the other."""
        (stage,), count = self._stages, self._layout.num_microbatches
        chunks = {name: tensor.chunk(count) for name, tensor in tensors.items()}
        for index in range(count):
            micro_batch = {name: parts[index] for name, parts in chunks.items()}
            if index == count - 1:
                with_reduction(stage)
                loss = stage(**micro_batch) / count
                loss.backward()
            else:
                with without_reduction(stage):
                    loss = stage(**micro_batch) / count
                    loss.backward()
            losses.append(loss)

    def _make_schedule(
        self, ranks: Ranks, config: Qwen2VLConfig, shape: SampleShape, dtype: torch.dtype
    ) -> _PipelineSchedule:
        layout, num_ranks = self._layout, ranks.size("pp")
        cuts = [output_of(pieces[-1], config, layout.micro_batch_size, shape, dtype) for pieces in layout.pieces[:-1]]
        loss = torch.empty((), device="meta", requires_grad=True)
        stages = []
        for chunk, stage in enumerate(self._stages):
            index = chunk * num_ranks + ranks.place("pp")
            stages.append(
                PipelineStage(
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
            return output / count

        name, whole_rounds = layout.schedule, count % num_ranks == 0
        if name == "interleaved_1f1b" and whole_rounds:
            return ScheduleInterleaved1F1B(stages, count, mean_share, scale_grads=False)
        if name == "1f1b" and count >= num_ranks:
            return Schedule1F1B(stages[0], count, mean_share, scale_grads=False)
        if name == "gpipe":
            return ScheduleGPipe(stages[0], count, mean_share, scale_grads=False)
        return _Planned(stages, count, mean_share, name)


class _Planned(_PipelineScheduleRuntime):
    """A schedule of mm_autoparallel.pipeline.schedules, action for action."""

    def __init__(self, stages: list[PipelineStage], num_microbatches: int, loss_fn: object, name: str) -> None:
        super().__init__(stages, n_microbatches=num_microbatches, loss_fn=loss_fn, scale_grads=False)
        order_of = find_schedule(name, len(stages)).order
        kinds = {True: _ComputationType.FORWARD, False: _ComputationType.FULL_BACKWARD}
        self.pipeline_order = {
            rank: [
                _Action(chunk * self.pp_group_size + rank, kinds[kind == FORWARD], micro_batch)
                for kind, chunk, micro_batch in order_of(
                    self.pp_group_size, len(stages), num_microbatches, rank
                ).tolist()
            ]
            for rank in range(self.pp_group_size)
        }
        self._prepare_schedule_with_comms(self.pipeline_order)
