"""The longest path of a simulated step, stage by stage and in words: only what lies on it can shorten the step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from mm_autoparallel.pipeline.simulate.step import Timeline
from mm_autoparallel.units import format_ms, format_percent

_SHOWN_FRACTION = 5e-4
"""Of the step: what is less prints as 0.0 %."""


@dataclass(frozen=True)
class PathShare:
    """What of the longest path lies on one stage: how many of its forwards and backwards, and how long they take."""

    stage: int
    num_forwards: int
    num_backwards: int
    time_ms: float


@dataclass(frozen=True)
class PathShares:
    """The longest path: its stages, the transfers on it, and the tail of `end_stage`. Together they are the step."""

    stages: tuple[PathShare, ...]
    transfers_ms: float
    end_stage: int
    tail_ms: float


def share_path(timeline: Timeline) -> PathShares:
    """Divide the longest path of `timeline` among the stages that it runs through."""
    path, loads, num_stages = timeline.critical_path, timeline.loads, timeline.graph.num_stages
    times_ms = path.forward * loads.forward_ms + path.backward * loads.backward_ms
    shares = []
    for stage in range(num_stages):
        forwards, backwards = path.forward[stage::num_stages], path.backward[stage::num_stages]
        time_ms = float(times_ms[stage::num_stages].sum())
        shares.append(PathShare(stage, int(forwards.sum()), int(backwards.sum()), time_ms))
    hops_ms = np.dot(path.hop_forward, loads.hop_forward_ms) + np.dot(path.hop_backward, loads.hop_backward_ms)
    return PathShares(tuple(shares), float(hops_ms), path.end_stage, float(loads.tail_ms[path.end_stage]))


def describe_path(timeline: Timeline) -> str:
    """`the longest path: 97.0 % on stage 1 (127 forwards, 128 backwards), …, 0.1 % in transfers`."""
    shares = share_path(timeline)
    parts = [
        (one.time_ms, f"on stage {one.stage} ({_count(one.num_forwards, 'forward')}, "
        f"{_count(one.num_backwards, 'backward')})")
        for one in shares.stages
    ]  # fmt: skip
    parts += [
        (shares.transfers_ms, "in transfers"),
        (shares.tail_ms, f"after the last backward of stage {shares.end_stage}"),
    ]
    parts.sort(key=lambda part: -part[0])
    shown = [part for part in parts if part[0] >= _SHOWN_FRACTION * timeline.step_ms]
    told = [f"{format_percent(time_ms / timeline.step_ms)} {where}" for time_ms, where in shown[:_MOST_PARTS]]
    rest_ms = sum(time_ms for time_ms, _ in shown[_MOST_PARTS:])
    told += [f"{format_percent(rest_ms / timeline.step_ms)} on {len(shown) - _MOST_PARTS} others"] if rest_ms else []
    return f"the longest path, {format_ms(timeline.step_ms)}: {_join(told)}"


_MOST_PARTS = 5
"""Of a path that are told one by one. Assumed: who reads more looks into the document of --json."""


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _join(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last
