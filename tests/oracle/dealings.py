"""The law of dealings written once more, from its text: one 1F1B step by recursion, and every dealing of few samples.

It shares no code with the package.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

Bins = Sequence[Sequence[int]]
"""[micro-batch] of a replica: its samples."""


def step_1f1b_ms(
    loads_ms: Sequence[tuple[float, float]],
    encoder_layers: Sequence[int],
    decoder_layers: Sequence[int],
    encoder_frozen: bool = False,
) -> float:
    """The step of one replica whose micro-batches have these loads of encoder and decoder, forward and backward."""
    num_stages, count = len(encoder_layers), len(loads_ms)

    def task_ms(kind: str, stage: int, mb: int) -> float:
        encoder = loads_ms[mb][0] * encoder_layers[stage] / max(1, sum(encoder_layers))
        decoder = loads_ms[mb][1] * decoder_layers[stage] / max(1, sum(decoder_layers))
        if encoder_frozen:
            return encoder + decoder / 3 if kind == "F" else 2 * decoder / 3
        return (encoder + decoder) / 3 if kind == "F" else 2 * (encoder + decoder) / 3

    orders = []
    for stage in range(num_stages):
        warmup = min(count, num_stages - stage - 1)
        order = [("F", mb) for mb in range(warmup)]
        for mb in range(count - warmup):
            order += [("F", warmup + mb), ("B", mb)]
        orders.append(order + [("B", mb) for mb in range(count - warmup, count)])
    ended: dict[tuple[str, int, int], float] = {}

    def end_ms(kind: str, stage: int, mb: int) -> float:
        key = (kind, stage, mb)
        if key not in ended:
            at = orders[stage].index((kind, mb))
            start = end_ms(orders[stage][at - 1][0], stage, orders[stage][at - 1][1]) if at else 0.0
            if kind == "F" and stage:
                start = max(start, end_ms("F", stage - 1, mb))
            if kind == "B" and stage < num_stages - 1:
                start = max(start, end_ms("B", stage + 1, mb))
            ended[key] = start + task_ms(kind, stage, mb)
        return ended[key]

    return max(end_ms(*order[-1][:1], stage, order[-1][1]) for stage, order in enumerate(orders))


def sum_loads(bins: Bins, loads_ms: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The load of each micro-batch."""
    return [(sum(loads_ms[i][0] for i in held), sum(loads_ms[i][1] for i in held)) for held in bins]


def every_dealing(num_samples: int, num_replicas: int, num_microbatches: int) -> Iterator[list[list[list[int]]]]:
    """All ways to deal samples, those that leave micro-batches empty too."""
    for places in product(range(num_replicas * num_microbatches), repeat=num_samples):
        bins = [[i for i, at in enumerate(places) if at == b] for b in range(num_replicas * num_microbatches)]
        yield [bins[r * num_microbatches : (r + 1) * num_microbatches] for r in range(num_replicas)]
