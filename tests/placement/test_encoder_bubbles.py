"""Encoder work beside a decoder's pipeline: known steps, closed forms, and what orders keep."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from mm_autoparallel.errors import JobError
from mm_autoparallel.pipeline.encoder import Encoder
from mm_autoparallel.pipeline.encoders import EncodedProblem, check_encoders, deal_pipelines
from mm_autoparallel.pipeline.placement.bubbles.bounds import bound_placed, decoder_beside, list_cuts
from mm_autoparallel.pipeline.placement.bubbles.compare import compare, features_bytes
from mm_autoparallel.pipeline.placement.bubbles.construct import construct
from mm_autoparallel.pipeline.placement.bubbles.run import EncodedResult, place_encoded
from mm_autoparallel.pipeline.placement.orders.compiling import compile_orders
from mm_autoparallel.pipeline.problem import ChainBlock, Placement, Problem
from mm_autoparallel.pipeline.simulate.encoders.orders import write_orders
from mm_autoparallel.pipeline.simulate.encoders.play import Player
from mm_autoparallel.pipeline.simulate.encoders.tasks import list_tasks
from mm_autoparallel.pipeline.simulate.step import simulate


def decoder(num_stages: int, num_microbatches: int, schedule: str = "1f1b", limit_bytes: float = 1e9) -> Problem:
    """Forwards of 20 ms, backwards of 40, hops of 1, one layer a stage; memory is what the schedule itself asks for."""
    zeros = (0.0,) * num_stages
    hops = (1.0,) * (num_stages - 1), (0.0,) * (num_stages - 1)
    block = ChainBlock("text", "text", num_stages, 20.0, 40.0, activation_bytes=1.0)
    limits = (limit_bytes,) * num_stages
    return Problem(num_stages, 1, num_microbatches, schedule, (block,), limits, zeros, zeros, *hops)


def encoder(num_stages: int, forward_ms: float, backward_ms: float, name: str = "vision", **figures: object) -> Encoder:
    pipelines = figures.pop("pipelines", None) or deal_pipelines(num_stages, 1)
    assert isinstance(pipelines, tuple)
    shown: dict[str, object] = {"feed_ms": 1.0, "static_bytes": (0.0,), "activation_bytes": (0.0,)} | figures
    return Encoder(name, (forward_ms,), (backward_ms,), pipelines, **shown)  # type: ignore[arg-type]


def placed(problem: Problem) -> Placement:
    return Placement(((1,),) * problem.num_stages, (((),),) * problem.num_stages)


def texts(result: EncodedResult) -> list[list[str]]:
    assert result.tasks is not None
    assert result.words is not None
    return [order.split() for order in write_orders(result.tasks, result.words)]


@pytest.mark.parametrize(
    ("num_stages", "num_microbatches", "forward_ms", "backward_ms", "alone", "phases", "chain", "best"),
    [
        (4, 8, 12.0, 24.0, 676.0, 748.0, 765.0, 714.0),
        (8, 16, 16.0, 32.0, 1420.0, 1516.0, 1532.0, 1470.0),
        (8, 16, 16.0, 0.0, 1420.0, 1452.0, 1440.0, 1437.0),
        (8, 32, 16.0, 32.0, 2408.0, 2600.0, 2588.0, 2458.0),
    ],
)
def test_known_steps(
    num_stages: int,
    num_microbatches: int,
    forward_ms: float,
    backward_ms: float,
    alone: float,
    phases: float,
    chain: float,
    best: float,
) -> None:
    """One lead-in, one lead-out, and nothing else is left of the encoder's work."""
    of = decoder(num_stages, num_microbatches)
    problem = EncodedProblem(of, (encoder(num_stages, forward_ms, backward_ms),))
    result = place_encoded(problem)
    assert (result.status, result.step_ms) == ("optimal", best)
    assert result.lower_bound_ms == pytest.approx(best, rel=1e-6)
    others = compare(problem, placed(of))
    assert (others.decoder_ms, others.phases_ms, others.chain_ms) == (alone, phases, chain)


def test_gain_over_phases() -> None:
    """8 stages, 16 micro-batches, as Optimus has it: at least three in a hundred."""
    problem = EncodedProblem(decoder(8, 16), (encoder(8, 16.0, 32.0),))
    assert place_encoded(problem).step_ms <= 0.97 * compare(problem, placed(problem.decoder)).phases_ms


