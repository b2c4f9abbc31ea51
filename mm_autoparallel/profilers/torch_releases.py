"""PyTorch from 2.1 to today's: all that its releases name differently or lack, in one file; the rest of the package
uses only names that every one of them has.

MindSpeed-MM pins torch 2.1 to 2.7. A device is reached through its own module (`torch.cuda`, `torch.npu`), which has
the same functions in every release, where `torch.accelerator` grew from 2.6 to 2.9. Which names exist where stands in
tests/fixtures/torch_names, read from the wheels.
"""

from __future__ import annotations

from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from socket import socket
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torch.distributed.device_mesh import DeviceMesh as DeviceMesh
else:
    DeviceMesh = Any
    """For annotations: torch 2.1 keeps it in a private module."""


# ------------------------------------------------------------------------------------------------------------- devices


def accelerator_type() -> str | None:
    """`cuda`, `npu` or another accelerator of PyTorch that is at hand; None where there is none."""
    if hasattr(torch, "accelerator"):  # from 2.6 on
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return None if found is None else str(found.type)
    modules = {name: getattr(torch, name, None) for name in ("npu", "cuda")}
    return next((name for name, module in modules.items() if module is not None and module.is_available()), None)


def device_module(device_type: str) -> Any:
    """`torch.cuda`, or `torch.npu` once torch_npu is imported: memory, events and the current device."""
    return getattr(torch, device_type)


def is_out_of_device_memory(failure: BaseException) -> bool:
    """Whether an accelerator's allocator said no (`torch.OutOfMemoryError` from 2.5 on)."""
    return isinstance(failure, torch.cuda.OutOfMemoryError)


# --------------------------------------------------------------------------------------------------------- collectives


def all_gather(whole: Tensor, part: Tensor, group: dist.ProcessGroup | None) -> None:
    """Every rank's `part`, one after the other, into `whole`."""
    if _is_old_gloo(group):
        dist.all_gather(list(whole.chunk(dist.get_world_size(group))), part, group)
        return
    gather = getattr(dist, "all_gather_single", None)  # from 2.13 on, where the older name warns
    (gather or dist.all_gather_into_tensor)(whole, part, group=group)


def reduce_scatter(part: Tensor, whole: Tensor, group: dist.ProcessGroup | None) -> None:
    """The sum of the ranks' `whole`, of which each gets its `part`."""
    if _is_old_gloo(group):
        total = whole.clone()
        dist.all_reduce(total, group=group)
        part.copy_(total.chunk(dist.get_world_size(group))[dist.get_rank(group)].view_as(part))
        return
    scatter = getattr(dist, "reduce_scatter_single", None)  # from 2.13 on, where the older name warns
    (scatter or dist.reduce_scatter_tensor)(part, whole, group=group)


def _is_old_gloo(group: dist.ProcessGroup | None) -> bool:
    """Between CPUs: until 2.5 gloo may lack both operations, which are then made of others that it has."""
    return not hasattr(torch, "accelerator") and dist.get_backend(group) == "gloo"


def serve_store(host: str, listener: socket, timeout: timedelta, multi_tenant: bool = False) -> TCPStore:
    """The key-value store that this process serves on a socket that listens, reached at `host`.

    By the older of its two servers: from 2.4 to 2.7 the newer one, the default, takes no open socket.
    """
    port = listener.getsockname()[1]
    return dist.TCPStore(  # type: ignore[attr-defined]
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        multi_tenant=multi_tenant,
        master_listen_fd=listener.detach(),
        use_libuv=False,
    )


def tensor_mesh(device_type: str, tp: int) -> DeviceMesh:
    """This rank's group of `tp` neighbouring ranks, as a mesh of one dimension `tp`.

    The default process group falls into such groups. On torch 2.1, whose meshes lie in a private module, it has
    `size` and `get_group`, and is of that module's class.
    """
    num_groups = dist.get_world_size() // tp
    sizes, names = ((num_groups, tp), ("dp", "tp")) if num_groups > 1 else ((tp,), ("tp",))
    if find_spec("torch.distributed.device_mesh") is not None:  # from 2.2 on
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh(device_type, sizes, mesh_dim_names=names)
        return mesh["tp"] if num_groups > 1 else mesh
    old: Any = import_module("torch.distributed._tensor.device_mesh")
    whole = old.init_device_mesh(device_type, sizes, mesh_dim_names=names)
    part = whole["tp"] if num_groups > 1 else whole
    part.get_group = lambda: part.get_dim_groups(0)
    return cast("DeviceMesh", part)


# ------------------------------------------------------------------------------------------------------------ autograd


def autocast_type(device_type: str) -> torch.dtype | None:
    """The type that automatic mixed precision computes in on such a device now; None where it is off."""
    if hasattr(torch, "get_autocast_dtype"):  # from 2.4 on
        return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    if device_type == "cpu":
        return torch.get_autocast_cpu_dtype() if torch.is_autocast_cpu_enabled() else None
    if device_type == "cuda":
        return torch.get_autocast_gpu_dtype() if torch.is_autocast_enabled() else None
    module = device_module(device_type)  # torch_npu for 2.1 has the two functions in its own module
    return module.get_autocast_dtype() if module.is_autocast_enabled() else None


def tree_leaves(tree: Any) -> list[Any]:
    """What `tree` of lists, tuples and dictionaries holds, in order (`tree_leaves` of _pytree from 2.2 on)."""
    return pytree.tree_flatten(tree)[0]


# ------------------------------------------------------------------------------------------------------------ profiler


def memory_profile() -> Any:
    """PyTorch's profiler, to be entered, of allocations on CPU; it drops no event where it would (from 2.6 on)."""
    kept: dict[str, Any] = {"acc_events": True} if "acc_events" in signature(profile).parameters else {}
    return profile(activities=[ProfilerActivity.CPU], profile_memory=True, **kept)


def start_ns(event: Any) -> int:
    """When an event of PyTorch's profiler began; microseconds until 2.3."""
    return int(event.start_ns() if hasattr(event, "start_ns") else event.start_us() * 1000)


def parted_backward() -> tuple[Any, Any] | None:
    """What torch's pipeline runs in place of a backward: gradients of inputs, then of weights; None before torch 2.6,
    whose functions for it take other arguments or are not there."""
    release = str(torch.__version__).split("+")[0]
    if tuple(map(int, release.split(".")[:2])) < (2, 6):
        return None
    found = import_module("torch.distributed.pipelining._backward")
    return found.stage_backward_input, found.stage_backward_weight
