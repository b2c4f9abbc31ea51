"""Known answers: published optima reproduced and proven, published plans never beaten where they are lawful."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
from known_cases import fixture, large_case, multimodal_case, program_placement, taylor_case

from mm_autoparallel.pipeline.placement import place
from mm_autoparallel.pipeline.simulate.loads import overfull_stages
from mm_autoparallel.pipeline.simulate.step import simulate


@pytest.mark.parametrize("name", fixture("taylor")["cases"])
def test_the_published_optimum_is_found_and_proven(name: str) -> None:
    problem, case = taylor_case(name)
    result = place(problem)
    assert result.status == "optimal"
    assert result.step_ms == pytest.approx(case["best_step"], rel=1e-6)
    assert result.lower_bound_ms == pytest.approx(case["best_step"], rel=1e-6)
    print(f"{name}: {result.solve_s:.2f} s, the mixed-integer program took {case['milp_seconds']} s")


@pytest.mark.nightly
def test_no_plan_of_the_mixed_integer_program_is_faster() -> None:
    speedups = []
    for name in fixture("mindspeed_mm_milp")["cases"]:
        problem, case = multimodal_case(name)
        result = place(problem)
        assert result.status == "optimal", name
        if "vision_layers" not in case["milp"]:  # it refuses fewer micro-batches than stages
            continue
        speedups.append(case["milp"]["seconds"] / result.solve_s)
        theirs = simulate(problem, program_placement(problem, case))
        if not overfull_stages(problem, theirs.peak_memory_bytes):
            assert result.step_ms <= theirs.step_ms * (1 + 1e-9), name
    print(f"times faster than the mixed-integer program: median {statistics.median(speedups):.0f}")


@pytest.mark.nightly
def test_the_case_its_notes_prove_is_reproduced() -> None:
    """16 stages, 8 and 64 micro-batches, hops of 1.25 ms: 7714.3 and 31794.3 ms were proven by another prototype."""
    for name, step_ms in (("pp16_m8", 7714.3), ("pp16_m64", 31794.3)):
        problem, _ = multimodal_case(name)
        result = place(replace(problem, p2p_ms=(1.25,) * 15))
        assert result.status == "optimal"
        assert result.step_ms == pytest.approx(step_ms, abs=0.05)


def test_two_chunks_on_sixteen_stages_are_proven() -> None:
    problem, case = large_case("p16_v2_m128_n62")
    result = place(problem)
    assert result.status == "optimal"
    assert result.step_ms == pytest.approx(case["best_step_ms"], abs=1e-3)


@pytest.mark.nightly
def test_64_stages_are_proven_and_better_than_what_was_said_to_be_best() -> None:
    problem, case = large_case("p64_v1_m1024_n200")
    result = place(problem, time_limit_s=120)
    assert result.status == "optimal"
    assert result.step_ms == pytest.approx(11264.147732, rel=1e-6)
    assert result.step_ms < case["best_step_ms"]
    assert not overfull_stages(problem, simulate(problem, result.placement).peak_memory_bytes)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["p8_v4_m16_n62", "p16_v2_m128_n100"])
def test_open_cases_are_settled(name: str) -> None:
    """The best step known is the optimum: mixtures of paths refute all below it, without a limit of time."""
    problem, case = large_case(name)
    result = place(problem)
    assert (result.status, result.proof) == ("optimal", "mixtures")
    assert result.step_ms == pytest.approx(case["best_step_ms"], abs=5e-4)
    assert result.placement is not None
    assert not overfull_stages(problem, simulate(problem, result.placement).peak_memory_bytes)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["p8_v4_m16_n62", "p16_v2_m128_n100", "p8_v4_m240_n96"])
def test_open_cases_come_close_in_seconds(name: str) -> None:
    """Five seconds, beside other tests, come within 2 % of the best known step."""
    problem, case = large_case(name)
    result = place(problem, time_limit_s=5)
    assert result.placement is not None
    assert result.step_ms <= case["best_step_ms"] * 1.02
    assert result.lower_bound_ms <= result.step_ms
    print(f"{name}: {result.step_ms:.3f} ms, best known {case['best_step_ms']}, gap {result.gap_fraction:.1%}")
