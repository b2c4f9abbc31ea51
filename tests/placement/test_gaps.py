"""Passes of one encoder between the actions of one stage: the bound against every choice of gaps, played."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from pass_gaps import list_words

from mm_autoparallel.pipeline.encoder import Encoder
from mm_autoparallel.pipeline.encoders import EncodedProblem
from mm_autoparallel.pipeline.placement.bubbles.bounds import list_cuts
from mm_autoparallel.pipeline.problem import ChainBlock, Placement, Problem
from mm_autoparallel.pipeline.simulate.encoders.play import Player
from mm_autoparallel.pipeline.simulate.encoders.tasks import Tasks, list_tasks

#: A bound is found to a part of 1e-5.
CLOSE_FRACTION = 3e-5


def problem(
    num_stages: int, num_microbatches: int, schedule: str, times_ms: list[float], encoder: Encoder
) -> EncodedProblem:
    """A decoder of one layer a stage, each pinned by being the only one; times_ms: its forward, backward and hop."""
    zeros = (0.0,) * num_stages
    hops = (times_ms[2],) * (num_stages - 1), (0.0,) * (num_stages - 1)
    block = ChainBlock("text", "text", num_stages, times_ms[0], times_ms[1])
    shape = num_stages, 1, num_microbatches, schedule
    return EncodedProblem(Problem(*shape, (block,), (1e9,) * num_stages, zeros, zeros, *hops), (encoder,))


def every_step(tasks: Tasks, stage: int) -> Iterator[float]:
    """The step of every way to put passes into gaps of a stage, those of either direction in their order; infinite
    where it never ends."""
    player = Player(tasks, is_limited=False)
    for words in list_words(tasks, stage):
        yield player.step_ms(words)


def placed(of: EncodedProblem) -> Tasks:
    num_stages = of.decoder.num_stages
    return list_tasks(of, Placement(((1,),) * num_stages, (((),),) * num_stages))


@pytest.mark.parametrize(("schedule", "least_met"), [("1f1b", 18), ("gpipe", 24)])
def test_no_choice_of_gaps_goes_below_and_the_best_is_met(schedule: str, least_met: int) -> None:
    """Passes that delay one another through other stages alone may be missed."""
    dice = random.Random(11)
    num_met = 0
    for _ in range(25):
        num_stages, count = dice.choice((2, 3, 4)), dice.choice((3, 4, 5))
        stage, size = dice.randrange(num_stages), dice.choice((1, 2))
        run = dice.choice(("bubbles", "prefetch"))
        forward_ms, feed_ms = dice.uniform(1, 60), dice.uniform(0, 3)
        encoder = Encoder("vision", (forward_ms,), (0.0,), ((stage,),), run, size, feed_ms, 0.0, (0.0,), (0.0,))
        times_ms = [dice.uniform(2, 20), dice.uniform(2, 30), dice.uniform(0, 3)]
        of = problem(num_stages, count, schedule, times_ms, encoder)
        best_ms = min(every_step(placed(of), stage))
        bound_ms = bound(of)
        assert bound_ms <= best_ms * (1.0 + 1e-9)
        num_met += bound_ms >= best_ms * (1.0 - CLOSE_FRACTION)
    assert num_met >= least_met


def test_no_choice_of_gaps_of_both_directions_goes_below() -> None:
    dice = random.Random(12)
    for _ in range(25):
        num_stages, count = dice.choice((2, 3)), dice.choice((2, 3))
        stage, size = dice.randrange(num_stages), dice.choice((1, 2))
        passes_ms = (dice.uniform(1, 40),), (dice.uniform(1, 60),)
        encoder = Encoder("vision", *passes_ms, ((stage,),), "bubbles", size, dice.uniform(0, 3), 0.0, (0.0,), (0.0,))
        of = problem(num_stages, count, "1f1b", [dice.uniform(2, 20), dice.uniform(2, 30), 1.0], encoder)
        assert bound(of) <= min(every_step(placed(of), stage)) * (1.0 + 1e-9)


def test_a_pass_that_no_wait_has_room_for_delays_the_steady_state() -> None:
    """Two stages, 20 micro-batches of 10 and 10 ms, no hops. The last stage waits 10 ms for its first forward, and
    never again: of its second pass, of 30 ms, 20 delay the step wherever it lies."""
    encoder = Encoder("vision", (30.0,), (0.0,), ((1,),), "bubbles", 10, 0.0, 0.0, (0.0,), (0.0,))
    of = problem(2, 20, "1f1b", [10.0, 10.0, 0.0], encoder)
    alone_ms = 21 * 20.0
    assert bound(of) == pytest.approx(30.0 + alone_ms + 20.0, rel=CLOSE_FRACTION)
    assert min(every_step(placed(of), 1)) == 30.0 + alone_ms + 20.0


def bound(of: EncodedProblem) -> float:
    cuts = list_cuts(of, lambda: None)
    assert cuts is not None
    return cuts.bound(0.0, lambda: None)
