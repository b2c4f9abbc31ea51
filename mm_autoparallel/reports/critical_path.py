"""The longest path of a simulated step, stage by stage and in words: only what lies on it can shorten the step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from mm_autoparallel.pipeline.schedules.action import INPUT
from mm_autoparallel.pipeline.simulate.step import Timeline
from mm_autoparallel.units import format_ms, format_percent

_SHOWN_FRACTION = 5e-4
"""Of the step: what is less prints as 0.0 %."""


@dataclass(frozen=True)
class PathShare:
    """What of the longest path lies on one stage: how many of its forwards, backwards (whole or of inputs) and weight
    gradients, and how long they take. A forward and a backward that run together count as one of each."""

    stage: int
    num_forwards: int
    num_backwards: int
    num_weights: int
    time_ms: float


@dataclass(frozen=True)
class PathShares:
    """The longest path: its stages, the transfers on it, the tail of `end_stage`, and what encoders beside the pipeline
    and ways to and from them are of it. Together they are the step."""

    stages: tuple[PathShare, ...]
    transfers_ms: float
    end_stage: int
    tail_ms: float
    beside_ms: float = 0.0


def share_path(timeline: Timeline) -> PathShares:
    """Divide the longest path of `timeline` among the stages that it runs through."""
    path, loads, graph = timeline.critical_path, timeline.loads, timeline.graph
    of_stage = np.array(graph.stage_of)
    of_pair = of_stage[graph.pairs[:, 0] // graph.num_classes]
    shares = []
    for stage in range(graph.num_stages):
        mine, together = of_stage == stage, of_pair == stage
        time_ms = path.pairs[together] @ loads.pair_ms[together]
        time_ms += np.sum(path.forward[mine] * loads.forward_ms[mine] + path.backward[mine] * loads.backward_ms[mine])
        num_pairs, num_inputs, num_weights = int(path.pairs[together].sum()), 0, 0
        if graph.num_kinds > INPUT:
            time_ms += np.sum(path.input[mine] * loads.input_ms[mine] + path.weight[mine] * loads.weight_ms[mine])
            num_inputs, num_weights = int(path.input[mine].sum()), int(path.weight[mine].sum())
        num_forwards = int(path.forward[mine].sum()) + num_pairs
        num_backwards = int(path.backward[mine].sum()) + num_pairs + num_inputs
        shares.append(PathShare(stage, num_forwards, num_backwards, num_weights, float(time_ms)))
    hops_ms = np.dot(path.hop_forward, loads.hop_forward_ms) + np.dot(path.hop_backward, loads.hop_backward_ms)
    tail_ms = float(loads.tail_ms[path.end_stage])
    return PathShares(tuple(shares), float(hops_ms), path.end_stage, tail_ms, path.beside_ms)


def describe_path(timeline: Timeline) -> str:
    """`the longest path: 97.0 % on stage 1 (127 forwards, 128 backwards), …, 0.1 % in transfers`."""
    shares = share_path(timeline)
    parts = [
        (one.time_ms, f"on stage {one.stage} ({_count(one.num_forwards, 'forward')}, "
        f"{_count(one.num_backwards, 'backward')}"
        f"{', ' + _count(one.num_weights, 'weight gradient') if one.num_weights else ''})")
        for one in shares.stages
    ]  # fmt: skip
    parts += [
        (shares.transfers_ms, "in transfers"),
        (shares.beside_ms, "in encoders beside the pipeline, with the ways to and from them"),
        (shares.tail_ms, f"after the last backward of stage {shares.end_stage}"),
    ]
    parts.sort(key=lambda part: -part[0])
    shown = [part for part in parts if part[0] >= _SHOWN_FRACTION * timeline.step_ms]
    told = [f"{format_percent(time_ms / timeline.step_ms)} {where}" for time_ms, where in shown[:_MOST_PARTS]]
    rest_ms = sum(time_ms for time_ms, _ in shown[_MOST_PARTS:])
    told += [f"{format_percent(rest_ms / timeline.step_ms)} on {len(shown) - _MOST_PARTS} others"] if rest_ms else []
    return f"the longest path, {format_ms(timeline.step_ms)}: {_join(told)}"


_MOST_PARTS = 5
"""Of a path that are shown one by one. Assumed: who reads more looks into the document of --json."""


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _join(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last
