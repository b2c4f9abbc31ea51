"""A certificate's file: it reads back exactly what was written, and says which key is wrong where it was not."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from known_cases import taylor_case

from mm_autoparallel.errors import PlanError
from mm_autoparallel.pipeline.certify.certificate import Times, read_certificate, write_certificate
from mm_autoparallel.pipeline.certify.digest import problem_sha256
from mm_autoparallel.pipeline.placement import PlacementResult, place
from mm_autoparallel.pipeline.placement.cuts.path_cuts import stage_cuts
from mm_autoparallel.pipeline.problem import ChainBlock, Mode, Placement, Problem, place_in_modes
from mm_autoparallel.pipeline.problem_file import ProblemEntry, problem_document, problem_from_entry
from mm_autoparallel.records import LARGEST_MS

THIRD = 1 / 3


@pytest.fixture(scope="module")
def rich_problem() -> Problem:
    """Every key that the planner's own jobs use, with numbers that no short decimal equals."""
    mode = (Mode("recompute", 0.0, THIRD, 0.1 + 0.2, math.pi * 1e9),)
    vision = ChainBlock(
        "vision_layer", "vision", 4, 1.1, 2.2 * THIRD, 1e9 * THIRD, 3e8 + THIRD, mode, recompute_group="vision",
        transient_bytes=7e7 / 9, tail_ms=THIRD, output_bytes=1e6 * THIRD, sends_gradient=False,
        microbatch_scale=(1.0, THIRD, 1.0, 2.0, 1.0, THIRD),
    )  # fmt: skip
    return Problem(
        num_stages=2,
        num_chunks=2,
        num_microbatches=6,
        schedule="interleaved_1f1b",
        chain=(
            ChainBlock("vision_pre", "vision", 1, 0.1, 0.0, layer=False, pinned="first", attach="next"),
            vision,
            ChainBlock("projector", "vision", 1, 0.3, 0.7, layer=False, attach="previous"),
            replace(vision, name="text_layer", modality="text", recompute_group=None, microbatch_scale=()),
            ChainBlock("head", "text", 1, 0.5, 1.0, layer=False, pinned="last"),
        ),
        memory_limit_bytes=(6e10, 5e10 + THIRD),
        stage_static_bytes=(1e9, 1e9),
        stage_tail_ms=(0.0, THIRD),
        p2p_ms=(0.1, 0.2, THIRD),
        p2p_ms_per_byte=(1e-9, 1e-9 * THIRD, 0.0),
        max_layers_per_chunk=4,
    )


@pytest.fixture(scope="module")
def rich_result(rich_problem: Problem) -> PlacementResult:
    result = place(rich_problem)
    assert result.proof == "cuts"  # its micro-batches differ
    return result


@pytest.fixture
def spoilt(rich_problem: Problem, rich_result: PlacementResult, tmp_path: Path) -> Callable[..., str]:
    """What is said of a certificate after `change` has been at its document."""

    def spoil(change: Callable[[dict[str, Any]], Any]) -> str:
        path = tmp_path / "spoilt.json"
        write_certificate(path, rich_problem, rich_result)
        document = json.loads(path.read_text(encoding="utf-8"))
        change(document)
        path.write_text(json.dumps(document), encoding="utf-8")
        with pytest.raises(PlanError) as error:
            read_certificate(path)
        assert str(error.value).startswith(f"certificate {path}: ")
        assert "\n" not in str(error.value)
        return str(error.value)

    return spoil


