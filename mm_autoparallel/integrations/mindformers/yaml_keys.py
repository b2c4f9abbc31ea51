"""Where the two forms of a MindFormers YAML keep what the planner reads and writes."""

from __future__ import annotations

from dataclasses import dataclass

from mm_autoparallel.integrations.yaml_text import KeyPath


@dataclass(frozen=True)
class YamlKeys:
    """Paths of keys. num_microbatches, global_batch_size: one of them, from which the other follows."""

    model: KeyPath
    offset: KeyPath
    dp: KeyPath
    tp: KeyPath
    pp: KeyPath
    ep: KeyPath
    cp: KeyPath
    vp: KeyPath
    num_microbatches: KeyPath | None
    global_batch_size: KeyPath | None
    mbs: KeyPath
    optimizer_parallel: KeyPath


_PARALLEL, _MODEL = ("parallel_config",), ("model", "model_config")

PRETRAIN = YamlKeys(
    model=_MODEL,
    offset=(*_MODEL, "offset"),
    dp=(*_PARALLEL, "data_parallel"),
    tp=(*_PARALLEL, "model_parallel"),
    pp=(*_PARALLEL, "pipeline_stage"),
    ep=(*_PARALLEL, "expert_parallel"),
    cp=(*_PARALLEL, "context_parallel"),
    vp=(*_MODEL, "pp_interleave_num"),
    num_microbatches=(*_PARALLEL, "micro_batch_num"),
    global_batch_size=None,
    mbs=("runner_config", "batch_size"),
    optimizer_parallel=("parallel", "enable_parallel_optimizer"),
)
"""Every release's."""

_DISTRIBUTED = ("distribute_parallel_config",)
_PIPELINE = (*_DISTRIBUTED, "pipeline_parallel_config")

TEMPLATE_V2 = YamlKeys(
    model=("model_config",),
    offset=(*_PIPELINE, "pipeline_stage_offset"),
    dp=(*_DISTRIBUTED, "data_parallel_size"),
    tp=(*_DISTRIBUTED, "tensor_model_parallel_size"),
    pp=(*_DISTRIBUTED, "pipeline_model_parallel_size"),
    ep=(*_DISTRIBUTED, "expert_model_parallel_size"),
    cp=(*_DISTRIBUTED, "context_parallel_size"),
    vp=(*_PIPELINE, "virtual_pipeline_model_parallel_size"),
    num_microbatches=None,
    global_batch_size=("training_args", "global_batch_size"),
    mbs=("training_args", "micro_batch_size"),
    optimizer_parallel=(*_DISTRIBUTED, "optimizer_parallel_config", "enable_parallel_optimizer"),
)
"""Of MindFormers' experimental trainer (configs/llm_template_v2_experimental, branch br_feature_llm_trainer)."""


def written(path: KeyPath) -> str:
    """As one would write it: `parallel_config.pipeline_stage`."""
    return ".".join(map(str, path))
