"""Parallel: what PyTorch has for each dimension, put on a stage: tensor parallel, pipeline, data parallel.

Ranks are numbered as in Megatron-LM: tensor parallel neighbours first, then data parallel, then pipeline stages.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from mm_autoparallel.profilers.device import claim_device, device_backend, find_device_type
from mm_autoparallel.profilers.torch_releases import device_module
from model import Stage

BUCKET_BYTES = 25 * 2**20
"""Gradients that are averaged together; the bucket of DistributedDataParallel by default."""


@dataclass(frozen=True)
class Ranks:
    """Where this process stands: its device and the mesh (pp, dp, tp) of all that share the same modules.

    Of a mesh that this process is not in, it knows `of_stage` alone.
    """

    device: torch.device
    mesh: DeviceMesh

    @property
    def here(self) -> bool:
        """Whether this process is one of them."""
        return self.mesh.get_coordinate() is not None

    def of_stage(self, stage: int) -> Tensor:
        """Numbers of the ranks of a pipeline stage, (dp, tp)."""
        return self.mesh.mesh[stage]

    def size(self, dimension: str) -> int:
        """Ranks along `pp`, `dp` or `tp`."""
        return self.mesh[dimension].size()

    def place(self, dimension: str) -> int:
        """This rank's place along `pp`, `dp` or `tp`."""
        return int(self.mesh[dimension].get_local_rank())

    def group(self, dimension: str) -> dist.ProcessGroup:
        """The ranks that differ from this one along `pp`, `dp` or `tp` alone."""
        return self.mesh[dimension].get_group()


def join() -> torch.device:
    """Join the process group that torchrun describes, or be alone; this process's device.

    It is the one that LOCAL_RANK numbers; on CPU it is a core. Raises ProfileError where there are too few.
    """
    device = claim_device(int(os.environ.get("LOCAL_RANK", "0")))
    if not dist.is_initialized():
        alone: dict[str, Any] = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        backend = device_backend(find_device_type())
        dist.init_process_group(backend, device_id=device if device.index is not None else None, **alone)
    return device


def divide(device: torch.device, pp: int, dp: int, tp: int, first: int = 0) -> Ranks:
    """The mesh of the pp · dp · tp ranks from `first` on. Every process calls it, whether it is one of them or not."""
    ranks = torch.arange(first, first + pp * dp * tp).view(pp, dp, tp)
    return Ranks(device, DeviceMesh(device.type, ranks, mesh_dim_names=("pp", "dp", "tp")))


# ------------------------------------------------------------------------------------------------ tensor parallel


def make_shard(mesh: DeviceMesh) -> Callable[[nn.Module, str], None]:
    """A function that divides one part among the ranks of a one-dimensional mesh, in place.

    Matrices by columns, then by rows (Shoeybi et al. 2019, arXiv:1909.08053, section 3); norms and the patch embedding
    stay whole on every rank. Every rank has drawn the same weights, so each keeps its slice and nothing is sent.
    """

    def shard(part: nn.Module, role: str) -> None:
        if role == "vision_layer":
            _interleave_heads(part.attn, mesh.size())
        plan = _PLANS.get(role)
        if plan is None:
            return
        parallelize_module(part, mesh, plan(), src_data_rank=None)
        for parameter in part.parameters():
            if isinstance(parameter, DTensor):
                parameter.register_hook(partial(_divide_like, parameter.placements))

    return shard


def _divide_like(placements: tuple[Placement, ...], gradient: DTensor) -> DTensor:
    """A gradient divided as its parameter is; that of an embedding comes whole."""
    return gradient if gradient.placements == placements else gradient.redistribute(placements=placements)


def _interleave_heads(attention: nn.Module, num_ranks: int) -> None:
    """Order the rows of a fused query-key-value matrix so that a contiguous slice holds whole heads of all three.

    From [q of all heads, k of all, v of all] to [q, k, v of the first rank's heads, those of the second's, …]; the
    module then reshapes its slice with the number of heads it has, so what it computes stays the same.
    """
    attention.num_heads //= num_ranks
    for values in (attention.qkv.weight.data, attention.qkv.bias.data):
        by_part = values.reshape(3, num_ranks, -1, *values.shape[1:])
        values.copy_(by_part.transpose(0, 1).reshape(values.shape).clone())


def separate_heads(values: Tensor, num_ranks: int) -> Tensor:
    """The rows of a fused query-key-value matrix or bias as they were before they were ordered for `num_ranks`."""
    by_rank = values.reshape(num_ranks, 3, -1, *values.shape[1:])
    return by_rank.transpose(0, 1).reshape(values.shape)


