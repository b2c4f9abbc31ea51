"""A MindFormers pretrain YAML as one frozen noun: what the planner needs of it, and the text it is written back into.

Keys are MindFormers' own and far more than those read here, so unknown ones are no mistake. What a key means is as
MindFormers' `LayerSetting` has it (mindformers/models/utils.py): multi-token prediction modules count as layers, and
`pp_interleave_num` chunks a stage count only where `parallel.pipeline_config.pipeline_interleave` is on.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field

from mm_autoparallel.errors import JobError
from mm_autoparallel.files import describe_value, read_document, read_text
from mm_autoparallel.job.fields import Count, Few, Flag, Name, Noun, Number
from mm_autoparallel.validation import parse_record

WHAT = "MindFormers YAML"

DEEPSEEK, LLAMA = "DeepseekV3Config", "LlamaConfig"
"""`model.model_config.type` of the families that are read."""


class _Section(Noun):
    """A section of the YAML; keys that the planner has no use for are the user's."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())


class _ModelConfig(_Section):
    type: Name
    num_layers: Few
    pp_interleave_num: Few = 1
    mtp_depth: Number = 0
    seq_length: Count | None = None
    offset: Any = 0


class _Model(_Section):
    settings: _ModelConfig = Field(alias="model_config")


class _ParallelConfig(_Section):
    data_parallel: Count = 1
    model_parallel: Count = 1
    pipeline_stage: Few
    expert_parallel: Count = 1
    context_parallel: Count = 1
    micro_batch_num: Few
    seq_split_num: Count = 1
    use_seq_parallel: Flag = False


class _PipelineConfig(_Section):
    pipeline_interleave: Flag = False
    pipeline_scheduler: Name = "1f1b"


class _OptimizerConfig(_Section):
    optimizer_weight_shard_size: int = -1


class _Parallel(_Section):
    enable_parallel_optimizer: Flag = False
    pipeline_config: _PipelineConfig | None = None
    parallel_optimizer_config: _OptimizerConfig | None = None


class _RunnerConfig(_Section):
    batch_size: Count = 1
    gradient_accumulation_steps: Count = 1


class _MoeConfig(_Section):
    expert_num: Count = 1
    first_k_dense_replace: Number = 0
    expert_model_parallel: Count | None = None


class _Context(_Section):
    max_device_memory: str | None = None


class _RecomputeConfig(_Section):
    """Flags that MindFormers reads; LayerSetting does not hand the first two to layers."""

    parallel_optimizer_comm_recompute: Flag = False
    mp_comm_recompute: Flag = True
    recompute_slice_activation: Flag = False


class _SwapConfig(_Section):
    swap: Flag = False


class _Document(_Section):
    model: _Model
    parallel_config: _ParallelConfig
    parallel: _Parallel = _Parallel()
    runner_config: _RunnerConfig = _RunnerConfig()
    moe_config: _MoeConfig | None = None
    context: _Context = _Context()
    swap_config: _SwapConfig = _SwapConfig()
    recompute_config: _RecomputeConfig = _RecomputeConfig()
    micro_batch_interleave_num: Count = 1


@dataclass(frozen=True)
class Pretrain:
    """What a pretrain YAML says.

    text, document: the file as read. vp: chunks a stage. num_dense: layers before the first expert layer; num_layers
    counts them, the expert layers and the multi-token prediction modules (mtp_depth). dp, tp, pp, ep, cp: parallel
    sizes. optimizer_parallel: optimizer states are divided over data parallel ranks, over groups of
    optimizer_shard_size of them (-1: all). mbs: samples of a micro-batch. max_memory_bytes: None where
    `context.max_device_memory` is left out. expert_tp: ranks that share an expert, None where the YAML does not say.
    notes: what its reader should know.
    """

    path: Path
    text: str
    document: dict[str, Any]
    family: str
    num_layers: int
    num_dense: int
    has_experts: bool
    mtp_depth: int
    dp: int
    tp: int
    pp: int
    ep: int
    cp: int
    vp: int
    sequence_parallel: bool
    optimizer_parallel: bool
    optimizer_shard_size: int
    mbs: int
    num_microbatches: int
    gradient_accumulation_steps: int
    interleave_num: int
    max_memory_bytes: int | None
    expert_tp: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def num_virtual_stages(self) -> int:
        return self.pp * self.vp

    @property
    def base_layers(self) -> int:
        """Layers that every chunk of every stage holds before `offset` is added."""
        return self.num_layers // self.num_virtual_stages

    @property
    def global_batch_size(self) -> int:
        """Samples of one optimizer step."""
        return self.mbs * self.dp * self.num_microbatches * self.interleave_num * self.gradient_accumulation_steps

    def error(self, key: str, problem: str) -> JobError:
        """A mistake in the file, at `key`."""
        return JobError(f"{WHAT} {self.path}: {key} {problem}")


