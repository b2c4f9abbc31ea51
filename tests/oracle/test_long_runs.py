"""The simulator skips over the middle of long runs; the oracle plays every action."""

from __future__ import annotations

import random

import pytest
import semantics
from compare import read
from generate import MOODS, problem, some_placement
from nouns import placement_of

from mm_autoparallel.pipeline.simulate.step import simulate

PROBLEMS_OF_A_MOOD = 40


@pytest.mark.parametrize("mood", MOODS)
def test_long_runs_equal_the_oracle(mood: str) -> None:
    """13 to 130 micro-batches, equal ones or unequal, in and out of step with the stages."""
    played = 0
    for seed in range(PROBLEMS_OF_A_MOOD):
        draw = random.Random(f"long {mood} {seed}")
        document = problem(f"{mood}-{seed}")
        count = document["num_microbatches"] = draw.randint(13, 130)
        for block in document["chain"]:
            if "microbatch_scale" in block:
                block["microbatch_scale"] = [draw.choice(block["microbatch_scale"]) for _ in range(count)]
        placement = some_placement(draw, document)
        if placement is None:
            continue
        cost = semantics.evaluate(document, placement)
        timeline = simulate(read(document), placement_of(placement))
        assert timeline.step_ms == pytest.approx(cost.step_ms, rel=1e-11), seed
        assert timeline.peak_memory_bytes.tolist() == pytest.approx(cost.peak_bytes, rel=1e-12), seed
        assert timeline.peak_host_bytes.tolist() == pytest.approx(cost.host_bytes, rel=1e-12), seed
        played += 1
    assert played > PROBLEMS_OF_A_MOOD / 2
