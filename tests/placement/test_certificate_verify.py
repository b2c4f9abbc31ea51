"""`verify`: true certificates are confirmed, and every kind of false one is refused for what is false in it."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from known_cases import fixture, large_case, multimodal_case, taylor_case
from random_problems import random_problem

from mm_autoparallel.errors import PlanError
from mm_autoparallel.pipeline.certify.certificate import Certificate, Times, read_certificate, write_certificate
from mm_autoparallel.pipeline.certify.verify import verify
from mm_autoparallel.pipeline.placement import PlacementResult, place
from mm_autoparallel.pipeline.problem import Placement, Problem, place_in_modes, recomputed

Count = tuple[tuple[int, ...], ...]


def certified(problem: Problem, result: PlacementResult, folder: Path) -> Certificate:
    """The certificate as whoever receives the file has it."""
    write_certificate(folder / "certificate.json", problem, result)
    return read_certificate(folder / "certificate.json")


def claiming(certificate: Certificate, bound_ms: float | None = None, **changes: object) -> Certificate:
    """The certificate with other claims, its gap in keeping with them."""
    changed = replace(certificate, **({"lower_bound_ms": bound_ms} if bound_ms else {}), **changes)  # type: ignore[arg-type]
    assert changed.lower_bound_ms is not None
    return replace(changed, gap_fraction=max(0.0, 1 - changed.lower_bound_ms / changed.step_ms))


def changed(counts: Count, *changes: tuple[int, int, int]) -> Count:
    rows = [list(row) for row in counts]
    for k, e, difference in changes:
        rows[k][e] += difference
    return tuple(map(tuple, rows))


@pytest.fixture(scope="module")
def by_tree(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    """Six stages whose memory binds."""
    problem, _ = taylor_case("768_4k_gp")
    certificate = certified(problem, place(problem), tmp_path_factory.mktemp("tree"))
    assert certificate.method == "tree"
    return certificate


@pytest.fixture(scope="module")
def by_cuts(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    """Three stages or more, with micro-batches that differ and cuts that were not there from the beginning."""
    for seed in range(100):
        problem = random_problem(seed, "unequal")
        result = place(problem)
        if result.proof == "cuts" and problem.num_stages >= 3 and any(cut.placement for cut in result.cuts):
            return certified(problem, result, tmp_path_factory.mktemp("cuts"))
    raise AssertionError("no such problem among the random ones")


CASES = [
    *(("taylor", name) for name in fixture("taylor")["cases"]),
    *(("multimodal", name) for name in fixture("mindspeed_mm_milp")["cases"] if name.startswith("pp8")),
    ("large", "p16_v2_m128_n62"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_known_answers_are_confirmed(kind: str, name: str, tmp_path: Path) -> None:
    problem, _ = {"taylor": taylor_case, "multimodal": multimodal_case, "large": large_case}[kind](name)
    result = place(problem)
    certificate = certified(problem, result, tmp_path)
    verification = verify(certificate, time_limit_s=60)
    assert verification.step_ms == result.step_ms
    assert verification.lower_bound_ms == result.lower_bound_ms
    assert result.status == "optimal"
    print(f"{name}: {verification.method}, confirmed in {verification.verify_s:.2f} s, found in {result.solve_s:.2f} s")


@pytest.mark.nightly
@pytest.mark.slow
def test_sixteen_stages_with_hops_are_confirmed(tmp_path: Path) -> None:
    problem = replace(multimodal_case("pp16_m16")[0], p2p_ms=(1.25,) * 15)
    result = place(problem)
    assert verify(certified(problem, result, tmp_path), time_limit_s=60).method == result.proof


@pytest.mark.parametrize("name", ["p8_v4_m16_n62", "p16_v2_m128_n100"])
def test_a_bound_from_before_the_end_is_confirmed_too(name: str, tmp_path: Path) -> None:
    problem, _ = large_case(name)
    result = place(problem, gap_fraction=0.15)
    assert result.status == "feasible"
    verification = verify(certified(problem, result, tmp_path), time_limit_s=60)
    assert verification.gap_fraction == result.gap_fraction
    print(f"{name}: gap {result.gap_fraction:.1%} by {verification.method}, confirmed in {verification.verify_s:.2f} s")


def test_a_step_that_is_not_played_is_refused(by_tree: Certificate, by_cuts: Certificate) -> None:
    for certificate in (by_tree, by_cuts):
        for factor in (0.5, 1 - 1e-8, 1 + 1e-8):
            with pytest.raises(PlanError, match=r"step_ms is .* but the simulator plays this placement in"):
                verify(claiming(certificate, step_ms=certificate.step_ms * factor))


def test_a_bound_above_its_step_is_refused(by_tree: Certificate, by_cuts: Certificate) -> None:
    for certificate in (by_tree, by_cuts):
        with pytest.raises(PlanError, match="it is no bound"):
            verify(claiming(certificate, certificate.step_ms * (1 + 1e-8)))


def test_a_gap_of_other_numbers_is_refused(by_tree: Certificate) -> None:
    with pytest.raises(PlanError, match=r"gap_fraction is 0\.1, but"):
        verify(replace(by_tree, gap_fraction=0.1))


def test_a_moved_layer_is_refused(by_tree: Certificate) -> None:
    problem, layers = by_tree.problem, by_tree.placement.layers
    again = {"recompute": recomputed(problem, by_tree.placement)}
    for k, step in product(range(1, 5), (-1, 1)):
        moved = place_in_modes(problem, changed(layers, (k, 1, -1), (k + step, 1, 1)), again)
        with pytest.raises(PlanError, match=r"step_ms is|holds .* GB and its limit|recomputes"):
            verify(replace(by_tree, placement=moved))
    with pytest.raises(PlanError, match=r"placement: stage \d does not continue the chain"):
        verify(replace(by_tree, placement=place_in_modes(problem, changed(layers, (0, 0, -1), (2, 0, 1)), again)))
    with pytest.raises(PlanError, match=r"placement: the placement holds \d+ blocks; the chain has"):
        verify(replace(by_tree, placement=place_in_modes(problem, changed(layers, (5, 2, -1)), again)))


def test_less_recompute_is_refused(by_tree: Certificate) -> None:
    """Recompute was minimal: without one layer of it, some stage does not fit."""
    problem, layers = by_tree.problem, by_tree.placement.layers
    recompute = recomputed(problem, by_tree.placement)
    found = [(k, e) for k, row in enumerate(recompute) for e, count in enumerate(row) if count]
    assert found
    for k, e in found:
        fewer = place_in_modes(problem, layers, {"recompute": changed(recompute, (k, e, -1))})
        with pytest.raises(PlanError, match=r"placement: stage \d holds .* GB and its limit is|step_ms is"):
            verify(replace(by_tree, placement=fewer))
    with pytest.raises(PlanError, match="GB and its limit is"):
        verify(replace(by_tree, placement=place_in_modes(problem, layers, {})))


def test_a_proof_of_another_problem_is_refuted(by_tree: Certificate) -> None:
    """With more memory, hash and all, the same claim is wrong: another placement is faster."""
    problem = replace(by_tree.problem, memory_limit_bytes=tuple(2 * b for b in by_tree.problem.memory_limit_bytes))
    with pytest.raises(
        PlanError, match=r"lower_bound_ms is .* but another placement takes .* fits its memory: dense \["
    ):
        verify(replace(by_tree, problem=problem))


def test_cuts_that_were_changed_do_not_prove(by_cuts: Certificate) -> None:
    assert verify(by_cuts).num_cuts == len(by_cuts.cuts)
    with pytest.raises(PlanError, match=r"its cuts do not prove it|another placement takes"):
        verify(replace(by_cuts, cuts=by_cuts.cuts[:1]))
    first = by_cuts.cuts[0]
    assert isinstance(first, Times)
    nothing = Times(np.zeros_like(first.durations_ms), first.hops_ms, first.tails_ms)
    with pytest.raises(PlanError, match=r"its cuts do not prove it|another placement takes"):
        verify(replace(by_cuts, cuts=tuple(nothing for _ in by_cuts.cuts)))
    at, witness = next((i, cut) for i, cut in enumerate(by_cuts.cuts) if isinstance(cut, Placement))
    broken = replace(witness, layers=changed(witness.layers, (0, 0, 1)))
    with pytest.raises(PlanError, match=rf"proof\.cuts\[{at}\]: "):
        verify(replace(by_cuts, cuts=(*by_cuts.cuts[:at], broken, *by_cuts.cuts[at + 1 :])))


def test_no_claim_of_a_bound_is_not_checked(by_tree: Certificate) -> None:
    verification = verify(replace(by_tree, method="none", lower_bound_ms=None, gap_fraction=None))
    assert (verification.step_ms, verification.lower_bound_ms) == (by_tree.step_ms, None)


def test_what_takes_too_long_is_said_so() -> None:
    problem, case = large_case("p16_v2_m128_n100")
    result = place(problem, gap_fraction=0.3)
    assert result.placement is not None
    bound_ms = case["best_step_ms"] * 0.9995
    gap_fraction = 1 - bound_ms / result.step_ms
    for method in ("tree", "cuts"):
        certificate = Certificate(
            problem, result.placement, result.step_ms, bound_ms, gap_fraction, method, (result.placement,) * 3
        )
        expected = r"placement checked, bound not confirmed: .* stopped" if method == "tree" else "cuts do not prove"
        with pytest.raises(PlanError, match=expected):
            verify(certificate, time_limit_s=1.0)
