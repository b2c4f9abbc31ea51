"""Small problems of a V whose order is to be found (two chunks a stage, there and back): what words cost, and the best.

Written from the documented semantics, and sharing nothing with the package: virtual stage k lies on stage k, or on
2P - 1 - k on the way back. A placement has "layers", "modes" and an "order" as texts, `0F0 0F1 0I1 0W1 0B0`.
"""

from __future__ import annotations

import random
import re
from itertools import pairwise, product
from typing import Any, NamedTuple

import brute_force
from brute_force import held_between, mode_counts
from free_orders import split_content
from semantics import Document, fits, hops, limits, spread

STAGE_CONTENT = ("static", "restored", "step", "step_shard", "host_static")


class NoOrder(Exception):
    """Words that are none, or never end."""


class Nodes(NamedTuple):
    """A placement's virtual stages. times[k]: of F, I, W and B; kept[k]: bytes in flight, pending, and on the host in
    flight; arrive: hops forward and backward behind k. Of stages: tails, rooms on device and host."""

    times: list[dict[str, float]]
    kept: list[tuple[float, float, float]]
    there: list[float]
    back: list[float]
    tails: list[float]
    rooms: list[tuple[float, float, float]]  # peak without micro-batches, at the step, and on the host
    limits: list[tuple[float, float]]


def stage_at(k: int, stages: int) -> int:
    return k if k < stages else 2 * stages - 1 - k


def nodes_of(problem: Document, layers: list[list[int]], modes: list[list[list[int]]]) -> Nodes:
    stages = problem["num_stages"]
    contents = [split_content(problem, stage_at(k, stages), layers[k], modes[k]) for k in range(2 * stages)]
    there, back = hops(problem, [max(e for e, n in enumerate(row) if n) for row in layers])
    there[stages - 1] = back[stages - 1] = 0.0
    there, back = [*there, 0.0], [*back, 0.0]
    own = spread(problem.get("stage_static_bytes", 0.0), stages)
    own_tail = spread(problem.get("stage_tail_ms", 0.0), stages)
    tails, rooms = [], []
    device, host = limits(problem)
    for s in range(stages):
        both = s, 2 * stages - 1 - s
        sums: dict[str, float] = {name: sum(contents[k][name] for k in both) for name in STAGE_CONTENT}
        once, transient = (max(contents[k][name] for k in both) for name in ("step_once", "transient"))
        fixed = own[s] + sums["static"]
        at_step = fixed + sums["step"] + min(once, sums["step_shard"])
        rooms.append((fixed + sums["restored"] + transient, at_step, sums["host_static"]))
        chain = problem["chain"]
        tails.append(own_tail[s] + sum(layers[k][e] * b.get("tail_ms", 0.0) for k in both for e, b in enumerate(chain)))
    names = {"F": "forward", "I": "input_gradient", "W": "weight", "B": "backward"}
    times = [{letter: float(of[name][0]) for letter, name in names.items()} for of in contents]
    kept = [(of["activation"], of["pending"], of["host"]) for of in contents]
    return Nodes(times, kept, there, back, tails, rooms, list(zip(device, host, strict=True)))


def takes(of: Nodes, stage: int, counts: list[tuple[int, int]]) -> bool:
    """Whether a stage's memory takes so many of each chunk in flight and pending."""
    both = stage, len(of.times) - 1 - stage
    device, host = of.limits[stage]
    at_work, at_step, on_host = of.rooms[stage]
    for k, (flight, pending) in zip(both, counts, strict=True):
        at_work += flight * of.kept[k][0] + pending * of.kept[k][1]
        on_host += flight * of.kept[k][2]
    return bool(fits(max(at_work, at_step), device) and fits(on_host, host))