def test_all_of_it_reads_back_exactly(rich_problem: Problem, rich_result: PlacementResult, tmp_path: Path) -> None:
    write_certificate(tmp_path / "c.json", rich_problem, rich_result)
    certificate = read_certificate(tmp_path / "c.json")
    assert certificate.problem == rich_problem
    assert certificate.placement == rich_result.placement
    assert certificate.step_ms == rich_result.step_ms
    assert certificate.lower_bound_ms == rich_result.lower_bound_ms
    assert certificate.gap_fraction == rich_result.gap_fraction
    assert certificate.method == "cuts"
    assert len(certificate.cuts) == len(rich_result.cuts)
    for witness, cut in zip(certificate.cuts, rich_result.cuts, strict=True):
        if isinstance(witness, Placement):
            assert witness == cut.placement
        else:
            assert np.array_equal(witness.durations_ms, cut.durations_ms)
            assert np.array_equal(witness.hops_ms, cut.hops_ms)
            assert np.array_equal(witness.tails_ms, cut.tails_ms)
    assert any(isinstance(witness, Times) for witness in certificate.cuts)


@given(st.just(0.0) | st.floats(1e-8, LARGEST_MS), st.floats(7.0, 1e17))
def test_no_number_loses_a_digit(time_ms: float, size_bytes: float) -> None:
    block = ChainBlock(
        "layer", "text", 2, time_ms, time_ms / 3, size_bytes, size_bytes / 7, (Mode("recompute", 0.0, time_ms, 0.0),)
    )
    problem = Problem(
        2, 1, 3, "1f1b", (block,), (size_bytes, size_bytes * 3), (0.0, 0.0), (time_ms, 0.0), (time_ms,), (0.0,)
    )
    again = json.loads(json.dumps(problem_document(problem)))
    assert problem_from_entry(ProblemEntry.model_validate(again)) == problem


def test_only_what_matters_is_in_the_hash(rich_problem: Problem) -> None:
    whole = replace(rich_problem, memory_limit_bytes=(60_000_000_000, 5e10 + THIRD))  # as a file may write 6e10
    assert problem_sha256(whole) == problem_sha256(rich_problem)
    assert problem_sha256(replace(rich_problem, num_microbatches=7)) != problem_sha256(rich_problem)
    hidden = replace(rich_problem, p2p_ms_per_byte=(1e-9, 1e-9 * THIRD, 1e-30))
    assert problem_sha256(hidden) != problem_sha256(rich_problem)


def test_a_bound_of_the_tree_needs_no_data(tmp_path: Path) -> None:
    problem, _ = taylor_case("768_4k_gp")
    result = place(problem)
    assert result.proof == "tree"
    write_certificate(tmp_path / "c.json", problem, result)
    assert read_certificate(tmp_path / "c.json").cuts == ()
    assert (tmp_path / "c.json").stat().st_size < 3000


def test_without_a_proof_no_bound_is_claimed(
    rich_problem: Problem, rich_result: PlacementResult, tmp_path: Path
) -> None:
    write_certificate(tmp_path / "c.json", rich_problem, replace(rich_result, proof="none", lower_bound_ms=0.0))
    certificate = read_certificate(tmp_path / "c.json")
    assert (certificate.method, certificate.lower_bound_ms, certificate.gap_fraction) == ("none", None, None)


