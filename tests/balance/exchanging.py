"""Two gloo processes that swap samples on line; each prints what it got. Arguments: folder of the store, rank."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mm_autoparallel import BatchBalancer, PlanError, Sample, SampleCost, hooks

PLAN = {
    "parallel_config": {"PP": 1, "TP": 1, "DP": 2, "MBS": 1},
    "layer_placement": {"vit_layer_placement": [4], "llm_layer_placement": [4]},
}
COST = SampleCost(image_ms=(0.0, 0.01, 0.1), token_ms=(1e-6, 0.02))


def own_part(rank: int, batch: int) -> list[tuple[Sample, dict[str, torch.Tensor]]]:
    """What this rank reads: rank 0 all that is long, and one sample more."""
    part = []
    for number in range(4 - rank):
        patches = (400 * (number + 1),) if rank == 0 else ()
        sample = Sample(patches, text_tokens=10 + number + 100 * batch)
        name = 1000 * batch + 10 * rank + number
        pixels = torch.full((sum(patches), 2), float(name))
        part.append((sample, {"pixels": pixels, "ids": torch.arange(sample.text_tokens) + name}))
    return part


def main() -> None:
    """Two global batches, then one whose samples have different forms."""
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    exchange = hooks.RankExchange()
    with pytest.raises(PlanError, match=f"rank {rank} of 2 replicas, and the balancer deals to 3"):
        BatchBalancer(PLAN, dp=3, micro_batches=2, token_cap=2000, cost=COST).wrap([], exchange)
    balancer = BatchBalancer(PLAN, micro_batches=2, token_cap=2000, cost=COST)
    stream = balancer.wrap(iter([own_part(rank, batch) for batch in range(2)]), exchange)
    got = []
    for micro_batch in stream:
        for sample in micro_batch:
            first = int(sample["ids"][0])
            assert torch.equal(sample["ids"], torch.arange(len(sample["ids"])) + first)
            assert sample["pixels"].shape[1] == 2
            assert bool((sample["pixels"] == first).all())
        got.append([(int(sample["ids"][0]), len(sample["ids"]), len(sample["pixels"])) for sample in micro_batch])
    try:
        exchange.swap([[{"ids": torch.zeros(2, dtype=torch.float32 if rank else torch.int64)}], []], [1, 1])
        refused = ""
    except PlanError as error:
        refused = str(error)
    outgoing: list[list[dict[str, torch.Tensor]]] = [[], []]
    outgoing[1 - rank].append({"n": torch.tensor(rank)})
    (scalar,) = exchange.swap(outgoing, [int(other != rank) for other in range(2)])[1 - rank]
    assert scalar["n"].shape == ()
    assert int(scalar["n"]) == 1 - rank
    with pytest.raises(PlanError, match="on rank 1, a sample has 'n': a list"):
        exchange.swap([[{"n": [1] if rank else torch.zeros(1)}], []], [1, 1])
    print(json.dumps({"got": got, "refused": refused}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
