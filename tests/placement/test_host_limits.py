"""A limit of what lies on the host: closed forms, reasons, and what solvers and checkers make of it by themselves.

That placement equals brute force under such limits, `test_modes` shows.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from nouns import cost_of

from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.integrations.mindformers.program import build_program
from mm_autoparallel.pipeline.certify.certificate import Certificate
from mm_autoparallel.pipeline.certify.verify import verify
from mm_autoparallel.pipeline.placement import place
from mm_autoparallel.pipeline.placement.bounds.step import bound_step
from mm_autoparallel.pipeline.problem import ChainBlock, Mode, Placement, Problem, counts_in_mode
from mm_autoparallel.pipeline.simulate.step import simulate

OFFLOAD = Mode("offload", 0.0, 0.0, 2.0, 0.0, host_bytes=8.0)
RECOMPUTE = Mode("recompute", 0.0, 1.0, 0.0)
LAYER = ChainBlock("layer", "text", 16, 1.0, 2.0, 0.0, 10.0, (RECOMPUTE, OFFLOAD))


def one_stage(host_bytes: float, **more: object) -> Problem:
    """One micro-batch in flight; of 160 bytes 64 must be freed, and moving costs nothing."""
    nothing = (0.0,)
    problem = Problem(
        1, 1, 8, "1f1b", (LAYER,), (96.0,), nothing, nothing, (), (), host_ms_per_byte=nothing
    )  # fmt: skip
    return replace(problem, host_limit_bytes=(host_bytes,), **more)  # type: ignore[arg-type]


def num_in(problem: Problem, placement: Placement, name: str) -> int:
    return sum(map(sum, counts_in_mode(problem, placement, name)))


@pytest.mark.parametrize("host_bytes", [0.0, 7.9, 8.0, 33.0, 63.9, 64.0, 1e9])
def test_the_host_takes_what_it_has_room_for_and_recompute_the_rest(host_bytes: float) -> None:
    """Eight layers go, as many as the host has room for, 8 bytes each; one that is recomputed frees 10 bytes."""
    problem = one_stage(host_bytes)
    result = place(problem)
    assert result.status == "optimal"
    assert result.placement is not None
    moved = min(8, int(host_bytes // 8))
    again = int(np.ceil((64 - 8 * moved) / 10))
    assert result.step_ms == pytest.approx(8 * (48 + again))
    assert num_in(problem, result.placement, "recompute") == again
    assert result.peak_host_bytes[0] <= host_bytes
    assert 8 * (48 + (64 - min(host_bytes, 64)) / 10) * (1 - 2e-5) <= bound_step(problem).step_ms <= result.step_ms


def test_what_lies_on_the_host_follows_the_order() -> None:
    """The first of three stages of 1F1B has three micro-batches in flight; with chunks it is what a walk says."""
    problem = replace(
        one_stage(1.0), num_stages=3, memory_limit_bytes=(1e9,) * 3, stage_static_bytes=(0.0,) * 3,
        stage_tail_ms=(0.0,) * 3, p2p_ms=(0.0,) * 2, p2p_ms_per_byte=(0.0,) * 2, host_ms_per_byte=(0.0,) * 3,
        host_limit_bytes=(), chain=(replace(LAYER, host_static_bytes=3.0),),
    )  # fmt: skip
    placement = Placement(((6,), (5,), (5,)), (((0, 4),), ((0, 1),), ((1, 0),)))
    timeline = simulate(problem, placement)
    assert timeline.peak_host_bytes.tolist() == [3 * 6 + 3 * 4 * 8, 3 * 5 + 2 * 8, 3 * 5]
    chunked = replace(
        problem, schedule="interleaved_1f1b", num_chunks=2, num_microbatches=9, p2p_ms=(0.0,) * 5,
        p2p_ms_per_byte=(0.0,) * 5,
    )  # fmt: skip
    held, moved = (3, 3, 3, 3, 2, 2), (1, 0, 3, 2, 2, 0)
    placement = Placement(tuple((n,) for n in held), tuple(((0, m),) for m in moved))
    assert simulate(chunked, placement).peak_host_bytes.tolist() == cost_of(chunked, placement).host_bytes


def test_why_nothing_fits_names_the_host() -> None:
    able = replace(LAYER, modes=(OFFLOAD,))
    problem = one_stage(40.0, chain=(able,))
    result = place(problem)
    assert result.status == "infeasible"
    assert result.overflow_bytes == pytest.approx(24.0)
    assert "within the limits of its host" in result.reason
    assert "so would 24 bytes more on every host" in result.reason
    assert bound_step(problem).by_host
    assert "host memory: with at most 4e-08 GB on the host" in bound_step(problem).reason
    kept = replace(LAYER, modes=(), host_static_bytes=3.0)
    problem = one_stage(40.0, chain=(kept,), memory_limit_bytes=(1e9,))
    result = place(problem)
    assert (result.status, result.overflow_bytes) == ("infeasible", 0.0)
    assert result.reason.startswith("host memory: with no layer in a mode that moves bytes, some stage keeps more")
    assert bound_step(problem).by_host
    assert place(replace(problem, host_limit_bytes=(48.0,))).status == "optimal"
    # where the device is the cause, the host is not named
    problem = one_stage(1e9, chain=(able,), memory_limit_bytes=(20.0,))
    assert "host" not in place(problem).reason
    assert not bound_step(problem).by_host


def test_verify_refuses_what_the_host_has_no_room_for() -> None:
    roomy = place(one_stage(64.0))
    assert roomy.placement is not None
    claim = Certificate(one_stage(64.0), roomy.placement, roomy.step_ms, None, None, "none")
    assert verify(claim).step_ms == roomy.step_ms
    with pytest.raises(PlanError, match=r"stage 0 keeps 0\.000 GB on its host and its limit there is"):
        verify(replace(claim, problem=one_stage(63.0)))
    tight = place(one_stage(40.0))
    assert tight.placement is not None
    claim = Certificate(one_stage(40.0), tight.placement, tight.step_ms, tight.step_ms, 0.0, "tree")
    assert verify(claim).lower_bound_ms == tight.step_ms
    with pytest.raises(PlanError, match="another placement takes"):
        verify(replace(claim, problem=one_stage(64.0)))


def test_limits_are_one_a_stage_and_the_linear_program_knows_none() -> None:
    with pytest.raises(JobError, match="host_limit_bytes has 2 entries; num_stages is 1"):
        place(replace(one_stage(1.0), host_limit_bytes=(1.0, 2.0)))
    kept = replace(LAYER, modes=(RECOMPUTE,), host_static_bytes=3.0)
    with pytest.raises(JobError, match="limits of host memory"):
        build_program(one_stage(48.0, chain=(kept,)))
