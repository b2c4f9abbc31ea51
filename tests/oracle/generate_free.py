"""Small random problems whose order is to be found; `problem("tidy-17")` is the same one for ever.

Moods as in `generate`, and tight (memory for few micro-batches, or for none). Blocks have weight gradients apart (none,
some or all of their backward), what these keep and what parting them costs; encoders may be frozen.
"""

from __future__ import annotations

import generate
import numpy as np
from brute_force import count_placements, cuts
from free_orders import moments_of, peak_of, split_content
from generate import some_placement
from semantics import Document, modes_of, spread

TIGHT = "tight"
MOODS = (*generate.MOODS, TIGHT)
MOST_PLACEMENTS = 400
MOST_LARGE_PLACEMENTS = 60  # of three stages and four micro-batches


def problem(name: str) -> Document:
    """The problem called `mood-seed`."""
    mood, _, seed = name.rpartition("-")
    figures = f"{generate.MOODS[int(seed) % 2] if mood == TIGHT else mood}-free{mood}{seed}"
    draw = generate._Draw(figures)
    stages = draw.pick(1, 2, 2, 2, 2, 3, 3, 3, 3)
    document: Document = {
        "schema": "mm-autoparallel/problem/1",
        "num_stages": stages,
        "num_chunks": 1,
        "num_microbatches": draw.pick(1, 2, 2, 3, 3, 3, 4, 4),
        "schedule": "free",
    }
    most = MOST_LARGE_PLACEMENTS if stages * document["num_microbatches"] > 9 else MOST_PLACEMENTS
    for _ in range(20):
        document["chain"] = _chain(draw, stages, document)
        if count_placements(document, most) <= most:
            break
    else:
        for block in document["chain"]:
            block.pop("modes", None)
            block.pop("recompute", None)
    generate._optimizer_step(figures, document)
    generate._costs_of_stages(draw, document)
    for key in ("p2p_ms", "p2p_ms_per_byte"):
        if stages == 1:
            document.pop(key, None)
    _limits(draw, document, mood == TIGHT)
    return document


def _chain(draw: generate._Draw, stages: int, document: Document) -> list[Document]:
    layers = stages + draw.pick(0, 0, 1, 1, 2, 2, 3) - draw.chance(0.02)
    kinds = min(max(1, layers), draw.pick(1, 1, 2, 2, 3))
    counts = [1] * kinds
    for _ in range(max(1, layers) - kinds):
        counts[draw.random.randrange(kinds)] += 1
    chain = [_block(draw, f"b{i}", count, document) for i, count in enumerate(counts)]
    if draw.chance(0.3):
        chain.insert(0, _block(draw, "head", 1, document) | {"layer": False, "pinned": "first"})
    if draw.chance(0.3):
        chain.append(_block(draw, "tail", 1, document) | {"layer": False, "pinned": "last"})
    if draw.chance(0.1):
        extra = _block(draw, "extra", draw.pick(1, 1, 2), document) | {"layer": False}
        if draw.chance(0.5):
            extra["attach"] = draw.pick("previous", "next")
        chain.insert(draw.random.randint(0, len(chain)), extra)
    if draw.chance(0.25):  # a frozen encoder: nothing goes back to it
        for block in chain[: draw.random.randint(1, len(chain))]:
            block |= {"backward_ms": 0.0, "sends_gradient": False}
            block.pop("backward_weight_ms", None)
            block.pop("split_extra_ms", None)
    generate._modes(draw, chain)
    for block in chain:
        for mode in modes_of(block):
            if not block["backward_ms"] and not block["sends_gradient"] and draw.chance(0.8):
                mode.pop("extra_backward_ms", None)  # nothing to run again for
                block.pop("recompute", None)
    return chain


def _block(draw: generate._Draw, name: str, count: int, document: Document) -> Document:
    block = generate._block(draw, name, count, document)
    block.pop("microbatch_scale", None)
    block.setdefault("sends_gradient", True)
    backward = block["backward_ms"]
    share = draw.pick(0.0, 0.5, 0.5, 0.4, 1.0, draw.random.random(), None)
    if backward and share is not None:
        weight = backward * share
        block["backward_weight_ms"] = min(backward, float(round(weight))) if draw.mood == "tidy" else weight
        if block["backward_weight_ms"] and draw.chance(0.3):
            block["split_extra_ms"] = draw.ms(0.2)
    kept = draw.pick(None, None, 0.0, 0.5, 0.25, 0.9, 1.0)
    if kept is not None:
        kept *= block["activation_bytes"]
        block["kept_for_weight_bytes"] = float(round(kept)) if draw.whole else kept
        block["kept_for_weight_bytes"] = min(block["kept_for_weight_bytes"], block["activation_bytes"])
    if draw.mood in ("tidy", "sparse") and draw.chance(0.3):  # whole numbers of JSON
        block |= {key: int(value) for key, value in block.items() if isinstance(value, float) and value.is_integer()}
    return block


def _limits(draw: generate._Draw, document: Document, tight: bool) -> None:
    """Near what a random placement needs for some micro-batches in flight or pending, for the device and the host."""
    stages, count = document["num_stages"], document["num_microbatches"]
    document["memory_limit_bytes"] = 1e18
    placement = some_placement(draw.random, document) if next(cuts(document), None) else None
    if placement is None:
        document["memory_limit_bytes"] = draw.size(30)
        return
    own = spread(document.get("stage_static_bytes", 0.0), stages)
    peaks, on_hosts = [], []
    for s in range(stages):
        content = split_content(document, s, placement["layers"][s], placement["modes"][s])
        flight = draw.pick(1, 1, 2) if tight else draw.random.randint(1, count)
        moments = [(min(flight, count), 0)]
        if draw.chance(0.5):
            moments.append((moments[0][0] - 1, 1))
        if draw.chance(0.2):
            moments = moments_of([(0, "F"), (0, "I")] * count)
        peak, on_host = peak_of(content, own[s], moments)
        peaks.append(peak)
        on_hosts.append(on_host)
    if tight:
        distance = 1.0 if draw.whole else 1.0 + 1e-6
        factor = draw.pick(1.0, 1.0, 1.0, 0.9, 1.1)
        document["memory_limit_bytes"] = [peak * distance * factor for peak in peaks]
    else:
        document["memory_limit_bytes"] = generate._near(draw, peaks)
    if any(on_hosts) and draw.chance(0.5):
        document["host_limit_bytes"] = generate._near(draw, on_hosts)
    if np.ndim(document["memory_limit_bytes"]) and draw.chance(0.15):
        document["memory_limit_bytes"] = max(document["memory_limit_bytes"])
