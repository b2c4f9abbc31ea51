"""Vision-language models with experts planned on today's clusters: what precision, EP and domain size are worth.

    python tests/benchmarks/multimodal_clusters.py [--model NAME...] [--cluster NAME...] [--limit S]

Prints a table in Markdown, a row for each model, cluster and setting: the step of the best plan, the bound that no plan
of that space is below, the gap between both, the chance to run out of memory, and the plan's strategy. Nothing is
asserted here. Models are read from the sizes of their config.json (tests/fixtures); the workload is assumed: 8,192
tokens a sample, 2,048 of them of four images, vision frozen as the reader has it, its tower in BF16 beside a decoder of
lower precision unless a setting says otherwise. Limits count this process's own CPU time, so that what else runs on the
machine changes no gap but by CP-SAT's own clock.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from mm_autoparallel.errors import JobError, NoFeasiblePlan, Unfinished
from mm_autoparallel.files import read_document
from mm_autoparallel.model.readers.job_file import parse_job
from mm_autoparallel.planner.search.planner import search
from mm_autoparallel.planner.search.space import describe_strategy

FIXTURES = Path(__file__).parents[1] / "fixtures"
MODELS = {
    "Kimi-VL-A3B": "huggingface/kimi_vl_a3b.json",
    "DeepSeek-VL2": "huggingface/deepseek_vl2.json",
    "Qwen3-VL-30B-A3B": "huggingface/qwen3_vl_30b_a3b.json",
    "GLM-4.5V": "mindspeed_mm_configs/glm4_5v.json",
    "Qwen3-VL-235B-A22B": "mindspeed_mm_configs/qwen3_vl_235b_a22b.json",
}
EXPERT_RANKS = (1, 2, 4, 8, 16, 32, 64)

_RACK = {"num_nodes": 64, "devices_per_node": 4, "device": "gb300-288g"}
_EIGHTS = {
    "num_nodes": 32,
    "devices_per_node": 8,
    "device": {"based_on": "gb300-288g", "domain_devices": 8},
}
"""The same devices, of which NVLink joins no more than eight."""
CLUSTERS: dict[str, tuple[dict[str, Any], str]] = {
    "1,024 H100, 8 a domain": ({"num_nodes": 128, "devices_per_node": 8, "device": "h100-80g"}, "deepep"),
    "256 GB300, 64 of 72 a domain": (_RACK, "hybridep"),
    "256 GB300, 8 a domain": (_EIGHTS, "hybridep"),
}
"""Cluster, and what its experts' tokens are exchanged by (assumed)."""

SETTINGS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "bf16": ({"precision": "bf16"}, EXPERT_RANKS),
    "fp8": ({"precision": "fp8_current"}, EXPERT_RANKS),
    "fp8, EP 1": ({"precision": "fp8_current"}, (1,)),
    "fp8, EP 8": ({"precision": "fp8_current"}, (8,)),
    "fp8, EP above 8": ({"precision": "fp8_current"}, (16, 32, 64)),
    "mxfp8": ({"precision": "mxfp8"}, EXPERT_RANKS),
    "mxfp8, tower too": ({"precision": "mxfp8", "tower_precision": "mxfp8"}, EXPERT_RANKS),
    "mxfp8, EP 1": ({"precision": "mxfp8"}, (1,)),
    "mxfp8, EP 8": ({"precision": "mxfp8"}, (8,)),
    "mxfp8, EP above 8": ({"precision": "mxfp8"}, (16, 32, 64)),
}
"""What the workload says, and the expert parallel sizes that are searched."""
_ON_HOPPER = ("bf16", "fp8", "fp8, EP 1", "fp8, EP 8", "fp8, EP above 8")
_ON_BLACKWELL = ("bf16", "fp8", "mxfp8", "mxfp8, tower too", "mxfp8, EP 1", "mxfp8, EP 8", "mxfp8, EP above 8")
_OF_EIGHTS = ("mxfp8", "mxfp8, EP 8", "mxfp8, EP above 8")
ROWS = dict(zip(CLUSTERS, (_ON_HOPPER, _ON_BLACKWELL, _OF_EIGHTS), strict=True))


def job_document(model: str, cluster: str, setting: str) -> dict[str, Any]:
    """The job of one row."""
    devices, dispatcher = CLUSTERS[cluster]
    workload, ranks = SETTINGS[setting]
    return {
        "model": read_document(FIXTURES / MODELS[model], "model file"),
        "cluster": devices,
        "workload": {
            "global_batch_size": 4096,
            "seq_length": 8192,
            "image_tokens_per_sample": 2048,
            "images_per_sample": 4,
            "cross_entropy": "fused",
            "gradient_fusion": True,
            "facts": {"dispatcher": dispatcher, "graphs": "partial"},
        }
        | workload,
        "search": {"cp": [1], "ep": list(ranks), "etp": [1], "mbs": [1, 2], "max_vpp": 2, "choice": "point"},
    }


def plan_row(model: str, cluster: str, setting: str, limit_s: float) -> str:
    """One row of the table, in Markdown."""
    job = parse_job(job_document(model, cluster, setting), Path("job.yaml"))
    began_s = time.process_time()
    try:
        found = search(job, time_limit_s=limit_s, num_workers=1)
    except (NoFeasiblePlan, Unfinished, JobError) as failure:
        what = {"NoFeasiblePlan": "nothing fits", "Unfinished": "nothing found in time"}
        said = what.get(type(failure).__name__, "no lawful strategy")
        return f"| {model} | {cluster} | {setting} | {said} | | | | | {time.process_time() - began_s:.1f} |"
    best = found.estimates[0]
    return (
        f"| {model} | {cluster} | {setting} | {best.step_ms / 1e3:.3f} | {found.lower_bound_ms / 1e3:.3f} | "
        f"{found.gap_fraction:.2%} | {best.oom_probability:.1%} | {describe_strategy(found.plan.strategy)} | "
        f"{time.process_time() - began_s:.1f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--cluster", nargs="+", choices=list(CLUSTERS), default=list(CLUSTERS))
    parser.add_argument("--limit", type=float, default=20.0, metavar="S", help="CPU seconds of each row's search")
    given = parser.parse_args()
    time.monotonic = time.process_time  # the clock that a search ends by
    print("| model | cluster | setting | step, s | bound, s | gap | out of memory | best strategy | CPU s |")
    print("|---|---|---|---|---|---|---|---|---|")
    for model in given.model:
        for cluster in given.cluster:
            for setting in ROWS[cluster]:
                print(plan_row(model, cluster, setting, given.limit), flush=True)


if __name__ == "__main__":
    main()
