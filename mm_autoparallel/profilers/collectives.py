"""Measure the network between the ranks at hand: every operation, group shape and size of each level, and overlap.

All groups of a shape communicate at once, as they do in training, so that what they share is shared here too. Of every
level two kinds of groups are measured: ranks that have this level alone between them, and all ranks that it spans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mm_autoparallel.errors import ProfileError
from mm_autoparallel.model.profiles import network
from mm_autoparallel.model.profiles.collectives import OPERATIONS
from mm_autoparallel.model.profiles.disk import check_writable, clear_strays
from mm_autoparallel.model.profiles.store import Origin, Timing, check_fresh, today
from mm_autoparallel.profilers.clock import Effort, Stopwatch, collect_samples, summarize, time_callable
from mm_autoparallel.profilers.device import identify_device, software_versions
from mm_autoparallel.profilers.lockstep import Lockstep, PeerFailed, PeersStopped, join_ranks
from mm_autoparallel.profilers.torch_releases import all_gather, reduce_scatter

SIZES_BYTES = (1 << 12, 1 << 16, 1 << 19, 1 << 22, 1 << 25)
"""From what latency decides to what bandwidth decides; gradients of a layer are of the last one's order. Assumed."""

SHORT_BYTES = 1 << 19
"""Up to this size BATCH operations are timed as one sample: one alone is not much longer than the way to the clock."""
BATCH = 8

NETWORK_EFFORT = Effort(budget_s=0.2, min_rounds=5, max_rounds=20, max_warm_up=3)
"""For one operation, shape and size; assumed."""

OVERLAP_BYTES = 1 << 24
"""Of what runs beside compute: some layers' gradients, long enough to be timed. Assumed."""
OVERLAP_EFFORT = Effort(budget_s=2.0, min_rounds=5, max_rounds=20, max_warm_up=3)
_PRODUCT_SIZES: Mapping[str, int] = {"cpu": 256, "cuda": 4096, "npu": 4096}
"""Rows and columns of the matrix product that is the compute beside traffic: some 0.2 to 1 ms. Assumed."""

_ELEMENT_BYTES = 4
"""Gradients are reduced in fp32."""


@dataclass(frozen=True)
class Shape:
    """Groups of `num_ranks` ranks `stride` apart whose outermost level is `level`; inside: as in network.Fit."""

    level: str
    num_ranks: int
    stride: int
    inside: int = 1


def profile_network(
    root: Path,
    command: str,
    device: torch.device,
    num_per_node: int,
    sizes_bytes: Sequence[int] = SIZES_BYTES,
    lockstep: Lockstep | None = None,
) -> Path | None:
    """Measures the network between the ranks of the default process group and writes it to the store at `root`.

    Called by all ranks; num_per_node: ranks of one node, which have consecutive numbers. Gives the file's path, or None
    where there is one rank and so no network. A file that is there already and covers these ranks is left as it is; of
    one that does not, what other ranks measured is kept. Raises ProfileError where it is stale, or cannot be written.
    """
    lockstep = lockstep or join_ranks()
    if lockstep.num_ranks == 1:
        return None
    shapes = list_shapes(lockstep.num_ranks, num_per_node)
    software = {name: version for name, version in software_versions().items() if name != "transformers"}
    origin = Origin(device=identify_device().name, software=software, date=today(), command=command)
    path = network.network_path(root, origin.device)
    try:
        known = _known_fits(path, origin) if lockstep.rank == 0 else ()
        if lockstep.largest(float(_cover(known, shapes))) > 0:
            return path
        fits = [fit for shape in shapes for fit in measure_shape(shape, device, sizes_bytes, lockstep)]
        overlaps = [measure_overlap(*each, device, lockstep) for each in list_overlaps(shapes)]
        if lockstep.rank == 0:
            measured = {_key(fit) for fit in fits}
            network.write_network(path, origin, [*fits, *(fit for fit in known if _key(fit) not in measured)], overlaps)
        lockstep.wait()
    except ProfileError:
        lockstep.stop(1)
        raise
    except PeersStopped as stopped:
        raise PeerFailed(f"measuring the network: {stopped}; the first of them says why") from None
    return path


