"""A launch script and the files that it names, as `plan --script` reads and writes them, wherever the checkout lies.

Scripts are started in the checkout and name files from there. It is looked for from the script's folder upwards, then
in the working directory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

from mm_autoparallel.errors import JobError
from mm_autoparallel.files import describe_value, is_folder, is_there, read_document
from mm_autoparallel.integrations.described import Described, Given
from mm_autoparallel.integrations.export import Export
from mm_autoparallel.integrations.framework import LaunchKind
from mm_autoparallel.integrations.launch_script import (
    SUFFIXES,
    WORLD,
    find_broken_arithmetic,
    find_devices,
    find_world_size,
    list_arguments,
    read_launch_script,
)
from mm_autoparallel.integrations.mindspeed_mm import flags
from mm_autoparallel.integrations.mindspeed_mm.arguments import decoder_settings, find_argument, find_switch
from mm_autoparallel.integrations.mindspeed_mm.gpt_yaml import (
    config_arguments,
    read_gpt_yaml,
    write_gpt_yaml,
)
from mm_autoparallel.integrations.mindspeed_mm.hetero_parallel import count_ranks
from mm_autoparallel.integrations.mindspeed_mm.launch import FSDP, describe_arguments
from mm_autoparallel.integrations.mindspeed_mm.plan_files import read_plan_back, write_plan
from mm_autoparallel.integrations.mindspeed_mm.refusals import entry_reason
from mm_autoparallel.integrations.mindspeed_mm.sharded_files import list_targets, read_sharded_plan, write_sharded_plan
from mm_autoparallel.integrations.mindspeed_mm.trained_model import read_trained_model
from mm_autoparallel.integrations.shell_text import LaunchScript
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.planner.plan import Plan

_OF_THE_PACKAGE = {
    "mindspeed_mm/fsdp": "is a trainer with FSDP and a YAML of its own",
    "mindspeed_mm/mcore": "trains another model than Qwen3.5, from a YAML of its own",
}
"""Trainers inside the package, which `entry_reason` does not know by their file's name."""

_QWEN3_5 = "mindspeed_mm/mcore/models/qwen3_5/pretrain_qwen3_5.py"

_LAYERS = "--num-layers"
_AS_MEGATRON = "; where {} trains a decoder as Megatron-LM's pretrain_gpt.py does, --from megatron-core reads it"
PLANNED = "pretrain_vlm.py and its like (pretrain_internvl.py, pretrain_transformers.py, pretrain_qwen3_5.py)"


@dataclass(frozen=True)
class Launch:
    """A launch script and what it passes: `arguments` of each process, and a YAML `config` that has them in its place.

    find: the path here of a path that the script names.
    """

    script: LaunchScript
    entry: str
    config: Path | None
    arguments: tuple[str, ...]
    find: Callable[[str], Path]


def read_launch(path: Path, world_size: int | None) -> Launch:
    """The launch in the script at `path`. world_size: devices that are meant, None for those that it starts itself.

    Raises JobError where it starts no training that can be planned, or names a file that is not there.
    """
    script = read_launch_script(path)
    started = script.started()
    if started is None:
        raise JobError(
            f"launch script {path}: it starts no Python file with torchrun, msrun or python; give the script that "
            f"starts the training, as {PLANNED} of MindSpeed-MM"
        )
    entry, config = started
    line = script.line(entry.start)
    inside = next(
        (what for folder, what in _OF_THE_PACKAGE.items() if entry.text.startswith(folder) and entry.text != _QWEN3_5),
        None,
    )
    what = entry_reason(entry.text) or inside
    if what:
        raise JobError(f"launch script {path}: line {line} starts {entry.text}, which {what}; planned are {PLANNED}")
    find = _finder(path, entry.text)
    known = world_size if world_size is not None else find_world_size(script)
    launch = Launch(script, entry.text, None, tuple(list_arguments(script, known)), find)
    if config is not None:
        config_path = find(config)
        launch = replace(launch, config=config_path, arguments=tuple(config_arguments(config_path)))
    elif not script.has_flag(flags.MODEL):
        raise JobError(
            f"launch script {path}: line {line} starts {entry.text}, and neither {flags.MODEL} nor a YAML is behind "
            f"it, so it is no training of MindSpeed-MM that can be planned; planned are {PLANNED}"
            + (_AS_MEGATRON.format(PurePath(entry.text).name) if script.has_flag(_LAYERS) else "")
        )
    else:
        _check_batch(script, known)
    return launch


def describe_script(path: Path, given: Given) -> Described:
    """Model, workload and search space of the training that the script at `path` starts. Raises JobError."""
    launch = read_launch(path, given.world_size)
    arguments = launch.arguments
    hetero = launch.config is None and find_switch(arguments, flags.HETERO)
    if hetero:  # what the search may do too, and what counts the batch otherwise
        arguments = tuple(word for word in arguments if word != flags.HETERO)
    described = describe_arguments(arguments, given, launch.find, flags="")
    notes = [*described.notes, *launch.script.doubts()]
    if hetero:
        model_json = _model_json(launch)
        num_ranks = count_ranks(read_document(model_json, "model file"), model_json)
        batch = int(str(described.workload["global_batch_size"])) // num_ranks
        described = replace(
            described,
            workload={**described.workload, "global_batch_size": batch},
            search={**described.search, "layouts": ["chain", "colocated"]},
        )
        notes.append(
            f"{flags.GLOBAL_BATCH} counts every device as a replica of the decoder, which {flags.HETERO} gives "
            f"{num_ranks}: a step has {batch} samples"
        )
    broken = find_broken_arithmetic(launch.script)
    if broken:
        notes.append(
            f"launch script {path}: {broken}, so the shell cannot work out what depends on {WORLD}; the global "
            f"batch is taken as meant, {described.workload['global_batch_size']}"
        )
    return replace(described, world_size=find_world_size(launch.script), notes=tuple(notes))