def test_caps_on_passes_ahead() -> None:
    """Fewer passes ahead of the decoder, and the step is no shorter; four are enough here."""
    capped = [replace(encoder(4, 12.0, 24.0), most_ahead=cap) for cap in (1, 2, 4, None)]
    found = [place_encoded(EncodedProblem(decoder(4, 8), (of,))) for of in capped]
    assert [(result.step_ms, result.status) for result in found] == [
        (734.0, "optimal"),
        (724.0, "optimal"),
        (714.0, "optimal"),
        (714.0, "optimal"),
    ]


def test_random_orders_keep_every_dependency() -> None:
    """A thousand random orders that end: no decoder's forward before its encoder's, no encoder's backward before the
    decoder's, each with its way."""
    problem = EncodedProblem(decoder(3, 6), (encoder(3, 7.0, 9.0), encoder(3, 4.0, 0.0, "audio", feed_ms=2.0)))
    tasks = list_tasks(problem, placed(problem.decoder))
    player = Player(tasks)
    _, words = construct(player, 1e9, 1, lambda: False)
    assert words is not None
    dice = random.Random(0)
    seen, num_ended, num_tried = set(), 0, 0
    while num_ended < 1_000:
        num_tried += 1
        trial = words.copy()
        lane = dice.randrange(3)
        length = int((words[lane] >= 0).sum())
        letters = trial[lane, :length].tolist()
        letters.insert(dice.randrange(length), letters.pop(dice.randrange(length)))
        trial[lane, :length] = letters
        step_ms = player.step_ms(trial)
        if not np.isfinite(step_ms):
            continue
        words, num_ended = trial, num_ended + 1
        seen.add(step_ms)
        ends = player.ends_ms
        starts = ends - tasks.length_ms
        at = {
            (int(owner), int(kind), int(part), int(index)): task
            for task, (owner, kind, part, index) in enumerate(
                zip(tasks.owner, tasks.kind, tasks.part, tasks.index, strict=True)
            )
        }
        for m in range(6):
            first, last = at[-1, 0, 0, m], at[-1, 1, 0, m]
            assert starts[first] >= ends[at[0, 0, 0, m]] + 1.0 - 1e-9
            assert starts[first] >= ends[at[1, 0, 0, m]] + 2.0 - 1e-9
            assert starts[at[0, 1, 0, m]] >= ends[last] + 1.0 - 1e-9
        for lane in range(3):
            row = player.tasks_of(words, lane)
            assert all(starts[b] >= ends[a] - 1e-9 for a, b in pairwise(row))
    assert num_tried > num_ended
    assert len(seen) > 100


def test_branches_on_devices_of_their_own() -> None:
    """The decoder waits for the slower of two; what comes after it is the slower of both ways back."""
    of = decoder(4, 8)
    branches = (
        encoder(4, 12.0, 24.0, pipelines=deal_pipelines(1, 1, 0, 4)),
        encoder(4, 5.0, 9.0, "audio", feed_ms=3.0, pipelines=deal_pipelines(1, 1, 0, 5)),
    )
    result = place_encoded(EncodedProblem(of, branches))
    assert (result.status, result.step_ms) == ("optimal", 676.0 + 13.0 + 25.0)
    assert len(texts(result)) == 6
    assert texts(result)[5][0] == "0F0@audio"


def test_branches_on_the_decoder_s_devices() -> None:
    """Both hide in the bubbles of other devices, since their passes begin on different ones."""
    of = decoder(4, 8)
    branches = (encoder(4, 6.0, 12.0), encoder(4, 5.0, 0.0, "audio", pipelines=deal_pipelines(4, 1, 1)))
    result = place_encoded(EncodedProblem(of, branches))
    assert (result.status, result.step_ms) == ("optimal", 676.0 + 7.0 + 13.0)


def test_one_encoder_follows_another() -> None:
    of = decoder(4, 8)
    chained = (encoder(4, 6.0, 12.0), encoder(4, 5.0, 7.0, "audio", follows="vision"))
    result = place_encoded(EncodedProblem(of, chained))
    assert (result.status, result.step_ms) == ("optimal", 676.0 + (6 + 1 + 5 + 1) + (1 + 7 + 1 + 12))


