"""A plan of torch FSDP2 into a launch's files, and back: batches and CP as flags, the rest in fsdp2_config.yaml.

The flags stand in the launch script, or under gpt_args of the one YAML that has them in its place. What a model
recomputes whatever files say (Sharding.all_or_none) stays, and a sentence says so.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.files import read_document, write_text_atomically
from mm_autoparallel.integrations.export import Export, write_files
from mm_autoparallel.integrations.launch_script import list_arguments
from mm_autoparallel.integrations.mindspeed_mm import flags
from mm_autoparallel.integrations.mindspeed_mm.arguments import (
    find_argument,
    find_count,
    find_size,
    find_switch,
    key_of,
)
from mm_autoparallel.integrations.mindspeed_mm.fsdp2_config import (
    CONFIG_PATH,
    RECOMPUTE,
    RESHARD,
    Sharding,
    find_config,
    find_sharding,
    keeps,
    read_sharding,
)
from mm_autoparallel.integrations.mindspeed_mm.gpt_yaml import config_arguments
from mm_autoparallel.integrations.mindspeed_mm.launch_script import set_batches
from mm_autoparallel.integrations.mindspeed_mm.plan_files import describe_devices, name_target, point_to
from mm_autoparallel.integrations.mindspeed_mm.trained_model import model_section
from mm_autoparallel.integrations.mindspeed_mm_fsdp.module_patterns import name_layers
from mm_autoparallel.integrations.yaml_text import KeyPath, set_file_values
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.planner.plan import Plan

if TYPE_CHECKING:
    from mm_autoparallel.integrations.mindspeed_mm.script_files import Launch

_WHAT = "configuration"


def read_sharded_plan(launch: Launch, model: Model, devices: int | None) -> Plan:
    """The plan that the launch trains under by itself. Raises JobError or PlanError where that is unknown."""
    if devices is None:
        raise JobError(
            f"launch script {launch.script.path}: how many devices it starts is known only on the machine; say it"
        )
    return _form_plan(launch.arguments, find_launch_sharding(launch, devices), model, devices, launch)


def find_launch_sharding(launch: Launch, devices: int | None) -> Sharding:
    """What the launch's fsdp2_config.yaml says. Raises JobError as find_sharding does."""
    return find_sharding(launch.arguments, _model_id(launch), launch.find, devices)


def list_targets(launch: Launch, out: Path) -> tuple[Path, Path]:
    """What write_sharded_plan writes into `out`: the file with the flags, and that with what is sharded."""
    return (
        out / (launch.config or launch.script.path).name,
        out / find_config(launch.arguments, launch.find).name,
    )


def write_sharded_plan(plan: Plan, model: Model, launch: Launch, out: Path, overwrite: bool) -> Export:
    """Write launch script or YAML, and fsdp2_config.yaml, with `plan` in them into the folder `out`.

    Both are written or neither; all that the plan does not decide stays byte for byte. overwrite: files that are there
    already may be replaced. Raises JobError where a file cannot be edited or would be replaced unasked, PlanError where
    FSDP2 cannot run the plan, OSError where `out` cannot be written.
    """
    strategy = plan.strategy
    sizes = {name: getattr(strategy, name) for name in ("dp", "mbs", "cp", "reshard")}
    if strategy != Strategy(pp=1, tp=1, zero=3, **sizes) or any(plan.modes.values()):
        said = (f"PP {strategy.pp}", f"TP {strategy.tp}", f"EP {strategy.ep}", f"ZeRO {strategy.zero}")
        raise PlanError(
            f"plan: {', '.join((*said, *strategy.choices, *plan.modes_used))}: FSDP2 shards weights among all devices "
            "(ZeRO 3), recomputes whole layers and runs beside none of the others; plan the launch script"
        )
    devices = strategy.world_size
    sharding = find_launch_sharding(launch, devices)
    target, sharding_target = list_targets(launch, out)
    told = _list_told(plan, model, sharding)
    sharding_text = set_file_values(sharding.path, _WHAT, _list_sharding_changes(plan, model, sharding, told))
    if launch.config is None:
        source = launch.script.path
        script = point_to(set_batches(launch.script, plan), sharding.path, sharding_target, CONFIG_PATH)
        text, arguments = script.text, list_arguments(script, devices)
        told += describe_devices(script, plan)
    else:
        source = launch.config
        text = set_file_values(source, _WHAT, _list_flag_changes(plan, launch, sharding.path, sharding_target))
        arguments = _arguments_of(text)
        if target.resolve() != source.resolve():
            told.append(f"the launch script names {source}; let it name {target}")
    _check_written(arguments, sharding_text, plan, model, sharding, launch)
    write_files(
        {target: text, sharding_target: sharding_text}, overwrite, {target: source, sharding_target: sharding.path}
    )
    return Export((target, sharding_target), tuple(told))


def _model_id(launch: Launch) -> object:
    path = launch.find(find_argument(launch.arguments, flags.MODEL) or "")
    return model_section(read_document(path, "model file"), path).get("model_id")


