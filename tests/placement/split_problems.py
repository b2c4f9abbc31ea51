"""Seeded small problems whose schedules part backwards, and their steps and peaks from the documented rules alone."""

from __future__ import annotations

import random
import re

from mm_autoparallel.pipeline.problem import ChainBlock, Mode, Placement, Problem

Action = tuple[str, int, int]
"""Letter, chunk, micro-batch."""


def random_orders(rng: random.Random, num_stages: int, num_chunks: int, num_microbatches: int) -> tuple[str, ...]:
    """An order of every stage that ends: each next action is one of those that could begin. Some are pairs."""
    num_virtual = num_stages * num_chunks
    done: set[tuple[str, int, int]] = set()  # F, G (gradient), W by virtual stage and micro-batch
    words: list[list[str]] = [[] for _ in range(num_stages)]
    is_parted = {(k, m): rng.random() < 0.7 for k in range(num_virtual) for m in range(num_microbatches)}
    lazy = rng.random()
    while any(("G", k, m) not in done or ("W", k, m) not in done for k, m in is_parted):
        stage = rng.randrange(num_stages)
        ready: list[tuple[str, int, int]] = []
        for chunk in range(num_chunks):
            k = chunk * num_stages + stage
            for m in range(num_microbatches):
                if ("F", k, m) not in done:
                    if k == 0 or ("F", k - 1, m) in done:
                        ready.append(("F", k, m))
                elif ("G", k, m) not in done:
                    if k == num_virtual - 1 or ("G", k + 1, m) in done:
                        ready.append(("I" if is_parted[k, m] else "B", k, m))
                elif ("W", k, m) not in done and rng.random() < lazy:
                    ready.append(("W", k, m))
        if not ready:
            continue
        kind, k, m = rng.choice(ready)
        others = [one for one in ready if one[0] == "B"]
        if kind == "F" and others and rng.random() < 0.3:
            other = rng.choice(others)
            words[stage].append(f"({m}F{k // num_stages};{other[2]}B{other[1] // num_stages})")
            done |= {("F", k, m), ("G", *other[1:]), ("W", *other[1:])}
            continue
        words[stage].append(f"{m}{kind}{k // num_stages}")
        done |= {"F": {("F", k, m)}, "B": {("G", k, m), ("W", k, m)}, "I": {("G", k, m)}, "W": {("W", k, m)}}[kind]
    return tuple(map(" ".join, words))


