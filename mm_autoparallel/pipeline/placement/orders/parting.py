"""Parting: of the whole backwards of a stage the last are split where the step then ends sooner.

Local search looks at stages that split all of their backwards or none. One that has no room to split all of them can
split the last: their weight gradients wait until the stage has nothing else to do, and the stages before it have their
gradients sooner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from mm_autoparallel.pipeline.problem import Placement

#: Last backwards of a stage that are split at most. Assumed: one more is seldom of use, and all are tried.
MOST_PARTED = 4


def part_backwards(
    placement: Placement, step_ms: float, stages: Sequence[int], play: Callable[[Placement], float]
) -> tuple[Placement, float]:
    """The placement with the last backwards of these stages split as long as that gains, and its step.

    step_ms: the step of the placement. play: that of another, infinite where it does not fit.
    """
    is_better = True
    while is_better:
        is_better = False
        for stage in reversed(stages):
            for text in _partings(placement.orders[stage]):
                tried = replace(placement, orders=(*placement.orders[:stage], text, *placement.orders[stage + 1 :]))
                tried_ms = play(tried)
                if tried_ms < step_ms:
                    placement, step_ms, is_better = tried, tried_ms, True
    return placement, step_ms


def _partings(text: str) -> Iterator[str]:
    """A stage's order with its last backward that is whole split, its last two, and so on: their I where they stood,
    their W at the end."""
    actions, weights = text.split(), list[str]()
    wholes = [at for at, action in enumerate(actions) if "B" in action]
    for at in wholes[: -MOST_PARTED - 1 : -1]:
        weights.insert(0, actions[at].replace("B", "W"))
        actions[at] = actions[at].replace("B", "I")
        yield " ".join(actions + weights)