def play(problem: Document, placement: Document) -> float:
    """The step of a placement. Raises NoOrder where its words are none, never end or do not fit."""
    stages, count = problem["num_stages"], problem["num_microbatches"]
    of = nodes_of(problem, placement["layers"], placement["modes"])
    words = []
    for s, text in enumerate(placement["order"]):
        word = [re.fullmatch(r"(\d+)([FIWB])([01])", each) for each in text.split()]
        if not all(word):
            raise NoOrder(text)
        words.append([(int(m[1]), m[2], s if m[3] == "0" else 2 * stages - 1 - s) for m in word if m])
        wanted = {(m, letter, k) for m in range(count) for k in (s, 2 * stages - 1 - s) for letter in "FIWB"}
        done = set(words[-1])
        if len(done) != len(words[-1]) or not done <= wanted:
            raise NoOrder(f"stage {s} runs {text}")
        for m in range(count):
            for k in (s, 2 * stages - 1 - s):
                if "".join(letter for letter in "FIWB" if (m, letter, k) in done) not in ("FIW", "FB"):
                    raise NoOrder(f"stage {s} runs {text}")
        counts = [[0, 0], [0, 0]]
        for _, letter, k in words[-1]:
            mine = counts[int(k >= stages)]
            mine[0] += {"F": 1, "I": -1, "B": -1, "W": 0}[letter]
            mine[1] += {"F": 0, "I": 1, "B": 0, "W": -1}[letter]
            if letter in "FI" and not takes(of, s, [(f, p) for f, p in counts]):
                raise NoOrder(f"stage {s} keeps too much with {text}")
    ends: dict[tuple[int, str, int], float] = {}
    at, free = [0] * stages, [0.0] * stages
    moving = True
    while moving:
        moving = False
        for s, word in enumerate(words):
            while at[s] < len(word):
                m, letter, k = word[at[s]]
                needs = []
                if letter == "F" and k:
                    needs = [((m, "F", k - 1), of.there[k - 1])]
                elif letter in "IB":
                    needs = [((m, "F", k), 0.0)] + [((m, "I", k + 1), of.back[k])] * (k < 2 * stages - 1)
                elif letter == "W":
                    needs = [((m, "I", k), 0.0)]
                if any(need not in ends for need, _ in needs):
                    break
                begin = max([free[s], *(ends[need] + hop for need, hop in needs)])
                free[s] = ends[m, "I" if letter == "B" else letter, k] = begin + of.times[k][letter]
                at[s] += 1
                moving = True
    if any(place < len(word) for place, word in zip(at, words, strict=True)):
        raise NoOrder(f"waits for ever: {placement['order']}")
    return max(end + tail for end, tail in zip(free, of.tails, strict=True))


def best_words(of: Nodes, count: int, upper: float) -> float:
    """The least step below `upper` over all words, micro-batches in order (which loses nothing where they are equal);
    inf where there is none. Depth first by the moments at which actions start."""
    total = len(of.times)
    stages = total // 2
    known: dict[Any, list[tuple[float, ...]]] = {}
    best = upper
    chain = [sum(of.times[k]["I"] + of.back[k] for k in range(below)) for below in range(total)]  # after I of k

    def explore(counts: tuple[tuple[int, int, int], ...], ready: dict[tuple[str, int, int], float],
                free: tuple[float, ...], now: float) -> None:  # fmt: skip
        nonlocal best
        least = 0.0
        for s in range(stages):
            load = 0.0
            for k in (s, total - 1 - s):
                f, g, p = counts[k]
                times = of.times[k]
                load += (count - f) * times["F"] + p * times["W"]
                load += (count - g) * min(times["B"], times["I"] + times["W"])
                if g < count:
                    least = max(least, max(free[s], now) + (count - g) * times["I"] + chain[k])
            least = max(least, (max(free[s], now) if load else free[s]) + load + of.tails[s])
        if least >= best - 1e-12 * best:
            return
        if all(c == (count, count, 0) for c in counts):
            best = least
            return
        values = [max(free[s], now) for s in range(stages)]
        for k in range(1, total):
            values += [max(now, ready["F", k, m]) for m in range(counts[k][0], counts[k - 1][0])]
        for k in range(total - 1):
            values += [max(now, ready["I", k, m]) for m in range(counts[k][1], counts[k + 1][1])]
        vector = tuple(values)
        stored = known.setdefault(counts, [])
        if any(all(a <= b for a, b in zip(other, vector, strict=True)) for other in stored):
            return
        stored.append(vector)
        choices = []
        for k in range(total):
            s, (f, g, p) = stage_at(k, stages), counts[k]
            other = counts[total - 1 - k]
            flight = [(f - g, p), (other[0] - other[1], other[2])]

            def room(mine: tuple[int, int], k: int = k, s: int = s, rest: tuple[int, int] = flight[1]) -> bool:
                return takes(of, s, [mine, rest] if k < stages else [rest, mine])

            if f < count and (k == 0 or counts[k - 1][0] > f) and room((f - g + 1, p)):
                choices.append((max(free[s], ready.get(("F", k, f), 0.0)), "F", k))
            if g < f and (k == total - 1 or counts[k + 1][1] > g):
                begin = max(free[s], ready.get(("I", k, g), 0.0))
                choices.append((begin, "B", k))
                if of.times[k]["B"] > of.times[k]["I"] and room((f - g - 1, p + 1)):
                    choices.append((begin, "I", k))
            if p:
                choices.append((free[s], "W", k))
        for begin, letter, k in sorted(choices):
            if begin < now:
                continue  # begun before, it was looked at before
            s, (f, g, p) = stage_at(k, stages), counts[k]
            end = begin + of.times[k][letter]
            after, then = ready, list(counts)
            if letter == "F":
                then[k] = (f + 1, g, p)
                after = {**ready, ("F", k + 1, f): end + of.there[k]}
            elif letter == "W":
                then[k] = (f, g, p - 1)
            else:
                then[k] = (f, g + 1, p + (letter == "I"))
                after = {**ready, ("I", k - 1, g): end + of.back[k - 1] if k else end}
            explore(tuple(then), after, (*free[:s], end, *free[s + 1 :]), begin)

    explore(((0, 0, 0),) * total, {}, (0.0,) * stages, 0.0)
    return best if best < upper else float("inf")


