"""Decoders with encoders beside them: what an order costs, and the best of all orders of the smallest problems.

Written from the documented semantics (docs/reference/problem-file.md, "Encoders"), sharing nothing with the package.
Schedule 1f1b, or interleaved_1f1b with several chunks a stage, and what a problem's keys say of encoders; layers are
given as a count for each virtual stage.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any, NamedTuple

Document = dict[str, Any]
Op = tuple[str, str, int, int]  # encoder ("" for the decoder), F or B, its (virtual) stage, micro-batch or pass


class Work(NamedTuple):
    """device, length: of each action; waits: what it waits for, with the lag; turn: what must have begun before it."""

    device: dict[Op, int]
    length: dict[Op, float]
    waits: dict[Op, list[tuple[Op, float]]]
    kept: dict[Op, float]
    fixed: list[float]
    limit: list[float]
    tails: list[float]


def listed(value: Any, count: int) -> list[float]:
    return list(value) if isinstance(value, list) else [value] * count


def parted(encoder: Document, key: str) -> list[float]:
    """Of each stage, or of each piece: one number is what all pieces come to."""
    value, pieces = encoder.get(key, 0.0), encoder.get("pieces", 1)
    if pieces > 1:
        return list(value) if isinstance(value, list) else [value / pieces] * pieces
    return listed(value, encoder.get("num_stages", 1))


def one_f_one_b(stages: int, count: int, stage: int) -> list[tuple[str, int]]:
    ahead = min(count, stages - stage - 1)
    word = [("F", m) for m in range(ahead)]
    for m in range(count - ahead):
        word += [("F", ahead + m), ("B", m)]
    return word + [("B", m) for m in range(count - ahead, count)]


def in_turn(stages: int, chunks: int, count: int, stage: int) -> list[tuple[str, int, int]]:
    """What a stage runs: forward or backward, virtual stage, micro-batch.

    Of several chunks micro-batches pass in groups, of as many as there are stages; the first takes what is left over.
    """
    if chunks == 1:
        return [(kind, stage, m) for kind, m in one_f_one_b(stages, count, stage)]
    first = min(count, stages + count % stages)
    groups = [range(first), *(range(at, at + stages) for at in range(first, count, stages))]
    forwards = [("F", chunk * stages + stage, m) for group in groups for chunk in range(chunks) for m in group]
    backwards = [("B", chunk * stages + stage, m) for group in groups for chunk in range(chunks)[::-1] for m in group]
    ahead = min(len(forwards), (chunks - 1) * first + 2 * (stages - stage - 1))
    word = forwards[:ahead]
    for later, back in zip(forwards[ahead:], backwards, strict=False):
        word += [later, back]
    return word + backwards[len(forwards) - ahead :]


def work_of(document: Document, layers: Sequence[int]) -> Work:
    """One block alone, `layers` of it on each virtual stage."""
    stages, chunks, count = document["num_stages"], document.get("num_chunks", 1), document["num_microbatches"]
    (block,) = document["chain"]
    work = Work({}, {}, {}, {}, [], [], [])
    hops = listed(document.get("p2p_ms", 0.0), stages * chunks - 1)
    for s in range(stages):
        work.fixed.append(sum(layers[s::stages]) * block.get("static_bytes", 0.0))
        work.limit.append(document["memory_limit_bytes"])
        work.tails.append(document.get("stage_tail_ms", 0.0))
        before: Op | None = None
        for kind, k, m in in_turn(stages, chunks, count, s):
            op = ("", kind, k, m)
            work.device[op] = s
            work.length[op] = layers[k] * block["forward_ms" if kind == "F" else "backward_ms"]
            work.kept[op] = layers[k] * block.get("activation_bytes", 0.0)
            work.waits[op] = [(before, 0.0)] if before else []
            if kind == "F" and k > 0:
                work.waits[op].append((("", "F", k - 1, m), hops[k - 1]))
            if kind == "B" and k < stages * chunks - 1:
                work.waits[op].append((("", "B", k + 1, m), hops[k]))
            before = op
    own = stages
    on_decoder = 0
    for encoder in document["encoders"]:
        if encoder.get("run") == "cached":
            on_decoder += encoder.get("devices") != "own"
            continue
        length, pieces = encoder.get("num_stages", 1), encoder.get("pieces", 1)
        if encoder.get("devices") == "own":
            number = encoder.get("num_pipelines", 1)
            pipelines = [[own + g * length + j for j in range(length)] for g in range(number)][::-1]
            own += number * length
            work.fixed.extend([0.0] * number * length)
            work.limit.extend([encoder.get("memory_limit_bytes", math.inf)] * number * length)
            work.tails.extend([0.0] * number * length)
        else:
            begun = encoder.get("first_stage", 0)
            number = (stages - begun) // length
            pipelines = [[begun + g * length + j for j in range(length)] for g in range(number)][::-1]
            first = on_decoder % len(pipelines)
            pipelines = [pipeline * pieces for pipeline in pipelines[first:] + pipelines[:first]]
            on_decoder += 1
        _add_encoder(work, document, encoder, pipelines)
    _feed(work, document)
    return work


def members(encoder: Document, index: int, count: int) -> list[int]:
    size = encoder.get("microbatches_per_pass", 1)
    return [m for m in range(count) if m // size == index]


def _add_encoder(work: Work, document: Document, encoder: Document, pipelines: list[list[int]]) -> None:
    length, count = encoder.get("num_stages", 1) * encoder.get("pieces", 1), document["num_microbatches"]
    forward, backward = parted(encoder, "forward_ms"), parted(encoder, "backward_ms")
    for pipeline in pipelines:
        for device, held in zip(pipeline, parted(encoder, "static_bytes"), strict=True):
            work.fixed[device] += held
    passes = -(-count // encoder.get("microbatches_per_pass", 1))
    if any(each.get("follows") == encoder["name"] for each in document["encoders"]):
        pass  # its outputs go to that one
    elif encoder.get("run", "bubbles") == "bubbles":
        work.fixed[encoder.get("first_stage", 0)] += encoder.get("output_bytes", 0.0) * min(
            passes, encoder.get("most_ahead", passes)
        )
    else:
        work.fixed[encoder.get("first_stage", 0)] += (
            encoder.get("output_bytes", 0.0) * passes * encoder.get("prefetch_depth", 1)
        )
    for i in range(passes):
        for j, device in enumerate(pipelines[i % len(pipelines)]):
            for kind, each in (("F", forward), ("B", backward)):
                if kind == "B" and not any(backward):
                    continue
                op = (encoder["name"], kind, j, i)
                work.device[op], work.length[op], work.waits[op] = device, each[j], []
                work.kept[op] = parted(encoder, "activation_bytes")[j]
                hop = encoder.get("stage_hop_ms", 0.0)
                if kind == "F" and j > 0:
                    work.waits[op].append(((encoder["name"], "F", j - 1, i), hop))
                if kind == "B" and j < length - 1:
                    work.waits[op].append(((encoder["name"], "B", j + 1, i), hop))


def _feed(work: Work, document: Document) -> None:
    count = document["num_microbatches"]
    running = [each for each in document["encoders"] if each.get("run", "bubbles") == "bubbles"]
    for encoder in running:
        name, last = encoder["name"], encoder.get("num_stages", 1) * encoder.get("pieces", 1) - 1
        lag, first = encoder.get("feed_ms", 0.0), encoder.get("first_stage", 0)
        size = encoder.get("microbatches_per_pass", 1)
        passes = -(-count // size)
        followers = [each for each in running if each.get("follows") == name]
        for i in range(passes):
            for follower in followers:
                work.waits[follower["name"], "F", 0, i].append(((name, "F", last, i), lag))
            if not followers:
                for m in members(encoder, i, count):
                    work.waits["", "F", first, m].append(((name, "F", last, i), lag))
            if (name, "B", last, i) in work.waits:
                for follower in followers:
                    work.waits[name, "B", last, i].append(((follower["name"], "B", 0, i), lag))
                if not followers:
                    for m in members(encoder, i, count):
                        work.waits[name, "B", last, i].append((("", "B", first, m), lag))
            if encoder.get("most_ahead") and i >= encoder["most_ahead"]:
                for m in members(encoder, i - encoder["most_ahead"], count):
                    work.waits[name, "F", 0, i].append((("", "F", first, m), 0.0))


def parse(word: str, device: int, stages: int) -> Op:
    """`2F0@vision`, or `2F1` of the decoder's chunk 1, on one of its devices."""
    match = re.fullmatch(r"(\d+)([FB])(\d+)(?:@(.+))?", word)
    assert match, word
    index, kind, part, name = match.groups()
    return name or "", kind, int(part) if name else int(part) * stages + device, int(index)


