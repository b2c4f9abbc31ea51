"""The sections of a MindFormers YAML that the planner reads, as records; keys it has no use for are the user's."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field

from mm_autoparallel.records import Count, Few, Flag, Name, Noun


class YamlSection(Noun):
    """A section of the YAML; keys that the planner has no use for are the user's."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())


class ModelSettings(YamlSection):
    """`model.model_config`, as far as every class has it alike."""

    pp_interleave_num: Few | None = None


class Model(YamlSection):
    """`model`."""

    settings: ModelSettings = Field(alias="model_config", default=ModelSettings())


class ParallelSizes(YamlSection):
    """`parallel_config`. expert_model_parallel: ranks that share an expert (today's; before, in moe_config)."""

    data_parallel: Count = 1
    model_parallel: Count = 1
    pipeline_stage: Few
    expert_parallel: Count = 1
    expert_model_parallel: Count | None = None
    context_parallel: Count = 1
    micro_batch_num: Few
    seq_split_num: Count = 1
    use_seq_parallel: Flag = False


class PipelineConfig(YamlSection):
    """`parallel.pipeline_config`; the last two are of the experimental trainer's `pipeline_parallel_config`."""

    pipeline_interleave: Flag = False
    pipeline_scheduler: Name = "1f1b"
    virtual_pipeline_model_parallel_size: Few | None = None
    seq_split_num: Count = 1


class OptimizerConfig(YamlSection):
    """`parallel.parallel_optimizer_config`."""

    optimizer_weight_shard_size: int = -1


class ParallelContext(YamlSection):
    """`parallel`. parallel_mode: 1 as parallel_config says, 2 as MindSpore finds."""

    parallel_mode: Any = 1
    enable_parallel_optimizer: Flag = False
    pipeline_config: PipelineConfig | None = None
    parallel_optimizer_config: OptimizerConfig | None = None


class RunnerConfig(YamlSection):
    """`runner_config`."""

    batch_size: Count = 1
    gradient_accumulation_steps: Count = 1


class MoeConfig(YamlSection):
    """`moe_config`, beside what it says of the model."""

    expert_model_parallel: Count | None = None


class Context(YamlSection):
    """`context`."""

    max_device_memory: str | None = None


class RecomputeFlags(YamlSection):
    """Flags that MindFormers reads; LayerSetting does not hand the first two to layers."""

    parallel_optimizer_comm_recompute: Flag = False
    mp_comm_recompute: Flag = True
    recompute_slice_activation: Flag = False


class SwapConfig(YamlSection):
    """`swap_config`."""

    swap: Flag = False


class CommonSections(YamlSection):
    """What both forms of a YAML have."""

    context: Context = Context()
    swap_config: SwapConfig = SwapConfig()
    recompute_config: RecomputeFlags = RecomputeFlags()


class PretrainSections(CommonSections):
    """A YAML of any release."""

    model: Model
    parallel_config: ParallelSizes
    parallel: ParallelContext = ParallelContext()
    runner_config: RunnerConfig = RunnerConfig()
    moe_config: MoeConfig | None = None
    micro_batch_interleave_num: Count = 1


class TrainingArgs(YamlSection):
    """`training_args` of the experimental trainer."""

    micro_batch_size: Count = 1
    global_batch_size: Count


class OptimizerParallel(OptimizerConfig):
    """`optimizer_parallel_config` of the experimental trainer."""

    enable_parallel_optimizer: Flag = False


class Distributed(YamlSection):
    """`distribute_parallel_config` of the experimental trainer; without data_parallel_size devices decide it."""

    data_parallel_size: Count | None = None
    tensor_model_parallel_size: Count = 1
    pipeline_model_parallel_size: Few = 1
    context_parallel_size: Count = 1
    expert_model_parallel_size: Count = 1
    expert_tensor_parallel_size: Count | None = None
    sequence_parallel: Flag = False
    pipeline_parallel_config: PipelineConfig = PipelineConfig()
    optimizer_parallel_config: OptimizerParallel = OptimizerParallel()
    micro_batch_interleave_num: Count = 1


class TemplateSections(CommonSections):
    """A YAML of the experimental trainer."""

    training_args: TrainingArgs
    distribute_parallel_config: Distributed