def random_split_problem(seed: int, schedule: str, num_stages: int, num_chunks: int, num_microbatches: int) -> Problem:
    """Of a schedule that parts backwards: modes, transfers, tails, limits that bind, and less kept for weights."""
    rng = random.Random(seed)
    num_virtual = num_stages * num_chunks
    kinds = rng.choice([1, 2])
    num_layers = num_virtual + rng.randint(0, 2)
    counts = [num_layers - num_layers // 2, num_layers // 2] if kinds == 2 else [num_layers]
    chain = []
    for i, count in enumerate(counts):
        activation = float(rng.randint(2, 8))
        backward = float(rng.randint(1, 8))
        weight = rng.choice([0.0, backward, float(rng.randint(0, int(backward)))])
        modes: tuple[Mode, ...] = ()
        if rng.random() < 0.7:
            modes = (Mode("recompute", 0.0, float(rng.randint(1, 4)), rng.choice([0.0, 1.0]), rng.choice([0.0, 1.0])),)
            if rng.random() < 0.3:
                modes = (*modes, Mode("offload", 0.5, 0.25, 0.0, 0.0, host_bytes=float(rng.randint(1, 4))))
        chain.append(
            ChainBlock(
                f"kind{i}",
                "text",
                count,
                float(rng.randint(1, 6)),
                backward,
                float(rng.randint(0, 3)),
                activation,
                modes,
                transient_bytes=rng.choice([0.0, 2.0]),
                tail_ms=rng.choice([0.0, 0.5]),
                output_bytes=rng.choice([0.0, 1.0]),
                sends_gradient=rng.random() < 0.9,
                microbatch_scale=tuple(rng.choice([0.5, 1.0]) for _ in range(num_microbatches))
                if rng.random() < 0.2
                else (),
                backward_weight_ms=weight,
                kept_for_weight_bytes=rng.choice([None, activation // 2, 0.0]),
                split_extra_ms=rng.choice([0.0, 0.5]) if weight else 0.0,
            )
        )
    given = schedule == "given"
    return Problem(
        num_stages,
        num_chunks,
        num_microbatches,
        schedule,
        tuple(chain),
        tuple(float(rng.randint(20, 90)) for _ in range(num_stages)),
        tuple(rng.choice([0.0, 2.0]) for _ in range(num_stages)),
        tuple(rng.choice([0.0, 1.0]) for _ in range(num_stages)),
        tuple(rng.choice([0.0, 0.5]) for _ in range(num_virtual - 1)),
        tuple(rng.choice([0.0, 0.25]) for _ in range(num_virtual - 1)),
        host_ms_per_byte=tuple(rng.choice([0.25, 1.0]) for _ in range(num_stages)),
        stage_time_factor=tuple(rng.choice([1.0, 1.5]) for _ in range(num_stages)) if rng.random() < 0.3 else (),
        orders=random_orders(rng, num_stages, num_chunks, num_microbatches) if given else (),
        pair_overlap_fraction=rng.choice([0.0, 0.5, 1.0]),
    )


def read_words(text: str) -> list[tuple[Action, ...]]:
    """The words of an order: one action each, or the two of a pair."""
    found = []
    for word in text.split():
        parts = [(kind, int(chunk), int(m)) for m, kind, chunk in re.findall(r"(\d+)([FBIW])(\d+)", word)]
        found.append(tuple(parts))
    return found


def play_by_the_rules(
    problem: Problem, placement: Placement, orders: tuple[str, ...], v_shaped: bool
) -> tuple[float, float, list[float]]:
    """Step and span in ms, and the peak of every stage, of orders in text form."""
    num_stages, num_virtual, chain = problem.num_stages, problem.num_stages * problem.num_chunks, problem.chain
    factors = problem.stage_time_factor or (1.0,) * num_stages
    links = problem.host_ms_per_byte or (0.0,) * num_stages

    def virtual(stage: int, chunk: int) -> int:
        return chunk * num_stages + (num_stages - 1 - stage if v_shaped and chunk % 2 else stage)

    where = {virtual(stage, chunk): stage for stage in range(num_stages) for chunk in range(problem.num_chunks)}

    def sum_of(k: int, m: int, figure: str) -> float:
        total, host, stage = 0.0, 0.0, where[k]
        for block, n, counts in zip(chain, placement.layers[k], placement.modes[k], strict=True):
            scale = block.microbatch_scale[m] if block.microbatch_scale else 1.0
            each = {
                "F": block.forward_ms,
                "B": block.backward_ms,
                "I": block.backward_ms - block.backward_weight_ms,
                "W": block.backward_weight_ms + block.split_extra_ms,
            }[figure]
            total += n * each * scale * factors[stage]
            for mode, count in zip(block.modes, counts, strict=True):
                extra = {"F": mode.extra_forward_ms, "W": 0.0}.get(figure, mode.extra_backward_ms)
                total += count * extra * scale * factors[stage]
                host += count * mode.host_bytes * scale * links[stage]
        return total if figure == "W" else max(total, host)

    def hop(k: int) -> tuple[float, float]:
        if where[k] == where[k + 1]:
            return 0.0, 0.0
        last = [block for block, n in zip(chain, placement.layers[k], strict=True) if n][-1]
        time = problem.p2p_ms[k] + problem.p2p_ms_per_byte[k] * last.output_bytes
        return time, time if last.sends_gradient else 0.0

    words = [read_words(text) for text in orders]
    ends: dict[tuple[str, int, int], float] = {}
    at, free, starts = [0] * num_stages, [0.0] * num_stages, [-1.0] * num_stages
    progressed = True
    while progressed:
        progressed = False
        for stage in range(num_stages):
            while at[stage] < len(words[stage]):
                word, begin, blocked = words[stage][at[stage]], free[stage], False
                for kind, chunk, m in word:
                    k = virtual(stage, chunk)
                    needs = {
                        "F": [("F", k - 1, hop(k - 1)[0])] if k else [],
                        "W": [("G", k, 0.0)],
                    }.get(kind, [("F", k, 0.0)] + ([("G", k + 1, hop(k)[1])] if k < num_virtual - 1 else []))
                    for letter, other, lag in needs:
                        if (letter, other, m) not in ends:
                            blocked = True
                        else:
                            begin = max(begin, ends[letter, other, m] + lag)
                if blocked:
                    break
                lengths = [sum_of(virtual(stage, chunk), m, kind) for kind, chunk, m in word]
                length = sum(lengths) - (problem.pair_overlap_fraction * min(lengths) if len(word) == 2 else 0.0)
                starts[stage] = begin if at[stage] == 0 else starts[stage]
                free[stage] = begin + length
                for kind, chunk, m in word:
                    ends[{"F": "F", "W": "W"}.get(kind, "G"), virtual(stage, chunk), m] = free[stage]
                at[stage] += 1
                progressed = True
    assert all(at[stage] == len(words[stage]) for stage in range(num_stages)), "the orders never end"
    tails, peaks = [], []
    for stage in range(num_stages):
        mine = [virtual(stage, chunk) for chunk in range(problem.num_chunks)]
        held = [sum(placement.layers[k][e] for k in mine) for e in range(len(chain))]
        tails.append(problem.stage_tail_ms[stage] + sum(n * b.tail_ms for b, n in zip(chain, held, strict=True)))
        static = problem.stage_static_bytes[stage] + sum(n * b.static_bytes for b, n in zip(chain, held, strict=True))
        restored = sum(
            count * mode.restored_bytes
            for k in mine
            for block, counts in zip(chain, placement.modes[k], strict=True)
            for mode, count in zip(block.modes, counts, strict=True)
        )
        transient = max(block.transient_bytes for block, n in zip(chain, held, strict=True) if n)
        kept, most = 0.0, 0.0
        for word in words[stage]:
            for kind, chunk, _ in word:
                k = virtual(stage, chunk)
                active, pending = 0.0, 0.0
                for block, n, counts in zip(chain, placement.layers[k], placement.modes[k], strict=True):
                    active += (n - sum(counts)) * block.activation_bytes
                    active += sum(c * mode.activation_bytes for c, mode in zip(counts, block.modes, strict=True))
                    least = block.kept_for_weight_bytes
                    pending += n * (block.activation_bytes if least is None else least)
                kept += {"F": active, "B": -active, "I": pending - active, "W": -pending}[kind]
                most = max(most, kept)
        peaks.append(static + most + restored + transient)
    step = max(end + tail for end, tail in zip(free, tails, strict=True))
    return step, max(end - start for end, start in zip(free, starts, strict=True)), peaks