def count_stages(work: Work) -> int:
    """Devices of the decoder."""
    return 1 + max(device for op, device in work.device.items() if not op[0])


def play(work: Work, orders: Sequence[Sequence[str]]) -> tuple[float, dict[Op, float]]:
    """Step and starts of an order of every device; raises AssertionError where an action is missing, or none ends."""
    stages = count_stages(work)
    queues = [[parse(word, device, stages) for word in words] for device, words in enumerate(orders)]
    assert sorted(op for queue in queues for op in queue) == sorted(work.device)
    free, starts, ends = [0.0] * len(queues), {}, {}
    moved = True
    while moved:
        moved = False
        for device, queue in enumerate(queues):
            while queue and all(before in ends for before, _ in work.waits[queue[0]]):
                op = queue.pop(0)
                assert work.device[op] == device
                starts[op] = max([free[device], *(ends[before] + lag for before, lag in work.waits[op])])
                free[device] = ends[op] = starts[op] + work.length[op]
                moved = True
    assert not any(queues), "orders never end"
    return max(free[d] + (work.tails[d] if d < len(work.tails) else 0.0) for d in range(len(free))), starts


def peaks(work: Work, orders: Sequence[Sequence[str]]) -> list[float]:
    """The most that each device holds."""
    found, stages = [], count_stages(work)
    for device, words in enumerate(orders):
        held = most = 0.0
        for word in words:
            op = name, kind, part, index = parse(word, device, stages)
            held += work.kept[op] if kind == "F" else -work.kept[op]
            most = max(most, held)
            if name and kind == "F" and (name, "B", part, index) not in work.device:
                held -= work.kept[op]
        found.append(work.fixed[device] + most)
    return found


