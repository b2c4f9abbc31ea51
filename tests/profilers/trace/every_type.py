"""Every multimodal and causal model type of the installed transformers, through the generic route to a plan.

    python tests/profilers/trace/every_type.py [--only TYPE...] [--kind multimodal|causal] [--part I/N]

Prints a line a type: its parts, how many kinds of layers each has, parameters by our blocks and of the real class, and
whether it was planned or why not. Ends with 1 where fewer are planned than were (LEAST). `make nightly` runs it.

A type is planned where its class is built from its default config (with what publishers' files say where the default
contradicts itself, published_sizes.py), every part of it that the config describes is taken apart and traced, the
parameters of all blocks are those of the class, and the search finds a plan.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

from mm_autoparallel.errors import NoFeasiblePlan, PlannerError
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.model.readers.job_file import parse_job
from mm_autoparallel.planner.evaluate import Estimate
from mm_autoparallel.planner.search.planner import search

LEAST = {"multimodal": 103, "causal": 180}
"""Planned types by kind, as a whole run counted them. They may only grow."""

MAPPINGS = {
    "multimodal": ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES"),
    "causal": ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",),
}

TEXT_TOKENS, ANY_IMAGE_TOKENS = 256, 64
LONGEST_S = 600.0
NODE_BYTES = 8 * 141e9
BYTES_PER_PARAMETER = 40.0
"""Twice the 18 bytes of weights, gradients and Adam, and some: most parameters may be an encoder-less pipeline's."""

TRIED = (("h200-141g", 1, 1), ("h200-141g", 3, 1), ("b200-192g", 3, 1), ("b200-192g", 3, 4), ("b300-288g", 3, 4))
"""Device, ZeRO stage, and how many times as many nodes as the weights ask for, one after another."""


