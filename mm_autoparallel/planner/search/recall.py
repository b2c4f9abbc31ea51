"""What the cache knows of a pipeline's problems: that of its level, and those of fills that are tried."""

from __future__ import annotations

import numpy as np

from mm_autoparallel.pipeline.problem import Problem
from mm_autoparallel.pipeline.solve.cache import SolvedCache
from mm_autoparallel.pipeline.solve.families import content_key, figures_of
from mm_autoparallel.pipeline.solve.task import Answer
from mm_autoparallel.planner.search.pipeline import Pipeline


def find_known(cache: SolvedCache | None, pipeline: Pipeline) -> Answer | None:
    """What is known of the problem that is to be placed now; of that of a level it is asked once."""
    level = pipeline.level
    if cache is None or pipeline.problem is None:
        return None
    if pipeline.raising.num_placed:
        return None  # what a shorter turn found is known
    if pipeline.is_probing:
        problem = pipeline.problem_at(pipeline.probe_fill_fraction)
        return cache.find(_key_of(pipeline, problem), problem)
    if level.is_recalled:
        return None
    level.is_recalled = True
    return cache.find(_level_key(pipeline), level.problem or pipeline.problem)


def remember(cache: SolvedCache | None, pipeline: Pipeline) -> None:
    """Write down what is known of the problem of its level."""
    if cache is not None and not pipeline.given_up:
        level, solve_s = pipeline.level, pipeline.cached_s + pipeline.solve_s
        known = (level.placement, level.step_ms, pipeline.within_ms, solve_s)
        ended = (bool(np.isinf(pipeline.within_ms)), pipeline.reason, pipeline.overflow_bytes)
        cache.keep(_level_key(pipeline), Answer(pipeline.number, *known, *ended))


def remember_probe(cache: SolvedCache | None, pipeline: Pipeline, fill: float, answer: Answer) -> None:
    """Write down what came of a fill that was tried."""
    if cache is not None and not pipeline.given_up:
        cache.keep(_key_of(pipeline, pipeline.problem_at(fill)), answer)


def _level_key(pipeline: Pipeline) -> str:
    level = pipeline.level
    if not level.key:
        level.key = pipeline.key if level.problem is None else _key_of(pipeline, level.problem)
    return level.key


def _key_of(pipeline: Pipeline, limited: Problem) -> str:
    """The content_key of a limited problem, whose bounds hold beside those of the pipeline's own."""
    shape, figures = figures_of(limited)
    return content_key((pipeline.key, *shape), figures)