def best_step(work: Work, upper: float) -> float:
    """The least step below `upper` of all orders, of whatever pass first; `upper` where there is none."""
    after: dict[Op, list[tuple[Op, float]]] = {op: [] for op in work.device}
    for op, waits in work.waits.items():
        for before, lag in waits:
            after[before].append((op, lag))
    tail: dict[Op, float] = {}

    def tail_of(op: Op) -> float:
        if op not in tail:
            rest = max((lag + tail_of(other) for other, lag in after[op]), default=0.0)
            tail[op] = work.length[op] + max(rest, work.tails[work.device[op]])
        return tail[op]

    for op in work.device:
        tail_of(op)
    frozen = {op for op in work.device if op[0] and (op[0], "B", op[2], op[3]) not in work.device}
    best = upper
    free = [0.0] * len(work.fixed)
    held = list(work.fixed)
    left = [0.0] * len(work.fixed)
    for op, length in work.length.items():
        left[work.device[op]] += length
    ends: dict[Op, float] = {}

    def grow(now: float) -> None:
        nonlocal best
        if len(ends) == len(work.device):
            best = min(best, max(free[d] + work.tails[d] for d in range(len(free)) if free[d] or d < len(free)))
            return
        options = []
        for op, device in work.device.items():
            if op in ends:
                continue
            if max(now, free[device]) + tail[op] >= best - 1e-9:
                return
            if all(before in ends for before, _ in work.waits[op]):
                start = max([free[device], now, *(ends[before] + lag for before, lag in work.waits[op])])
                if op[1] == "F" and held[device] + work.kept[op] > work.limit[device] + 1e-6:
                    continue
                options.append((start, -tail[op], op))
        for device, rest in enumerate(left):
            if rest and max(now, free[device]) + rest + work.tails[device] >= best - 1e-9:
                return
        for start, _, op in sorted(options):
            device = work.device[op]
            before, change = free[device], 0.0 if op in frozen else work.kept[op] * (1 if op[1] == "F" else -1)
            ends[op] = free[device] = start + work.length[op]
            held[device] += change
            left[device] -= work.length[op]
            grow(start)
            left[device] += work.length[op]
            held[device] -= change
            free[device] = before
            del ends[op]

    grow(0.0)
    return best


def layouts(document: Document) -> Iterator[list[int]]:
    """Every way to part the block's layers over the virtual stages."""
    (block,) = document["chain"]
    stages, layers = document["num_stages"] * document.get("num_chunks", 1), block["count"]
    for cuts in combinations(range(1, layers), stages - 1):
        edges = [0, *cuts, layers]
        yield [edges[s + 1] - edges[s] for s in range(stages)]


