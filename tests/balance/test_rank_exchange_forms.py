"""What replicas swap: tensors of any number of dimensions, and one error on all of them where one has what is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest

from mm_autoparallel import BatchBalancer, PlanError, Sample, SampleCost, hooks

torch = pytest.importorskip("torch")

PLAN = {
    "parallel_config": {"PP": 1, "TP": 1, "DP": 2, "MBS": 1},
    "layer_placement": {"vit_layer_placement": [4], "llm_layer_placement": [4]},
}
BALANCER = BatchBalancer(
    PLAN, micro_batches=2, token_cap=2000, cost=SampleCost(image_ms=(0.0, 0.01, 0.1), token_ms=(1e-6, 0.02))
)
Part = list[tuple[Sample, Any]]


class ThreadExchange(hooks.RankExchange):
    """Two replicas that are threads: collectives over a table that both see."""

    def __init__(self, rank: int, table: list[Any], barrier: Barrier) -> None:
        self.rank, self.size, self._device = rank, 2, "cpu"
        self._table, self._barrier = table, barrier

    def _show(self, mine: Any) -> list[Any]:
        self._barrier.wait()
        self._table[self.rank] = mine
        self._barrier.wait()
        return list(self._table)

    def _gather(self, numbers: Sequence[int]) -> list[list[int]]:
        return self._show(list(numbers))

    def _send(self, values: Any, counts_out: list[int], counts_in: list[int]) -> Any:
        arrived = [parts[self.rank] for parts in self._show(values.split(counts_out))]
        assert [len(part) for part in arrived] == counts_in
        return torch.cat(arrived)


def train(parts: tuple[Part, Part]) -> list[Any]:
    """Of each replica what it got, or the error that it ended with."""
    table, barrier = [None, None], Barrier(2, timeout=10)

    def run(rank: int) -> Any:
        try:
            return list(BALANCER.wrap([parts[rank]], ThreadExchange(rank, table, barrier)))
        except (PlanError, AttributeError, RuntimeError, TypeError, ValueError) as error:
            return error

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(run, range(2)))


def numbered(first: int, **more: Any) -> Part:
    return [(Sample(text_tokens=5, **more), {"number": torch.tensor(first + i)}) for i in range(4)]


def test_tensors_without_dimensions_arrive() -> None:
    got = train((numbered(0), numbered(10)))
    numbers = [sample["number"] for replica in got for micro_batch in replica for sample in micro_batch]
    assert all(number.dim() == 0 for number in numbers)
    assert sorted(map(int, numbers)) == [0, 1, 2, 3, 10, 11, 12, 13]


def test_what_samples_say_arrives_whole() -> None:
    samples = [Sample((4, 9), 3, 77, (0.1, 2.5)), Sample(), Sample(tokens=0)]
    table, barrier = [None, None], Barrier(2, timeout=10)
    with ThreadPoolExecutor(2) as threads:
        told = list(threads.map(lambda rank: ThreadExchange(rank, table, barrier).gather(samples[rank:]), range(2)))
    assert told == [[samples, samples[1:]]] * 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (numbered(10, audio_s=(3.0,)), "sample 4 has audio"),
        ([*numbered(10)[:3], (Sample(tokens=-1), {"number": torch.tensor(1)})], "on rank 1, sample 3 is .*tokens=-1"),
        ([(Sample(4096), {"number": torch.tensor(1)})] * 4, "on rank 1, sample 0 is .*patches is a tuple"),  # type: ignore[arg-type]
        ([(Sample(text_tokens=5), {"number": [1]})] * 4, "on rank 1, a sample has 'number': a list; tensors"),
        ([(Sample(text_tokens=5), [1])] * 4, "on rank 1, a sample holds a list; a mapping"),
        ([(Sample(text_tokens=5), {"number": torch.ones(2)})] * 4, "different forms"),
    ],
)
def test_all_replicas_end_with_one_error(wrong: Part, message: str) -> None:
    ended = train((numbered(0), wrong))
    assert [type(error) for error in ended] == [PlanError] * 2
    assert str(ended[0]) == str(ended[1])
    with pytest.raises(PlanError, match=message):
        raise ended[0]
