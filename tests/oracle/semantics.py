"""What a placement of a PROBLEM.json costs, straight from what its documentation says and from nothing else.

The oracle that `place` and `verify` are judged by: it imports nothing of the package and works on the plain document. A
placement is a document too: {"layers": [k][e], "modes": [k][e][m]}, counts of chain block e on virtual stage k =
chunk · num_stages + stage, and how many of them run in mode m.

Durations may be numbers, or arrays over many placements of one problem: `play` takes both.
"""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

Document = dict[str, Any]
ROUNDING = 1e-12  # relative; bytes that are no whole numbers add up to this, others exactly


class Action(NamedTuple):
    """One pass of micro-batch `index` through virtual stage `k`."""

    backward: bool
    k: int
    index: int


def spread(value: Any, length: int) -> list[float]:
    """A number where a list is meant stands for every entry."""
    return [float(entry) for entry in value] if isinstance(value, (list, tuple)) else [float(value)] * length


def modes_of(block: Document) -> list[Document]:
    """`recompute` is the short form of one mode of that name."""
    if block.get("recompute"):
        return [{"name": "recompute", **block["recompute"]}]
    return list(block.get("modes") or [])


def group_of(block: Document) -> tuple[str, str]:
    """Blocks of one `recompute_group`; by default each block is a group of its own."""
    return ("group", block["recompute_group"]) if block.get("recompute_group") else ("block", block["name"])


def num_virtual_stages(problem: Document) -> int:
    return problem["num_stages"] * problem.get("num_chunks", 1)


# ------------------------------------------------------------------------------------------------ orders of schedules


def stage_order(problem: Document, stage: int) -> list[Action]:
    """What `stage` runs, in program order."""
    stages, chunks, count = problem["num_stages"], problem.get("num_chunks", 1), problem["num_microbatches"]
    schedule = problem["schedule"]
    groups = [range(count)]
    warmup = count
    pieces = int(schedule.rsplit("_", 1)[1]) if schedule.startswith("seq") else 0
    if schedule == "1f1b":
        warmup = stages - stage - 1
    elif pieces:
        # Sequences of a micro-batch go in pieces, which come back in reverse order.
        warmup = stages - stage - 1 + pieces - 1
    elif schedule != "gpipe":
        # Groups of as many micro-batches as stages; the first takes what is left over, or all where there are fewer.
        first = min(count, stages + count % stages)
        groups = [range(first)] + [range(begin, begin + stages) for begin in range(first, count, stages)]
        lead = stages - stage - 1
        warmup = (chunks - 1) * first + (lead if schedule == "interleaved_1f1b_low_memory" else 2 * lead)
    forwards = [Action(False, c * stages + stage, i) for g in groups for c in range(chunks) for i in g]
    backwards = [Action(True, c * stages + stage, i) for g in groups for c in reversed(range(chunks)) for i in g]
    if pieces:
        samples = [backwards[begin : begin + pieces] for begin in range(0, count, pieces)]
        backwards = [backward for sample in samples for backward in reversed(sample)]
    warmup = min(warmup, len(forwards))
    order = forwards[:warmup]
    for done, forward in enumerate(forwards[warmup:]):
        order += [forward, backwards[done]]
    return order + backwards[len(forwards) - warmup :]


@functools.cache
def _program(schedule: str, stages: int, chunks: int, count: int) -> tuple[tuple[Action, ...], ...]:
    """Rows that can run one after another: every action behind those it waits for."""
    shape = {"schedule": schedule, "num_stages": stages, "num_chunks": chunks, "num_microbatches": count}
    waiting = [stage_order(shape, s) for s in range(stages)]
    last = stages * chunks - 1
    done: set[Action] = set()
    program: list[Action] = []
    while any(waiting):
        before = len(program)
        for order in waiting:
            while order:
                backward, k, index = order[0]
                needs = [] if backward or k == 0 else [Action(False, k - 1, index)]
                if backward:
                    needs = [Action(False, k, index)] + ([Action(True, k + 1, index)] if k < last else [])
                if not done.issuperset(needs):
                    break
                done.add(order[0])
                program.append(order.pop(0))
        if len(program) == before:
            raise AssertionError(f"{schedule}, {stages} stages, {chunks} chunks, {count} micro-batches waits for ever")
    return tuple(program)


