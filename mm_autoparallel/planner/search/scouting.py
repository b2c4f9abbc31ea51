"""Scouting: a plan of each strategy of several chunks at once, before any of them has its turn.

Bounds tell little of which of them is best, and a turn takes a second. What a short local search finds in some tens of
milliseconds tells which of them come first, and a good plan rules out many others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from mm_autoparallel.errors import JobError
from mm_autoparallel.pipeline.placement.first import place_at_once
from mm_autoparallel.pipeline.schedules.catalog import FREE
from mm_autoparallel.pipeline.simulate.step import simulate
from mm_autoparallel.planner.search.pipeline import PROBE_FACTOR, PROBES, Pipeline

#: Of the time that is left when their turn comes, for scouting; no longer than the search took until then, but so long
#: at least. Assumed.
SCOUT_FRACTION, LEAST_SCOUT_S = 0.15, 3.0
#: So many of those that were met have the first turns. Assumed.
NUM_FIRST = 3


def scouting_s(elapsed_s: float, left_s: float) -> float:
    """How long scouting may take."""
    return min(SCOUT_FRACTION * left_s, max(elapsed_s, LEAST_SCOUT_S))


def list_kin(pipelines: Sequence[Pipeline], chunked: Sequence[Pipeline]) -> list[Pipeline]:
    """Those of several chunks whose sizes are the best with one: what is good there tends to be good here."""
    with_plan = (p for p in pipelines if p.placement is not None and not p.has_chunks)
    best = min(with_plan, key=lambda p: p.rank_ms, default=None)
    if best is None:
        return []
    known = best.strategies[0]
    return [p for p in chunked if replace(p.strategies[0], vpp=known.vpp, schedule=known.schedule) == known]


def can_scout(pipeline: Pipeline) -> bool:
    """Whether its order is given, or one of a name."""
    return pipeline.strategies[0].schedule != FREE


def meet_at_once(pipeline: Pipeline) -> None:
    """Meet a plan of it: the fastest, and where that is far too full one that hardly ever runs out of memory; none
    where none is met that fits."""
    for factor in (math.inf, PROBES[0]):
        fill = min(pipeline.level.fill_fraction, pipeline.caution.fill_at(factor))
        problem = pipeline.problem_at(fill)
        try:
            placement, fits = place_at_once(problem)
        except JobError:  # nothing is lawful, which bounds will say
            return
        if fits:
            pipeline.offer(placement, simulate(problem, placement).step_ms, is_last=False)
        if pipeline.rank_ms <= PROBE_FACTOR * pipeline.level.step_ms:
            return


def was_placed(pipeline: Pipeline) -> bool:
    """Whether more is known of it than what scouting met."""
    return pipeline.num_slices > 0 or pipeline.cached_s > 0.0


def choose_first(kin: Sequence[Pipeline], scouted: Sequence[Pipeline]) -> list[Pipeline]:
    """Those that have the first turns: of the kin what cannot be scouted, and of what was met what promises most.
    Those that were met follow in that order: of the middle between what was met and what they take at least."""
    met = [p for p in scouted if p.placement is not None]
    for pipeline in met:
        pipeline.promised_ms = 0.5 * (pipeline.rank_ms + pipeline.bound_ms)
    met.sort(key=lambda p: p.promised_ms)
    return [*(p for p in kin if not (met and can_scout(p))), *met[:NUM_FIRST]]