def problem(seed: int, chunks: int = 1, first_stage: int = 0) -> Document:
    """A random problem whose every order can be looked through. first_stage: that encoders meet, behind others."""
    dice = random.Random(seed)
    if chunks > 1:
        return _with_chunks(problem(seed), chunks, dice)
    if first_stage:
        return _behind(problem(seed), first_stage, dice)
    stages = dice.choice((1, 2, 2, 2))
    count = dice.choice((1, 2, 2, 3)) if stages == 2 else dice.choice((2, 3))
    times = lambda low, high: dice.randint(low, high) * dice.choice((1.0, 1.0, 0.5))  # noqa: E731
    encoders: list[Document] = []
    number = dice.choice((1, 1, 2)) if count < 3 else 1
    for at in range(number):
        encoder: Document = {"name": "ab"[at], "forward_ms": times(1, 9)}
        frozen = dice.random() < 0.35
        encoder["backward_ms"] = 0.0 if frozen else times(1, 12)
        encoder["feed_ms"] = dice.choice((0.0, 0.5, 1.0))
        if stages == 2 and dice.random() < 0.25:
            encoder["num_stages"] = 2
            encoder["stage_hop_ms"] = dice.choice((0.0, 1.0))
            encoder["forward_ms"] = [times(1, 6), times(1, 6)]
        if dice.random() < 0.2:
            encoder["devices"] = "own"
        if dice.random() < 0.2:
            encoder["microbatches_per_pass"] = 2
        encoder["activation_bytes"] = float(dice.randint(0, 3))
        encoder["static_bytes"] = float(dice.randint(0, 2))
        encoder["output_bytes"] = float(dice.choice((0, 0, 1)))
        follows = at == 1 and dice.random() < 0.4
        same = encoders and encoders[0].get("microbatches_per_pass") == encoder.get("microbatches_per_pass")
        lawful = encoders and encoders[0].get("run") is None and (not frozen or not encoders[0]["backward_ms"])
        if follows and same and lawful:
            encoder["follows"] = "a"
        elif frozen and dice.random() < 0.3:
            encoder["run"] = "prefetch"
        elif dice.random() < 0.3:
            encoder["most_ahead"] = dice.choice((1, 2))
        encoders.append(encoder)
    return {
        "num_stages": stages,
        "num_microbatches": count,
        "schedule": "1f1b",
        "p2p_ms": dice.choice((0.0, 1.0)) if stages > 1 else 0.0,
        "stage_tail_ms": dice.choice((0.0, 0.0, 2.0)),
        "memory_limit_bytes": float(dice.choice((100, 100, 14, 18))),
        "chain": [
            {
                "name": "text",
                "modality": "text",
                "count": stages + dice.choice((0, 0, 1)),
                "forward_ms": times(2, 10),
                "backward_ms": times(2, 20),
                "static_bytes": 1.0,
                "activation_bytes": float(dice.randint(0, 2)),
            }
        ],
        "encoders": encoders,
    }


def in_pieces(seed: int) -> Document:
    """A problem whose encoders' passes are cut into two pieces, of unequal times where they are told apart."""
    dice = random.Random(f"pieces {seed}")
    document = problem(seed)
    for encoder in document["encoders"]:
        for key in ("num_stages", "devices", "stage_hop_ms"):
            encoder.pop(key, None)
        forward, backward = encoder["forward_ms"], encoder["backward_ms"]
        encoder["forward_ms"] = forward if isinstance(forward, list) else dice.choice((forward, [forward / 4, forward]))
        encoder["backward_ms"] = dice.choice((backward, [backward, backward / 4]))
        encoder["pieces"] = 2
    few = len(document["encoders"]) == 2
    return document | {"num_microbatches": min(2 if few else 3, document["num_microbatches"])}


def _behind(document: Document, first_stage: int, dice: random.Random) -> Document:
    """The same encoders beside two stages or one, behind so many others, with one micro-batch or two."""
    (block,), encoders = document["chain"], document["encoders"]
    stages = first_stage + dice.choice((1, 1, 2))
    for encoder in encoders:
        encoder["first_stage"] = first_stage
        if encoder.get("num_stages", 1) == 2 and (stages == first_stage + 1 or len(encoders) == 2):
            del encoder["num_stages"]
            encoder["forward_ms"] = encoder["forward_ms"][0]
    return document | {
        "num_stages": stages,
        "num_microbatches": dice.choice((2, 3)) if stages == 2 else 2,
        "p2p_ms": dice.choice((0.0, 1.0)),
        "memory_limit_bytes": float(dice.choice((100, 100, 14, 18))),
        "chain": [block | {"count": stages + dice.choice((0, 0, 1))}],
    }


def _with_chunks(document: Document, chunks: int, dice: random.Random) -> Document:
    """The same encoders beside two stages of so many chunks each, whose micro-batches are two or three, as few as that
    every order can be looked through."""
    (block,), encoders = document["chain"], document["encoders"]
    for encoder in encoders:
        if len(encoders) == 2 and encoder.pop("num_stages", 1) == 2:
            encoder["forward_ms"] = encoder["forward_ms"][0]
        if len(encoders) == 2 or dice.random() < 0.5:
            encoder.pop("microbatches_per_pass", None)
    few = len(encoders) == 2 or encoders[0].get("num_stages") == 2
    return document | {
        "num_stages": 2,
        "num_chunks": chunks,
        "num_microbatches": 2 if few else dice.choice((2, 3)),
        "schedule": "interleaved_1f1b",
        "p2p_ms": dice.choice((0.0, 1.0)),
        "memory_limit_bytes": float(dice.choice((100, 100, 18, 24))),
        "chain": [
            block
            | {
                "count": 2 * chunks + dice.choice((0, 0, 0, 1)),
                "forward_ms": dice.choice((1.0, 2.0, 2.5, 4.0)),
                "backward_ms": dice.choice((2.0, 3.0, 5.0, 8.0)),
            }
        ],
    }
