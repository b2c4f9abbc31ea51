"""Crossings from an encoder's ranks to a decoder's, run by four gloo processes, against the law of model/costs.

    python tests/benchmarks/resharding.py [--repeats 120]

Sends (by one rank, and by two at once) and gathers of several sizes are measured on the same machine and are the law's
network; the crossings are put together of them, at other sizes, as docs/guide/layouts.md tells. Each rank checks that
it has, bit by bit, what one process would have. Prints both times of each crossing; a busy machine's say little.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mm_autoparallel.model.costs.resharding import cross_between_ranks, cross_on_shared_ranks
from mm_autoparallel.model.job.arrangement import Arrangement, ModuleLayout
from mm_autoparallel.model.job.cluster import Cluster, Level
from mm_autoparallel.model.job.devices import DEVICES
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.model.profiles.network import Fit, NetworkProfile, Operation, SizeTiming, fit_line
from mm_autoparallel.model.profiles.store import Timing

RANKS = 4
SIZES = tuple(1 << n for n in range(16, 25, 2))
"""Bytes of what the network is measured with."""
BETWEEN = 3 << 20
"""Bytes of the crossings: one decoder micro-batch, whole."""


def of_rank(rank: int, size: int) -> Any:
    """What a rank hands on: numbers that tell whose they are."""
    import torch

    return torch.arange(size // 4, dtype=torch.float32) % 1000 + 1000 * rank


def crossings(group: dict[str, Any]) -> dict[str, Callable[[int], Callable[[], Any]]]:
    """Name → size in bytes, whole → what the calling rank does; the encoder's ranks are 2 and 3, the decoder's 0, 1.

    What is sent and where it arrives is there beforehand: a training step has both, and the law counts the way alone.
    """
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()

    def send(size: int, lanes: int = 1) -> Callable[[], Any]:
        buffer = of_rank(rank, size) if rank >= 2 else torch.empty(size // 4)

        def run() -> Any:
            if 2 <= rank < 2 + lanes:
                dist.send(buffer, rank - 2)
            elif rank < lanes:
                dist.recv(buffer, rank + 2)
                return buffer
            return None

        return run

    def two_sends(size: int) -> Callable[[], Any]:
        return send(size, lanes=2)

    def gathered(size: int, ranks: int, among: Any = None) -> Callable[[], Any]:
        own, whole = of_rank(rank, size // ranks), torch.empty(size // 4)

        def run() -> Any:
            dist.all_gather(list(whole.chunk(ranks)), own, group=among)
            return whole

        return run

    def gather(size: int) -> Callable[[], Any]:
        return gathered(size, RANKS)

    def pair(size: int) -> Callable[[], Any]:
        return gathered(size, 2, group["decoder"]) if rank < 2 else lambda: None

    def ideal(size: int) -> Callable[[], Any]:
        half = of_rank(rank, size // 2) if rank >= 2 else torch.empty(size // 8)
        whole = torch.empty(size // 4)

        def run() -> Any:
            if rank >= 2:
                dist.send(half, rank - 2)
                return None
            dist.recv(half, rank + 2)
            dist.all_gather(list(whole.chunk(2)), half, group=group["decoder"])
            return whole

        return run

    def bridge(size: int) -> Callable[[], Any]:
        shape, whole = torch.tensor([size // 4]), torch.empty(size // 4)
        if rank == 2:
            torch.cat([of_rank(2, size // 2), of_rank(3, size // 2)], out=whole)

        def run() -> Any:
            if rank == 2:
                for message in (shape, shape, whole):
                    dist.send(message, 0)
            if rank >= 2:
                return None
            if rank == 0:
                for message in (shape.clone(), shape.clone(), whole):
                    dist.recv(message, 2)
            dist.broadcast(whole, 0, group=group["decoder"])
            return whole

        return run

    return {"send": send, "two_sends": two_sends, "gather": gather, "pair": pair, "ideal": ideal, "bridge": bridge}


def expected(name: str, size: int, rank: int) -> Any:
    """What one process would have."""
    import torch

    if name in ("send", "two_sends"):
        return of_rank(rank + 2, size)
    ranks = {"gather": range(RANKS), "pair": range(2)}.get(name, range(2, RANKS))
    return torch.cat([of_rank(each, size // len(ranks)) for each in ranks])


def measure(repeats: int, out: Path) -> None:
    """One rank's part; rank 0 writes the means, ms of the slowest rank."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)  # four processes on a few cores
    dist.init_process_group("gloo")
    known = crossings({"decoder": dist.new_group([0, 1])})
    measured = [(name, size) for name in ("send", "two_sends", "gather", "pair") for size in SIZES]
    measured += [(name, BETWEEN) for name in ("ideal", "bridge", "gather")]
    runs = {(name, size): known[name](size) for name, size in measured}
    times: dict[tuple[str, int], list[float]] = {one: [] for one in runs}
    for _ in range(repeats + 3):  # in turn: the machine's pace changes
        for one, run in runs.items():
            dist.barrier()
            begun = time.perf_counter()
            found = run()
            taken = torch.tensor([(time.perf_counter() - begun) * 1e3])
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            times[one].append(float(taken))
            assert found is None or torch.equal(found, expected(*one, dist.get_rank())), one
    # means, since the law adds up: a median of sums is above the sum of medians where processes wait for one another
    told = {f"{name} {size}": statistics.fmean(taken_ms[3:]) for (name, size), taken_ms in times.items()}
    if dist.get_rank() == 0:
        out.write_text(json.dumps(told))
    dist.destroy_process_group()