def test_a_pipeline_of_an_encoder() -> None:
    """Two stages on two devices each, two micro-batches a pass; frozen first, then not."""
    of = decoder(4, 8)
    cut = Encoder(
        "vision", (6.0, 5.0), (0.0, 0.0), deal_pipelines(4, 2), "bubbles", 2, 1.0, 0.5, (0.0,) * 2, (0.0,) * 2
    )
    frozen = place_encoded(EncodedProblem(of, (cut,)))
    assert (frozen.status, frozen.step_ms) == ("optimal", 676.0 + 6.0 + 0.5 + 5.0 + 1.0)
    trained = place_encoded(EncodedProblem(of, (replace(cut, backward_ms=(12.0, 10.0)),)))
    assert trained.lower_bound_ms == pytest.approx(frozen.step_ms + 1.0 + 22.0 + 0.5)
    assert trained.gap_fraction < 0.02
    assert [word for word in texts(trained)[3] if "@" in word][:2] == ["0F1@vision", "2F1@vision"]


def test_prefetched_and_cached_features() -> None:
    """Made a step ahead, or read: the decoder's own step, where devices have the time; and no less than their work."""
    of = decoder(8, 16)
    ahead = encoder(8, 16.0, 0.0, run="prefetch", output_bytes=3.0, prefetch_depth=2)
    assert place_encoded(EncodedProblem(of, (ahead,))).step_ms == 1420.0
    assert features_bytes(EncodedProblem(of, (ahead,))) == 2 * 16 * 3.0
    own = replace(ahead, forward_ms=(100.0,), pipelines=deal_pipelines(1, 1, 0, 8))
    assert place_encoded(EncodedProblem(of, (own,))).step_ms == 1600.0
    cached = replace(ahead, run="cached", read_ms_per_byte=50.0)
    result = place_encoded(EncodedProblem(of, (cached,)))
    assert (result.status, result.step_ms) == ("optimal", 16 * 3.0 * 50.0)
    assert place_encoded(EncodedProblem(of, (replace(cached, read_ms_per_byte=1.0),))).step_ms == 1420.0


def test_a_free_order_is_no_longer() -> None:
    """Whole backwards in any order: memory that the named schedule fills, or twice that."""
    compile_orders()
    named = place_encoded(EncodedProblem(decoder(3, 6), (encoder(3, 6.0, 12.0),)))
    free = place_encoded(EncodedProblem(decoder(3, 6, "free", 6.0), (encoder(3, 6.0, 12.0),)), time_limit_s=4.0)
    assert free.step_ms < named.step_ms
    assert free.lower_bound_ms <= free.step_ms
    assert max(free.peak_bytes) <= 6.0


def test_memory_holds_back_passes() -> None:
    """A device that can keep one pass beside the decoder's micro-batches keeps one, and the step is longer."""
    wide = EncodedProblem(decoder(4, 8, limit_bytes=100.0), (encoder(4, 12.0, 24.0, activation_bytes=(1.0,)),))
    tight = replace(wide, decoder=decoder(4, 8, limit_bytes=5.0))
    free, held = place_encoded(wide), place_encoded(tight)
    assert free.step_ms == 714.0
    assert max(free.peak_bytes) > 5.0 >= max(held.peak_bytes)
    assert held.step_ms >= free.step_ms
    nothing = place_encoded(replace(wide, decoder=decoder(4, 8, limit_bytes=3.0)))
    assert (nothing.status, nothing.placement) == ("infeasible", None)
    own = encoder(4, 12.0, 24.0, pipelines=deal_pipelines(1, 1, 0, 4), activation_bytes=(2.0,), limit_bytes=1.0)
    nowhere = place_encoded(replace(wide, encoders=(own,)))
    assert nowhere.status == "infeasible"
    assert 'a device of encoder "vision" needs 2 bytes for one pass, and its limit is 1' in nowhere.reason
    one = EncodedProblem(decoder(1, 2, limit_bytes=1.0), (encoder(1, 12.0, 24.0, activation_bytes=(1.0,)),))
    beside = place_encoded(one)
    assert beside.status == "infeasible"
    assert beside.reason.startswith("memory: ")
    assert "what a pass of each encoder keeps beside a full stage is counted" in beside.reason


def test_bounds_of_a_placement_hold_for_its_orders() -> None:
    of = decoder(4, 8)
    problem = EncodedProblem(of, (encoder(4, 90.0, 180.0),))
    tasks = list_tasks(problem, placed(of))
    bound_ms = bound_placed(tasks, simulate(of, placed(of)).step_ms)
    assert bound_ms >= 8 * 60 + 2 * 270
    result = place_encoded(problem, time_limit_s=5.0)
    assert bound_ms <= result.placed_bound_ms <= result.step_ms


