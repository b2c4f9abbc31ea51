"""Reads logs of MindSpeed-LLM and MindSpeed-MM on Ascend: Megatron-LM's arguments with some of MindSpeed's.

A model of MindSpeed-MM stands in its model.json alone (`mm_model`), with the layers of each stage and what recomputes;
the log names that file, and `--fact model=FILE` brings it. Sources: github Ascend/MindSpeed-LLM, mindspeed_llm/training
(arguments.py, training.py); Ascend/MindSpeed-MM, mindspeed_mm/arguments.py; Ascend/MindSpeed,
mindspeed/features_manager.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mm_autoparallel.errors import PlannerError
from mm_autoparallel.integrations.mindspeed_mm.model_json import read_placement
from mm_autoparallel.measurements.logs.arguments import has_arguments, read_arguments
from mm_autoparallel.measurements.logs.facts import Facts
from mm_autoparallel.measurements.logs.log import Log
from mm_autoparallel.measurements.logs.megatron import read_shared
from mm_autoparallel.measurements.logs.run import Run
from mm_autoparallel.model.readers.model_file import read_model

_IS_MINDSPEED = re.compile(
    r"(?:^|\s)(?:reuse_fp32_param|use_fused_rmsnorm|use_ascend_mc2|use_ascend_coc|mm_model) \.+ "
)
_KEPT_OPTIMIZER_BYTES, _REUSED_OPTIMIZER_BYTES = 12.0, 10.0
"""--reuse-fp32-param keeps the bf16 weight as the upper half of the fp32 one, two bytes a parameter less."""


def is_mindspeed(log: Log) -> bool:
    """Whether the arguments are MindSpeed's."""
    return has_arguments(log) and next(log.find(_IS_MINDSPEED), None) is not None


def read_run(log: Log, facts: Facts) -> Run:
    """The run. Raises TableError or JobError with what is missing, contradicts or is not understood."""
    arguments = read_arguments(log)
    if arguments.get("mm_model") is not None:
        return _read_multimodal(log, facts, arguments)
    return _read(log, facts, arguments, "mindspeed-llm", "mindspeed")


def _read(
    log: Log,
    facts: Facts,
    arguments: Mapping[str, Any],
    software: str,
    stack: str,
    model: Mapping[str, Any] | None = None,
    tokens: Mapping[str, int] | None = None,
) -> Run:
    reuses = arguments.get("reuse_fp32_param") is True
    more: dict[str, Any] = {
        "optimizer_bytes": _REUSED_OPTIMIZER_BYTES if reuses else _KEPT_OPTIMIZER_BYTES,
        "gradient_fusion": arguments.get("gradient_accumulation_fusion") is True,
        **(tokens or {}),
    }
    if arguments.get("context_parallel_algo") == "ulysses_cp_algo":
        more["context_parallel"] = "all_to_all"
    elif arguments.get("context_parallel_algo") not in (None, "megatron_cp_algo"):
        raise log.error(
            f"context_parallel_algo is {arguments['context_parallel_algo']}; megatron_cp_algo and ulysses_cp_algo are "
            "understood"
        )
    run = read_shared(
        log,
        facts,
        arguments,
        software=software,
        stack=stack,
        flash=arguments.get("use_flash_attn") is True,
        zero=int(arguments.get("use_distributed_optimizer") is True),
        more=more,
        model=model,
    )
    stated = arguments.get("num_layer_list")
    if stated is None:
        return run
    counts = re.findall(r"\d+", str(stated))
    layers = tuple(int(count) for count in counts)
    if len(layers) != run.strategy.pp * run.strategy.vpp or sum(layers) != arguments.get("num_layers"):
        raise log.error(
            f"num_layer_list is {stated}: {len(layers)} numbers that make {sum(layers)}, and PP {run.strategy.pp} with "
            f"num_layers {arguments.get('num_layers')} is what it must give"
        )
    return replace(run, layers=layers)


def _read_multimodal(log: Log, facts: Facts, arguments: dict[str, Any]) -> Run:
    """The same with the model, the layers of each stage and what recomputes from its model.json."""
    path = Path(facts.text(log, "model", expected=Path(str(arguments["mm_model"])).name))
    try:
        model = read_model(path)
    except PlannerError as failure:
        raise log.error(f"--fact model={path}: {failure}") from None
    more: dict[str, int] = {}
    if arguments.pop("variable_seq_lengths", None) is True:
        arguments["seq_length"] = facts.count(log, "tokens_per_sample")
    if model.encoders:
        more["image_tokens_per_sample"] = facts.count(log, "image_tokens_per_sample")
        more["images_per_sample"] = facts.optional_count(log, "images_per_sample") or 1
    run = _read(log, facts, arguments, "mindspeed-mm", "mindspeed-mm", model.model_dump(mode="json"), more)
    try:
        placed = read_placement(path, model, run.strategy.pp, run.strategy.vpp)
    except PlannerError as failure:
        raise log.error(f"--fact model={path}: {failure}") from None
    return replace(run, placed=placed)
