"""Which run teaches most: by hand on two rates, and on a job's plans that differ in one thing."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from mm_autoparallel.measurements.fit import FREE, ROW_ERROR_FRACTION
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.readers.job_file import parse_job
from mm_autoparallel.planner.explain.teaching import design, find_teaching
from mm_autoparallel.planner.plan import Plan

NAMES = [name for name in FREE if name != "grouped_matrix"]
PRIOR = np.diag(np.square([FREE[name].log_spread_fraction for name in NAMES]))


def rows(*slopes: dict[str, float]) -> np.ndarray:
    return np.array([[-one.get(name, 0.0) for name in NAMES] for one in slopes])


class TestDesign:
    def test_one_rate_by_hand(self) -> None:
        found = design(NAMES, rows({"matrix": 0.8}), PRIOR)
        variance = (0.8 * 0.1) ** 2
        (run,) = found.runs
        assert run.determinant_factor == pytest.approx(1 + variance / ROW_ERROR_FRACTION**2)
        assert run.narrowed[0].after_fraction == pytest.approx(0.1 / math.sqrt(1 + variance / ROW_ERROR_FRACTION**2))
        assert [rate.name for rate in found.rates] == ["matrix"]

    def test_the_run_that_turns_most_unknown_comes_first_and_its_like_not_again(self) -> None:
        found = design(
            NAMES, rows({"matrix": 0.9}, {"matrix": 0.5, "network": 0.3}, {"matrix": 0.5, "network": 0.29}), PRIOR
        )
        assert [run.plan for run in found.runs][:2] == [1, 0]
        assert found.runs[0].narrowed[0].name == "network"

    def test_what_no_run_tells_is_named(self) -> None:
        found = design(NAMES, rows({"matrix": 0.9, "memory": 0.06}), PRIOR)
        assert found.untold == ("memory",)

    def test_a_rate_without_effect_is_no_rate_to_learn(self) -> None:
        assert [rate.name for rate in design(NAMES, rows({"node": 0.5, "expert_launch": 0.001}), PRIOR).rates] == [
            "node"
        ]

    def test_what_a_posterior_knows_is_not_learnt_again(self) -> None:
        known = PRIOR.copy()
        known[NAMES.index("matrix"), NAMES.index("matrix")] = 1e-8
        found = design(NAMES, rows({"matrix": 0.9}, {"matrix": 0.1, "node": 0.2}), known)
        assert [run.plan for run in found.runs] == [1]

    def test_nothing_to_learn(self) -> None:
        assert design(NAMES, rows({}, {}), PRIOR).runs == ()


@pytest.fixture(scope="module")
def job() -> Job:
    model = {
        "num_layers": 40, "hidden_size": 5120, "num_attention_heads": 40, "swiglu": True, "padded_vocab_size": 32000,
        "seq_length": 2048, "position_embedding_type": "rope",
    }  # fmt: skip
    cluster = {"num_nodes": 2, "devices_per_node": 8, "device": "a800-80g"}
    return parse_job(
        {"model": model, "cluster": cluster, "workload": {"global_batch_size": 512, "seq_length": 2048}},
        Path("job.yaml"),
    )


def plan_of(tp: int, dp: int) -> Plan:
    """Micro-batches of four, so that no layer waits for its host."""
    return Plan(Strategy(pp=1, tp=tp, dp=dp, mbs=4), {"text": (40,)}, {"text": (0,)}, 512)


def test_of_a_job_wide_tensor_parallelism_tells_the_node(job: Job) -> None:
    found = find_teaching(job, [plan_of(1, 16), plan_of(8, 2)])
    told = {run.plan: {rate.name: rate for rate in run.narrowed} for run in found.runs}
    assert found.runs[0].plan == 1
    assert told[1]["node"].after_fraction < 0.8 * told[1]["node"].before_fraction
    assert {rate.name for rate in found.rates} >= {"matrix", "node"}