def test_forwards_do_not_fit_where_the_last_stage_waits_for_the_end() -> None:
    """Of four stages the last waits for three forwards before its work, which forwards of encoders may fill, and for
    three backwards and hops after it, which they may not; backwards of encoders the other way round."""
    of = decoder(4, 8)
    cuts = list_cuts(EncodedProblem(of, (encoder(4, 90.0, 0.0),)), lambda: None)
    assert cuts is not None
    paths = replace(cuts, strands=())
    assert paths.bound(0.0, lambda: None) == pytest.approx(2 * 90.0 + 8 * 60.0 + 3 * 41.0, rel=2e-5)
    # no wait of the third stage has room for its second pass before it feeds a micro-batch
    assert cuts.bound(0.0, lambda: None) == pytest.approx(814.0, rel=2e-5)
    result = place_encoded(EncodedProblem(of, (encoder(4, 90.0, 0.0),)), time_limit_s=20.0, gap_fraction=2e-5)
    assert result.status == "optimal"
    assert cuts.lightest(result.step_ms) == [0, 1, 2, 3, 4]
    trained = list_cuts(EncodedProblem(of, (encoder(4, 30.0, 150.0),)), lambda: None)
    assert trained is not None
    # the first stage waits for its first gradient, but for the four forwards that it runs meanwhile
    waits_ms = 30.0 + 1.0 + 3 * 21.0 + 3 * 41.0 - 3 * 20.0
    paths = replace(trained, strands=())
    assert paths.bound(0.0, lambda: None) == pytest.approx(waits_ms + 8 * 60.0 + 2 * 150.0, rel=2e-5)
    # no wait of the second stage after its fourth backward has room for 150
    assert trained.bound(0.0, lambda: None) == pytest.approx(964.0, rel=2e-5)
    result = place_encoded(EncodedProblem(of, (encoder(4, 30.0, 150.0),)), time_limit_s=20.0, gap_fraction=2e-5)
    assert result.status == "optimal"


def test_no_order_goes_below_all_cuts() -> None:
    dice = random.Random(5)
    for _ in range(12):
        num_stages = dice.choice((2, 3, 4))
        block = ChainBlock(
            "text", "text", num_stages + 2, dice.uniform(2, 9), dice.uniform(2, 18), activation_bytes=1.0
        )
        of = replace(decoder(num_stages, dice.choice((3, 6)), limit_bytes=dice.choice((9.0, 99.0))), chain=(block,))
        backward_ms = dice.choice((0.0, dice.uniform(2, 30)))
        beside = encoder(num_stages, dice.uniform(2, 20), backward_ms, activation_bytes=(1.0,))
        problem = EncodedProblem(of, (beside,))
        cuts = list_cuts(problem, lambda: None)
        assert cuts is not None
        result = place_encoded(problem, time_limit_s=0.2)
        assert cuts.bound(0.0, lambda: None) <= result.step_ms * (1.0 + 1e-9)


def test_what_a_pass_keeps_lies_beside_the_fullest_moment() -> None:
    of = decoder(4, 8)
    trained, frozen = (encoder(4, 9.0, backward_ms, activation_bytes=(2.0,)) for backward_ms in (9.0, 0.0))
    assert decoder_beside(EncodedProblem(of, (trained,))).stage_static_bytes == (2.0,) * 4
    assert decoder_beside(EncodedProblem(of, (frozen,))).stage_static_bytes == (0.0,) * 4
    with_rule = replace(of, schedule="gpipe")
    assert decoder_beside(EncodedProblem(with_rule, (trained,))).stage_static_bytes == (0.0,) * 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"run": "prefetch", "backward_ms": (3.0,)}, "freeze it"),
        ({"run": "cached", "most_ahead": 2}, "most_ahead and follows are of run"),
        ({"follows": "audio"}, "follows 'audio'"),
        ({"follows": "vision"}, "follows 'vision'"),
        ({"static_bytes": (0.0, 0.0)}, "static_bytes has 2 entries"),
    ],
)
def test_contradictions(changes: dict[str, object], words: str) -> None:
    one = replace(encoder(4, 12.0, 0.0), **changes)  # type: ignore[arg-type]
    with pytest.raises(JobError, match=words):
        check_encoders(EncodedProblem(decoder(4, 8), (one,)))


@pytest.mark.parametrize(
    ("schedule", "words"), [("seq_1f1b_2", "pieces of sequences"), ("zb_h1", "parts or pairs backwards")]
)
def test_schedules_that_encoders_do_not_go_with(schedule: str, words: str) -> None:
    with pytest.raises(JobError, match=words):
        check_encoders(EncodedProblem(decoder(4, 8, schedule), (encoder(4, 12.0, 24.0),)))
