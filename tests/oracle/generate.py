"""Small random problems over every feature of PROBLEM.json; `problem("tidy-17")` is the same one for ever.

Moods: tidy (small whole numbers, many ties), real (magnitudes of real models, whole bytes or not), heavy (times over
twelve orders of magnitude, bytes up to 10^12, memory to the byte), sparse (nearly everything is zero or left out). A
fifth, large, has up to 40 layers of few kinds, for brute force that prunes; a sixth, layouts, draws from the first four
problems whose layers may run in several layouts.
"""

from __future__ import annotations

import copy
import random
from itertools import groupby, pairwise
from typing import Any

import brute_force
import semantics
from semantics import Document

MOODS = ("tidy", "real", "heavy", "sparse")
LARGE, LAYOUTS = "large", "layouts"
MOST_PLACEMENTS = 6_000
MOST_CHOICES = 4_000  # of one stage of a large problem
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "interleaved_1f1b_low_memory")


class _Draw:
    """Figures of one mood."""

    def __init__(self, name: str) -> None:
        self.mood = name.rpartition("-")[0]
        self.random = random.Random(name)
        # Bytes that are no whole numbers add up differently in another order, so limits then keep a distance.
        self.whole = self.mood != "real" or self.random.random() < 0.6
        self.typical_ms = 10.0 ** self.random.uniform(-4, 4) if self.mood == "heavy" else 4.0
        self.rate = {"tidy": 0.4, "real": 0.4, "heavy": 0.5, "sparse": 0.12, LARGE: 0.25}[
            self.mood
        ]  # how often a feature is there

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def has(self) -> bool:
        return self.chance(self.rate)

    def pick(self, *values: Any) -> Any:
        return self.random.choice(values)

    def ms(self, share: float = 1.0) -> float:
        """A time, about `share` of a layer's."""
        if self.chance(0.15 if self.mood == "sparse" else 0.05):
            return 0.0
        if self.mood == "tidy":
            return float(self.random.randint(0 if share < 1 else 1, max(1, round(9 * share))))
        if self.mood == "heavy":
            if self.chance(0.3):
                return float(10.0 ** self.random.uniform(-6, 6))
            return float(self.typical_ms * share * 10.0 ** self.random.uniform(-2, 2))
        if self.mood == "sparse" and self.chance(0.5):
            return 1.0
        return round(self.random.uniform(0.2, 12.0) * share, self.pick(1, 3, 6))

    def size(self, share: float = 1.0) -> float:
        """Bytes, about `share` of what a layer keeps."""
        if self.chance(0.5 if self.mood == "sparse" else 0.08):
            return 0.0
        if self.mood in ("tidy", "sparse"):
            return float(self.random.randint(0, max(1, round(20 * share))))
        if self.mood == "heavy":
            return float(round(10.0 ** self.random.uniform(0, 12)))
        value = self.random.uniform(1e8, 4e9) * share
        return float(round(value)) if self.whole else value

    def positive(self) -> float:
        """A factor on times."""
        if self.mood == "heavy":
            return self.pick(1.0, 0.8, 1.3, float(10.0 ** self.random.uniform(-2, 2)))
        return self.pick(1.0, 1.0, 2.0, 0.5) if self.mood == "tidy" else self.pick(1.0, 1.1, 0.8, 1.25)

    def per(self, count: int, figure: Any) -> Any:
        """One number for all, or a list."""
        return [figure() for _ in range(count)] if self.chance(0.5) else figure()


def problem(name: str) -> Document:
    """The problem called `mood-seed`; it has at most MOST_PLACEMENTS placements."""
    mood, _, seed = name.rpartition("-")
    if mood == LAYOUTS:
        return _with_layouts(f"{MOODS[int(seed) % len(MOODS)]}-layouts{seed}")
    draw = _Draw(name)
    if draw.mood == LARGE:
        return _large(draw)
    for _ in range(50):
        document = _shape(draw)
        document["chain"] = _chain(draw, document)
        if brute_force.count_placements(document, MOST_PLACEMENTS) <= MOST_PLACEMENTS:
            break
    else:
        for block in document["chain"]:
            block.pop("modes", None)
            block.pop("recompute", None)
    _optimizer_step(name, document)
    _costs_of_stages(draw, document)
    _limits(draw, document)
    return document


