"""ZeRO 2 as a choice: where a search takes it, where it does not, and who refuses it by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from mm_autoparallel.errors import JobError
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.readers.job_file import parse_job
from mm_autoparallel.planner.search.planner import search

LAYERS = {"num_layers": 8, "hidden_size": 4096, "ffn_size": 11008, "num_heads": 32, "norm": "rms"}


def job_of(memory_bytes: int = 80_000_000_000, stack: str = "megatron-te") -> Job:
    document = {
        "model": {"text": {"vocab_size": 32000, "layers": LAYERS}},
        "cluster": {
            "num_nodes": 1,
            "devices_per_node": 8,
            "device": {"based_on": "h100-80g", "memory_bytes": memory_bytes},
        },
        "workload": {"global_batch_size": 64, "seq_length": 1024, "stack": stack},
        "search": {"pp": [1], "tp": [1], "cp": [1], "mbs": [1], "zero": [1, 2], "modes": []},
    }
    return parse_job(document, Path("job.json"))


def test_it_is_taken_where_gradients_do_not_fit_and_left_where_they_do() -> None:
    ample = search(job_of(), num_workers=1)
    assert ample.plan.strategy.zero == 1
    peak = max(ample.figures.peak_memory_bytes)
    assert search(job_of(int((peak - 3e9) / 0.95)), num_workers=1).plan.strategy.zero == 2


def test_mindspeed_refuses_it_by_name() -> None:
    with pytest.raises(JobError, match=r"search\.zero 2 cannot be run within the limits of search"):
        job_of(stack="mindspeed")