def _whole_input(*names: str) -> PrepareModuleInput:
    """The input becomes a DTensor once, so that the gradients of all its uses are summed before they are reduced."""
    if names:
        layouts = dict.fromkeys(names, Replicate())
        return PrepareModuleInput(input_kwarg_layouts=layouts, desired_input_kwarg_layouts=layouts)
    return PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),))


def _vision_layer() -> dict[str, ParallelStyle]:
    return {
        "attn.qkv": ColwiseParallel(),
        "attn.proj": RowwiseParallel(),
        "mlp.fc1": ColwiseParallel(),
        "mlp.fc2": RowwiseParallel(),
    }


def _text_layer() -> dict[str, ParallelStyle]:
    return {
        "self_attn": _whole_input("hidden_states"),
        **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
        "self_attn.o_proj": RowwiseParallel(),
        "mlp": _whole_input(),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(),
    }


_PLANS: dict[str, Callable[[], dict[str, ParallelStyle]]] = {
    "vision_layer": _vision_layer,
    "vision_post": lambda: {"merger.mlp.0": ColwiseParallel(), "merger.mlp.2": RowwiseParallel()},
    "text_pre": lambda: {"embed_tokens": RowwiseParallel(input_layouts=Replicate())},
    "text_layer": _text_layer,
    "text_post": lambda: {"lm_head": ColwiseParallel()},
}


# -------------------------------------------------------------------------------------------------- data parallel


def replicate_stage(stage: Stage, ranks: Ranks, fsdp: bool, parted: bool = False) -> nn.Module:
    """The stage as its data-parallel replicas run it: alone, under FSDP2, or under DistributedDataParallel.

    With tensor parallel and without FSDP2 it stays as it is, because DistributedDataParallel takes no DTensor; so it
    does where backwards are `parted`, because weight gradients that are computed apart pass its hooks by. Then
    `average_gradients` does its work after the last micro-batch. FSDP2 then keeps weights gathered from forward to
    backward, because PyTorch finds no gradients of weights that were given back. A stage that trains nothing stays too.
    """
    if fsdp:
        mesh, shard = ranks.mesh["dp"], partial(fully_shard, reshard_after_forward=not parted)
        for tower in (stage.vision, stage.text):
            for part in [] if tower is None else [*tower.layers, tower.post]:
                if part is not None:
                    shard(part, mesh=mesh)
        if stage.text is not None and stage.text.pre is not None:
            shard(stage.text.pre, mesh=mesh)
        return shard(stage, mesh=mesh)  # what is left: the small patch embedding
    trains = any(parameter.requires_grad for parameter in stage.parameters())
    if ranks.size("dp") == 1 or ranks.size("tp") > 1 or parted or not trains:
        return stage
    return DistributedDataParallel(stage, process_group=ranks.group("dp"), gradient_as_bucket_view=True)


def average_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Average gradients over `group`, in buckets; of DTensors the local slices, which are alike over the group."""
    gradients = [_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    bucket: list[Tensor] = []
    for gradient in [*gradients, None]:
        if gradient is None or sum(map(_count_bytes, bucket)) + _count_bytes(gradient) > BUCKET_BYTES:
            if bucket:
                flat = torch.cat([each.flatten() for each in bucket])
                dist.all_reduce(flat, group=group)
                flat /= dist.get_world_size(group)
                for each, part in zip(bucket, flat.split([each.numel() for each in bucket]), strict=True):
                    each.copy_(part.view_as(each))
            bucket = []
        if gradient is not None:
            bucket.append(gradient)


def _count_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def without_reduction(stage: nn.Module) -> AbstractContextManager[None]:
    """A context in which backwards of a replicated stage accumulate gradients and reduce nothing."""
    if isinstance(stage, DistributedDataParallel):
        return stage.no_sync()
    if isinstance(stage, FSDPModule):
        stage.set_requires_gradient_sync(False)
    return nullcontext()


def with_reduction(stage: nn.Module) -> None:
    """What the backward of the last micro-batch needs before its forward."""
    if isinstance(stage, FSDPModule):
        stage.set_requires_gradient_sync(True)


def wait_for_device(ranks: Ranks) -> None:
    """Return when this process's device has done its work."""
    if ranks.device.type != "cpu":
        device_module(ranks.device.type).synchronize()


def sum_over_ranks(value: float, ranks: Ranks) -> float:
    """Sum of a number over all processes; they meet here."""
    total = torch.tensor(value, dtype=torch.float32, device=ranks.device)
    dist.all_reduce(total)
    return float(total)


def gather_counts(counts: Sequence[int], ranks: Ranks) -> list[list[int]]:
    """The whole numbers that every process gives, by rank."""
    mine = torch.tensor(counts, dtype=torch.int64, device=ranks.device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return [each.tolist() for each in everyone]
