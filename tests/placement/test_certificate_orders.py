"""Certificates of free orders: their file, what is refused of it and in which words, and what the check covers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mm_autoparallel.api.placed import VerifyResult
from mm_autoparallel.errors import PlanError
from mm_autoparallel.pipeline.certify.certificate import Certificate, read_certificate, write_certificate
from mm_autoparallel.pipeline.certify.confirm_orders import confirm_orders
from mm_autoparallel.pipeline.certify.verify import verify
from mm_autoparallel.pipeline.placement import place
from mm_autoparallel.pipeline.problem import ChainBlock, Mode, Problem


def small_problem() -> Problem:
    """Three stages with hops and a tail; memory for few micro-batches, and recompute to have more."""
    layer = ChainBlock(
        "layer", "text", 6, 1.0, 2.0, 1.0, 4.0, (Mode("recompute", 0.0, 1.0, 1.0, 2.0),),
        tail_ms=0.25, backward_weight_ms=1.0, kept_for_weight_bytes=1.0,
    )  # fmt: skip
    head = ChainBlock("head", "text", 1, 1.0, 3.0, 2.0, 1.0, layer=False, pinned="last", backward_weight_ms=1.0)
    hops = (0.5,) * 2
    return Problem(3, 1, 5, "free", (layer, head), (24.0,) * 3, (0.0,) * 3, (0.0,) * 3, hops, (0.0,) * 2)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("orders") / "certificate.json"
    problem = small_problem()
    result = place(problem, time_limit_s=60.0)
    assert result.status == "optimal"
    write_certificate(path, problem, result)
    return path


@pytest.fixture(scope="module")
def certificate(path: Path) -> Certificate:
    return read_certificate(path)


def with_step(certificate: Certificate, step_ms: float, bound_ms: float) -> Certificate:
    return replace(certificate, step_ms=step_ms, lower_bound_ms=bound_ms, gap_fraction=max(0.0, 1 - bound_ms / step_ms))


def one_by_one(certificate: Certificate) -> Certificate:
    """The same layers, one micro-batch after another, with the step that this takes."""
    word = " ".join(f"{m}{letter}0" for m in range(certificate.problem.num_microbatches) for letter in "FB")
    slow = replace(certificate, placement=replace(certificate.placement, orders=(word,) * 3))
    with pytest.raises(PlanError, match="but the simulator plays this placement in") as told:
        verify(slow)
    return replace(slow, step_ms=float(str(told.value).split()[-2]))


def test_what_place_finds_is_confirmed(path: Path, certificate: Certificate) -> None:
    document = json.loads(path.read_text(encoding="utf-8"))
    order = document["placement"]["order"]
    assert [len(actions) for actions in order] == [len(text.split()) for text in certificate.placement.orders]
    assert order[0][0] == "0F0"
    assert document["proof"] == {"method": "orders"}
    verification = verify(certificate, time_limit_s=60.0)
    assert verification.method == "orders"
    assert verification.lower_bound_ms == certificate.lower_bound_ms
    assert "bounds and models of orders of its own leave none" in VerifyResult(verification).table()


def test_a_bound_above_the_best_is_refuted_by_an_order(certificate: Certificate) -> None:
    slow = one_by_one(certificate)
    for factor in (1.0 + 1e-3, 1.0 + 1e-5):
        bound_ms = certificate.step_ms * factor
        with pytest.raises(PlanError, match=r"lower_bound_ms is .* but another placement takes .* stage 0 runs 0F0 "):
            verify(with_step(slow, slow.step_ms, bound_ms))
    verify(with_step(slow, slow.step_ms, certificate.step_ms))


def test_another_step_is_refused(certificate: Certificate) -> None:
    for factor in (0.5, 1 - 1e-8, 1 + 1e-8):
        with pytest.raises(PlanError, match="but the simulator plays this placement in"):
            verify(replace(certificate, step_ms=certificate.step_ms * factor))


Change = Callable[[dict[str, Any]], object]


ALL_FORWARDS_FIRST = [f"{m}{letter}0" for letter in "FB" for m in range(5)]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda d: d["placement"]["order"].__setitem__(0, ALL_FORWARDS_FIRST), r"simulator plays|holds .* its limit"),
        (lambda d: d["placement"]["order"][1].reverse(), r"placement\.order: orders\[1\] has .* before it"),
        (lambda d: d["placement"]["order"][2].pop(), r"placement\.order: orders\[2\] has no 4[BW]0"),
        (lambda d: d["placement"]["order"][0].append("0F0"), r"placement\.order: orders\[0\] has 0F0 twice"),
        (
            lambda d: d["placement"]["order"][0].append("word"),
            "order: orders.*: 'word' is not an action",
        ),
        (lambda d: d["placement"]["order"][0].append("9F0"), r"orders\[0\] has 9F0; chunks are 0 to 0"),
        (lambda d: d["placement"]["order"].pop(), r"placement\.order: orders has 2 entries; num_stages is 3"),
        (lambda d: d["placement"].pop("order"), "the placement has no order, and schedule free needs one text a stage"),
        (lambda d: d["proof"].update(method="tree"), "proof.method is tree, which does not go with schedule free"),
        (lambda d: d["placement"].update(order="0F0 0B0"), r"placement\.order"),
    ],
)
def test_another_order_or_method_is_refused(path: Path, tmp_path: Path, change: Change, told: str) -> None:
    document = json.loads(path.read_text(encoding="utf-8"))
    change(document)
    other = tmp_path / "certificate.json"
    other.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(PlanError, match=told):
        verify(read_certificate(other))


def test_stages_that_wait_for_one_another_are_refused(certificate: Certificate) -> None:
    orders = list(certificate.placement.orders)
    orders[1] = " ".join([*(f"{m}F0" for m in range(5)), *(f"{m}B0" for m in range(4, -1, -1))])
    orders[2] = " ".join(f"{m}{letter}0" for m in range(5) for letter in "FB")
    orders[0] = " ".join(f"{m}{letter}0" for m in range(5) for letter in "FB")
    with pytest.raises(PlanError, match="placement: orders never end"):
        verify(replace(certificate, placement=replace(certificate.placement, orders=tuple(orders))))


def test_what_is_not_covered_or_takes_too_long_stays_open(certificate: Certificate) -> None:
    scaled = replace(certificate.problem.chain[0], microbatch_scale=(1.0, 2.0, 1.0, 1.0, 1.0))
    for changed, told in (
        (replace(certificate.problem, pair_overlap_fraction=0.5), "orders without overlapping pairs only"),
        (replace(certificate.problem, chain=(scaled, certificate.problem.chain[1])), "equal micro-batches only"),
    ):
        with pytest.raises(Exception, match=told):
            confirm_orders(changed, certificate.step_ms, lambda: False)
    with pytest.raises(PlanError, match=r"bound not confirmed: .* stopped"):
        verify(certificate, time_limit_s=0.0)


@pytest.mark.nightly
@pytest.mark.parametrize("num_microbatches", [8, 12])
def test_six_stages_are_confirmed(num_microbatches: int, tmp_path: Path) -> None:
    """Tight memory, two modalities, hops."""
    vision = ChainBlock("vision", "vision", 12, 3.0, 5.0, 1.0, 2.0, backward_weight_ms=2.0)
    text = ChainBlock("text", "text", 24, 6.0, 10.0, 4.0, 3.0, backward_weight_ms=4.0)
    last = ChainBlock("last", "text", 1, 6.0, 12.0, layer=False, pinned="last", backward_weight_ms=6.0)
    six = (0.0,) * 6
    problem = Problem(
        6, 1, num_microbatches, "free", (vision, text, last), (110.0,) * 6, six, six, (1.0,) * 5, (0.0,) * 5
    )
    write_certificate(tmp_path / "certificate.json", problem, place(problem, time_limit_s=30.0))
    verification = verify(read_certificate(tmp_path / "certificate.json"), time_limit_s=300.0)
    print(f"gap {verification.gap_fraction}, confirmed in {verification.verify_s:.2f} s")