def read_script_plan(path: Path, given: Given) -> Plan:
    """The plan that the script at `path` trains under by itself. Raises JobError or PlanError where that is unknown."""
    launch = read_launch(path, given.world_size)
    if find_switch(launch.arguments, FSDP):
        return read_sharded_plan(launch, sharded_model(path, given), given.world_size or find_world_size(launch.script))
    if launch.config is not None:
        devices = given.world_size or find_world_size(launch.script)
        if devices is None:
            raise JobError(f"launch script {path}: how many devices it starts is known only on the machine; say it")
        return read_gpt_yaml(launch.arguments, _config_model(launch.config), launch.config, devices)
    return read_plan_back(_model_json(launch), path, given.world_size)


def write_script_plan(plan: Plan, path: Path, out: Path, given: Given, overwrite: bool) -> Export:
    """Write the script at `path` and its model.json with `plan` in them into `out`, or the one YAML that has all; under

    FSDP2 the script or YAML and its fsdp2_config.yaml. Raises as write_plan, write_gpt_yaml and write_sharded_plan do.
    """
    launch = read_launch(path, plan.strategy.world_size)
    if find_switch(launch.arguments, FSDP):
        model = sharded_model(path, replace(given, world_size=plan.strategy.world_size))
        return write_sharded_plan(plan, model, launch, out, overwrite)
    if launch.config is not None:
        return write_gpt_yaml(plan, _config_model(launch.config), launch.config, out, overwrite)
    return write_plan(plan, _model_json(launch), path, out, overwrite)


def planned_files(path: Path, out: Path, given: Given) -> tuple[Path, ...]:
    """What write_script_plan would write for the script at `path` into `out`."""
    launch = read_launch(path, given.world_size)
    if find_switch(launch.arguments, FSDP):
        return list_targets(launch, out)
    if launch.config is not None:
        return (out / launch.config.name,)
    return (out / _model_json(launch).name, out / path.name)


def sharded_model(path: Path, given: Given) -> Model:
    """The model that the script trains. Raises JobError where files do not say its sizes."""
    launch = read_launch(path, given.world_size)
    named = launch.find(find_argument(launch.arguments, flags.MODEL) or "")
    _, model = read_trained_model(named, decoder_settings(launch.arguments), given.model_config, launch.find)
    return model


def _config_model(config: Path) -> Model:
    """The model whose sizes the YAML `config` has. Raises JobError where it names a folder that has them."""
    _, model = read_trained_model(config, {})
    return model


def _model_json(launch: Launch) -> Path:
    return launch.find(find_argument(launch.arguments, flags.MODEL) or "")


def _finder(path: Path, entry: str) -> Callable[[str], Path]:
    """The path here of a path that the script at `path` names. Raises JobError for placeholders and missing files."""
    folders = [*path.resolve().parents, Path.cwd()]
    root = next((folder for folder in folders if is_there(folder / entry)), None)
    if root is not None and not is_folder(root / "mindspeed_mm"):
        raise JobError(
            f"launch script {path}: it starts {entry}, which is in {root}, and no folder mindspeed_mm is beside it: "
            "that is no checkout of MindSpeed-MM"
        )

    def find(named: str) -> Path:
        if "<" in named or "$" in named:
            raise JobError(
                f"launch script {path}: it names {describe_value(named)}, which is no path until somebody fills it in"
            )
        if Path(named).is_absolute():
            return Path(named)
        return next((folder / named for folder in folders if is_there(folder / named)), Path(named))

    return find


def _check_batch(script: LaunchScript, world_size: int | None) -> None:
    """Raises JobError where the global batch has no number, which most scripts work out from their devices."""
    known = {} if world_size is None else {WORLD: world_size}
    for word in script.values(flags.GLOBAL_BATCH):
        if "$" in word.text and script.evaluate(word.text, known) is None:
            raise JobError(
                f"launch script {script.path}: line {script.line(word.start)} gives {flags.GLOBAL_BATCH} the value "
                f"{word.text}, whose number cannot be told from the script"
                + ("; say how many devices it starts with --nnodes and --nproc-per-node" if not known else "")
            )


LAUNCHES = (
    LaunchKind(
        title="a launch script of MindSpeed-MM (.sh)",
        is_one=lambda path: path.suffix in SUFFIXES,
        find_devices=lambda path: find_devices(read_launch_script(path)),
        describe=describe_script,
        read_plan=read_script_plan,
        planned_files=planned_files,
        write_plan=write_script_plan,
        asked_last=True,
    ),
)
