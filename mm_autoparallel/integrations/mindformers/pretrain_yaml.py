"""A MindFormers pretrain YAML as one frozen noun: what the planner needs of it, and the text it is written back into.

Keys are MindFormers' own and far more than those read here, so unknown ones are no mistake. What a key means is as
MindFormers' `LayerSetting` has it (mindformers/models/utils.py): multi-token prediction modules of DeepseekV3Config
count as layers (today's `use_legacy: False` keeps them behind the last one), and `pp_interleave_num` chunks a stage
count only where `parallel.pipeline_config.pipeline_interleave` is on.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mm_autoparallel.errors import JobError
from mm_autoparallel.files import describe_value, read_document, read_text
from mm_autoparallel.integrations.mindformers.decoder import count_layers
from mm_autoparallel.integrations.mindformers.model_section import WHAT, ModelSection, read_model_section
from mm_autoparallel.integrations.mindformers.yaml_keys import PRETRAIN, TEMPLATE_V2, YamlKeys, written
from mm_autoparallel.integrations.mindformers.yaml_sections import (
    CommonSections,
    MoeConfig,
    OptimizerConfig,
    PipelineConfig,
    PretrainSections,
    TemplateSections,
)
from mm_autoparallel.integrations.yaml_text import KeyPath
from mm_autoparallel.pipeline.schedules.catalog import SEQUENCE_PIECES
from mm_autoparallel.validation import parse_record


@dataclass(frozen=True)
class Pretrain:
    """What a pretrain YAML says.

    text, document: the file as read. keys: where it keeps what. model: what it trains. vp: chunks a stage. num_dense:
    layers before the first expert layer; num_layers counts them, the expert layers and mtp_depth multi-token prediction
    modules. num_last_mtp: such modules behind the last layer, which are none. dp, tp, pp, ep, cp: parallel sizes.
    optimizer_parallel: optimizer states are divided over data parallel ranks, over groups of optimizer_shard_size of
    them (-1: all). mbs: samples of a micro-batch. max_memory_bytes: None where `context.max_device_memory` is left out.
    expert_tp: ranks that share an expert, None where the YAML does not say. seq_split_num: pieces of a micro-batch's
    sequences that go through the pipeline one by one. notes: what its reader should know.
    """

    path: Path
    text: str
    document: dict[str, Any]
    keys: YamlKeys
    model: ModelSection
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
    num_last_mtp: int = 0
    seq_split_num: int = 1
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
        return JobError(f"{key} {problem}", where=f"{WHAT} {self.path}", key=key)


def read_pretrain(path: Path, config_json: Path | None = None, text: str = "") -> Pretrain:
    """The pretrain YAML at `path`. config_json: of its model, in place of the one in its `pretrained_model_dir`. text:
    what the file will hold, in place of what it holds.

    Raises JobError naming file, key, value and what would be right.
    """
    document = read_document(path, WHAT, part=text)
    text = text or read_text(path, WHAT, "YAML text")
    keys = _find_keys(document, path)
    model = read_model_section(_mapping_at(document, keys.model), written(keys.model), document, path, config_json)
    counts = count_layers(model)
    said = _read_template(document, path) if keys is TEMPLATE_V2 else _read_classic(document, path, model)
    common: CommonSections = said.pop("record")
    pipeline: PipelineConfig = said.pop("pipeline")
    _check_schedule(path, pipeline, said["seq_split_num"], said["vp"])
    if common.swap_config.swap:
        raise JobError(
            f"{WHAT} {path}: swap_config.swap is true; recompute lists then name layers instead of counting them, and "
            "swapped memory is not simulated; set it to false"
        )
    pretrain = Pretrain(
        path=path,
        text=text,
        document=document,
        keys=keys,
        model=model,
        num_layers=counts.num_layers + counts.counted_mtp,
        num_dense=counts.num_dense,
        has_experts=counts.has_experts,
        mtp_depth=counts.counted_mtp,
        num_last_mtp=counts.last_mtp,
        max_memory_bytes=_memory_bytes(common.context.max_device_memory, path),
        **said,
    )
    return replace(pretrain, notes=(*model.notes, *pretrain.notes, *_notes(pretrain, pipeline, common)))


_NO_TRAINING = {
    "parallelism": (
        "is one of MindFormers' pynative trainer: its stages and what they recompute are lists of layers, which are "
        "not planned"
    ),
    "llama2_config": "is of MindFormers' experimental parallel core (2024), which is in no release",
}


def _find_keys(document: dict[str, Any], path: Path) -> YamlKeys:
    if "distribute_parallel_config" in document and "model" not in document:
        return TEMPLATE_V2
    for section, why in _NO_TRAINING.items():
        if section in document:
            raise JobError(f"{WHAT} {path}: it has a section `{section}`, and so {why}")
    for section in ("model", "parallel_config"):
        if not isinstance(document.get(section), dict):
            raise JobError(
                f"{WHAT} {path}: section `{section}` is missing; a pretrain YAML has model.model_config (num_layers, "
                "offset) and parallel_config (pipeline_stage, micro_batch_num)"
            )
    return PRETRAIN


def _mapping_at(document: dict[str, Any], path: KeyPath) -> dict[str, Any]:
    """The mapping there; an empty one where nothing is. A YAML may take all of its model from a config.json."""
    node: Any = document
    for key in path:
        node = node.get(key) if isinstance(node, dict) else None
    return node if isinstance(node, dict) else {}


def _without_empty(document: dict[str, Any]) -> dict[str, Any]:
    """A section without content is one that was left out; a flag in place of recompute_config stands for its own."""
    return {
        key: value
        for key, value in document.items()
        if value is not None and not (key == "recompute_config" and isinstance(value, bool))
    }


def _read_classic(document: dict[str, Any], path: Path, model: ModelSection) -> dict[str, Any]:
    """What a YAML of any release says, by the names of Pretrain."""
    record = parse_record(PretrainSections, _without_empty(document), WHAT, path)
    sizes, optimizer = record.parallel_config, record.parallel.parallel_optimizer_config or OptimizerConfig()
    moe = record.moe_config or MoeConfig()
    return {
        "record": record,
        "pipeline": record.parallel.pipeline_config or PipelineConfig(),
        "seq_split_num": sizes.seq_split_num,
        "dp": sizes.data_parallel,
        "tp": sizes.model_parallel,
        "pp": sizes.pipeline_stage,
        "ep": sizes.expert_parallel,
        "cp": sizes.context_parallel,
        "vp": record.model.settings.pp_interleave_num or 1,
        "sequence_parallel": sizes.use_seq_parallel,
        "optimizer_parallel": record.parallel.enable_parallel_optimizer,
        "optimizer_shard_size": optimizer.optimizer_weight_shard_size,
        "mbs": record.runner_config.batch_size,
        "num_microbatches": sizes.micro_batch_num,
        "gradient_accumulation_steps": record.runner_config.gradient_accumulation_steps,
        "interleave_num": record.micro_batch_interleave_num,
        "expert_tp": sizes.expert_model_parallel if model.is_mcore else moe.expert_model_parallel,
    }


def _read_template(document: dict[str, Any], path: Path) -> dict[str, Any]:
    """What a YAML of the experimental trainer says. Without data_parallel_size the devices at hand decide it there."""
    record = parse_record(TemplateSections, _without_empty(document), WHAT, path)
    sizes, training = record.distribute_parallel_config, record.training_args
    pipeline = sizes.pipeline_parallel_config
    dp = sizes.data_parallel_size or 1
    samples = dp * training.micro_batch_size * sizes.micro_batch_interleave_num
    if training.global_batch_size % samples:
        raise JobError(
            f"{WHAT} {path}: training_args.global_batch_size is {training.global_batch_size}; {samples} samples "
            "(data_parallel_size, micro_batch_size and micro_batch_interleave_num) must divide it"
        )
    said = {
        "record": record,
        "pipeline": pipeline,
        "seq_split_num": pipeline.seq_split_num,
        "dp": dp,
        "tp": sizes.tensor_model_parallel_size,
        "pp": sizes.pipeline_model_parallel_size,
        "ep": sizes.expert_model_parallel_size,
        "cp": sizes.context_parallel_size,
        "vp": pipeline.virtual_pipeline_model_parallel_size or 1,
        "sequence_parallel": sizes.sequence_parallel,
        "optimizer_parallel": sizes.optimizer_parallel_config.enable_parallel_optimizer,
        "optimizer_shard_size": sizes.optimizer_parallel_config.optimizer_weight_shard_size,
        "mbs": training.micro_batch_size,
        "num_microbatches": training.global_batch_size // samples,
        "gradient_accumulation_steps": 1,
        "interleave_num": sizes.micro_batch_interleave_num,
        "expert_tp": sizes.expert_tensor_parallel_size,
    }
    if sizes.data_parallel_size is None:
        said["notes"] = (
            "distribute_parallel_config.data_parallel_size is not there, so the devices of a launch decide it; planned "
            f"for 1 ({said['num_microbatches']} micro-batches): write yours",
        )
    return said


def _check_schedule(path: Path, pipeline: PipelineConfig, seq_split_num: int, vp: int) -> None:
    """The orders that are simulated: 1F1B, interleaved or not, and seqpipe's of pieces with one chunk a stage."""
    name = pipeline.pipeline_scheduler
    one_chunk = ("seqvpp", "seqsmartvpp") if vp == 1 else ()
    if name in ("1f1b", "seqpipe", *one_chunk) and seq_split_num == 1:
        return
    if name in ("seqpipe", *one_chunk) and vp == 1 and seq_split_num in SEQUENCE_PIECES:
        return
    pieces = ", ".join(map(str, SEQUENCE_PIECES))
    raise JobError(
        f"{WHAT} {path}: pipeline_scheduler {name} with seq_split_num {seq_split_num} and pp_interleave_num {vp} is a "
        "schedule that is not simulated; known are 1f1b and seqpipe with one split, seqpipe with one chunk a stage and "
        f"{pieces} splits, and seqvpp and seqsmartvpp with one chunk"
    )


