"""Lanes beside decoders of several chunks: what they refute by hand, and no order below what they bound."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np

from mm_autoparallel.pipeline.encoder import Encoder
from mm_autoparallel.pipeline.encoders import EncodedProblem, deal_pipelines
from mm_autoparallel.pipeline.placement.bubbles.compare import compare
from mm_autoparallel.pipeline.placement.bubbles.construct import construct
from mm_autoparallel.pipeline.placement.bubbles.lanes import bound_lanes
from mm_autoparallel.pipeline.placement.bubbles.run import place_encoded
from mm_autoparallel.pipeline.problem import ChainBlock, Placement, Problem
from mm_autoparallel.pipeline.simulate.encoders.orders import write_orders
from mm_autoparallel.pipeline.simulate.encoders.play import Player
from mm_autoparallel.pipeline.simulate.encoders.tasks import list_tasks
from mm_autoparallel.pipeline.simulate.step import simulate


def problem(num_stages: int, num_chunks: int, count: int, forward_ms: float, backward_ms: float) -> EncodedProblem:
    """A layer of 10 and 20 ms on each chunk, hops of 1, one encoder that keeps a byte of each pass on every device."""
    zeros, num_hops = (0.0,) * num_stages, num_stages * num_chunks - 1
    block = ChainBlock("text", "text", num_stages * num_chunks, 10.0, 20.0, activation_bytes=1.0)
    schedule = "interleaved_1f1b" if num_chunks > 1 else "1f1b"
    limits, hops = (1e9,) * num_stages, ((1.0,) * num_hops, (0.0,) * num_hops)
    decoder = Problem(num_stages, num_chunks, count, schedule, (block,), limits, zeros, zeros, *hops)
    held = {"static_bytes": (0.0,), "activation_bytes": (1.0,)}
    encoder = Encoder("vision", (forward_ms,), (backward_ms,), deal_pipelines(num_stages, 1), feed_ms=1.0, **held)
    return EncodedProblem(decoder, (encoder,))


def placed(of: EncodedProblem) -> Placement:
    number = of.decoder.num_virtual_stages
    return Placement(((1,),) * number, (((),),) * number)


def test_one_lane_by_hand() -> None:
    """One stage, two micro-batches: F0 B0 F1 B1 of 10 and 20, encoder 5 and 7, ways of 1. The second encoder forward
    hides nowhere but before the decoder's, since its device has all the work: 5 + 1 or 5, then all else, 1, 7."""
    of = problem(1, 1, 2, 5.0, 7.0)
    player = Player(list_tasks(of, placed(of)))
    least_ms = 5.0 + 5.0 + 2 * 30.0 + 7.0 + 1.0 + 7.0 - 1.0  # the last way back hides
    result = place_encoded(of)
    assert result.status == "optimal"
    assert math.isclose(result.step_ms, least_ms)
    assert math.isclose(bound_lanes(player, 0.0, math.inf, lambda: False), least_ms, rel_tol=1e-5)
    tight = replace(of, decoder=replace(of.decoder, memory_limit_bytes=(1.0,)))  # a pass and a micro-batch are two
    assert bound_lanes(Player(list_tasks(tight, placed(tight))), 0.0, math.inf, lambda: False) == math.inf
    assert bound_lanes(player, 0.0, least_ms * 0.999, lambda: False) == math.inf


def test_two_chunks_hide_what_their_gaps_hold() -> None:
    """Short passes hide between chunks but for one at either end; the decoder keeps its schedule's order."""
    of = problem(4, 2, 8, 6.0, 12.0)
    result = place_encoded(of)
    alone_ms = simulate(of.decoder, placed(of)).step_ms
    assert result.status == "optimal"
    assert result.step_ms >= alone_ms + 6.0 + 1.0 + 1.0 + 12.0 - 1e-9
    assert result.step_ms < compare(of, placed(of)).phases_ms
    assert result.tasks is not None
    assert result.words is not None
    for order in write_orders(result.tasks, result.words):
        forwards = [word for word in order.split() if word.endswith("F0")]
        assert forwards == [f"{m}F0" for m in range(8)]


def test_no_order_goes_below_lanes() -> None:
    """Random orders of random problems, each played by the simulator's engine."""
    dice = random.Random(3)
    for _ in range(8):
        of = problem(dice.choice((2, 3)), dice.choice((1, 2, 3)), 6, dice.uniform(1, 30), dice.choice((0.0, 20.0)))
        player = Player(list_tasks(of, placed(of)))
        bound_ms = bound_lanes(player, 0.0, math.inf, lambda: False)
        best_ms, words = construct(player, 0.0, 3, lambda: False)
        assert words is not None
        assert bound_ms <= best_ms
        for _ in range(100):
            lane = dice.randrange(of.decoder.num_stages)
            letters = words[lane][words[lane] >= 0].tolist()
            letters.insert(dice.randrange(len(letters)), letters.pop(dice.randrange(len(letters))))
            trial = words.copy()
            trial[lane, : len(letters)] = letters
            step_ms = player.step_ms(trial)
            assert bound_ms <= step_ms
            if np.isfinite(step_ms):
                words = trial
