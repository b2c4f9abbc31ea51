"""A job that is planned in a second, and its plan, once for all tests of the face."""

from __future__ import annotations

from typing import Any

import pytest

import mm_autoparallel as mmap

MODEL: dict[str, Any] = {
    "name": "small <b>model</b>",
    "text": {
        "vocab_size": 32000,
        "layers": {"num_layers": 8, "hidden_size": 1024, "ffn_size": 4096, "num_heads": 8, "norm": "rms"},
    },
}
CLUSTER: dict[str, Any] = {"device": "a100-80g", "num_nodes": 1, "devices_per_node": 4}
WORKLOAD: dict[str, Any] = {"global_batch_size": 16, "seq_length": 1024}


@pytest.fixture(scope="package")
def job() -> mmap.Job:
    return mmap.Job(MODEL, CLUSTER, WORKLOAD, search={"pp": [4], "tp": [1], "mbs": [1, 2]})


@pytest.fixture(scope="package")
def best(job: mmap.Job) -> mmap.PlanResult:
    return mmap.plan(job, time_limit_s=30)