def best(problem: Document, upper: float = float("inf")) -> float:
    """The least step below `upper` over all placements and words; inf where there is none."""
    stages, count = problem["num_stages"], problem["num_microbatches"]
    for cut in brute_force.cuts(problem):
        layers = [held_between(problem, *ends) for ends in pairwise(cut)]
        for modes in product(*(mode_counts(problem, held) for held in layers)):
            of = nodes_of(problem, layers, list(modes))
            if all(takes(of, s, [(1, 0), (1, 0)]) for s in range(stages)):
                upper = min(upper, best_words(of, count, upper))
    return upper


def problem(name: str) -> Document:
    """A small random one; `problem("v-17")` is the same one for ever."""
    draw = random.Random(name)
    stages = draw.choice((1, 2, 2, 2))
    count = draw.choice((1, 2, 2, 3)) if stages == 2 else draw.choice((1, 2, 3, 3))
    whole = draw.random() < 0.6

    def figure(most: float) -> float:
        return float(draw.randint(0, int(most))) if whole else draw.random() * most

    kinds = draw.choice((1, 2, 2))
    layers = 2 * stages + draw.choice((0, 0, 1, 1, 2))
    counts = [layers // kinds + (i < layers % kinds) for i in range(kinds)]
    chain: list[Document] = []
    for i, number in enumerate(counts):
        backward, kept = figure(8), figure(4)
        block: Document = {"name": f"b{i}", "modality": "text", "count": number, "forward_ms": figure(5)}
        block |= {"backward_ms": backward, "static_bytes": figure(3), "activation_bytes": kept}
        block["backward_weight_ms"] = min(backward, draw.choice((0.0, 0.5, 0.5, 0.3, 1.0)) * backward)
        if draw.random() < 0.4:
            block["kept_for_weight_bytes"] = draw.choice((0.0, 0.5, 1.0)) * kept
        if draw.random() < 0.15 and block["backward_weight_ms"]:
            block["split_extra_ms"] = figure(2)
        if draw.random() < 0.15 and layers <= 5:
            block["recompute"] = {"extra_backward_ms": block["forward_ms"], "activation_bytes": kept / 4}
        if draw.random() < 0.2:
            block["tail_ms"] = figure(3)
        if draw.random() < 0.2:
            block["transient_bytes"] = figure(3)
        chain.append(block)
    if draw.random() < 0.25:
        chain[0] |= {"backward_ms": 0.0, "sends_gradient": False}
        for key in ("backward_weight_ms", "split_extra_ms", "recompute"):
            chain[0].pop(key, None)
    document: Document = {"schema": "mm-autoparallel/problem/1", "num_stages": stages, "num_chunks": 2}
    document |= {"num_microbatches": count, "schedule": "free", "chain": chain}
    if draw.random() < 0.6:
        document["p2p_ms"] = figure(3)
    if draw.random() < 0.2:
        document["stage_time_factor"] = [draw.choice((1.0, 1.5, 0.5)) for _ in range(stages)]
    if draw.random() < 0.2:
        document["stage_tail_ms"] = [figure(4) for _ in range(stages)]
    most = sum(b["count"] * (b["static_bytes"] + b["activation_bytes"] * count) for b in chain) + 3.0
    document["memory_limit_bytes"] = most * draw.choice((1.0, 1.0, 0.3, 0.45, 0.6, 0.8)) / draw.choice((1, stages))
    return document
