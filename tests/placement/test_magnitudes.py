"""Problems whose figures lie so far apart that solvers' integers do not hold them: refused in words, or proven."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from mm_autoparallel.errors import JobError
from mm_autoparallel.pipeline.placement import place
from mm_autoparallel.pipeline.problem import Problem
from mm_autoparallel.pipeline.problem_file import read_problem

LAYER: dict[str, Any] = {
    "name": "layer", "modality": "t", "count": 8, "forward_ms": 1.0, "backward_ms": 2.0, "activation_bytes": 3e8,
    "modes": [{"name": "recompute", "extra_backward_ms": 0.3}, {"name": "offload", "host_bytes": 1e8}],
}  # fmt: skip
PROBLEM: dict[str, Any] = {
    "num_stages": 2, "num_chunks": 2, "num_microbatches": 4, "schedule": "interleaved_1f1b", "memory_limit_bytes": 6e10,
    "host_ms_per_byte": 1e-9, "host_limit_bytes": 1e12, "chain": [LAYER],
}  # fmt: skip


def read(folder: Path, **changes: Any) -> Problem:
    """The problem with figures of its layer changed; `recompute` and `offload` change the mode so called."""
    document = copy.deepcopy(PROBLEM)
    layer = document["chain"][0]
    for mode in layer["modes"]:
        mode |= changes.pop(mode["name"], {})
    layer |= changes
    path = folder / "problem.json"
    path.write_text(json.dumps(document))
    return read_problem(path)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"static_bytes": 1e35}, "static_bytes"),
        ({"offload": {"host_bytes": 1e30}}, "host_bytes"),
        ({"recompute": {"extra_backward_ms": 1e99}}, "extra_backward_ms"),
    ],
)
def test_a_figure_that_nothing_has_is_refused(changes: dict[str, Any], key: str, tmp_path: Path) -> None:
    with pytest.raises(JobError, match=rf"{key} is 1e\+\d+; it must be at most"):
        read(tmp_path, **changes)


@pytest.mark.parametrize("host_bytes", [1e9, 1e12, 1e15])
def test_bytes_for_the_host_cost_no_bound(host_bytes: float, tmp_path: Path) -> None:
    result = place(read(tmp_path, offload={"host_bytes": host_bytes}), time_limit_s=60)
    assert (result.status, result.step_ms) == ("optimal", pytest.approx(54.0))
