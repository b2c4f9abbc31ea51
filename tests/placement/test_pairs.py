"""Forwards and backwards of one encoder between the actions of one stage, with what they keep: no bound is too high."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from pass_gaps import list_words

from mm_autoparallel.pipeline.encoder import Encoder
from mm_autoparallel.pipeline.encoders import EncodedProblem
from mm_autoparallel.pipeline.placement.bubbles.bounds import list_cuts
from mm_autoparallel.pipeline.problem import ChainBlock, Mode, Placement, Problem
from mm_autoparallel.pipeline.simulate.encoders.play import Player
from mm_autoparallel.pipeline.simulate.encoders.tasks import Tasks, list_tasks

#: A bound is found to a part of 1e-5.
CLOSE_FRACTION = 3e-5


def draw(dice: random.Random) -> EncodedProblem:
    """A layer a stage, which may run again in backward; all passes on one stage; memory that binds or does not."""
    num_stages, count = 2, dice.choice((2, 3))
    passes_ms = (dice.uniform(1, 40),), (dice.uniform(1, 60),)
    stage, size, kept = (
        dice.randrange(num_stages),
        1 if count == 2 else dice.choice((2, 3)),
        dice.choice((0.5, 1.0, 2.0)),
    )
    encoder = Encoder("vision", *passes_ms, ((stage,),), "bubbles", size, dice.uniform(0, 3), 0.0, (0.0,), (kept,))
    zeros, hops = (0.0,) * num_stages, ((1.0,) * (num_stages - 1), (0.0,) * (num_stages - 1))
    modes = (Mode("recompute", 0.0, dice.uniform(1, 10), 0.2),) if dice.random() < 0.7 else ()
    block = ChainBlock("text", "text", num_stages, dice.uniform(2, 20), dice.uniform(2, 30), modes=modes)
    block = replace(block, activation_bytes=1.0)
    limits = (dice.choice((2.2, 3.0, 4.0, 99.0)),) * num_stages
    return EncodedProblem(Problem(num_stages, 1, count, "1f1b", (block,), limits, zeros, zeros, *hops), (encoder,))


def every_step(tasks: Tasks) -> Iterator[float]:
    """The step of every way to put passes between the actions of their stage that keeps limits."""
    player = Player(tasks)
    for words in list_words(tasks, int(tasks.lane[tasks.owner == 0][0])):
        step_ms = player.step_ms(words)
        if np.isfinite(step_ms) and player.fits(words):
            yield step_ms


def every_placement(of: EncodedProblem) -> Iterator[Placement]:
    """A layer a stage, run again or not."""
    num_stages, has_mode = of.decoder.num_stages, bool(of.decoder.chain[0].modes)
    for chosen in range(2**num_stages if has_mode else 1):
        modes = tuple(((((chosen >> s) & 1),) if has_mode else (),) for s in range(num_stages))
        yield Placement(((1,),) * num_stages, modes)


def compare(of: EncodedProblem) -> tuple[float, float, float]:
    """The bound with pairs and without, and the best of every order of every placement."""
    bounds = []
    for has_pairs in (True, False):
        cuts = list_cuts(of, lambda: None)
        assert cuts is not None
        bounds.append((cuts if has_pairs else replace(cuts, pairs=())).bound(0.0, lambda: None))
    placements = every_placement(of)
    best_ms = min((step for each in placements for step in every_step(list_tasks(of, each))), default=np.inf)
    return bounds[0], bounds[1], best_ms


@pytest.mark.parametrize("seed", [21, 22, 23])
def test_no_order_that_fits_goes_below(seed: int) -> None:
    dice = random.Random(seed)
    num_raised = num_met = num_placed = 0
    for _ in range(10):
        bound_ms, without_ms, best_ms = compare(draw(dice))
        assert bound_ms <= best_ms * (1.0 + 1e-9)
        assert bound_ms >= without_ms * (1.0 - CLOSE_FRACTION)
        if np.isfinite(best_ms):
            num_placed += 1
            num_raised += bound_ms > without_ms * 1.001
            num_met += bound_ms >= best_ms * (1.0 - CLOSE_FRACTION)
    print(num_placed, num_raised, num_met)
    assert num_placed > 3
    assert num_raised > 0
    assert num_met > 1
