"""Pipelines of several chunks a stage, drawn at random: what a search of large multimodal jobs places most of its time.

4 to 16 stages of 2 to 4 chunks, 16 to 240 micro-batches, 40 to 120 layers of two or three modalities and a head. In
about half of them memory is tight, in a third hops take time; encoders may be frozen, or recompute too.
"""

from __future__ import annotations

import random
from itertools import pairwise

from mm_autoparallel.pipeline.problem import RECOMPUTE, ChainBlock, Mode, Placement, Problem, place_in_modes
from mm_autoparallel.pipeline.simulate.step import simulate

STAGES, CHUNKS = (4, 6, 8, 10, 12, 16), (2, 3, 4)
MOST_MICROBATCHES, MOST_LAYERS = 240, 120
#: Bytes of a layer's weights and of what it keeps of a micro-batch, of a modality whose layer takes 1 ms forward.
STATIC_BYTES, ACTIVATION_BYTES = 3e9, 1e9


def drawn_problem(seed: int, number: int) -> Problem:
    """The case of that number of a seed, the same for ever. Times in ms, bytes as a large model has them."""
    draw = random.Random(f"{seed}-{number}")
    num_stages, num_chunks = draw.choice(STAGES), draw.choice(CHUNKS)
    least_layers = max(40, num_stages * num_chunks)
    num_layers = draw.randint(least_layers, MOST_LAYERS)
    least_turns = -(-16 // num_stages)
    num_microbatches = num_stages * draw.randint(least_turns, MOST_MICROBATCHES // num_stages)
    names = draw.choice((("vision", "text"), ("vision", "audio", "text")))
    chain = _draw_chain(draw, names, num_layers)
    hops = num_stages * num_chunks - 1
    hop_ms = draw.choice((0.0, 0.0, round(draw.uniform(0.01, 0.2), 3)))
    roomy = Problem(
        num_stages,
        num_chunks,
        num_microbatches,
        "interleaved_1f1b",
        chain,
        (1e15,) * num_stages,
        (0.0,) * num_stages,
        (0.0,) * num_stages,
        (hop_ms,) * hops,
        (0.0,) * hops,
    )
    most, least = (float(max(simulate(roomy, one).peak_memory_bytes)) for one in _even(roomy))
    room = draw.uniform(0.3, 0.9) if draw.random() < 0.5 else draw.uniform(1.1, 1.6)
    return Problem(**{**vars(roomy), "memory_limit_bytes": (float(round(least + room * (most - least))),) * num_stages})


def _draw_chain(draw: random.Random, names: tuple[str, ...], num_layers: int) -> tuple[ChainBlock, ...]:
    """Encoders in front, the text's layers and a head; layers of the text take about 1 ms forward."""
    blocks, left = [], num_layers
    for name in names[:-1]:
        count = draw.randint(4, max(4, num_layers // 4))
        scale = round(draw.uniform(0.1, 0.9), 3)
        ratio = draw.choice((0.0, round(draw.uniform(1.8, 2.1), 3)))  # frozen, or trained
        modes = _recompute(draw, scale) if ratio and draw.random() < 0.5 else ()
        kept = (STATIC_BYTES * scale, ACTIVATION_BYTES * scale) if ratio else (0.2 * STATIC_BYTES * scale, 0.0)
        blocks.append(ChainBlock(name, name, count, scale, round(scale * ratio, 3), *kept, modes))
        left -= count
    forward_ms, ratio = round(draw.uniform(0.8, 1.3), 3), draw.uniform(1.5, 2.1)
    backward_ms = round(forward_ms * ratio, 3)
    modes = _recompute(draw, forward_ms)
    text = ChainBlock("text", "text", left, forward_ms, backward_ms, STATIC_BYTES, ACTIVATION_BYTES, modes)
    head_ms = round(draw.uniform(0.5, 2.0), 3)
    head = ChainBlock("head", "text", 1, head_ms, round(head_ms * 1.7, 3), layer=False, pinned="last")
    return (*blocks, text, head)


def _recompute(draw: random.Random, forward_ms: float) -> tuple[Mode, ...]:
    """Recompute of all of a layer, or of some of it."""
    part = draw.choice((0.25, 1.0))
    kept_bytes = ACTIVATION_BYTES * forward_ms * (0.3 if part < 1.0 else 0.05)
    return (Mode(RECOMPUTE, 0.0, round(part * forward_ms, 3), kept_bytes),)


def _even(problem: Problem) -> tuple[Placement, Placement]:
    """The layers in equal numbers along the chain, none in a mode and all that can be."""
    counts = [block.count for block in problem.chain]
    num_layers, num_virtual = sum(counts[:-1]), problem.num_virtual_stages
    ends = [round(k * num_layers / num_virtual) for k in range(num_virtual + 1)]
    begins = [sum(counts[:b]) for b in range(len(counts))]
    layers = [
        [max(0, min(end, begin + count) - max(first, begin)) for begin, count in zip(begins, counts[:-1], strict=False)]
        for first, end in pairwise(ends)
    ]
    layers = [[*held, int(k == num_virtual - 1)] for k, held in enumerate(layers)]
    able = [[n if block.modes else 0 for n, block in zip(held, problem.chain, strict=True)] for held in layers]
    return place_in_modes(problem, layers, {}), place_in_modes(problem, layers, {RECOMPUTE: able})