def network(told: dict[str, float], sends: str) -> NetworkProfile:
    """What was measured, with the sends called so as those between two ranks."""

    def fit(operation: Operation, name: str, num_ranks: int) -> Fit:
        timings = ((size, Timing(median_ms=told[f"{name} {size}"], mad_ms=0.0, num_samples=1)) for size in SIZES)
        samples = [SizeTiming(size_bytes=size, time_ms=timing) for size, timing in timings]
        return fit_line(operation, num_ranks, "node", samples)

    fits = (fit("send_recv", sends, 2), fit("all_gather", "gather", RANKS), fit("all_gather", "pair", 2))
    origin = {"device": "cpu", "software": {}, "date": "today", "command": "tests/benchmarks/resharding.py"}
    return NetworkProfile.model_validate(origin | {"schema": "mm-autoparallel/network/1", "fits": fits})


def predicted(told: dict[str, float]) -> dict[str, float]:
    """ms of the crossings by the law."""
    level = Level(name="node", num_devices=RANKS, bandwidth_bytes_per_s=1e9, latency_ms=0.1)
    cluster = Cluster(num_nodes=1, devices_per_node=RANKS, device=DEVICES["a100-80g"], levels=(level,))
    own = Arrangement("disaggregated", "inline", ModuleLayout("vision", 1, 1, 2, 1, rank_offset=2))
    strategy, sizes = Strategy(2, 2, 1, 2, arrangement=own), {"global_batch_size": 8, "seq_length": 1024}
    shared = Arrangement("colocated", "inline", ModuleLayout("vision", 1, 1, 4, 1))
    fans_in = Strategy(1, 4, 1, 4, arrangement=shared)
    plain, megatron = (Workload.model_validate(sizes | more) for more in ({}, {"stack": "megatron-te"}))
    one, two = network(told, "send"), network(told, "two_sends")
    return {
        "ideal": cross_between_ranks(cluster, two, plain, strategy, BETWEEN).forward_ms,
        "bridge": cross_between_ranks(cluster, one, megatron, strategy, BETWEEN).forward_ms,
        "gather": cross_on_shared_ranks(cluster, one, fans_in, BETWEEN).forward_ms,
    }


def start(repeats: int, out: Path) -> None:
    """Four processes of this file."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = os.environ | {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, __file__, "--out", str(out), "--repeats", str(repeats)]
    ranks = [subprocess.Popen(command, env={**common, "RANK": str(rank)}) for rank in range(RANKS)]
    codes = [one.wait() for one in ranks]
    if any(codes):
        raise SystemExit("a process failed")


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=120)
    parser.add_argument("--out", type=Path, default=Path("resharding.json"))
    arguments = parser.parse_args(given)
    if "RANK" in os.environ:
        measure(arguments.repeats, arguments.out)
        return 0
    start(arguments.repeats, arguments.out)
    told = json.loads(arguments.out.read_text())
    for name, law_ms in predicted(told).items():
        measured_ms = told[f"{name} {BETWEEN}"]
        print(f"{name:8} law {law_ms:8.3f} ms   measured {measured_ms:8.3f} ms   {law_ms / measured_ms - 1:+.1%}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
