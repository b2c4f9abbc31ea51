"""A plan for torchtitan: planned.py (0.3 and newer), a TOML of sections (0.2) or one's own TOML with the plan in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.integrations.accounting import check_decided
from mm_autoparallel.integrations.config_files import round_recompute, totals_of
from mm_autoparallel.integrations.export import only, patched_launch, read_exactly
from mm_autoparallel.integrations.features import refuse_features
from mm_autoparallel.integrations.framework import Exported, Exporter, Target
from mm_autoparallel.integrations.toml_text import parse_toml, set_toml_values
from mm_autoparallel.integrations.torch.schedule_csv import write_csv
from mm_autoparallel.integrations.torchtitan.config import (
    MAIN,
    PARALLELISM,
    RECOMPUTED,
    TRAINING,
    VERSIONS,
    Config,
    count_tokens,
    is_config,
    read_document,
    read_literals,
)
from mm_autoparallel.integrations.torchtitan.read import (
    MULTI,
    ROTATIONS,
    SCHEDULE,
    SCHEDULES,
    VISION,
    describe_launch,
    read_launch_plan,
    read_plan,
    run_with,
)
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.planner.plan import Plan

CODE, TOML = "planned.py", "plan.toml"

_ENCODER = "torchtitan's vision_encoder is whole, on the first part; plan with search.pp [1], or export --to torch"
_CONTEXT = "torchtitan gathers keys and values; plan with search.cp_kind [all_gather]"
_MODE = "torchtitan's own selective recompute is another; plan with search.modes [recompute]"
_NO_KEY = "torchtitan has no key for it; plan without it"
_OFFLOAD = "enable_cpu_offload moves weights to the host too; plan with search.optimizer_offload [false]"

REFUSED = (
    {"encoder_stages": _ENCODER, "optimizer_offload": _OFFLOAD}
    | dict.fromkeys(("ring", "all_to_all", "hierarchical"), _CONTEXT)
    | dict.fromkeys(("selective_all", "selective_some", "activation", "offload", "recompute_offload"), _MODE)
    | dict.fromkeys(("swap_attention", "swap_some"), _MODE)
    | dict.fromkeys(("pieces", "rank_order", "precision", "graphs"), _NO_KEY)
    | dict.fromkeys(("dispatcher", "token_overlap", "fused_products", "user_buffers", "overlaps"), _NO_KEY)
    | {"split_backwards": "its training was not tried under such orders; plan with search.schedule left out"}
)
ROUNDED = frozenset({"zero_1", "zero_2", "zero_2_pipeline"})
_OF_TOML = {
    "whole_sequences": "torchtitan 0.2 divides sequences wherever TP does; plan with search.sequence_parallel [true]"
}
_CHECKED = ("read back: the configuration as written gives the plan that it is said to run",)

_CODE = '''

class PlannedAC(FullAC):
    """Recomputes the layers that the plan recomputes, by their names."""

    @dataclass(kw_only=True, slots=True)
    class Config(FullAC.Config):
        layers: list[str] = field(default_factory=list)

    def _wrap_block(self, module, *, base_fqn=None):
        return super()._wrap_block(module, base_fqn=base_fqn) if base_fqn in self.config.layers else module


def apply(config):
    """The configuration of a registry with the plan in it."""
    for section, values in ((config.parallelism, PARALLELISM), (config.training, TRAINING)):
        for key, value in values.items():
            setattr(section, key, value)
    if PARALLELISM.get("pipeline_parallel_schedule") == "PipelineScheduleMulti":
        config.parallelism.pipeline_parallel_schedule_csv = str(Path(__file__).with_name("schedule.csv"))
    config.activation_checkpoint = PlannedAC.Config(layers=RECOMPUTED) if RECOMPUTED else None
    return config


def planned():
    """The plan alone; in a registry of yours: `return apply(llama3_8b())`."""
    return apply(Trainer.Config())
'''
_IMPORTS = """from dataclasses import dataclass, field
from pathlib import Path

from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.trainer import Trainer

