"""Placements of a decoder that leave encoders the most time: ways to cut the chain that bounds leave open."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from mm_autoparallel.pipeline.placement.bounds.cuts import Cuts
from mm_autoparallel.pipeline.placement.incumbents.anneal import NOTHING_FITS, Annealer
from mm_autoparallel.pipeline.placement.segments import Segments
from mm_autoparallel.pipeline.problem import Placement
from mm_autoparallel.pipeline.simulate.loads import equal_graphs

#: How far above the bound the steps are whose cuts of the least work are tried (assumed).
EXCESSES = (1e-4, 3e-3, 1e-2, 2e-2, 4e-2)


def list_starts(segments: Segments, cuts: Cuts, lower_ms: float) -> Iterator[Placement]:
    """Those that fit, of the least work that steps near lower_ms leave open. segments: of the decoder."""
    seen: set[tuple[int, ...]] = set()
    for excess in EXCESSES:
        boundaries = cuts.lightest(lower_ms * (1.0 + excess))
        if boundaries is None or tuple(boundaries) in seen:
            continue
        seen.add(tuple(boundaries))
        placement = _fit_modes(segments, boundaries)
        if placement is not None:
            yield placement


def _fit_modes(segments: Segments, boundaries: list[int]) -> Placement | None:
    """The placement so cut whose modes fit memory at little cost; None where none was found that does."""
    at = np.array(boundaries)
    annealer = Annealer(replace(segments, first=at, last=at), *equal_graphs(segments.problem), 0)
    annealer.run(1, True, lambda: False)
    return segments.placement(*annealer.best_boundaries()) if annealer.best_ms < NOTHING_FITS else None
