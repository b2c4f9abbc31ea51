"""Problems that `place` once got wrong, each with what is right of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from brute_force import brute_force, count_placements
from compare import compare, compare_to

from mm_autoparallel.errors import PlanError
from mm_autoparallel.pipeline.certify.certificate import read_certificate
from mm_autoparallel.pipeline.certify.verify import verify

FOLDER = Path(__file__).parent.parent / "fixtures" / "exactness"
MOST_PLACEMENTS = 100_000
CASES = sorted(path for path in FOLDER.glob("*.json") if not path.name.startswith("certificate"))


@pytest.mark.slow
@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_place_is_right(path: Path) -> None:
    case = json.loads(path.read_text(encoding="utf-8"))
    problem, expected = case["problem"], case["expected"]
    if "optimum_ms" in expected:
        verdict = compare(path.stem, problem)
        assert verdict.optimum_ms == (float("inf") if expected["optimum_ms"] is None else expected["optimum_ms"])
    else:
        assert count_placements(problem, MOST_PLACEMENTS) > MOST_PLACEMENTS, "brute force can say the optimum"
        verdict = compare_to(path.stem, problem, expected["optimum_at_most_ms"], None)
        verdict.wrong.pop("oracle", None)  # what was found may be better still
    assert not verdict.wrong


@pytest.mark.parametrize("path", sorted(FOLDER.glob("certificate*.json")), ids=lambda path: path.stem)
def test_a_false_claim_is_not_confirmed(path: Path) -> None:
    certificate = json.loads(path.read_text(encoding="utf-8"))
    assert certificate["lower_bound_ms"] > brute_force(certificate["problem"]).step_ms
    with pytest.raises(PlanError, match="bound"):
        verify(read_certificate(path), time_limit_s=10)