def _with_layouts(name: str) -> Document:
    """One chunk a stage and equal micro-batches, nothing on hosts; most groups have one or two layouts."""
    draw = _Draw(name)
    while True:
        document = _shape(draw) | {"num_chunks": 1, "schedule": draw.pick("gpipe", "1f1b", "1f1b")}
        chain = document["chain"] = _chain(draw, document)
        for block in chain:
            block.pop("microbatch_scale", None)
            block.pop("host_static_bytes", None)
            for mode in semantics.modes_of(block):
                mode.pop("host_bytes", None)
        groups = [list(members) for _, members in groupby(chain, semantics.group_of)]
        names = [semantics.group_of(members[0]) for members in groups]
        for members, group in zip(groups, names, strict=True):
            if names.count(group) == 1 and draw.chance(0.8):
                _add_layouts(draw, members, document)
        has_layouts = any("reshards" in block for block in chain)
        if has_layouts and brute_force.count_placements(document, MOST_PLACEMENTS) <= MOST_PLACEMENTS:
            break
    _optimizer_step(name, document)
    _costs_of_stages(draw, document)
    document.pop("host_ms_per_byte", None)
    _limits(draw, document)
    document.pop("host_limit_bytes", None)
    return document


def _add_layouts(draw: _Draw, blocks: list[Document], document: Document) -> None:
    """The same layouts with the same reshards for all blocks of a group that have modes, or all of it."""
    able = [block for block in blocks if semantics.modes_of(block)] or blocks
    if blocks[blocks.index(able[0]) : blocks.index(able[0]) + len(able)] != able:
        return
    names = ["A", "B"][: draw.pick(1, 1, 2)]
    modes_of_layout = {name: draw.pick(("",), ("again", ""), ("again",), ("again", "kept", "")) for name in names}
    reshards = [
        {"source": source, "target": target, "forward_ms": draw.ms(0.3), "backward_ms": draw.ms(0.3)}
        for source in ("", *names)
        for target in ("", *names)
        if source != target
    ]
    for block in able:
        modes: list[Document] = []
        for name in names:
            other = _block(draw, name, 1, document)
            for key in ("modality", "count", "microbatch_scale", "host_static_bytes", "output_bytes", "sends_gradient"):
                other.pop(key, None)
            if draw.has():
                other["step_bytes"] = draw.size()
            if draw.has():
                other["step_once_bytes"] = draw.size(2)
            for mode in modes_of_layout[name]:
                drawn = {"name": name, "activation_bytes": other["activation_bytes"]}
                if mode:
                    drawn = _mode(draw, f"{name}+{mode}", block | other | {"name": block["name"]})
                    drawn.pop("host_bytes", None)
                modes.append(drawn | {"layout": other})
        own = semantics.modes_of(block)
        block.pop("recompute", None)
        block |= {"modes": [*modes, *own], "reshards": reshards}


