"""A plan into the YAML of MindSpeed-MM's FSDP trainer, and back.

Written are the values that the plan decides; comments, anchors, order and quoting stay byte for byte. What the written
file trains is read back and compared before it is there.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.files import write_text_atomically
from mm_autoparallel.integrations.export import Export, describe_other_devices, write_files
from mm_autoparallel.integrations.mindspeed_mm_fsdp.describe import list_paths
from mm_autoparallel.integrations.mindspeed_mm_fsdp.launch import find_checkout, read_launch
from mm_autoparallel.integrations.mindspeed_mm_fsdp.llm_yaml import rename
from mm_autoparallel.integrations.mindspeed_mm_fsdp.module_patterns import count_layers, list_of, name_layers
from mm_autoparallel.integrations.mindspeed_mm_fsdp.trainer_yaml import (
    WHAT,
    Trainer,
    read_trainer,
    value_at,
)
from mm_autoparallel.integrations.yaml_text import KeyPath, set_file_values
from mm_autoparallel.model.job.model import Decoder, Modality, Model
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.planner.plan import Plan

_OFFLOAD = "recompute_offload"
_MODES = ("recompute", _OFFLOAD)


def write_plan(plan: Plan, model: Model, path: Path, out: Path, overwrite: bool = False) -> Export:
    """Write the trainer's YAML with `plan` in it into the folder `out`, under its own name.

    path: the launch script, or the YAML. model: what the YAML trains (describe). overwrite: a file that is there
    already, the given one included, may be replaced.
    Raises JobError where a file cannot be read or would be replaced unasked, PlanError where the trainer cannot run the
    plan, OSError where `out` cannot be written.
    """
    launch = read_launch(path)
    text, told = yaml_with_plan(plan, model, launch.yaml_path, launch.checkout)
    target = out / launch.yaml_path.name
    told += describe_other_devices(launch.world_size, plan.strategy.world_size)
    if target.resolve() != launch.yaml_path.resolve():
        told.append(f"the launch script names {launch.yaml_path}; let it name {target} to train under the plan")
    write_files({target: text}, overwrite)
    return Export((target,), tuple(told))


def yaml_with_plan(plan: Plan, model: Model, yaml_path: Path, checkout: Path | None = None) -> tuple[str, list[str]]:
    """The text of the trainer's YAML with the plan in it, and a sentence for what a person must know of it.

    Raises as write_plan does.
    """
    trainer = read_trainer(yaml_path, checkout or find_checkout(yaml_path))
    _check_plan(plan, trainer)
    told: list[str] = []
    changes = _list_sizes(plan, trainer) | _list_modules(plan, trainer, model, told)
    if trainer.layout.of_llm:
        changes = rename(changes, f"{WHAT} {trainer.path}")
    text = set_file_values(yaml_path, WHAT, changes)
    _check_written(text, plan, model, trainer, checkout or find_checkout(yaml_path))
    return text, told


def read_plan_back(path: Path, model: Model, world_size: int | None = None) -> Plan:
    """The plan that the trainer's YAML runs. path: the launch script, or the YAML. world_size: of the training, where

    the script's is not meant. Raises JobError where a file cannot be read or the world size is known neither here nor
    there, PlanError where the trainer would refuse its sizes.
    """
    launch = read_launch(path)
    devices = world_size or launch.world_size
    if devices is None:
        raise JobError(f"{WHAT} {launch.yaml_path}: how many devices train is not known from it; give the world size")
    return _form_plan(read_trainer(launch.yaml_path, launch.checkout), model, devices)


def _form_plan(trainer: Trainer, model: Model, devices: int) -> Plan:
    """The law is that of params/parallel_args.py and distributed/parallel_state.py."""
    where, cp, shard, ep = f"{WHAT} {trainer.path}", trainer.cp, trainer.shard or devices, trainer.ep
    if trainer.layout.of_llm and shard != devices:
        raise PlanError(
            f"{where}: fsdp_size is {shard}, and MindSpeed-LLM's trainer asks that all {devices} devices share one copy"
        )
    if shard == 1 < devices and not trainer.section("training").flag("init_model_with_meta_device", False):
        raise PlanError(
            f"{where}: fully_shard_parallel_size 1 without init_model_with_meta_device trains whole copies in DDP, "
            "which is not planned; auto shards the model over all devices"
        )
    if devices % cp:
        raise PlanError(f"{where}: {devices} devices are no whole number of the {cp} that share a sequence")
    if devices % shard or shard % cp:
        raise PlanError(
            f"{where}: fully_shard_parallel_size {shard} must divide the {devices} devices and be a multiple of the "
            f"{cp} that share a sequence"
        )
    dealt = ep if trainer.expert_modules else 1
    expert_shard = trainer.expert_shard or devices // dealt
    if dealt > 1 and dealt * expert_shard != devices:
        raise PlanError(
            f"{where}: expert_parallel_size {ep} x expert_fully_shard_parallel_size {expert_shard} is not the "
            f"{devices} devices; the trainer sums no gradients over further copies of experts"
        )
    strategy = Strategy(
        pp=1,
        tp=1,
        dp=devices // cp,
        mbs=trainer.mbs,
        cp=cp,
        ep=dealt,
        zero=3,
        reshard=trainer.reshard,
        shard=0 if shard == devices else shard,
        cp_kind=("ring" if trainer.ring > 1 else "all_to_all") if cp > 1 else "",
    )
    layers, recompute, modes = {}, {}, {}
    paths = list_paths(trainer, model)
    for modality in model.modalities:
        name, num_layers = modality.name, modality.layers.num_layers
        counted = name in paths and _keeps(modality)
        rerun = count_layers(trainer.recompute, paths[name], num_layers) if counted else 0
        moved = count_layers(trainer.offload, paths[name], num_layers) if counted else 0
        both = min(rerun, moved)
        layers[name], recompute[name] = (num_layers,), (rerun - both,)
        if both:
            modes[name] = {_OFFLOAD: (both,)}
    return Plan(strategy, layers, recompute, trainer.mbs * trainer.accumulation * strategy.dp, modes=modes)


def _keeps(modality: Modality) -> bool:
    """Whether its layers keep anything for a backward: those of frozen encoders do not, and recompute nothing."""
    return isinstance(modality, Decoder) or not modality.freeze


# -------------------------------------------------------------------------------------------------------------- changes


def _check_plan(plan: Plan, trainer: Trainer) -> None:
    """What the trainer cannot run."""
    strategy, where = plan.strategy, f"{WHAT} {trainer.path}"
    if (strategy.pp, strategy.tp, strategy.zero) != (1, 1, 3):
        raise PlanError(
            f"{where}: the plan has PP {strategy.pp}, TP {strategy.tp} and ZeRO {strategy.zero}; the trainer shards "
            "weights (ZeRO 3) and has neither pipeline nor tensor parallelism"
        )
    if strategy.ep > 1 and not trainer.expert_modules:
        raise PlanError(
            f"{where}: the plan has EP {strategy.ep}, and parallel.ep_plan.apply_modules names no experts, so the "
            "trainer would deal none out; name them there"
        )
    if strategy.optimizer_offload:
        raise PlanError(f"{where}: the plan keeps the optimizer on the host; plan without optimizer_offload")
    if strategy.precision not in ("", "bf16"):
        raise PlanError(f"{where}: the plan multiplies in {strategy.precision}; the trainer runs bf16 alone")
    other = next((mode for mode in plan.modes_used if mode not in _MODES), None)
    if other:
        raise PlanError(f"{where}: layers run in the mode {other}; the trainer knows {' and '.join(_MODES)} alone")


def _list_sizes(plan: Plan, trainer: Trainer) -> dict[KeyPath, Any]:
    """Values of sizes and batches that differ from what the trainer has now."""
    strategy, document = plan.strategy, trainer.document
    devices, kind = strategy.world_size, strategy.cp_kind or "all_to_all"
    wanted: dict[KeyPath, Any] = {}

    def want(path: KeyPath, now: object, value: object) -> None:
        if now != value:
            wanted[path] = value

    if trainer.shard not in (strategy.shard, devices if not strategy.shard else -1):
        whole = devices if trainer.layout.of_llm else "auto"
        wanted["parallel", "fully_shard_parallel_size"] = strategy.shard or whole
    want(("parallel", "ulysses_parallel_size"), trainer.ulysses, strategy.cp if kind == "all_to_all" else 1)
    want(("parallel", "ring_attention_size"), trainer.ring, strategy.cp if kind == "ring" else 1)
    want(("parallel", "expert_parallel_size"), trainer.ep, strategy.ep)
    if trainer.expert_shard and (strategy.ep > 1 or devices % trainer.expert_shard):
        key = ("parallel", "expert_fully_shard_parallel_size")
        want(key, trainer.expert_shard, devices // strategy.ep)
    if value_at(document, ("parallel", "data_parallel_size")) is not None:
        want(("parallel", "data_parallel_size"), document["parallel"]["data_parallel_size"], strategy.dp)
    want(("parallel", "fsdp_plan", "reshard_after_forward"), trainer.reshard, strategy.reshard)
    want(("training", "micro_batch_size"), trainer.mbs, strategy.mbs)
    want(("training", "gradient_accumulation_steps"), trainer.accumulation, plan.num_microbatches)
    return wanted


def _list_modules(plan: Plan, trainer: Trainer, model: Model, told: list[str]) -> dict[KeyPath, Any]:
    """Patterns of what recomputes and what is offloaded, and their switches, where they differ from now."""
    layout, paths = trainer.layout, list_paths(trainer, model)
    rerun: list[str] = []
    moved: list[str] = []
    for modality in model.modalities:
        name, num_layers = modality.name, modality.layers.num_layers
        if not _keeps(modality):  # what the file says of them changes nothing and stays
            rerun += [pattern for pattern in trainer.recompute if list_of(pattern) == paths.get(name)]
            moved += [pattern for pattern in trainer.offload if list_of(pattern) == paths.get(name)]
            continue
        moved_count = plan.modes.get(name, {}).get(_OFFLOAD, (0,))[0]
        rerun_count = plan.recompute[name][0] + moved_count
        if not rerun_count:
            continue
        if name not in paths:
            raise PlanError(
                f"{WHAT} {trainer.path}: the plan recomputes {rerun_count} {name} layers, and no pattern of the YAML "
                f"names their list; put it into parallel.fsdp_plan.apply_modules, as in model.{name}.layers.{{*}}"
            )
        rerun += name_layers(paths[name], rerun_count, num_layers)
        moved += name_layers(paths[name], moved_count, num_layers)
    changes: dict[KeyPath, Any] = {}
    partial = [pattern for pattern in trainer.recompute if list_of(pattern) not in paths.values()]
    if partial and sorted(trainer.recompute) != sorted(rerun):
        told.append(f"recompute_plan named {', '.join(partial)}, no whole layers; the plan's layers are in their place")
    if sorted(trainer.recompute) != sorted(rerun):
        changes[layout.recompute] = bool(rerun)
        if rerun:
            changes[layout.recompute_modules] = rerun
    if sorted(trainer.offload) != sorted(moved):
        if layout.offload_switch:
            changes[layout.offload_switch] = bool(moved)
        if moved or not layout.offload_switch:
            changes[layout.offload_modules] = moved
    if rerun:
        section = trainer.section("model")
        skipped = [key for key in section.content if key.startswith("skip_") and key.endswith("_recompute")]
        skipped = [key for key in skipped if section.flag(key, False)]
        changes |= {("model", key): False for key in skipped}
        if skipped:
            told.append(
                f"{', '.join(skipped)} set to false: the plan counts a recomputed layer as one that keeps its input "
                "alone; with them steps are shorter and peaks higher than planned"
            )
    return changes


def _check_written(text: str, plan: Plan, model: Model, trainer: Trainer, checkout: Path | None) -> None:
    """Read back what was written; a difference is none that a person could mend."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "written.yaml"
        write_text_atomically(copy, text)
        found = _form_plan(read_trainer(copy, checkout, trainer.path), model, plan.strategy.world_size)
    expected = Plan(plan.strategy, plan.layers, plan.recompute, plan.global_batch_size, modes=_nonzero(plan.modes))
    if _figures(found) != _figures(expected):
        raise JobError(
            f"{WHAT} {trainer.path}: with the plan in it, it would train {_figures(found)} and not "
            f"{_figures(expected)}; its anchors or merged mappings share values that the plan needs apart: write out"
        )


def _nonzero(modes: Mapping[str, Mapping[str, tuple[int, ...]]]) -> dict[str, dict[str, tuple[int, ...]]]:
    kept = {name: {mode: counts for mode, counts in held.items() if any(counts)} for name, held in modes.items()}
    return {name: held for name, held in kept.items() if held}


def _figures(plan: Plan) -> tuple[object, ...]:
    strategy = plan.strategy
    sizes = (strategy.dp, strategy.mbs, strategy.cp, strategy.ep, strategy.reshard, strategy.shard)
    return (*sizes, plan.global_batch_size, dict(plan.layers), dict(plan.recompute), _nonzero(plan.modes))
