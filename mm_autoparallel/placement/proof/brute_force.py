"""The oracle: every placement of a small problem, each played. It shares nothing with the solvers but the schedule's
graph.

Sums are taken block by block from the problem's own words, memory by walking every stage's order; no units, no prefix
sums, no patterns, no in-flight tables. Only for problems with few layers: the count grows as (layers choose chunks).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, combinations_with_replacement, pairwise, product

import numpy as np

from mm_autoparallel.problem import ChainBlock, Placement, Problem
from mm_autoparallel.schedules.action import FORWARD
from mm_autoparallel.schedules.catalog import find_schedule
from mm_autoparallel.simulate import engine
from mm_autoparallel.simulate.graph import full_graph

#: Fraction by which sums of bytes in another order may differ.
ROUNDING_FRACTION = 1e-12
#: Of a block that runs in no mode.
NONE = -1


def splits(problem: Problem) -> Iterator[list[list[int]]]:
    """Every way to cut the flat chain into virtual stages that respects layers, pins and attachments: block indices
    each."""
    chain = problem.chain
    flat = [e for e, block in enumerate(chain) for _ in range(block.count)]
    num_virtual = problem.num_virtual_stages
    for cuts in combinations(range(1, len(flat)), num_virtual - 1):
        edges = [0, *cuts, len(flat)]
        if any(_glued(chain, flat[cut - 1], flat[cut]) for cut in cuts):
            continue
        parts = [flat[a:b] for a, b in pairwise(edges)]
        if all(_lawful(problem, parts, k) for k in range(num_virtual)):
            yield parts


def _glued(chain: tuple[ChainBlock, ...], before: int, after: int) -> bool:
    if before == after:
        return chain[before].attach is not None
    return chain[before].attach == "next" or chain[after].attach == "previous"


def _lawful(problem: Problem, parts: list[list[int]], k: int) -> bool:
    blocks = [problem.chain[e] for e in parts[k]]
    num_layers = sum(block.layer for block in blocks)
    most = problem.max_layers_per_chunk
    if num_layers < 1 or (most is not None and num_layers > most):
        return False
    first, last = k == 0, k == len(parts) - 1
    return all((b.pinned != "first" or first) and (b.pinned != "last" or last) for b in blocks)


def mode_choices(problem: Problem, part: list[int]) -> Iterator[list[int]]:
    """The mode of each block of a virtual stage (NONE where it runs in none): along every group modes only go up, and
    none comes after all.
    """
    chain = problem.chain
    members: dict[str, list[int]] = {}
    for i, e in enumerate(part):
        if chain[e].modes:
            members.setdefault(chain[e].group, []).append(i)
    of_groups = [
        combinations_with_replacement([*range(len(chain[part[mine[0]]].modes)), NONE], len(mine))
        for mine in members.values()
    ]
    for chosen in product(*of_groups):
        modes = [NONE] * len(part)
        for mine, of_group in zip(members.values(), chosen, strict=True):
            for i, mode in zip(mine, of_group, strict=True):
                modes[i] = mode
        yield modes


def peak_of_stage(problem: Problem, stage: int, parts: list[list[int]], modes: list[list[int]]) -> float:
    """Peak bytes of `stage` by walking its order and adding what is held after every action."""
    chain, num_stages = problem.chain, problem.num_stages
    fixed, restored, transient = problem.stage_static_bytes[stage], 0.0, 0.0
    step, step_once, shard = 0.0, 0.0, 0.0
    held = [0.0] * problem.num_chunks
    for chunk in range(problem.num_chunks):
        k = chunk * num_stages + stage
        for e, mode in zip(parts[k], modes[k], strict=True):
            block = chain[e]
            fixed += block.static_bytes
            transient = max(transient, block.transient_bytes)
            step += block.step_bytes
            step_once = max(step_once, block.step_once_bytes)
            shard += block.shard_bytes
            if mode == NONE:
                held[chunk] += block.activation_bytes
            else:
                held[chunk] += block.modes[mode].activation_bytes
                restored += block.modes[mode].restored_bytes
    order = find_schedule(problem.schedule, problem.num_chunks).order(
        num_stages, problem.num_chunks, problem.num_microbatches, stage
    )
    now, most = 0.0, 0.0
    for kind, chunk, _ in order.tolist():
        now += held[chunk] if kind == FORWARD else -held[chunk]
        most = max(most, now)
    return max(fixed + restored + transient + most, fixed + step + min(step_once, shard))


def host_peak_of_stage(problem: Problem, stage: int, parts: list[list[int]], modes: list[list[int]]) -> float:
    """The most bytes that `stage` keeps on its host, by walking its order likewise."""
    chain = problem.chain
    fixed, held = 0.0, [0.0] * problem.num_chunks
    for chunk in range(problem.num_chunks):
        k = chunk * problem.num_stages + stage
        fixed += sum(chain[e].host_static_bytes for e in parts[k])
        held[chunk] = sum(
            chain[e].modes[mode].host_bytes for e, mode in zip(parts[k], modes[k], strict=True) if mode != NONE
        )
    order = find_schedule(problem.schedule, problem.num_chunks).order(
        problem.num_stages, problem.num_chunks, problem.num_microbatches, stage
    )
    now, most = 0.0, 0.0
    for kind, chunk, _ in order.tolist():
        now += held[chunk] if kind == FORWARD else -held[chunk]
        most = max(most, now)
    return fixed + most


def fits(problem: Problem, stage: int, parts: list[list[int]], modes: list[list[int]]) -> bool:
    """Whether `stage` is within its limits."""
    room = 1 + ROUNDING_FRACTION
    if peak_of_stage(problem, stage, parts, modes) > problem.memory_limit_bytes[stage] * room:
        return False
    if not problem.host_limit_bytes:
        return True
    return host_peak_of_stage(problem, stage, parts, modes) <= problem.host_limit_bytes[stage] * room


def times_of(problem: Problem, parts: list[list[int]], modes: list[list[int]]) -> list[float]:
    """Forwards, backwards [K · M each, micro-batch fastest], hops forward and backward, a zero, tails: as the kernel
    takes them."""
    chain, num_stages, num_virtual = problem.chain, problem.num_stages, problem.num_virtual_stages
    forward, backward, hop_forward, hop_backward = [], [], [], []
    tails = list(problem.stage_tail_ms)
    for k, (part, mode_of) in enumerate(zip(parts, modes, strict=True)):
        stage = k % num_stages
        factor = problem.stage_time_factor[stage] if problem.stage_time_factor else 1.0
        for mb in range(problem.num_microbatches):
            f = b = moved = 0.0
            for e, mode in zip(part, mode_of, strict=True):
                block = chain[e]
                scale = block.microbatch_scale[mb] if block.microbatch_scale else 1.0
                f += block.forward_ms * scale
                b += block.backward_ms * scale
                if mode != NONE:
                    f += block.modes[mode].extra_forward_ms * scale
                    b += block.modes[mode].extra_backward_ms * scale
                    moved += block.modes[mode].host_bytes * scale
            link_ms = moved * problem.host_ms_per_byte[stage] if moved else 0.0
            forward.append(max(f * factor, link_ms))
            backward.append(max(b * factor, link_ms))
        tails[k % num_stages] += sum(chain[e].tail_ms for e in part)
        if k < num_virtual - 1:
            last = chain[part[-1]]
            hop = 0.0 if num_stages == 1 else problem.p2p_ms[k] + problem.p2p_ms_per_byte[k] * last.output_bytes
            hop_forward.append(hop)
            hop_backward.append(hop if last.sends_gradient else 0.0)
    return [*forward, *backward, *hop_forward, *hop_backward, 0.0, *tails]


def brute_force(problem: Problem) -> tuple[float, Placement | None]:
    """The least step in ms of all placements that fit, and one that has it; (inf, None) where none fits."""
    num_stages, num_virtual, num_microbatches = problem.num_stages, problem.num_virtual_stages, problem.num_microbatches
    graph = full_graph(
        problem.schedule, num_stages, problem.num_chunks, num_microbatches, tuple(range(num_microbatches))
    )
    ends, free = np.empty(graph.num_tasks + 1), np.empty(num_stages)
    best_ms, best = np.inf, None
    num_durations, num_hops = 2 * num_virtual * num_microbatches, 2 * (num_virtual - 1) + 1
    for parts in splits(problem):
        per_stage = []
        for s in range(num_stages):
            mine = [c * num_stages + s for c in range(problem.num_chunks)]
            fitting = []
            for choice in product(*(list(mode_choices(problem, parts[k])) for k in mine)):
                modes = [[NONE] * len(part) for part in parts]
                for k, mode in zip(mine, choice, strict=True):
                    modes[k] = mode
                if fits(problem, s, parts, modes):
                    fitting.append(dict(zip(mine, choice, strict=True)))
            per_stage.append(fitting)
        for combination in product(*per_stage):
            modes = [combination[k % num_stages][k] for k in range(num_virtual)]
            times = np.array(times_of(problem, parts, modes))
            step_ms = engine.play(
                graph.stage,
                graph.dependency,
                graph.hop,
                graph.duration,
                times[:num_durations],
                times[num_durations : num_durations + num_hops],
                times[num_durations + num_hops :],
                ends,
                free,
            )
            if step_ms < best_ms:
                best_ms, best = float(step_ms), (parts, modes)
    if best is None:
        return np.inf, None
    chain = problem.chain
    return best_ms, Placement(
        tuple(tuple(part.count(e) for e in range(len(chain))) for part in best[0]),
        tuple(
            tuple(
                tuple(
                    sum(x == e and of == m for x, of in zip(part, mode, strict=True)) for m in range(len(block.modes))
                )
                for e, block in enumerate(chain)
            )
            for part, mode in zip(*best, strict=True)
        ),
    )