def _large(draw: _Draw) -> Document:
    stages = draw.pick(2, 2, 3)
    chunks = draw.pick(1, 1, 2) if stages == 2 else 1
    while True:
        document = {
            "schema": "mm-autoparallel/problem/1",
            "num_stages": stages,
            "num_chunks": chunks,
            "num_microbatches": draw.pick(2, 4, 6, 9, 16),
            "schedule": draw.pick(*SCHEDULES[1:]) if chunks == 1 else draw.pick(*SCHEDULES[2:]),
        }
        kinds = draw.pick(1, 1, 2)
        most = (40 if chunks == 1 else 16) // kinds
        chain = [_block(draw, f"b{i}", draw.random.randint(most // 3, most), document) for i in range(kinds)]
        for i in range(draw.pick(0, 1, 1)):
            count = draw.pick(1, 2, 5)
            chain.insert(draw.random.randint(0, kinds), _block(draw, f"x{i}", count, document) | {"layer": False})
        _modes(draw, chain)
        document["chain"] = chain
        whole = [block["count"] for block in chain]
        if brute_force.count_modes(document, whole) <= MOST_CHOICES:
            break
    _costs_of_stages(draw, document)
    _limits(draw, document)
    return document


def _shape(draw: _Draw) -> Document:
    schedule = draw.pick(*SCHEDULES, "interleaved_1f1b", "interleaved_1f1b_low_memory", "1f1b")
    interleaved = schedule.startswith("interleaved")
    stages = draw.pick(1, 2, 2, 3, 3, 4)
    chunks = draw.pick(1, 2, 2, 3) if interleaved else 1
    count = draw.pick(1, 2, 3, 4, 5, 6, 7, 8, 9, 11) if stages * chunks <= 6 else draw.pick(1, 2, 3, 4, 5, 6)
    return {
        "schema": "mm-autoparallel/problem/1",
        "num_stages": stages,
        "num_chunks": chunks,
        "num_microbatches": count,
        "schedule": schedule,
    }


def _chain(draw: _Draw, document: Document) -> list[Document]:
    total = semantics.num_virtual_stages(document)
    layers = max(1, total + draw.pick(0, 1, 1, 2, 2, 3, 4, 5) - (draw.chance(0.03) * 2))
    kinds = min(layers, draw.pick(1, 2, 2, 3, 4))
    ends = [*sorted(draw.random.sample(range(1, layers), kinds - 1)), layers]
    counts = [end - begin for begin, end in pairwise([0, *ends])]
    chain = [_block(draw, f"b{i}", count, document) for i, count in enumerate(counts)]
    for block in chain:
        if draw.chance(0.04):
            block["pinned"] = {chain[0]["name"]: "first", chain[-1]["name"]: "last"}.get(block["name"]) or draw.pick(
                "first", "last"
            )
        if draw.chance(0.04):
            block["attach"] = draw.pick("previous", "next")
    for i in range(draw.pick(0, 0, 1, 1, 2, 3)):
        extra = _block(draw, f"x{i}", draw.pick(1, 1, 1, 2, 3), document) | {"layer": False}
        where = draw.pick("head", "tail", "middle", "anywhere")
        at = {"head": 0, "tail": len(chain)}.get(where, draw.random.randint(0, len(chain)))
        if where in ("head", "tail"):
            if draw.chance(0.8):
                extra["pinned"] = {"head": "first", "tail": "last"}[where]
        elif where == "middle":
            extra["attach"] = draw.pick("previous", "next")
        elif draw.chance(0.03):
            extra["pinned"] = draw.pick("first", "last")
        chain.insert(at, extra)
    _modes(draw, chain)
    for i in range(1, len(chain)):
        if draw.chance(0.12):
            chain[i] = _twin(draw, chain[i - 1], chain[i], document)
    return chain


def _twin(draw: _Draw, block: Document, instead_of: Document, document: Document) -> Document:
    """A block that differs from another in one figure, or in none but its name."""
    place = ("name", "count", "layer", "pinned", "attach")
    twin = {key: copy.deepcopy(value) for key, value in block.items() if key not in place}
    twin = {key: instead_of[key] for key in place if key in instead_of} | twin
    other = _block(draw, "other", 1, document)
    modes = semantics.modes_of(twin)
    if modes and draw.chance(0.4):
        changed = draw.pick(*modes) if "modes" in twin else twin["recompute"]
        changed[draw.pick(*[key for key in changed if key != "name"])] = draw.pick(0.0, 1.0)
    else:
        key = draw.pick(*[key for key in other if key not in ("name", "count", "modality")], "backward_ms")
        twin[key] = other[key]
    return twin


def _block(draw: _Draw, name: str, count: int, document: Document) -> Document:
    forward = draw.ms()
    backward = 0.0 if draw.chance(0.1) else draw.pick(draw.ms(), 2 * forward)
    block: Document = {
        "name": name,
        "modality": draw.pick("vision", "text"),
        "count": count,
        "forward_ms": forward,
        "backward_ms": backward,
        "static_bytes": draw.size(3),
        "activation_bytes": draw.size(),
    }
    if draw.has():
        block["transient_bytes"] = draw.size(0.5)
    if draw.has():
        block["output_bytes"] = draw.size(0.3)
    if draw.chance(draw.rate / 2):
        block["sends_gradient"] = False
    if draw.chance(draw.rate / 2):
        block["tail_ms"] = draw.ms(0.5)
    if draw.chance(draw.rate / 3):
        some = [draw.positive() for _ in range(draw.pick(2, 2, 3))]
        block["microbatch_scale"] = [draw.pick(*some) for _ in range(document["num_microbatches"])]
    if draw.chance(draw.rate / 3):
        block["host_static_bytes"] = draw.size()
    return block


def _modes(draw: _Draw, chain: list[Document]) -> None:
    """Some blocks get modes, some of those share a group; all of a group have the same names."""
    if not draw.chance(0.75):
        return
    groups = {name: _mode_names(draw) for name in ("g0", "g1")}
    for block in chain:
        if not draw.chance(0.8 if block.get("layer", True) else 0.3):
            continue
        names = _mode_names(draw)
        if draw.chance(draw.rate * 0.8):
            block["recompute_group"] = draw.pick(*groups)
            names = groups[block["recompute_group"]]
        modes = [_mode(draw, name, block) for name in names]
        if len(modes) == 1 and names == ["recompute"] and not modes[0].get("host_bytes") and draw.chance(0.7):
            (mode,) = modes
            keys = ("extra_backward_ms", "activation_bytes", "restored_bytes")
            block["recompute"] = {key: mode.get(key, 0.0) for key in keys}
        elif modes:
            block["modes"] = modes


def _mode_names(draw: _Draw) -> list[str]:
    return draw.random.sample(["recompute", "offload", "m1"], draw.pick(1, 1, 1, 2, 2, 3))


def _mode(draw: _Draw, name: str, block: Document) -> Document:
    kept = block["activation_bytes"] * draw.pick(0.0, 0.125, 0.25, 0.5, 0.5, 1.0)
    mode: Document = {"name": name, "activation_bytes": float(round(kept)) if draw.whole else kept}
    if draw.chance(0.05):
        mode["activation_bytes"] = draw.size(1.5)
    if name == "offload":
        mode["host_bytes"] = draw.pick(draw.size(), block["activation_bytes"])
        mode["activation_bytes"] = draw.pick(0.0, mode["activation_bytes"])
    elif draw.chance(0.05):
        mode["host_bytes"] = draw.size(0.5)
    if name != "offload" or draw.chance(0.3):
        mode["extra_backward_ms"] = draw.pick(block["forward_ms"], draw.ms(0.5), 0.0)
    if draw.chance(draw.rate / 2):
        mode["extra_forward_ms"] = draw.ms(0.3)
    if draw.chance(draw.rate):
        mode["restored_bytes"] = draw.pick(block["activation_bytes"], draw.size(0.5))
    return mode


def _optimizer_step(name: str, document: Document) -> None:
    """In some problems much passes then. Drawn apart, so that the rest is as if there were none of it."""
    draw = _Draw(name)
    draw.random.seed(f"{name}-step")
    if not draw.chance(draw.rate / 2):
        return
    share = draw.pick(1, 4, 8, 20)
    for block in document["chain"]:
        if draw.has():
            block["step_bytes"] = draw.size(share)
        if draw.has():
            block["step_once_bytes"] = draw.size(2 * share)
            if draw.chance(0.6):
                block["step_shard_bytes"] = draw.size(share)


def _costs_of_stages(draw: _Draw, document: Document) -> None:
    stages, chain = document["num_stages"], document["chain"]
    hops = semantics.num_virtual_stages(document) - 1
    if draw.has():
        document["p2p_ms"] = draw.per(hops, lambda: draw.ms(0.3))
    largest = max([block.get("output_bytes", 0.0) for block in chain] + [1.0])
    if draw.has():
        document["p2p_ms_per_byte"] = draw.per(hops, lambda: _per_byte(draw.ms(0.5), largest))
    if draw.has():
        document["stage_static_bytes"] = draw.per(stages, lambda: draw.size(2))
    if draw.has():
        document["stage_tail_ms"] = draw.per(stages, lambda: draw.ms(0.5))
    if draw.chance(draw.rate / 2):
        document["stage_time_factor"] = draw.per(stages, draw.positive)
    if draw.chance(draw.rate / 2):
        layers = sum(block["count"] for block in chain if block.get("layer", True))
        document["max_layers_per_chunk"] = max(
            1, -(-layers // (hops + 1)) + draw.pick(0, 1, 1, 2, 2, 3) - draw.chance(0.05)
        )
    moved = max([mode.get("host_bytes", 0.0) for block in chain for mode in semantics.modes_of(block)] + [0.0])
    if moved or draw.chance(0.05):
        document["host_ms_per_byte"] = draw.per(
            stages, lambda: _per_byte(draw.ms() * draw.pick(0.0, 0.2, 1.0, 1.0), moved or 1.0)
        )


def _per_byte(time_ms: float, size_bytes: float) -> float:
    """Such that `size_bytes` take `time_ms`; nothing where that is less than a problem may say."""
    return time_ms / size_bytes if time_ms / size_bytes >= 1e-18 else 0.0


def _limits(draw: _Draw, document: Document) -> None:
    """Near what a random placement needs, for the device and (where anything lies there) for the host."""
    stages = document["num_stages"]
    document["memory_limit_bytes"] = 1e18
    placement = some_placement(draw.random, document)
    if placement is None:
        document["memory_limit_bytes"] = draw.size(30)
        return
    cost = semantics.evaluate(document, placement)
    document["memory_limit_bytes"] = _near(draw, cost.peak_bytes)
    if any(cost.host_bytes) and draw.chance(0.5):
        document["host_limit_bytes"] = _near(draw, cost.host_bytes)
    elif draw.chance(0.03):
        document["host_limit_bytes"] = draw.per(stages, lambda: draw.size(10))


def _near(draw: _Draw, peaks: list[float]) -> float | list[float]:
    distance = 1.0 if draw.whole else 1.0 + 1e-6
    kind = draw.pick("loose", "slack", "slack", "each", "each", "one", "one", "one", "scaled", "byte")
    if kind == "loose":
        return draw.pick(1e13, max(peaks) * 3 + 1)
    if kind == "slack":
        slack = draw.random.uniform(0.02, 0.6)
        return [float(round(peak * (1 + slack))) for peak in peaks] if draw.chance(0.5) else max(peaks) * (1 + slack)
    if kind == "each":
        return [peak * distance for peak in peaks]
    if kind == "one":
        return max(peaks) * distance
    if kind == "scaled":
        factor = draw.random.uniform(0.85, 1.4)
        limits = [peak * factor for peak in peaks]
        return [float(round(limit)) for limit in limits] if draw.whole else limits
    if draw.chance(0.2):
        return draw.pick(0.0, min(peaks) * distance)
    return [max(0.0, peak - draw.pick(0, 0, 0, 1)) * distance for peak in peaks]


def some_placement(draw: random.Random, document: Document) -> Document | None:
    """A random lawful placement, whether it fits or not; None where there is none."""
    lawful = list(brute_force.cuts(document))
    if not lawful:
        return None
    cut = draw.choice(lawful)
    layers = [brute_force.held_between(document, *ends) for ends in pairwise(cut)]
    greedy = draw.random() < 0.4  # every layer in a mode, so that modes are needed
    modes = []
    for held in layers:
        choices = brute_force.mode_counts(document, held)
        if greedy:
            most = max(sum(map(sum, choice)) for choice in choices)
            choices = [choice for choice in choices if sum(map(sum, choice)) == most]
        modes.append(draw.choice(choices))
    return {"layers": layers, "modes": modes}
