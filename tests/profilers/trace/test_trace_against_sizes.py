"""What sizes alone say of transformers' layers (`implementation: transformers`) is what their code keeps."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tracing_jobs import DOCUMENTS, SMALL, job_of, trace_job  # noqa: E402

from mm_autoparallel.blocks.expand import expand  # noqa: E402
from mm_autoparallel.costs.stage import block_costs  # noqa: E402
from mm_autoparallel.job.strategy import Strategy  # noqa: E402

WHOLE_PROJECTOR = "vision_post"
"""The plan by which a Hugging Face model is divided leaves its projector whole; sizes alone divide it."""


@pytest.mark.parametrize(
    ("tp", "mbs", "workload"),
    [
        (1, 1, {}),
        (1, 2, {"attention": "unfused"}),
        (2, 1, {}),
        (2, 2, {"sequence_parallel": True}),
        (2, 1, {"attention": "unfused", "sequence_parallel": True}),
    ],
)
def test_kept_bytes_agree(tp: int, mbs: int, workload: dict[str, Any]) -> None:
    job = job_of(SMALL, 160, implementation="transformers", **workload)
    entries = trace_job(SMALL, job, tp, mbs, recompute=False)
    costs = block_costs(job, Strategy(pp=1, tp=tp, dp=1, mbs=mbs))
    for kind, entry in entries.items():
        if kind == WHOLE_PROJECTOR and tp > 1:
            continue
        cost = costs[kind]
        assert cost.parameter_count == entry.parameter_count, kind
        assert cost.activation_bytes == pytest.approx(entry.activation_bytes, rel=0.01), kind
        if kind.endswith("_layer"):
            assert cost.checkpoint_bytes == pytest.approx(entry.checkpoint_bytes, rel=0.01), kind
            assert cost.output_bytes == entry.output_bytes, kind


@pytest.mark.parametrize("model_type", [name for name in DOCUMENTS if name != "qwen2_vl"])
def test_layers_of_every_family_agree(model_type: str) -> None:
    document = copy.deepcopy(DOCUMENTS[model_type])
    job = job_of(document, 64, implementation="transformers")
    entries = trace_job(document, job, recompute=False)
    costs = block_costs(job, Strategy(pp=1, tp=1, dp=1, mbs=1))
    for block in (block for block in expand(job.model).blocks if block.role == "layer"):
        traced_bytes = entries[block.kind].activation_bytes
        assert costs[block.name].activation_bytes == pytest.approx(traced_bytes, rel=0.01), block.name
