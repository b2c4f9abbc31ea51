"""Parallel: where this process stands among all, and what tensor and expert parallel ranks tell each other.

Ranks are numbered as in Megatron-LM: tensor parallel neighbours first, then replicas, then pipeline stages. Experts are
divided among neighbouring replicas.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from mm_autoparallel.profilers.device import claim_device, device_backend, find_device_type
from mm_autoparallel.profilers.torch_releases import all_gather, reduce_scatter

BUCKET_BYTES = 25 * 2**20
"""Gradients that are averaged together; the bucket of DistributedDataParallel by default."""


@dataclass(frozen=True)
class Group:
    """Ranks that share something. place: this process's among them. handle: None where it is alone.

    divides_sequence: of tensor parallel ranks, each holds its part of every sequence wherever no matrix needs the whole
    (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2).
    """

    size: int = 1
    place: int = 0
    handle: dist.ProcessGroup | None = None
    divides_sequence: bool = False


ALONE = Group()


@dataclass(frozen=True)
class Ranks:
    """This process's device, and its groups: pipeline stages, replicas, tensor parallel ranks.

    ep: replicas among which experts are divided. expert_dp: those that hold the same experts.
    """

    device: torch.device
    pp: Group
    dp: Group
    tp: Group
    ep: Group = ALONE
    expert_dp: Group = ALONE


def join(pp: int, tp: int, ep: int, divides_sequence: bool) -> Ranks:
    """Join the process group that torchrun describes, or be alone; what PP and TP leave over are replicas."""
    device = claim_device(int(os.environ.get("LOCAL_RANK", "0")))
    alone: dict[str, Any] = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    if not dist.is_initialized():
        dist.init_process_group(device_backend(find_device_type()), **alone)
    sizes = (pp, dist.get_world_size() // (pp * tp), tp)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("pp", "dp", "tp"))
    groups = {name: mesh[name].get_group() for name in ("pp", "dp", "tp")}
    replicas = dist.get_process_group_ranks(groups["dp"])
    near, far = _divide_experts(mesh.mesh, ep)
    places = {name: (mesh[name].size(), mesh[name].get_local_rank(), groups[name]) for name in groups}
    return Ranks(
        device,
        pp=Group(*places["pp"]),
        dp=Group(*places["dp"]),
        tp=Group(*places["tp"], divides_sequence and tp > 1),
        ep=Group(ep, replicas.index(dist.get_rank()) % ep, near),
        expert_dp=Group(len(replicas) // ep, replicas.index(dist.get_rank()) // ep, far),
    )


def _divide_experts(ranks: Tensor, ep: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The groups of this process that share all experts, and that hold the same; all processes make all groups.

    ranks: (stages, replicas, tensor parallel ranks).
    """
    lines = ranks.transpose(1, 2).flatten(0, 1)  # the replicas of one slice of one stage
    near = [part.tolist() for line in lines for part in line.split(ep)]
    far = [line[place::ep].tolist() for line in lines for place in range(ep)]
    made = [dist.new_subgroups_by_enumeration(parts)[0] for parts in (near, far)]
    return made[0], made[1]


class _Copied(torch.autograd.Function):
    """Identity; gradients of all ranks are summed: what enters a matrix that is divided by columns."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Summed(torch.autograd.Function):
    """Sum over all ranks; gradients are the same on each: what leaves a matrix that is divided by rows."""

    @staticmethod
    def forward(_: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Gathered(torch.autograd.Function):
    """Parts of sequences put together; of gradients each rank gets the sum of its part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gather(part, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _scatter(gradient, ctx.group), None


class _Scattered(torch.autograd.Function):
    """The sum over all ranks, of which each gets its part of the sequences; gradients are put together."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _scatter(whole, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _gather(gradient, ctx.group), None


def _gather(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(samples, part of a sequence, width) of all ranks → (samples, sequence, width)."""
    size = dist.get_world_size(group)
    whole = part.new_empty((size * part.shape[0], *part.shape[1:]))
    all_gather(whole, part.contiguous(), group)
    return whole.unflatten(0, (size, -1)).transpose(0, 1).flatten(1, 2)


def _scatter(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of all ranks' (samples, sequence, width) → (samples, this rank's part of it, width)."""
    size = dist.get_world_size(group)
    by_rank = whole.unflatten(1, (size, -1)).transpose(0, 1).flatten(0, 1).contiguous()
    part = whole.new_empty((whole.shape[0], whole.shape[1] // size, whole.shape[2]))
    reduce_scatter(part, by_rank, group)
    return part


class _Exchanged(torch.autograd.Function):
    """Rows dealt among ranks: `sent[i]` go to rank i, `received[i]` come from it; gradients go back the same way."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _deal(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _deal(gradient, ctx.received, ctx.sent, ctx.group), None, None, None


def _deal(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    result = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(result, rows.contiguous(), list(received), list(sent), group=group)
    return result


def copied(tensor: Tensor, group: Group) -> Tensor:
    """`tensor` itself, whose gradient is the sum over `group`."""
    return tensor if group.size == 1 else _Copied.apply(tensor, group.handle)


def summed(tensor: Tensor, group: Group) -> Tensor:
    """The sum over `group`, whose gradient each rank has whole."""
    return tensor if group.size == 1 else _Summed.apply(tensor, group.handle)


def entered(hidden: Tensor, group: Group) -> Tensor:
    """Hidden states as a matrix that is divided by columns takes them: whole sequences."""
    return _Gathered.apply(hidden, group.handle) if group.divides_sequence else copied(hidden, group)


def left(products: Tensor, group: Group) -> Tensor:
    """Hidden states from the ranks' products: summed, and of each sequence this rank's part where it is divided."""
    return _Scattered.apply(products, group.handle) if group.divides_sequence else summed(products, group)


def whole_weight(weight: nn.Parameter, group: Group) -> Tensor:
    """A weight that every rank has whole, and uses on its part of the sequences where they are divided."""
    return copied(weight, group) if group.divides_sequence else weight


def exchanged(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Group) -> Tensor:
    """What the ranks of `group` deal to this one of their rows."""
    return _Exchanged.apply(rows, sent, received, group.handle)


class Gradients:
    """The gradients of `parameters` in buckets of one tensor each, as Megatron-LM keeps them: they are summed over
    `group` where they lie.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], group: Group, num_replicas: int) -> None:
        self.group, self.num_replicas = group, num_replicas
        self.buckets: list[Tensor] = []
        waiting: list[nn.Parameter] = []
        for parameter in (*parameters, None):
            held = sum(each.nbytes for each in waiting)
            if waiting and (parameter is None or held + parameter.nbytes > BUCKET_BYTES):
                self.buckets.append(_bucket(waiting))
                waiting = []
            if parameter is not None:
                waiting.append(parameter)

    def average(self) -> None:
        """Sum over the group and divide by the number of replicas."""
        for bucket in self.buckets if self.num_replicas > 1 else ():
            if self.group.size > 1:
                dist.all_reduce(bucket, group=self.group.handle)
            bucket /= self.num_replicas


def _bucket(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Zeros for the gradients of all of `parameters`, which become views of them."""
    bucket = torch.cat([torch.zeros_like(parameter).flatten() for parameter in parameters])
    for parameter, part in zip(parameters, bucket.split([each.numel() for each in parameters]), strict=True):
        parameter.grad = part.view_as(parameter)
    return bucket