def list_shapes(num_ranks: int, num_per_node: int) -> tuple[Shape, ...]:
    """The shapes of groups among `num_ranks` ranks, `num_per_node` on each node, named as Cluster names its levels.

    Inside a node and between nodes: groups of two, and doubled until no more ranks are there. Then all ranks together.
    """
    num_nodes = max(1, num_ranks // num_per_node)
    per_node = min(num_ranks, num_per_node)
    shapes = [Shape("node", size, 1) for size in _sizes(per_node)]
    shapes += [Shape("cluster", size, per_node) for size in _sizes(num_nodes)]
    if num_nodes > 1 and per_node > 1:
        shapes.append(Shape("cluster", num_nodes * per_node, 1, inside=per_node))
    return tuple(shapes)


def measure_shape(
    shape: Shape, device: torch.device, sizes_bytes: Sequence[int] = SIZES_BYTES, lockstep: Lockstep | None = None
) -> list[network.Fit]:
    """A line for every operation in groups of this shape; of sending and receiving for pairs that stand like it."""
    lockstep = lockstep or join_ranks()
    fits = []
    with _own_group(shape, lockstep) as group:
        for operation in OPERATIONS:
            if operation == "send_recv" and (shape.num_ranks, shape.inside) != (2, 1):
                continue
            samples = []
            for size_bytes in sizes_bytes:
                grain_bytes = _ELEMENT_BYTES * shape.num_ranks  # every rank has an equal part
                whole_bytes = max(1, round(size_bytes / grain_bytes)) * grain_bytes
                timing = _time_operation(operation, whole_bytes, shape.num_ranks, device, group, lockstep)
                samples.append(network.SizeTiming(size_bytes=whole_bytes, time_ms=timing))
            fits.append(network.fit_line(operation, shape.num_ranks, shape.level, samples, shape.inside))
    return fits


def list_overlaps(shapes: Sequence[Shape]) -> tuple[tuple[Shape, network.Operation], ...]:
    """What runs beside compute, a kind of traffic each (profiles/lanes.py): of replicas and of experts among all ranks,
    of tensor parallel ranks inside a node."""
    in_node = [shape for shape in shapes if shape.level == shapes[0].level]
    return tuple(dict.fromkeys([(shapes[-1], "all_reduce"), (in_node[-1], "all_reduce"), (shapes[-1], "all_to_all")]))


def measure_overlap(
    shape: Shape, operation: network.Operation, device: torch.device, lockstep: Lockstep | None = None
) -> network.Overlap:
    """An operation and matrix products of about the same time, each alone and both at once."""
    lockstep = lockstep or join_ranks()
    size = _PRODUCT_SIZES[device.type]
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(left)
    num_elements = OVERLAP_BYTES // _ELEMENT_BYTES // shape.num_ranks * shape.num_ranks
    with _own_group(shape, lockstep) as group:

        def compute(num_products: int) -> None:
            for _ in range(num_products):
                torch.mm(left, right, out=product)

        communicate = _make_run(operation, num_elements, shape.num_ranks, device, group)

        def both(num_products: int) -> None:
            work = communicate(async_op=True)
            compute(num_products)
            assert work is not None
            work.wait()

        one_ms = time_callable(partial(compute, 1), device, NETWORK_EFFORT, lockstep).median_ms
        alone_ms = time_callable(communicate, device, NETWORK_EFFORT, lockstep).median_ms
        num_products = max(1, round(alone_ms / max(one_ms, 1e-3)))
        stopwatch = Stopwatch(device)

        def run_round() -> dict[str, float]:
            """All three in turn, so that whatever else slows the machine slows them alike."""
            times_ms: dict[str, float] = {}
            runs: dict[str, Callable[[], object]] = {
                "compute": partial(compute, num_products),
                "traffic": communicate,
                "both": partial(both, num_products),
            }
            for name, run in runs.items():
                lockstep.wait()
                times_ms[name] = stopwatch.time_ms(run)
            return times_ms

        samples = collect_samples(run_round, OVERLAP_EFFORT, lockstep)
    compute_ms, traffic_ms, together_ms = (
        summarize(samples[name], lockstep) for name in ("compute", "traffic", "both")
    )
    return network.Overlap(
        hidden_fraction=network.hidden_part(traffic_ms.median_ms, compute_ms.median_ms, together_ms.median_ms),
        operation=operation,
        num_ranks=shape.num_ranks,
        level=shape.level,
        traffic_ms=traffic_ms,
        compute_ms=compute_ms,
        together_ms=together_ms,
    )


def _sizes(num_ranks: int) -> list[int]:
    """2, 4, 8 … that divide `num_ranks`, and `num_ranks` itself."""
    sizes = [2**power for power in range(1, num_ranks.bit_length()) if num_ranks % 2**power == 0]
    return sorted({*sizes, num_ranks} - {1})


def _known_fits(path: Path, origin: Origin) -> tuple[network.Fit, ...]:
    """What the file at `path` has already. ProfileError where it is stale, or cannot be written."""
    check_writable(path.parent)
    clear_strays(path.parent)
    if not path.exists():
        return ()
    found = network.read_network([path], origin.device)
    if found is None:
        raise ProfileError(f"network file {path}: it is no network file; remove it, and `{origin.command}` writes it")
    check_fresh(path, found[1], origin)
    return found[1].fits


def _key(group: network.Fit | Shape) -> tuple[str, int, int]:
    return group.level, group.num_ranks, group.inside


def _cover(fits: Sequence[network.Fit], shapes: Sequence[Shape]) -> bool:
    return {_key(shape) for shape in shapes} <= {_key(fit) for fit in fits}


@contextmanager
def _own_group(shape: Shape, lockstep: Lockstep) -> Iterator[dist.ProcessGroup]:
    """This rank's group of `shape`; every rank of the world has one."""
    span = shape.num_ranks * shape.stride
    mine: dist.ProcessGroup | None = None
    groups = []
    for start in range(lockstep.num_ranks):
        if start % span >= shape.stride:
            continue  # it is not the first of its group
        ranks = list(range(start, start + span, shape.stride))
        groups.append(dist.new_group(ranks))
        if lockstep.rank in ranks:
            mine = groups[-1]
    assert mine is not None
    try:
        yield mine
    finally:
        dist.destroy_process_group(mine)


def _time_operation(
    operation: network.Operation,
    whole_bytes: int,
    num_ranks: int,
    device: torch.device,
    group: dist.ProcessGroup,
    lockstep: Lockstep,
) -> Timing:
    run = _make_run(operation, whole_bytes // _ELEMENT_BYTES, num_ranks, device, group)
    num_runs = BATCH if whole_bytes <= SHORT_BYTES else 1

    def run_batch() -> None:
        for _ in range(num_runs):
            run()

    batch = time_callable(run_batch, device, NETWORK_EFFORT, lockstep)
    num_operations = 2 * num_runs if operation == "send_recv" else num_runs  # there and back again
    return Timing(
        median_ms=batch.median_ms / num_operations,
        mad_ms=batch.mad_ms / num_operations,
        num_samples=batch.num_samples,
    )


def _make_run(
    operation: network.Operation, num_elements: int, num_ranks: int, device: torch.device, group: dist.ProcessGroup
) -> Callable[..., Any]:
    """One operation on a whole tensor of `num_elements` fp32 numbers; of sending, there and back.

    Zeros, so that sums over many rounds stay finite; written, so that their memory is there.
    """
    whole = torch.empty(num_elements, device=device).fill_(0.0)
    if operation == "all_reduce":
        return partial(dist.all_reduce, whole, group=group)
    if operation == "send_recv":
        return partial(_send_and_return, whole, group)
    if operation == "all_to_all":
        return partial(dist.all_to_all_single, torch.empty_like(whole), whole, group=group)
    part = torch.empty(num_elements // num_ranks, device=device).fill_(0.0)
    if operation == "all_gather":
        return partial(all_gather, whole, part, group)
    return partial(reduce_scatter, part, whole, group)


def _send_and_return(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    """The first of two ranks sends and gets back."""
    first = dist.get_rank(group) == 0
    other = dist.get_global_rank(group, int(first))
    if first:
        dist.send(tensor, other, group)
        dist.recv(tensor, other, group)
    else:
        dist.recv(tensor, other, group)
        dist.send(tensor, other, group)