def test_64_stages_and_131_cuts_stay_small(tmp_path: Path) -> None:
    """As large as proofs get: the largest case measured had 64 stages, 1024 micro-batches and 131 cuts, in 0.25 MB."""
    block = ChainBlock("layer", "text", 197, 1.0, 1.627, 3.67e9, 1.346e9, (Mode("recompute", 0.0, 0.246, 3.16e8),))
    others = (ChainBlock("dense", "text", 3, 0.71, 1.15517), block, ChainBlock("head", "text", 1, 1.493, 2.429))
    stages = range(64)
    problem = Problem(
        64, 1, 1024, "1f1b", others, (1.2616875e11,) * 64, (0.0,) * 64, (0.0,) * 64, (0.0,) * 63, (0.0,) * 63
    )
    layers = [(3 if s == 0 else 0, 3 if s < 59 else 4, int(s == 63)) for s in stages]
    placement = place_in_modes(problem, layers, {"recompute": ((0, 1, 0),) * 64})
    cuts = stage_cuts(problem)
    found = [replace(cuts[0], placement=placement)] * 67
    result = PlacementResult("optimal", placement, None, 1.0, 1.0, 1.0, proof="cuts", cuts=(*cuts[:64], *found))
    write_certificate(tmp_path / "c.json", problem, result)
    assert (tmp_path / "c.json").stat().st_size < 1_000_000
    assert len(read_certificate(tmp_path / "c.json").cuts) == 131


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(schema="mm-autoparallel/certificate/2"), ["schema", "certificate/1"]),
        (lambda d: d.pop("step_ms"), ["step_ms is missing"]),
        (lambda d: d.update(step_mss=1), ["step_mss", "did you mean"]),
        (lambda d: d.update(step_ms="1"), ["step_ms"]),
        (lambda d: d.update(step_ms=math.nan), ["NaN", "finite"]),
        (lambda d: d.update(lower_bound_ms=-1), ["lower_bound_ms is -1"]),
        (lambda d: d.update(lower_bound_ms=None), ["proof.method is cuts", "lower_bound_ms = None"]),
        (lambda d: d.update(gap_fraction=None), ["gap_fraction = None"]),
        (lambda d: d["proof"].update(method="faith"), ["proof.method", "faith", "tree"]),
        (lambda d: d["proof"].update(method="tree"), ["proof.method is tree", "cuts"]),
        (lambda d: d["proof"].update(cuts=[]), ["proof.method is cuts", "0 cuts"]),
        (lambda d: d["problem"].update(num_microbatches=12), ["microbatch_scale", "12"]),
        (lambda d: d["problem"]["memory_limit_bytes"].__setitem__(0, 7e10), ["problem_sha256", "changed"]),
        (lambda d: d["problem"]["chain"][1].update(tail_ms=0.0), ["problem_sha256", "changed"]),
        (lambda d: d["problem"].update(schedule="1f1b"), ["num_chunks is 2"]),
        (lambda d: d.update(problem_sha256="0" * 64), ["problem_sha256", "changed"]),
        (lambda d: d["placement"]["layers"].pop("head"), ["placement.layers", "head"]),
        (lambda d: d["placement"]["recompute"]["head"].pop(), ["placement.recompute.head has 3 entries", "is 4"]),
        (lambda d: d["placement"]["layers"]["head"].__setitem__(3, -1), ["placement.layers.head", "-1"]),
        (lambda d: d["placement"]["layers"]["head"].__setitem__(3, 1.5), ["placement.layers.head", "1.5"]),
        (lambda d: d["proof"]["cuts"][0]["times"]["hops_ms"].pop(), ["proof.cuts[0].times.hops_ms has 6", "needs 7"]),
        (lambda d: d["proof"]["cuts"][0]["times"]["tails_ms"].pop(), ["proof.cuts[0].times.tails_ms has 1", "needs 2"]),
        (lambda d: d["proof"]["cuts"][0]["times"]["durations_ms"].pop(), ["durations_ms has 7", "needs 24"]),
        (lambda d: d["proof"]["cuts"].append({}), ["either a placement or times"]),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(
    spoilt: Callable[..., str], change: Callable[[dict[str, Any]], Any], words: list[str]
) -> None:
    message = spoilt(change)
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (lambda text: text[: len(text) // 2], "no valid JSON"),
        (lambda text: text.replace("step_ms", "schema", 1), "stands twice"),
        (lambda text: "[]", "a mapping of keys to values is expected"),
        (lambda text: text + "\0", "binary"),
        (lambda text: "", "no valid JSON"),
    ],
)
def test_a_broken_file_is_refused(
    rich_problem: Problem,
    rich_result: PlacementResult,
    tmp_path: Path,
    content: Callable[[str], str],
    words: str,
) -> None:
    path = tmp_path / "broken.json"
    write_certificate(path, rich_problem, rich_result)
    path.write_text(content(path.read_text(encoding="utf-8")), encoding="utf-8")
    with pytest.raises(PlanError, match=words):
        read_certificate(path)
    with pytest.raises(PlanError, match="no such file"):
        read_certificate(tmp_path / "nowhere.json")