def read_pretrain(path: Path) -> Pretrain:
    """The pretrain YAML at `path`. Raises JobError naming file, key, value and what would be right."""
    document = read_document(path, WHAT)
    text = read_text(path, WHAT, "YAML text")
    for section in ("model", "parallel_config"):
        if not isinstance(document.get(section), dict):
            raise JobError(
                f"{WHAT} {path}: section `{section}` is missing; a pretrain YAML has model.model_config (num_layers, "
                "offset) and parallel_config (pipeline_stage, micro_batch_num)"
            )
    optional = ("parallel", "runner_config", "moe_config", "context", "swap_config", "recompute_config")
    record = parse_record(
        _Document,
        {
            key: value
            for key, value in document.items()
            if key not in optional or not (value is None or (key == "recompute_config" and isinstance(value, bool)))
        },
        WHAT,
        path,
    )
    model, sizes = record.model.settings, record.parallel_config
    if model.type not in (DEEPSEEK, LLAMA):
        raise JobError(
            f"{WHAT} {path}: model.model_config.type is {describe_value(model.type)}; read are {DEEPSEEK} and {LLAMA}"
        )
    moe = record.moe_config if record.moe_config is not None and record.moe_config.expert_num > 1 else None
    pipeline = record.parallel.pipeline_config or _PipelineConfig()
    if moe and moe.first_k_dense_replace > model.num_layers:
        raise JobError(
            f"{WHAT} {path}: moe_config.first_k_dense_replace is {moe.first_k_dense_replace}; the model has "
            f"num_layers: {model.num_layers}"
        )
    if pipeline.pipeline_scheduler not in ("1f1b", "seqpipe") or sizes.seq_split_num > 1:
        raise JobError(
            f"{WHAT} {path}: pipeline_scheduler {pipeline.pipeline_scheduler} with seq_split_num "
            f"{sizes.seq_split_num} is a schedule that is not simulated; known are 1f1b, and seqpipe with one split"
        )
    if record.swap_config.swap:
        raise JobError(
            f"{WHAT} {path}: swap_config.swap is true; recompute lists then name layers instead of counting them, and "
            "swapped memory is not simulated; set it to false"
        )
    notes = []
    if model.pp_interleave_num > 1 and not pipeline.pipeline_interleave:
        notes.append(
            f"pp_interleave_num is {model.pp_interleave_num}, and MindFormers runs one chunk a stage unless "
            "parallel.pipeline_config.pipeline_interleave is true; it is planned for as if it were"
        )
    idle = {
        "mp_comm_recompute: false": not record.recompute_config.mp_comm_recompute,
        "parallel_optimizer_comm_recompute: true": record.recompute_config.parallel_optimizer_comm_recompute,
    }
    notes += [
        f"{text} is left as it is: MindFormers hands it to no layer of this model, so nothing here depends on it"
        for text, is_there in idle.items()
        if is_there
    ]
    optimizer = record.parallel.parallel_optimizer_config or _OptimizerConfig()
    return Pretrain(
        path=path,
        text=text,
        document=document,
        family=model.type,
        num_layers=model.num_layers + model.mtp_depth,
        num_dense=moe.first_k_dense_replace if moe else 0,
        has_experts=moe is not None,
        mtp_depth=model.mtp_depth,
        dp=sizes.data_parallel,
        tp=sizes.model_parallel,
        pp=sizes.pipeline_stage,
        ep=sizes.expert_parallel,
        cp=sizes.context_parallel,
        vp=model.pp_interleave_num,
        sequence_parallel=sizes.use_seq_parallel,
        optimizer_parallel=record.parallel.enable_parallel_optimizer,
        optimizer_shard_size=optimizer.optimizer_weight_shard_size,
        mbs=record.runner_config.batch_size,
        num_microbatches=sizes.micro_batch_num,
        gradient_accumulation_steps=record.runner_config.gradient_accumulation_steps,
        interleave_num=record.micro_batch_interleave_num,
        max_memory_bytes=_memory_bytes(record.context.max_device_memory, path),
        expert_tp=moe.expert_model_parallel if moe else None,
        notes=tuple(notes),
    )


def recompute_config(pretrain: Pretrain) -> dict[str, Any]:
    """`recompute_config` as a mapping; a flag in its place stands for its `recompute`."""
    config = pretrain.document.get("recompute_config")
    if config is None or isinstance(config, bool):
        return {} if config is None else {"recompute": config}
    found: dict[str, Any] = config
    return found


def _memory_bytes(text: str | None, path: Path) -> int | None:
    """MindSpore's `54GB` is 54 · 2^30 bytes (mindspore.set_context, max_device_memory)."""
    if text is None:
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*GB\s*", text)
    if match is None:
        raise JobError(
            f"{WHAT} {path}: context.max_device_memory is {describe_value(text)}; MindSpore takes a number and GB, "
            'like "54GB"'
        )
    return round(float(match[1]) * 2**30)
