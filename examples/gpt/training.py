"""Training: builds this rank's stages, runs the iterations, and says how they go as Megatron-LM does."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterable
from datetime import datetime

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from arguments import ArgumentsError, Division
from model import Experts, Recipe, Sizes, Stage
from parallel import Gradients, Group, Ranks, join


def make_tokens(first: int, count: int, sizes: Sizes, seed: int) -> Tensor:
    """(count, sequence + 1) tokens of samples `first` and on, the same whoever draws them; few words are frequent."""
    rows = []
    for sample in range(first, first + count):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + sample)
        draws = torch.rand(sizes.seq_length + 1, generator=generator)
        rows.append((sizes.vocab_size**draws - 1).long())
    return torch.stack(rows)


def make_optimizer(
    parameters: Iterable[nn.Parameter], learning_rate: float, group: Group | None = None
) -> torch.optim.Optimizer:
    """AdamW; with `group`, its state is divided among that group's ranks."""
    if group is None or group.size == 1:
        return torch.optim.AdamW(parameters, lr=learning_rate, fused=True)
    options = {"lr": learning_rate, "fused": True}
    return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, process_group=group.handle, **options)


class Trainer:
    """One rank's share of a training run."""

    def __init__(self, arguments: argparse.Namespace, sizes: Sizes, division: Division) -> None:
        self.arguments, self.sizes, self.division = arguments, sizes, division
        self.ranks = ranks = join(division.pp, division.tp, division.ep, division.divides_sequence)
        recipe = Recipe(sizes, arguments.seed, ranks.device, ranks.tp, ranks.ep)
        self.stages = {
            number: _build_stage(recipe, division, number)
            for number in range(ranks.pp.place, len(division.layers), division.pp)
        }
        modules = [module for stage in self.stages.values() for module in stage.modules()]
        of_experts = [module.experts.parameters() for module in modules if isinstance(module, Experts)]
        self.expert_parameters = [parameter for parameters in of_experts for parameter in parameters]
        known = {id(parameter) for parameter in self.expert_parameters}
        every = [parameter for stage in self.stages.values() for parameter in stage.parameters()]
        self.shared_parameters = [parameter for parameter in every if id(parameter) not in known]
        self.gradients = [
            Gradients(self.shared_parameters, ranks.dp, division.dp),
            Gradients(self.expert_parameters, ranks.expert_dp, division.dp),
        ]
        sharded = bool(division.zero)
        self.optimizers = [
            make_optimizer(parameters, arguments.lr, group if sharded else None)
            for parameters, group in (
                (self.shared_parameters, ranks.dp),
                (self.expert_parameters, ranks.expert_dp),
            )
            if parameters
        ]
        self.schedule = _make_schedule(self.stages, division, sizes, ranks) if division.pp > 1 else None

    def run(self) -> None:
        """All iterations. Raises ArgumentsError where the loss is no number any more."""
        for iteration in range(self.arguments.train_iters):
            start_s = time.perf_counter()
            loss = self.step(iteration)
            elapsed_ms = 1e3 * (time.perf_counter() - start_s)
            if not math.isfinite(loss):
                raise ArgumentsError(f"the loss of iteration {iteration + 1} is {loss}; a lower --lr may help")
            if (iteration + 1) % self.arguments.log_interval == 0 and not dist.get_rank():
                batch = self.arguments.global_batch_size
                print(
                    f" [{datetime.now():%Y-%m-%d %H:%M:%S}] iteration {iteration + 1:8d}/"
                    f"{self.arguments.train_iters:8d} | consumed samples: {(iteration + 1) * batch:12d} | "
                    f"elapsed time per iteration (ms): {elapsed_ms:.2f} | learning rate: {self.arguments.lr:.6E} | "
                    f"global batch size: {batch:5d} | lm loss: {loss:.6E} |",
                    flush=True,
                )

    def step(self, iteration: int) -> float:
        """One iteration; its mean loss over all samples."""
        division, ranks = self.division, self.ranks
        per_replica = division.mbs * division.num_micro_batches
        first = iteration * self.arguments.global_batch_size + ranks.dp.place * per_replica
        rows = make_tokens(first, per_replica, self.sizes, self.arguments.seed).to(ranks.device)
        loss = self._accumulate(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
        for gradients in self.gradients:
            gradients.average()
        self._clip()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        total = torch.tensor(loss / (division.dp * division.tp), device=ranks.device)
        dist.all_reduce(total)
        return float(total)

    def _accumulate(self, tokens: Tensor, labels: Tensor) -> float:
        """The gradients of the mean loss of this replica's samples; that loss on the last stage, else 0."""
        if self.schedule is None:
            (stage,) = self.stages.values()
            total = 0.0
            for part, wanted in zip(tokens.split(self.division.mbs), labels.split(self.division.mbs), strict=True):
                loss = stage(tokens=part, labels=wanted) / self.division.num_micro_batches
                loss.backward()
                total += float(loss.detach())
            return total
        wanted = {name for stage in self.stages.values() for name in _inputs_of(stage)}
        given = {name: each for name, each in (("tokens", tokens), ("labels", labels)) if name in wanted}
        losses: list[Tensor] = []
        self.schedule.step(target=given.get("labels"), losses=losses, return_outputs=False, **given)
        return float(torch.stack([loss.detach() for loss in losses]).sum()) if losses else 0.0

    def _clip(self) -> None:
        """Scale gradients to a norm of --clip-grad over all ranks; what tensor parallel ranks repeat counts once."""
        limit, ranks = self.arguments.clip_grad, self.ranks
        if limit <= 0:
            return
        squares = torch.zeros((), device=ranks.device)
        for parameters, copies in (
            (self.shared_parameters, ranks.dp.size),
            (self.expert_parameters, ranks.expert_dp.size),
        ):
            for parameter in parameters:
                if parameter.grad is not None:
                    repeats = copies * (ranks.tp.size if getattr(parameter, "is_whole", False) else 1)
                    squares += parameter.grad.square().sum() / repeats
        dist.all_reduce(squares)
        norm = float(squares.sqrt())
        if norm > limit:
            for parameter in (*self.shared_parameters, *self.expert_parameters):
                if parameter.grad is not None:
                    parameter.grad.mul_(limit / (norm + 1e-6))


def _build_stage(recipe: Recipe, division: Division, number: int) -> Stage:
    first, last = number == 0, number == len(division.layers) - 1
    begin = sum(division.layers[:number])
    numbers = range(begin, begin + division.layers[number])
    return Stage(recipe, numbers, first, last, division.recomputed[number]).train()


def _inputs_of(stage: Stage) -> list[str]:
    """Names of the batch's tensors that its parts read."""
    return [name for name, part in (("tokens", stage.embedding), ("labels", stage.head)) if part is not None]


def _make_schedule(
    stages: dict[int, Stage], division: Division, sizes: Sizes, ranks: Ranks
) -> Schedule1F1B | ScheduleGPipe | ScheduleInterleaved1F1B:
    """PyTorch's own schedule of the stages' number. Raises ArgumentsError where it has none for these micro-batches."""
    count, last = division.num_micro_batches, len(division.layers) - 1
    length = sizes.seq_length // (division.tp if division.divides_sequence else 1)
    hidden = torch.empty((division.mbs, length, sizes.hidden_size), device="meta", requires_grad=True)
    loss = torch.empty((), device="meta", requires_grad=True)
    parts = [
        PipelineStage(
            stage,
            number,
            last + 1,
            ranks.device,
            input_args=(hidden,) if number else (),
            output_args=(loss if number == last else hidden,),
            group=ranks.pp.handle,
        )
        for number, stage in stages.items()
    ]

    def share(output: Tensor, _: Tensor) -> Tensor:
        return output / count

    if len(parts) > 1:
        if count % division.pp:
            raise ArgumentsError(f"{count} micro-batches of virtual stages are no multiple of PP {division.pp}")
        return ScheduleInterleaved1F1B(parts, count, share, scale_grads=False)
    if count < division.pp:
        return ScheduleGPipe(parts[0], count, share, scale_grads=False)
    return Schedule1F1B(parts[0], count, share, scale_grads=False)
