"""One rank's shard on a device by itself: a group whose other ranks are not there, and the collectives it asked for.

With PyTorch's process group `fake` a model divided over `tp` ranks builds and runs on one device: compute is that of
rank 0's shard, collectives return at once with whatever is in their buffers. What they would have carried is recorded,
so that their time can be added from a model of the network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from mm_autoparallel.profilers.dispatch import is_of_wrappers, tensors_in
from mm_autoparallel.profilers.meter import count_bytes
from mm_autoparallel.profilers.torch_releases import DeviceMesh, tensor_mesh

Returned = TypeVar("Returned")


@dataclass(frozen=True)
class Collective:
    """A collective that a rank took part in.

    size_bytes: of the whole tensor, as profiles/collectives counts: what an all-gather makes, a reduce-scatter or
    all-to-all is given, an all-reduce turns into its sum.
    """

    operation: str
    size_bytes: int


COLLECTIVES: Mapping[str, str] = {
    "_c10d_functional::all_reduce": "all_reduce",
    "_c10d_functional::all_reduce_": "all_reduce",
    "_c10d_functional::all_reduce_coalesced": "all_reduce",
    "_c10d_functional::all_reduce_coalesced_": "all_reduce",
    "_c10d_functional::all_gather_into_tensor": "all_gather",
    "_c10d_functional::all_gather_into_tensor_out": "all_gather",
    "_c10d_functional::all_gather_into_tensor_coalesced": "all_gather",
    "_c10d_functional::reduce_scatter_tensor": "reduce_scatter",
    "_c10d_functional::reduce_scatter_tensor_out": "reduce_scatter",
    "_c10d_functional::reduce_scatter_tensor_coalesced": "reduce_scatter",
    "_c10d_functional::all_to_all_single": "all_to_all",
    "c10d::allreduce_": "all_reduce",
    "c10d::allreduce_coalesced_": "all_reduce",
    "c10d::allgather_": "all_gather",
    "c10d::_allgather_base_": "all_gather",
    "c10d::allgather_into_tensor_coalesced_": "all_gather",
    "c10d::reduce_scatter_": "reduce_scatter",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "c10d::alltoall_": "all_to_all",
    "c10d::alltoall_base_": "all_to_all",
}
"""PyTorch's operators: functional collectives, which DTensor uses, and those behind torch.distributed.all_reduce."""


class CollectiveRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the collectives that run while it is entered, backward included, in `collectives`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.collectives: list[Collective] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Lets tensor subclasses go first: what they make of an operator comes by here again, on plain tensors."""
        if is_of_wrappers(tuple(types)):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        operation = COLLECTIVES.get(func._schema.name)
        if operation:
            # one of what goes in and what comes out is the whole tensor, for each operation
            values = [*args, *(result if isinstance(result, (list, tuple)) else (result,))]
            size_bytes = max(count_bytes(tensors_in(value)) for value in values)
            self.collectives.append(Collective(operation, size_bytes))
        return result


def record_collectives(run: Callable[[], Returned]) -> tuple[Returned, tuple[Collective, ...]]:
    """What `run` returns, and the collectives it takes part in, in their order."""
    with CollectiveRecorder() as recorder:
        returned = run()
    return returned, tuple(recorder.collectives)


@contextmanager
def fake_mesh(tp: int, device_type: str) -> Iterator[DeviceMesh]:
    """The mesh of `tp` ranks of which this process is rank 0 and the others are not there.

    It is the default process group meanwhile, so there must be none before.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=tp)
    try:
        yield tensor_mesh(device_type, tp)
    finally:
        dist.destroy_process_group()