def in_flight(problem: Document, stage: int) -> np.ndarray:
    """[moments, chunks]: micro-batches in flight of each chunk of `stage` after each forward: where the most are."""
    chunks = problem.get("num_chunks", 1)
    now, moments = [0] * chunks, []
    for action in stage_order(problem, stage):
        now[action.k // problem["num_stages"]] += -1 if action.backward else 1
        if not action.backward:
            moments.append(tuple(now))
    return np.array(sorted(set(moments)), dtype=float)


# --------------------------------------------------------------------------------------------------------------- times


def scales(problem: Document) -> np.ndarray:
    """[blocks, micro-batches]: factors on times."""
    count = problem["num_microbatches"]
    return np.array([block.get("microbatch_scale") or [1.0] * count for block in problem["chain"]], dtype=float)


def hops(problem: Document, last_blocks: list[int]) -> tuple[list[float], list[float]]:
    """Times of each hop, forward and backward, where virtual stage k ends with block `last_blocks[k]`."""
    count = num_virtual_stages(problem) - 1
    fixed = spread(problem.get("p2p_ms", 0.0), count)
    per_byte = spread(problem.get("p2p_ms_per_byte", 0.0), count)
    there, back = [], []
    for k in range(count):
        block = problem["chain"][last_blocks[k]]
        time_ms = fixed[k] + per_byte[k] * block.get("output_bytes", 0.0)
        if problem["num_stages"] == 1:  # one stage follows itself
            time_ms = 0.0
        there.append(time_ms)
        back.append(time_ms if block.get("sends_gradient", True) else 0.0)
    return there, back


def play(problem: Document, forward: Any, backward: Any, there: Any, back: Any, tails: Any) -> Any:
    """The step, ms. forward[k][i], backward[k][i]: of virtual stage k for micro-batch i; tails[s]: after the last
    backward of stage s."""
    stages, chunks, count = problem["num_stages"], problem.get("num_chunks", 1), problem["num_microbatches"]
    free: list[Any] = [0.0] * stages
    end: dict[Action, Any] = {}
    last = stages * chunks - 1
    for action in _program(problem["schedule"], stages, chunks, count):
        went_backward, k, index = action
        begin = free[k % stages]
        if went_backward and k < last:
            begin = np.maximum(begin, end[Action(True, k + 1, index)] + back[k])
        elif not went_backward and k > 0:
            begin = np.maximum(begin, end[Action(False, k - 1, index)] + there[k - 1])
        free[k % stages] = end[action] = begin + (backward if went_backward else forward)[k][index]
    step: Any = 0.0
    for s in range(stages):
        step = np.maximum(step, free[s] + tails[s])
    return step


def stage_tails(problem: Document, held: np.ndarray) -> list[float]:
    """[s]: what comes after the last backward of each stage whose blocks are all in their own layouts; held [k, e]."""
    stages = problem["num_stages"]
    tail = np.array([block.get("tail_ms", 0.0) for block in problem["chain"]])
    own = spread(problem.get("stage_tail_ms", 0.0), stages)
    return [own[s] + float((held[s::stages] @ tail).sum()) for s in range(stages)]


# -------------------------------------------------------------------------------------------------------- a placement


def content(problem: Document, stage: int, held: list[int], modes: list[list[int]]) -> Document:
    """What one virtual stage of `stage` takes and keeps, if it holds held[e] of each block, modes[e][m] in each mode.

    forward, backward: [micro-batches], ms; tail: ms beyond what blocks have in their own layouts. Bytes: static,
    activation and host for each micro-batch in flight, restored, transient (the largest), host_static; during the
    optimizer's step step, step_once (the largest) and step_shard.
    """
    chain, scale = problem["chain"], scales(problem)
    factor = spread(problem.get("stage_time_factor") or 1.0, problem["num_stages"])[stage]
    link = spread(problem.get("host_ms_per_byte") or 0.0, problem["num_stages"])[stage]
    forward, backward, moved = (np.zeros(problem["num_microbatches"]) for _ in range(3))
    names = ("static", "activation", "host", "restored", "transient", "host_static", "step", "step_once", "step_shard")
    kept = dict.fromkeys((*names, "tail"), 0.0)
    for source in _runs(problem, held, modes):
        forward += source["forward_ms"]
        backward += source["backward_ms"]
    parts = [part for e, block in enumerate(chain) for part in _by_layout(e, block, held[e], modes[e])]
    for e, block, count_held, taken in parts:
        if not count_held:
            continue
        kept["tail"] += count_held * (block.get("tail_ms", 0.0) - chain[e].get("tail_ms", 0.0))
        kept["static"] += count_held * block.get("static_bytes", 0.0)
        kept["host_static"] += count_held * block.get("host_static_bytes", 0.0)
        kept["transient"] = max(kept["transient"], block.get("transient_bytes", 0.0))
        once = block.get("step_once_bytes", 0.0)
        kept["step"] += count_held * block.get("step_bytes", 0.0)
        kept["step_once"] = max(kept["step_once"], once)
        kept["step_shard"] += count_held * block.get("step_shard_bytes", once)
        kept["activation"] += (count_held - sum(taken)) * block.get("activation_bytes", 0.0)
        forward_ms, backward_ms, host = count_held * block["forward_ms"], count_held * block["backward_ms"], 0.0
        for count, mode in zip(taken, modes_of(block), strict=True):
            forward_ms += count * mode.get("extra_forward_ms", 0.0)
            backward_ms += count * mode.get("extra_backward_ms", 0.0)
            host += count * mode.get("host_bytes", 0.0)
            kept["activation"] += count * mode.get("activation_bytes", 0.0)
            kept["restored"] += count * mode.get("restored_bytes", 0.0)
        kept["host"] += host
        forward += forward_ms * scale[e]
        backward += backward_ms * scale[e]
        moved += host * scale[e]
    return kept | {
        "forward": np.maximum(factor * forward, link * moved),
        "backward": np.maximum(factor * backward, link * moved),
    }


def _by_layout(e: int, block: Document, held: int, taken: list[int]) -> list[tuple[int, Document, int, list[int]]]:
    """A block's number, and what it is in each layout, its own last: figures, layers there, counts in its modes."""
    modes = modes_of(block)
    names = dict.fromkeys(mode["layout"]["name"] for mode in modes if mode.get("layout"))
    parts = []
    for name in names:
        mine = [(m, mode) for m, mode in enumerate(modes) if (mode.get("layout") or {}).get("name") == name]
        there = {**mine[0][1]["layout"], "modes": [mode for _, mode in mine]}
        counts = [taken[m] for m, _ in mine]
        parts.append((e, there, sum(counts), counts))
    own = [(m, mode) for m, mode in enumerate(modes) if not mode.get("layout")]
    at_home = {**block, "modes": [mode for _, mode in own], "recompute": None}
    left = held - sum(count for *_, count, _ in parts)
    return [*parts, (e, at_home, left, [taken[m] for m, _ in own])]


def _runs(problem: Document, held: list[int], modes: list[list[int]]) -> list[Document]:
    """The reshards that a virtual stage's layers pass one after another: between neighbours of one group directly,
    else by way of the blocks' own layout, in which a virtual stage begins and ends."""
    layers: list[tuple[Document, str]] = []
    for e, block in enumerate(problem["chain"]):
        for mode, count in zip(modes_of(block), modes[e], strict=True):
            layers += [(block, (mode.get("layout") or {}).get("name", ""))] * count
        layers += [(block, "")] * (held[e] - sum(modes[e]))

    def find(block: Document, source: str, target: str) -> list[Document]:
        if source == target:
            return []
        return [one for one in block["reshards"] if (one["source"], one["target"]) == (source, target)][:1]

    passed: list[Document] = []
    for (one, source), (other, target) in pairwise([({}, ""), *layers, ({}, "")]):
        if one and other and group_of(one) == group_of(other):
            passed += find(one if one.get("reshards") else other, source, target)
        else:
            passed += find(one, source, "") + find(other, "", target)
    return passed


def fits(peak: Any, limit: float) -> Any:
    """Whether a peak (or each of an array of them) is within a limit."""
    return peak <= limit * (1 + ROUNDING * (np.mod(peak, 1.0) != 0))


def limits(problem: Document) -> tuple[list[float], list[float]]:
    """Bytes that each stage may keep, on the device and on the host."""
    host = problem.get("host_limit_bytes")
    stages = problem["num_stages"]
    return spread(problem["memory_limit_bytes"], stages), spread(np.inf if host is None else host, stages)


class Cost(NamedTuple):
    """Of a placement: its step, and of each stage the most that it keeps, on the device and on the host."""

    step_ms: float
    peak_bytes: list[float]
    host_bytes: list[float]


def evaluate(problem: Document, placement: Document) -> Cost:
    """What a lawful placement costs."""
    stages, total = problem["num_stages"], num_virtual_stages(problem)
    layers, modes = placement["layers"], placement["modes"]
    contents = [content(problem, k % stages, layers[k], modes[k]) for k in range(total)]
    last_blocks = [max(e for e, count in enumerate(row) if count) for row in layers]
    there, back = hops(problem, last_blocks)
    step = play(
        problem,
        [of["forward"] for of in contents],
        [of["backward"] for of in contents],
        there,
        back,
        [
            tail + sum(of["tail"] for of in contents[s::stages])
            for s, tail in enumerate(stage_tails(problem, np.array(layers)))
        ],
    )
    own = spread(problem.get("stage_static_bytes", 0.0), stages)
    peaks, host_peaks = [], []
    for s in range(stages):
        mine = contents[s::stages]
        flight = in_flight(problem, s)
        at_work = (
            sum(of["restored"] for of in mine)
            + float((flight @ [of["activation"] for of in mine]).max())
            + max(of["transient"] for of in mine)
        )
        at_step = sum(of["step"] for of in mine)
        at_step += min(max(of["step_once"] for of in mine), sum(of["step_shard"] for of in mine))
        peaks.append(own[s] + sum(of["static"] for of in mine) + max(at_work, at_step))
        host_peaks.append(sum(of["host_static"] for of in mine) + float((flight @ [of["host"] for of in mine]).max()))
    return Cost(float(step), peaks, host_peaks)


def unlawful(problem: Document, placement: Document) -> str:
    """Why this is no placement of the problem that fits; "" where it is one."""
    chain, total = problem["chain"], num_virtual_stages(problem)
    layers, modes = placement["layers"], placement["modes"]
    flat: list[int] = []  # the virtual stage of every block of the chain in turn
    names: list[int] = []
    for e, block in enumerate(chain):
        flat += [k for k in range(total) for _ in range(layers[k][e])]
        names += [e] * block["count"]
        if sum(layers[k][e] for k in range(total)) != block["count"] or min(layers[k][e] for k in range(total)) < 0:
            return f"{block['name']}: {[row[e] for row in layers]} are not its {block['count']}"
        for k in range(total):
            if min(modes[k][e], default=0) < 0 or sum(modes[k][e]) > layers[k][e]:
                return f"{block['name']} on {k}: {modes[k][e]} of {layers[k][e]} in modes"
            if len(modes[k][e]) != len(modes_of(block)):
                return f"{block['name']} on {k}: {len(modes[k][e])} modes of {len(modes_of(block))}"
    if flat != sorted(flat):
        return "the chain is not kept in order"
    for i, e in enumerate(names):
        block = chain[e]
        pinned = block.get("pinned")
        if pinned and flat[i] != (0 if pinned == "first" else total - 1):
            return f"{block['name']} is pinned {pinned} and lies on {flat[i]}"
        within = block.get("within")
        if within and not within[0] <= flat[i] < within[1]:
            return f"{block['name']} keeps to {within} and lies on {flat[i]}"
        neighbour = {"previous": i - 1, "next": i + 1}.get(block.get("attach") or "", i)
        if 0 <= neighbour < len(flat) and flat[neighbour] != flat[i]:
            return f"{block['name']} is attached {block['attach']} and cut off"
    most = problem.get("max_layers_per_chunk") or np.inf
    for k in range(total):
        held = sum(count for block, count in zip(chain, layers[k], strict=True) if block.get("layer", True))
        if not 1 <= held <= most:
            return f"virtual stage {k} holds {held} layers"
        latest: dict[tuple[str, str], int] = {}
        for e, block in enumerate(chain):
            plain = len(modes_of(block))
            if not plain or not layers[k][e]:
                continue
            counts = [*modes[k][e], layers[k][e] - sum(modes[k][e])]
            used = [m for m, count in enumerate(counts) if count]
            if used[0] < latest.get(group_of(block), 0):
                return f"{block['name']} on {k} takes its modes out of the order of its group"
            latest[group_of(block)] = used[-1]
    cost = evaluate(problem, placement)
    for s, (peak, host, most_bytes, most_host) in enumerate(
        zip(cost.peak_bytes, cost.host_bytes, *limits(problem), strict=True)
    ):
        if not fits(peak, most_bytes):
            return f"stage {s} keeps {peak} of {most_bytes} bytes"
        if not fits(host, most_host):
            return f"stage {s} keeps {host} of {most_host} bytes on its host"
    return ""
