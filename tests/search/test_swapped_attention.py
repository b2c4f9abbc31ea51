"""swap_attention as a mode: what it moves, where a search takes it, where it does not, and who refuses it by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mm_autoparallel.api.exported import export_plan
from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.model.costs.stage import build_problem
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.readers.job_file import parse_job
from mm_autoparallel.planner.plan import Plan
from mm_autoparallel.planner.search.planner import search

LAYERS = {"num_layers": 8, "hidden_size": 4096, "ffn_size": 11008, "num_heads": 32, "norm": "rms"}
ALONE = Strategy(pp=1, tp=8, dp=1, mbs=1)


def job_of(
    memory_bytes: int = 64_000_000_000, stack: str = "mindspeed", modes: tuple[str, ...] = ("swap_attention",)
) -> Job:
    device = {"based_on": "ascend-910b-64g", "memory_bytes": memory_bytes, "host_link_bytes_per_s": 2e10}
    document = {
        "model": {"text": {"vocab_size": 32000, "layers": LAYERS}},
        "cluster": {"num_nodes": 1, "devices_per_node": 8, "device": device},
        "workload": {"global_batch_size": 8, "seq_length": 16384, "stack": stack},
        "search": {"pp": [1], "tp": [8], "cp": [1], "mbs": [1], "modes": list(modes)},
    }
    return parse_job(document, Path("job.json"))


def test_it_moves_less_than_offload_and_no_feed_forward() -> None:
    job = job_of(modes=("offload", "swap_attention"))
    block = next(block for block in build_problem(job, ALONE).chain if block.name == "text_layer")
    modes = {mode.name: mode for mode in block.modes}
    offload, swap = modes["offload"], modes["swap_attention"]
    assert swap.activation_bytes + swap.host_bytes == block.activation_bytes
    # gate, up and their product of a feed-forward that 8 ranks share, 2 bytes a number, stay
    kept = 3 * 2 * 16384 * 11008 / 8
    assert offload.host_bytes - swap.host_bytes == pytest.approx(kept, rel=0.25)
    assert 0 < swap.host_bytes < offload.host_bytes


def test_a_search_takes_it_where_memory_is_short_and_not_where_it_is_ample() -> None:
    ample = search(job_of(), num_workers=1)
    assert ample.plan.modes == {}
    peak = max(ample.figures.peak_memory_bytes)
    short = search(job_of(memory_bytes=int((peak - 0.6e9) / 0.95)), num_workers=1)
    assert sum(short.plan.modes["text"]["swap_attention"]) > 0


def test_elsewhere_it_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"swap_attention, and no layer can run so: it is MindSpeed's"):
        job_of(stack="megatron-te")
    plan = Plan(ALONE, {"text": (8,)}, {"text": (0,)}, 8, modes={"text": {"swap_attention": (8,)}})
    written = export_plan(plan, None, "mindspeed-llm", out=tmp_path).exported
    assert any("--swap-attention" in text for text in written.texts.values())
    for shown, framework, told in (
        (plan, "megatron-core", "MindSpeed's --swap-attention"),
        (replace(plan, modes={"text": {"swap_attention": (3,)}}), "mindspeed-llm", "3 of 8 layers"),
    ):
        with pytest.raises(PlanError, match=told):
            export_plan(shown, None, framework, out=tmp_path)
