"""Many steps that follow each other without a barrier, by a plain loop over the words of a schedule."""

from __future__ import annotations

from mm_autoparallel.pipeline.problem import Placement, Problem
from mm_autoparallel.pipeline.schedules.action import format_order
from mm_autoparallel.pipeline.schedules.catalog import SCHEDULES

FEW, MANY = 10, 30
"""Steps: between both their distance has settled."""


def apart_ms(problem: Problem, placement: Placement) -> float:
    """How far apart the ends of steps are in the end, where each stage begins its next step as soon as it has ended its
    own, tail included. Micro-batches are equal, and no layer runs in a mode."""
    return (_end_ms(problem, placement, MANY) - _end_ms(problem, placement, FEW)) / (MANY - FEW)


def _end_ms(problem: Problem, placement: Placement, num_steps: int) -> float:
    num_stages, num_virtual = problem.num_stages, problem.num_virtual_stages
    stage_of = problem.stage_of
    factors = problem.stage_time_factor or (1.0,) * num_stages
    costs: list[dict[str, float]] = []
    tails = list(problem.stage_tail_ms)
    for k, row in enumerate(placement.layers):
        held = list(zip(problem.chain, row, strict=True))
        whole, factor = sum(n * b.backward_ms for b, n in held), factors[stage_of[k]]
        weight = sum(n * b.backward_weight_ms for b, n in held)
        extra = sum(n * b.split_extra_ms for b, n in held)
        forward = sum(n * b.forward_ms for b, n in held)
        costs.append({"F": factor * forward, "B": factor * whole, "I": factor * (whole - weight)})
        costs[k]["W"] = factor * (weight + extra)
        tails[stage_of[k]] += sum(n * b.tail_ms for b, n in held)
    hops = [0.0 if stage_of[k] == stage_of[k + 1] else problem.p2p_ms[k] for k in range(num_virtual - 1)]
    schedule, queues = SCHEDULES[problem.schedule], []
    for stage in range(num_stages):
        words = format_order(schedule.order(num_stages, problem.num_chunks, problem.num_microbatches, stage)).split()
        queues.append([(step, *_parts(word)) for step in range(num_steps) for word in (*words, "0T0")])
    ends: dict[tuple[int, str, int, int], float] = {}
    free = [0.0] * num_stages
    while any(queues):
        for stage, queue in enumerate(queues):
            while queue:
                step, kind, batch, chunk = queue[0]
                if kind == "T":  # the optimizer's step
                    free[stage] += tails[stage]
                    queue.pop(0)
                    continue
                here = problem.virtual_stages[stage][chunk]
                ready = _ready_ms(ends, hops, step, kind, batch, here)
                if ready is None:
                    break
                free[stage] = ends[step, kind, batch, here] = max(free[stage], ready) + costs[here][kind]
                queue.pop(0)
    return max(free)


def _ready_ms(
    ends: dict[tuple[int, str, int, int], float], hops: list[float], step: int, kind: str, batch: int, here: int
) -> float | None:
    """When what an action needs is there; None: not yet."""
    if kind == "W":
        return ends.get((step, "I", batch, here))
    if kind == "F":
        if here == 0:
            return 0.0
        before = ends.get((step, "F", batch, here - 1))
        return None if before is None else before + hops[here - 1]
    own = ends.get((step, "F", batch, here))
    if own is None or here == len(hops):
        return own
    after = [end for name in "IB" if (end := ends.get((step, name, batch, here + 1))) is not None]
    return max(own, after[0] + hops[here]) if after else None


def _parts(word: str) -> tuple[str, int, int]:
    """`12F1` → ("F", 12, 1)."""
    kind = next(letter for letter in word if letter.isalpha())
    batch, chunk = word.split(kind)
    return kind, int(batch), int(chunk)