def plan_type(model_type: str) -> dict[str, Any]:
    """What became of one type, as JSON values."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    from published_sizes import PUBLISHED

    from mm_autoparallel.profilers.trace.undescribed import Undescribed

    document = {"model_type": model_type, **PUBLISHED.get(model_type, {})}
    told: dict[str, Any] = {"type": model_type}
    plain = Workload(global_batch_size=8, seq_length=TEXT_TOKENS, implementation="transformers")
    try:
        found = Undescribed(document, Path("config.json"), plain, model_type, {})
        model = found.model
        told["parts"] = [
            (part.name, part.layers.num_layers, len({block.kind for block in part.blocks if block.role == "layer"}))
            for part in model.parts
        ]
        told["ours"] = sum(block.count * block.parameter_count for part in model.parts for block in part.blocks)
        told["real"] = found.count_real_parameters()
        told["remarks"] = list(model.remarks)
        missing = [remark for remark in model.remarks if "cannot be run" in remark]
        if missing:
            told["reason"] = missing[0]
            return told
        kinds = {encoder.kind for encoder in model.encoders}
        images = (model.tokens_per_image or ANY_IMAGE_TOKENS) if "images" in kinds else 0
        audios = (model.tokens_per_audio or ANY_IMAGE_TOKENS) if "audios" in kinds else 0
        workload = Workload(
            global_batch_size=8,
            seq_length=TEXT_TOKENS + images + audios,
            image_tokens_per_sample=images,
            audio_tokens_per_sample=audios,
            implementation="transformers",
        )
        with tempfile.TemporaryDirectory() as folder:
            found.write_traces(Path(folder) / "model", 1, workload, "every_type.py", recompute=True)
            (Path(folder) / "model.json").write_text(json.dumps(model.document()))
            told |= plan_file(Path(folder), workload, model.parameter_count)
    except PlannerError as failure:
        told["reason"] = f"{type(failure).__name__}: {failure}"
    except Exception as failure:  # noqa: BLE001 — a crash of one type must not hide the others
        told["reason"] = f"CRASH {type(failure).__name__}: {failure}"
    return told


def plan_file(folder: Path, workload: Any, parameter_count: int) -> dict[str, Any]:
    """A plan of the model in `folder`, on as many nodes of H200s as its weights ask for.

    Its layers are undivided: where one of them, with all its experts, is too large for a device, weights are sharded
    too (ZeRO 3), and then on larger devices or more of them.
    """
    least = 1
    while least * NODE_BYTES < BYTES_PER_PARAMETER * parameter_count:
        least *= 2
    keys = ("seq_length", "image_tokens_per_sample", "audio_tokens_per_sample")
    sizes = {key: getattr(workload, key) for key in keys}
    refusal: NoFeasiblePlan | None = None
    for device, zero, times in TRIED:
        num_nodes = least * times
        document = {
            "model": "model.json",
            "cluster": {"device": device, "num_nodes": num_nodes, "devices_per_node": 8},
            "workload": sizes | {"global_batch_size": 8 * num_nodes, "implementation": "transformers"},
            "search": {"mbs": [1], "zero": [zero]},
        }
        try:
            first = first_plan(parse_job(document, folder / "job.json"))
        except NoFeasiblePlan as failure:
            refusal = failure
            continue
        found = {"device": device, "num_nodes": num_nodes, "pp": first.plan.strategy.pp, "zero": zero}
        return found | {"step_ms": round(first.step_ms, 2)}
    assert refusal is not None
    raise refusal


def first_plan(job: Job) -> Estimate:
    """What the search finds first. That it is the best is left unproven: with several kinds of layers that takes
    minutes, and is not what is asked here.
    """
    seen = [math.inf]
    result = search(
        job,
        time_limit_s=LONGEST_S,
        should_stop=lambda: seen[-1] < math.inf,
        on_progress=lambda progress: seen.append(progress.best_ms),
        num_workers=1,
    )
    return result.estimates[0]


def describe(told: dict[str, Any]) -> str:
    """A line of the table."""
    parts = " ".join(f"{name}:{layers}/{kinds}" for name, layers, kinds in told.get("parts", ()))
    counts = f"{told.get('ours', 0):,} of {told.get('real', 0):,}"
    result = (
        f"{told['num_nodes']} nodes of {told['device']}, PP {told['pp']}, ZeRO {told['zero']}, {told['step_ms']} ms"
        if "step_ms" in told
        else f"not planned: {told.get('reason')}"
    )
    return f"{told['type']} | {parts} | {counts} | {'; '.join(told.get('remarks', ()))} | {result}"


def main() -> int:
    """The table, the counts, and whether they fell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", nargs="+", default=())
    parser.add_argument("--kind", choices=tuple(MAPPINGS), nargs="+", default=tuple(MAPPINGS))
    parser.add_argument(
        "--part", default="1/1", help="I/N: the I-th of N parts of the types; counts are then not checked"
    )
    arguments = parser.parse_args()
    from mm_autoparallel.profilers.huggingface_classes import model_types

    part, num_parts = (int(number) for number in arguments.part.split("/"))
    planned, known = Counter[str](), Counter[str]()
    done: dict[str, bool] = {}
    print("type | parts: layers/kinds | parameters, ours of the class's | remarks | planned")
    for kind in arguments.kind:
        types = sorted(arguments.only or model_types(*MAPPINGS[kind]))
        for model_type in types[part - 1 :: num_parts]:
            if model_type not in done:
                told = plan_type(model_type)
                done[model_type] = "step_ms" in told and told["ours"] == told["real"]
                print(describe(told), flush=True)
            known[kind] += 1
            planned[kind] += done[model_type]
    for kind in arguments.kind:
        print(f"{kind}: {planned[kind]} of {known[kind]} types planned (at least {LEAST[kind]})")
    whole = not arguments.only and num_parts == 1
    return int(whole and any(planned[kind] < LEAST[kind] for kind in arguments.kind))


if __name__ == "__main__":
    sys.exit(main())
