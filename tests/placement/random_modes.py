"""Seeded small problems with several modes a kind, host links and stages of unequal speed, for the oracle tests."""

from __future__ import annotations

import random
from dataclasses import replace
from math import comb

from random_problems import random_problem

from mm_autoparallel.pipeline.problem import ChainBlock, Mode, Problem

#: Choices of modes, times splits of the chain, beyond which brute force is not asked.
MAX_CHOICES = 12_000


def random_modes_problem(seed: int) -> Problem:
    """A random problem whose kinds have three modes each: one that saves little for little time (an activation
    function run again), one that saves most (full recompute), and one that moves what it keeps to the host.

    Round numbers, real magnitudes or unequal micro-batches. Links from ones that hide everything to ones too slow to be
    of use; half of the problems have stages of unequal speed, some modes cost forward time, some restore bytes. Half of
    them limit what lies on the host, from nothing to all that could lie there.
    """
    number = 0
    while True:
        rng = random.Random(f"modes {seed} {number}")
        style = rng.choice(["round", "round", "real", "unequal"])
        problem = _with_modes(random_problem(rng.randrange(10**9), style), rng, style)  # type: ignore[arg-type]
        if count_choices(problem) <= MAX_CHOICES:
            return _with_host_limits(problem, random.Random(f"host {seed}"))
        number += 1


def count_choices(problem: Problem) -> int:
    """About how many placements brute force plays."""
    num_segments = sum(block.count for block in problem.chain)
    num_modes = [len(block.modes) for block in problem.chain for _ in range(block.count) if block.modes]
    per_chunk = max(1, len(num_modes) // problem.num_virtual_stages)
    of_chunk = comb(per_chunk + max(num_modes, default=0), per_chunk)
    return comb(num_segments - 1, problem.num_virtual_stages - 1) * of_chunk**problem.num_virtual_stages


def _with_modes(problem: Problem, rng: random.Random, style: str) -> Problem:
    shared = rng.random() < 0.4
    all_three = shared or rng.random() < 0.7
    slows_forward = rng.random() < 0.4
    restores = rng.random() < 0.3

    def modes_of(block: ChainBlock) -> tuple[Mode, ...]:
        kept, time_ms = block.activation_bytes, block.forward_ms
        forward_ms = time_ms * rng.choice([0.0, 0.25]) if slows_forward else 0.0
        modes = (
            Mode("activation", forward_ms, time_ms * rng.choice([0.1, 0.2]), kept * rng.choice([0.5, 0.75])),
            Mode("recompute", 0.0, time_ms, kept * rng.choice([0.0, 0.125]), kept if restores else 0.0),
            Mode("offload", forward_ms / 2, 0.0, kept * rng.choice([0.0, 0.25]), kept / 2 if restores else 0.0, kept),
        )
        return modes if all_three else tuple(rng.sample(modes, rng.choice([1, 2, 3])))

    chain = []
    for block in problem.chain:
        if not block.layer:
            chain.append(block)
        elif block.activation_bytes == 0 or (not shared and rng.random() < 0.15):
            chain.append(replace(block, modes=(), recompute_group=None))
        else:
            chain.append(replace(block, modes=modes_of(block), recompute_group="shared" if shared else None))
    kept_bytes = [block.activation_bytes for block in chain if block.modes] or [1.0]
    time_ms = [max(block.forward_ms, 1e-9) for block in chain if block.modes] or [1.0]
    hidden = sum(time_ms) / sum(kept_bytes)  # a link this slow takes as long for a layer as its forward does
    links = tuple(hidden * rng.choice([0.0, 0.5, 1.0, 2.0, 5.0, 5.0]) for _ in range(problem.num_stages))
    factors = tuple(rng.choice([1.0, 1.0, 1.25, 1.6]) for _ in range(problem.num_stages)) if rng.random() < 0.5 else ()
    in_flight = min(problem.num_stages, problem.num_microbatches) * (1.0 + 0.5 * (problem.num_chunks > 1))
    least, most = (
        sum(
            block.count * (block.static_bytes + in_flight * choose(kept_in_modes(block)) + block.transient_bytes / 2)
            for block in chain
        )
        / problem.num_stages
        for choose in (min, max)
    )
    limit = (least + (most - least) * rng.choice([0.0, 0.1, 0.2, 0.4, 0.8])) * rng.choice([1.0, 1.1, 1.3])
    return replace(
        problem,
        chain=tuple(chain),
        host_ms_per_byte=links,
        stage_time_factor=factors,
        memory_limit_bytes=tuple(static + limit * rng.uniform(0.9, 1.1) for static in problem.stage_static_bytes),
    )


def kept_in_modes(block: ChainBlock) -> list[float]:
    return [block.activation_bytes, *(mode.activation_bytes for mode in block.modes)]


def _with_host_limits(problem: Problem, rng: random.Random) -> Problem:
    """Half of them as they are; the others with limits, half of these with blocks that keep some there anyway."""
    if rng.random() < 0.5:
        return problem
    keeps = rng.random() < 0.5
    chain = tuple(
        replace(block, host_static_bytes=block.activation_bytes * rng.choice([0.0, 0.25, 0.5])) if keeps else block
        for block in problem.chain
    )
    in_flight = min(problem.num_stages, problem.num_microbatches) * (1.0 + 0.5 * (problem.num_chunks > 1))
    static_bytes, moved_bytes = (
        sum(block.count * of(block) for block in chain) / problem.num_stages
        for of in (lambda b: b.host_static_bytes, lambda b: max((mode.host_bytes for mode in b.modes), default=0.0))
    )
    room = rng.choice([0.0, 0.1, 0.2, 0.3, 0.5, 0.5])
    limits = tuple(
        static_bytes * rng.uniform(0.9, 1.6) + in_flight * moved_bytes * room * rng.uniform(0.8, 1.2)
        for _ in range(problem.num_stages)
    )
    return replace(problem, chain=chain, host_limit_bytes=limits)