def _form_plan(arguments: Sequence[str], sharding: Sharding, model: Model, devices: int, launch: Launch) -> Plan:
    where = f"launch script {launch.script.path}"
    sizes = {name: find_size(arguments, flag) for flag, name in flags.SIZES.items()}
    cp, mbs, batch = (
        sizes.pop("cp"),
        find_count(arguments, flags.MICRO_BATCH),
        find_count(arguments, flags.GLOBAL_BATCH),
    )
    divided = {name: size for name, size in sizes.items() if size > 1}
    if divided:
        said = " and ".join(f"{name.upper()} {size}" for name, size in divided.items())
        raise PlanError(f"{where}: it trains with {said} beside FSDP2, which runs with none of them")
    if devices % cp or batch % (devices // cp * mbs):
        raise PlanError(
            f"{where}: {devices} devices and a global batch of {batch} are no whole number of CP {cp} and of the "
            f"samples of their data parallel ranks at MBS {mbs}"
        )
    strategy = Strategy(pp=1, tp=1, dp=devices // cp, mbs=mbs, cp=cp, zero=3, reshard=sharding.reshard)
    paths = sharding.list_paths(model)
    layers = {modality.name: (modality.layers.num_layers,) for modality in model.modalities}
    recompute = {modality.name: (sharding.count_recomputed(modality, paths),) for modality in model.modalities}
    return Plan(strategy, layers, recompute, batch)


def _list_told(plan: Plan, model: Model, sharding: Sharding) -> list[str]:
    """What recomputes otherwise than planned."""
    if sharding.all_or_none is None:
        return []
    paths = sharding.list_paths(model)
    other = [m.name for m in model.modalities if plan.recompute[m.name][0] != sharding.count_recomputed(m, paths)]
    other = [m.name for m in model.modalities if m.name in other and keeps(m)]
    if not other:
        return []
    names = " and ".join(other)
    if sharding.all_or_none:
        return [
            f"the plan recomputes not all layers of {names}, and this model recomputes all of them under FSDP2: steps "
            "are longer and peaks lower than planned"
        ]
    return [f"the plan recomputes layers of {names}, and {sharding.path} names classes, none of which recomputes"]


def _list_sharding_changes(plan: Plan, model: Model, sharding: Sharding, told: list[str]) -> dict[KeyPath, Any]:
    changes: dict[KeyPath, Any] = {}
    if plan.strategy.reshard != sharding.reshard:
        changes[RESHARD,] = plan.strategy.reshard
    paths = sharding.list_paths(model)
    if sharding.all_or_none is not None or all(
        plan.recompute[m.name][0] == sharding.count_recomputed(m, paths) for m in model.modalities if keeps(m)
    ):
        return changes
    planned: list[str] = []
    ours = [paths[m.name] for m in model.modalities if keeps(m) and m.name in paths]
    for modality in model.modalities:
        name, count = modality.name, plan.recompute[modality.name][0]
        if not keeps(modality) or not count:
            continue
        if name not in paths:
            raise PlanError(
                f"{sharding.path}: the plan recomputes {count} {name} layers, and no pattern of the file names their "
                f"list; put it into sub_modules_to_wrap, as in {name}.layers.{{*}}"
            )
        planned += name_layers(paths[name], count, modality.layers.num_layers)
    inside = [p for p in sharding.recompute if any(p.startswith(f"{path}.") for path in ours)]
    parts = [p for p in inside if "." in p.split("}", 1)[-1]]
    if parts:
        told.append(f"{RECOMPUTE} named {', '.join(parts)}, no whole layers; the plan's layers are in their place")
    changes[RECOMPUTE,] = [*(p for p in sharding.recompute if p not in inside), *planned]
    return changes


def _list_flag_changes(plan: Plan, launch: Launch, source: Path, target: Path) -> dict[KeyPath, Any]:
    """Of the YAML that has the launch's flags under gpt_args."""
    strategy = plan.strategy
    named = find_argument(launch.arguments, CONFIG_PATH) or ""
    values = {flags.MICRO_BATCH: strategy.mbs, flags.GLOBAL_BATCH: plan.global_batch_size, flags.CONTEXT: strategy.cp}
    changes: dict[KeyPath, Any] = {
        ("gpt_args", key_of(flag)): value
        for flag, value in values.items()
        if value != 1 or find_switch(launch.arguments, flag)
    }
    return changes | {("gpt_args", key_of(CONFIG_PATH)): name_target(named, source, target)}


def _arguments_of(text: str) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "written.yaml"
        write_text_atomically(copy, text)
        return config_arguments(copy)


def _check_written(
    arguments: Sequence[str], sharding_text: str, plan: Plan, model: Model, sharding: Sharding, launch: Launch
) -> None:
    """What was written is read back, because a person will train with it for weeks."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / sharding.path.name
        write_text_atomically(copy, sharding_text)
        written = read_sharding(copy, _model_id(launch), plan.strategy.world_size)
    devices = plan.strategy.world_size
    found = _form_plan(arguments, written, model, devices, launch)
    wanted = {m.name: plan.recompute[m.name] if keeps(m) else (0,) for m in model.modalities}
    recompute = found.recompute if sharding.all_or_none is not None else wanted
    if (found.strategy, found.recompute, found.global_batch_size) != (plan.strategy, recompute, plan.global_batch_size):
        raise JobError(
            f"launch script {launch.script.path}: with the plan in its files it would train {found.strategy} with "
            f"{dict(found.recompute)} recomputed, and not {plan.strategy} with {dict(recompute)}; write shared values "
            "out"
        )
