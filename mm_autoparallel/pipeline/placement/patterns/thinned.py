"""Thinned: the chain without the light blocks in front of its main kind, for bounds where stages could hold too much.

A few dozen light layers (a frozen encoder's) in front of the main kind multiply what each stage could hold by how many
of them each of its chunks has, and hardly change what it takes. Left out of the chain, and spread over the first
virtual stages in whatever parts, each kind by itself, they cost a mixture of paths no more than anywhere in the chain:

    Σ over light kinds · what all of it costs on the virtual stage where the mixture counts it least.

Virtual stages in front of the main kind's first layer may then hold nothing of what is left.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.placement.segments import Segments, cut_into_segments
from mm_autoparallel.pipeline.problem import ChainBlock, Problem

Floats = NDArray[np.float64]

#: Work of the light blocks beyond which spreading it says too little, as a fraction of all (assumed).
LIGHT_FRACTION = 0.15


class Spread(NamedTuple):
    """forward_ms, backward_ms: [E, K] what all of each light kind takes of a micro-batch on each virtual stage."""

    forward_ms: Floats
    backward_ms: Floats


def nothing_spread(problem: Problem) -> Spread:
    """Where every block is in the chain."""
    return Spread(*np.zeros((2, 0, problem.num_virtual_stages)))


def thin(problem: Problem, most_fraction: float = LIGHT_FRACTION) -> tuple[Segments, Spread] | None:
    """The segments without light blocks, and those; None where there is none to leave out, or more than that fraction
    of the work."""
    chain, num_virtual = problem.chain, problem.num_virtual_stages
    works_ms = [block.count * (block.forward_ms + block.backward_ms) for block in chain]
    main = int(np.argmax(works_ms))
    is_held = [bool(block.pinned or block.modes or block.within) for block in chain]
    num_light = min(main, (*is_held, True).index(True))  # what is in front of all that is kept
    light, kept = chain[:num_light], chain[num_light:]
    num_layers = sum(block.count for block in light if block.layer)
    is_heavy = sum(works_ms[:num_light]) > most_fraction * sum(works_ms)
    if not num_layers or is_heavy or any(block.pinned == "first" for block in kept):
        return None
    segments = cut_into_segments(replace(problem, chain=(_alone(kept[0]), *kept[1:])))
    if np.any(segments.first > segments.last):
        return None
    first = segments.first[np.maximum(np.arange(num_virtual + 1) - num_layers, 0)]
    first[num_virtual] = segments.num_segments
    num_spare = min(num_layers, num_virtual - 1)
    factor = np.array(problem.time_factors)[np.arange(num_virtual) % problem.num_stages]
    times_ms = np.array([(block.count * block.forward_ms, block.count * block.backward_ms) for block in light])
    spread_ms = np.ascontiguousarray(times_ms.T[:, :, None] * factor)  # in the order that kernels are compiled for
    return replace(segments, first=first, num_spare=num_spare), Spread(*spread_ms)


def _alone(block: ChainBlock) -> ChainBlock:
    """The block, not held by what was in front of it."""
    return replace(block, attach=None) if block.attach == "previous" else block