def _notes(pretrain: Pretrain, pipeline: PipelineConfig, common: CommonSections) -> tuple[str, ...]:
    notes = []
    if pretrain.vp > 1 and not pipeline.pipeline_interleave:
        notes.append(
            f"pp_interleave_num is {pretrain.vp}, and MindFormers runs one chunk a stage unless "
            "parallel.pipeline_config.pipeline_interleave is true; it is planned for as if it were"
        )
    idle = {
        "mp_comm_recompute: false": not common.recompute_config.mp_comm_recompute,
        "parallel_optimizer_comm_recompute: true": common.recompute_config.parallel_optimizer_comm_recompute,
    }
    notes += [
        f"{text} is left as it is: MindFormers hands it to no layer of this model, so nothing here depends on it"
        for text, is_there in idle.items()
        if is_there
    ]
    if pretrain.seq_split_num > 1:
        notes.append(
            f"seq_split_num is {pretrain.seq_split_num}: pieces count as equally long, for each attends to a masked "
            "whole sequence; keys and values, and caches of them and of their gradients, count whole; no layer is "
            "recomputed whole, which their caches do not allow (--select y searches recompute of operators)"
        )
    optimizer = pretrain.document.get("optimizer")
    if isinstance(optimizer, dict) and optimizer.get("swap") is True:
        notes.append(
            "optimizer.swap is true: its states wait on the host; memory counts them on the device, which is more"
        )
    adapter = pretrain.model.sizes.content.get("pet_config")
    if isinstance(adapter, dict):
        notes.append(
            f"model_config.pet_config ({describe_value(adapter.get('pet_type'))}) trains adapters alone; memory and "
            "times are those of training all parameters, which is more"
        )
    return tuple(notes)


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
    if match is None or not math.isfinite(float(match[1])):
        raise JobError(
            f"{WHAT} {path}: context.max_device_memory is {describe_value(text)}; MindSpore takes a number and GB, "
            'like "54GB"'
        )
    return round(float(match[1]) * 2**30)