"""


def export_new(plan: Plan, target: Target) -> Exported:
    """`planned.py`, or for 0.2 `plan.toml`, with `schedule.csv` where a class of torch's has not that order.

    Raises PlanError naming what torchtitan cannot run.
    """
    run, sections, recomputed, told = _decide(plan, target)
    header = "".join(f"# {line}\n" for line in (*target.describe(run), *told))
    if target.version == "0.2":
        changes = {(section, key): each for section, values in sections.items() for key, each in values.items()}
        text = (
            header
            + set_toml_values("", {key: each for key, each in changes.items() if each is not None}, TOML).lstrip()
        )
        config = read_document(parse_toml(text, TOML), TOML)
        return _export(run, target, {Path(TOML): text}, config, told)
    kept = {name: {key: each for key, each in values.items() if each is not None} for name, values in sections.items()}
    literals = {PARALLELISM: kept["parallelism"], TRAINING: kept["training"], RECOMPUTED: recomputed}
    text = header + _IMPORTS + "".join(_format(name, value) for name, value in literals.items()) + _CODE
    config = read_literals(kept["parallelism"], kept["training"], recomputed, CODE)
    return _export(run, target, {Path(CODE): text}, config, told)


def _format(name: str, value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{name} = {{\n{''.join(f'    {key!r}: {each!r},' + chr(10) for key, each in value.items())}}}\n"
    return f"{name} = {value!r}\n"


def export_patch(plan: Plan, target: Target, paths: Sequence[Path]) -> Exported:
    """The TOML at the one of `paths` with `plan` in it."""
    (path,) = only(paths, "torchtitan", "its configuration")
    if path.suffix != ".toml":
        raise JobError(f"{path}: a plan is written into a TOML of 0.2; a registry of 0.3 calls apply of a new {CODE}")
    if target.version != "0.2":
        raise JobError(f"{path}: TOMLs are torchtitan 0.2's; say --target-version 0.2")
    run, sections, _, told = _decide(plan, target)
    text = read_exactly(path, "configuration", "TOML")
    before = parse_toml(text, str(path))
    changes = {(section, key): each for section, values in sections.items() for key, each in values.items()}
    needed = {at: each for at, each in changes.items() if each is not None or at[1] in before.get(at[0], {})}
    text = set_toml_values(text, needed, str(path))
    return _export(run, target, {path: text}, read_document(parse_toml(text, str(path)), str(path)), told)


def _export(run: Plan, target: Target, texts: dict[Path, str], config: Config, told: tuple[str, ...]) -> Exported:
    order = write_csv(run) if config.parallelism.get("pipeline_parallel_schedule") == MULTI else None
    (path,) = texts
    again = read_plan(config, str(path), totals_of(run), run.strategy.world_size, order)
    check_decided(again, run, target.job)
    if order is not None:
        texts[path.parent / SCHEDULE] = order
    unchecked = () if target.job else ("without --job: heads, vocabulary and experts are not held against the sizes",)
    how = "" if target.version == "0.2" else "train.py --module planned --config planned, or apply in your registry: "
    notes = [f"{how}start it on {run.strategy.world_size} devices"]
    if order is not None and target.version == "0.2":
        notes.append(f"pipeline_parallel_schedule_csv is {SCHEDULE}: start the training in its folder")
    return Exported(texts, run, told, _CHECKED, unchecked, tuple(notes))


def decide_values(plan: Plan, target: Target) -> dict[str, Any]:
    """The keys that the plan decides, in their sections. Raises PlanError."""
    _, sections, recomputed, _ = _decide(plan, target)
    of_all = len(recomputed) in (0, sum(plan.layers["text"]))
    mode = {"activation_checkpoint": {"mode": "full" if recomputed else "none"}}
    return {**sections, **(mode if of_all else {RECOMPUTED: recomputed})}


def _decide(plan: Plan, target: Target) -> tuple[Plan, dict[str, dict[str, Any]], list[str], tuple[str, ...]]:
    """What the configuration runs, its decided keys by section (None: must not stand there), the layers that run again,
    and sentences for what is rounded."""
    is_toml = target.version == "0.2"
    refuse_features(plan, target.job, {key: why for key, why in REFUSED.items() if not (is_toml and key == "ring")})
    refuse_features(plan, target.job, _OF_TOML if is_toml else {})
    strategy, told = plan.strategy, list[str]()
    towers = [name for name, counts in plan.layers.items() if name != "text" and any(counts)]
    if len(towers) > 1:
        raise PlanError(
            f"plan: it has layers of {' and '.join(towers)}, and torchtitan's models have one vision_encoder; "
            "export --to torch"
        )
    if any(any(counts) for key, counts in plan.recompute.items() if key != "text"):
        raise PlanError("plan: it recomputes encoder layers, and torchtitan recomputes the decoder's alone")
    if strategy.zero in (1, 2):
        strategy = replace(strategy, zero=3, reshard=False)
        told.append(
            f"ZeRO {plan.strategy.zero}: FSDP2 shards weights too and keeps them gathered from forward to backward, so "
            "less is held between steps and weights are gathered in each micro-batch"
        )
    if strategy.zero == 0 and strategy.cp > 1:
        raise PlanError(
            f"plan: ZeRO 0 with CP {strategy.cp}, whose ranks share weights in torchtitan; plan with ZeRO 3"
        )
    if strategy.zero == 3 and strategy.dp * strategy.cp == 1:
        strategy = replace(strategy, zero=0, reshard=True)
    shard = strategy.shard or strategy.dp * strategy.cp if strategy.zero == 3 else 1
    if shard % strategy.cp:
        raise PlanError(
            f"plan: shards of {shard} ranks are no multiple of CP {strategy.cp}; plan with search.shard [0]"
        )
    _check_experts(plan, is_toml)
    _check_schedule(strategy)
    recompute, recomputed = plan.recompute, _name_recomputed(plan)
    if is_toml and recomputed:
        recompute = {**recompute, "text": plan.layers["text"]}
        told += round_recompute(plan, recompute, "torchtitan 0.2 recomputes all layers or none")
    run = replace(plan, strategy=strategy, recompute=recompute)
    kind = strategy.context_kind(target.job.workload) if target.job else strategy.cp_kind
    is_pipeline, steps = strategy.pp > 1, plan.num_microbatches
    parallelism: dict[str, Any] = {
        "data_parallel_replicate_degree": strategy.dp * strategy.cp // shard if strategy.zero == 3 else strategy.dp,
        "data_parallel_shard_degree": shard // strategy.cp if strategy.zero == 3 else 1,
        "fsdp_reshard_after_forward": "always" if strategy.reshard else "never",
        "tensor_parallel_degree": strategy.tp,
        "context_parallel_degree": strategy.cp,
        "expert_parallel_degree": strategy.ep,
        "pipeline_parallel_degree": strategy.pp,
        "module_fqns_per_model_part": _name_parts(plan, is_toml) if is_pipeline else None,
        "pipeline_parallel_schedule": _name_schedule(plan) if is_pipeline else "1F1B",
        "pipeline_parallel_microbatch_size": strategy.mbs if is_pipeline else None,
        "pipeline_parallel_layers_per_stage": None,
    }
    if is_toml:
        parallelism |= {
            "context_parallel_rotate_method": ROTATIONS[kind or "all_gather"] if strategy.cp > 1 else None,
            "expert_tensor_parallel_degree": strategy.expert_tp if strategy.ep > 1 else None,
            "pipeline_parallel_schedule_csv": SCHEDULE if is_pipeline and _name_schedule(plan) == MULTI else None,
        }
    else:
        parallelism["enable_sequence_parallel"] = strategy.sequence_parallel
    training: dict[str, Any] = {
        "local_batch_size": strategy.mbs * steps if is_pipeline else strategy.mbs,
        "global_batch_size": plan.global_batch_size,
        "seq_len": target.job.workload.seq_length if target.job else None,
    }
    sections = {"parallelism": parallelism, "training": training}
    if is_toml:
        sections["activation_checkpoint"] = {"mode": "full" if recomputed else "none"}
    elif is_pipeline:
        training["disable_cuda_graphs"] = True
    if target.version == MAIN:
        if target.job is None:
            raise PlanError(
                f"plan: torchtitan's {MAIN} counts tokens, and the plan's file has no sequence length; give --job"
            )
        length = target.job.workload.seq_length
        sections["parallelism"], sections["training"] = count_tokens(parallelism, training, length)
    return run, sections, recomputed, tuple(told)


def _check_experts(plan: Plan, is_toml: bool) -> None:
    strategy = plan.strategy
    lawful = (1, strategy.tp) if is_toml and strategy.ep > 1 else (1,) if strategy.ep > 1 else (strategy.tp,)
    if strategy.expert_tp not in lawful:
        raise PlanError(
            f"plan: EP {strategy.ep} with ETP {strategy.expert_tp} beside TP {strategy.tp}, and torchtitan has experts "
            f"divided by {' or '.join(map(str, lawful))} there; plan with search.etp {[*lawful]}"
        )


def _check_schedule(strategy: Strategy) -> None:
    fitting = run_with(strategy.vpp)
    if strategy.schedule in fitting:
        return
    several = "one part of the model" if strategy.vpp == 1 else f"{strategy.vpp} parts of the model"
    other = ", or with search.max_vpp 2" if strategy.vpp == 1 and strategy.schedule in run_with(2) else ""
    raise PlanError(
        f"plan: schedule {strategy.schedule} with VPP {strategy.vpp}, and torchtitan runs ranks of {several} under "
        f"{' or '.join(fitting)}; plan with search.schedule [{fitting[0]}]{other}"
    )


def _name_recomputed(plan: Plan) -> list[str]:
    """The decoder layers that run again: the first ones of each part."""
    found, start = [], 0
    for held, again in zip(plan.layers["text"], plan.recompute["text"], strict=True):
        found += [f"layers.{index}" for index in range(start, start + again)]
        start += held
    return found


def _name_parts(plan: Plan, is_toml: bool) -> list[list[str]]:
    """What each part holds, by names in the model."""
    parts, start = [], 0
    for held in plan.layers["text"]:
        parts.append([f"layers.{index}" for index in range(start, start + held)])
        start += held
    parts[0] = [*([VISION] if "vision" in plan.layers else []), "tok_embeddings", *parts[0]]
    parts[-1] += ["norm", "output" if is_toml else "lm_head"]
    return parts


def _name_schedule(plan: Plan) -> str:
    """The class that runs the order, or the one that runs a CSV: with a remainder torch's order is another."""
    strategy = plan.strategy
    whole = plan.num_microbatches % strategy.pp == 0 if strategy.vpp > 1 else plan.num_microbatches >= strategy.pp
    name = SCHEDULES.get(strategy.schedule)
    return name if name and (whole or strategy.schedule == "gpipe") else MULTI


EXPORTER = Exporter(VERSIONS, CODE, export_new, export_patch, ROUNDED, frozenset(REFUSED))
LAUNCHES = (
    patched_launch(
        "a configuration of torchtitan (TOML of 0.2, or a registry of 0.3 or newer)",
        is_config,
        describe_launch,
        read_launch_plan,
        EXPORTER,
        version="0.2",
        takes=("seq_length", "entry", "beside"),
    ),
)
