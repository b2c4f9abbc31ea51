"""The best dealing by CP-SAT: which sample lies in which micro-batch, and the 1F1B steps of all replicas, in one model.

Off line, for a few dozen samples: it measures what the balancer leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dealing_rules import Batch, Dealing
from ortools.sat.python import cp_model

PRECISION = 100_000
"""Whole numbers that the work of all samples is counted in."""


class Best(NamedTuple):
    """The best dealing found, and what none undercuts, but for rounding to PRECISION."""

    ranks: Dealing
    bound_ms: float
    proven: bool


def solve(
    batch: Batch,
    placement: tuple[Sequence[int], Sequence[int]],
    hint: Sequence[Sequence[Sequence[int]]],
    limit_s: float,
    workers: int = 8,
) -> Best:
    """Begin with the dealing `hint` and make the longest step of a replica as short as `limit_s` allows.

    placement: encoder and decoder layers of each stage; a forward is a third.
    """
    model = cp_model.CpModel()
    num_samples, num_bins = len(batch.samples), batch.dp * batch.micro_batches
    holds = [[model.new_bool_var(f"{i} in {b}") for b in range(num_bins)] for i in range(num_samples)]
    longest = max(range(num_samples), key=batch.work_ms.__getitem__)
    hint = sorted(hint, key=lambda replica: not any(longest in held for held in replica))  # it comes first, as below
    for i, row in enumerate(holds):
        model.add_exactly_one(row)
        for b, one in enumerate(row):
            model.add_hint(one, i in hint[b // batch.micro_batches][b % batch.micro_batches])
    for b in range(num_bins):
        model.add(sum(tokens * row[b] for tokens, row in zip(batch.tokens, holds, strict=True)) <= batch.token_cap)
        model.add_at_least_one(row[b] for row in holds)
    model.add_exactly_one(holds[longest][: batch.micro_batches])  # replicas are alike
    unit_ms = sum(batch.work_ms) / PRECISION
    step = model.new_int_var(0, PRECISION, "step")
    for r in range(batch.dp):
        _add_replica(
            model, batch, placement, [row[r * batch.micro_batches :][: batch.micro_batches] for row in holds], step
        )
    model.minimize(step)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit_s
    solver.parameters.num_workers = workers
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Best([list(map(list, replica)) for replica in hint], solver.best_objective_bound * unit_ms, False)
    bins = [[i for i in range(num_samples) if solver.boolean_value(holds[i][b])] for b in range(num_bins)]
    ranks = [bins[first : first + batch.micro_batches] for first in range(0, num_bins, batch.micro_batches)]
    return Best(ranks, solver.best_objective_bound * unit_ms, status == cp_model.OPTIMAL)


def _add_replica(
    model: cp_model.CpModel,
    batch: Batch,
    placement: tuple[Sequence[int], Sequence[int]],
    holds: list[list[cp_model.IntVar]],
    step: cp_model.IntVar,
) -> None:
    """The tasks of one replica: each ends after its own time behind the one before and the one that feeds it."""
    encoder, decoder = placement
    num_stages, count = len(encoder), batch.micro_batches
    unit_ms = sum(batch.work_ms) / PRECISION

    def parts(stage: int, thirds: int) -> list[int]:
        """Of each sample what it takes on this stage, in units."""
        return [
            round(
                thirds / 3 / unit_ms
                * (
                    batch.cost.encoder_ms(sample) * encoder[stage] / sum(encoder)
                    + batch.cost.decoder_ms(sample) * decoder[stage] / sum(decoder)
                )
            )
            for sample in batch.samples
        ]  # fmt: skip

    ends: dict[tuple[str, int, int], cp_model.IntVar] = {}
    for stage in range(num_stages):
        for mb in range(count):
            for kind in "FB":
                ends[kind, stage, mb] = model.new_int_var(0, PRECISION, f"{kind}{mb} of {stage}")
                model.add(ends[kind, stage, mb] <= step)
    for stage in range(num_stages):
        warmup = min(count, num_stages - stage - 1)
        order = [("F", mb) for mb in range(warmup)]
        for mb in range(count - warmup):
            order += [("F", warmup + mb), ("B", mb)]
        order += [("B", mb) for mb in range(count - warmup, count)]
        times = {"F": parts(stage, 1), "B": parts(stage, 2)}
        model.add(sum(a + b for a, b in zip(*times.values(), strict=True)) <= batch.dp * step)
        for at, (kind, mb) in enumerate(order):
            takes = sum(part * row[mb] for part, row in zip(times[kind], holds, strict=True))
            model.add(ends[kind, stage, mb] >= takes)
            before = [(order[at - 1][0], stage, order[at - 1][1])] if at else []
            if kind == "F" and stage:
                before.append(("F", stage - 1, mb))
            if kind == "B" and stage < num_stages - 1:
                before.append(("B", stage + 1, mb))
            for key in before:
                model.add(ends[kind, stage, mb] >= ends[key] + takes)
