"""A plan into MindSpeed-MM's two files, and back: model.json says which layers, the launch script which sizes.

The projector follows the last vision layer, the embedding the decoder's first stage and the head its last, by
themselves. What MindSpeed-MM 2.x cannot run is refused here, before a file is written (plan_law.py).
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.files import describe_value, read_document
from mm_autoparallel.integrations.accounting import check_decided
from mm_autoparallel.integrations.export import Export, describe_other_devices, only, read_exactly, write_files
from mm_autoparallel.integrations.framework import Exported, Exporter, PlanFiles, Target
from mm_autoparallel.integrations.launch_script import (
    find_broken_arithmetic,
    find_world_size,
    list_arguments,
    read_launch_script,
)
from mm_autoparallel.integrations.mindspeed_mm import flags
from mm_autoparallel.integrations.mindspeed_mm.arguments import decoder_settings
from mm_autoparallel.integrations.mindspeed_mm.hetero_parallel import (
    as_chain,
    is_hetero,
    list_conditions,
    read_modules,
    set_modules,
    set_switches,
)
from mm_autoparallel.integrations.mindspeed_mm.launch_script import check_switches, read_sizes, set_sizes
from mm_autoparallel.integrations.mindspeed_mm.model_json import (
    SECTIONS,
    place_layers,
    read_model_json,
    read_placement,
)
from mm_autoparallel.integrations.mindspeed_mm.plan_law import WORKLOAD, check_plan, has_frozen_stage
from mm_autoparallel.integrations.mindspeed_mm.refusals import check_dispatcher, check_flags
from mm_autoparallel.integrations.shell_text import LaunchScript
from mm_autoparallel.model.job.mindspeed_mm_law import describe_gradients
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.planner.plan import Plan

_PLAIN = re.compile(r"[\w./@%+=:,-]+")
"""What stands in a shell script as it is, with quotes around it or without."""


def write_plan(
    plan: Plan, model_json_path: Path, launch_script_path: Path, out: Path, overwrite: bool = False
) -> Export:
    """Write model.json and launch script with `plan` in them into the folder `out`, under their own names.

    Everything that the plan does not decide stays byte for byte. The written script trains the written model.json.
    Both files are written or neither, each in one step. overwrite: files that are there
    already, the given ones included, may be replaced.
    Raises JobError where a file is none of MindSpeed-MM's, lacks a flag or would be replaced unasked, PlanError where
    the plan does not fit the model or MindSpeed-MM cannot run it, OSError where `out` cannot be written.
    """
    targets = out / model_json_path.name, out / launch_script_path.name
    texts, told = plan_texts(plan, model_json_path, launch_script_path, *targets)
    write_files(texts, overwrite, dict(zip(targets, (model_json_path, launch_script_path), strict=True)))
    return Export(targets, told)


def plan_texts(
    plan: Plan, model_json_path: Path, launch_script_path: Path, model_target: Path, script_target: Path
) -> tuple[dict[Path, str], tuple[str, ...]]:
    """What `write_plan` writes: the text of each target, and its approximations. Raises as it does, but writes
    nothing."""
    script = read_launch_script(launch_script_path)
    model = _read_model(model_json_path, script)
    check_plan(plan, model, model_json_path, takes_layouts=True)
    check_switches(script.has_flag, plan.strategy, f"launch script {script.path}")
    check_flags(_without_hetero(script), None, f"launch script {script.path}")
    dispatchers = script.values(flags.DISPATCHER)
    document = read_document(model_json_path, "model file")
    check_dispatcher(document, dispatchers[-1].text if dispatchers else None, plan.strategy)
    chain = as_chain(plan, model) if plan.strategy.arrangement else plan
    script = set_sizes(script, plan, has_frozen_stage(chain, model))
    placed = model_json_with_plan(plan, model_json_path)
    if plan.strategy.arrangement:
        script, placed = set_switches(script, plan.strategy), set_modules(placed, plan.strategy)
    script = point_to(script, model_json_path, model_target)
    if model_target == script_target:
        raise JobError(f"model file and launch script are both called {model_target.name}; one folder cannot hold them")
    return {model_target: placed, script_target: script.text}, tuple(_approximations(plan, model, script))


def export_patch(plan: Plan, target: Target, paths: Sequence[Path]) -> Exported:
    """As `export --into model.json script` has it: both files with `plan` in them, read back before they are written.

    Raises as `write_plan` does.
    """
    only(paths, "MindSpeed-MM", "its model.json", "its launch script")
    model, script = sorted(paths, key=lambda path: path.suffix != ".json")
    if target.job and target.job.workload.stack not in ("mindspeed-mm", "mindspeed"):
        stack = target.job.workload.stack
        unchecked: tuple[str, ...] = (f"workload.stack is {stack}, whose predicted step is not that of MindSpeed-MM",)
    else:
        unchecked = () if target.job else ("without --job: the workload's choices stay as the script has them",)
    targets = tuple(path if target.out is None else target.out / path.name for path in (model, script))
    texts, told = plan_texts(plan, model, script, *targets)
    run = _recomputes_most(plan)
    with tempfile.TemporaryDirectory() as folder:
        copies = [Path(folder) / path.name for path in (model, script)]
        for copy, text in zip(copies, texts.values(), strict=True):
            copy.write_text(text, encoding="utf-8")
        check_decided(read_plan_back(copies[0], copies[1], plan.strategy.world_size), plan, None)
    named = dict(zip((model, script), texts.values(), strict=True))
    said = told if run != plan else ()
    notes = () if run != plan else told
    checked = ("read back: both files as written give the plan",)
    return Exported(named, run, said, checked, unchecked, notes)


def _recomputes_most(plan: Plan) -> Plan:
    """What MindSpeed-MM runs by itself: of each modality the largest number of any stage, on every stage."""
    recompute = {
        modality: tuple(min(max(plan.recompute[modality]), held) for held in counts)
        for modality, counts in plan.layers.items()
    }
    return replace(plan, recompute=recompute)


def model_json_with_plan(plan: Plan, model_json_path: Path) -> str:
    """The text of the model.json at `model_json_path` with the plan's layers and recompute; the rest byte for byte.

    Raises JobError where a part does not say how many layers it has: MindSpeed-MM then divides it by no list.
    """
    document = read_document(model_json_path, "model file")
    layers, recompute = dict(plan.layers), dict(plan.recompute)
    for modality in layers:
        part = document
        for key in SECTIONS[modality]:
            part = part[key]
        if "num_layers" not in part:
            raise JobError(
                f"model file {model_json_path}: {'.'.join(SECTIONS[modality])} has no num_layers, behind which a plan "
                f"is written; add it ({sum(layers[modality])} here)"
            )
        if modality in plan.strategy.away:  # whole on every device
            layers[modality], recompute[modality] = (part["num_layers"],), (0,)
    return place_layers(read_exactly(model_json_path), layers, recompute, plan.strategy.pp)


def read_plan_back(model_json_path: Path, launch_script_path: Path, world_size: int | None = None) -> Plan:
    """The plan that the two files train under. world_size: of the training, where the script's is not meant.

    Raises JobError where a size is not known or the world size is known neither here nor there, PlanError where the
    two files do not go together.
    """
    script = read_launch_script(launch_script_path)
    model = _read_model(model_json_path, script)
    check_switches(_without_hetero(script), Strategy(pp=1, tp=1, dp=1, mbs=1), f"launch script {script.path}")
    world_size = find_world_size(script) if world_size is None else world_size
    if world_size is None:
        raise JobError(
            f"launch script {launch_script_path}: how many devices it starts is known only on the machine, and with it "
            "the data parallel size; give the world size"
        )
    found = read_sizes(script, world_size)
    if is_hetero(script):
        document = read_document(model_json_path, "model file")
        strategy, batch = read_modules(script, found, document, model_json_path, world_size)
        layers, recompute = read_placement(model_json_path, model, strategy.pp, 1, whole=strategy.away)
        return Plan(strategy, layers, recompute, batch)
    group = found.sizes["pp"] * found.sizes["tp"] * found.sizes["cp"]
    if world_size % group:
        raise PlanError(
            f"launch script {launch_script_path}: it divides the model among {group} devices (PP x TP x CP), and "
            f"{world_size} devices are no whole number of those"
        )
    sizes = found.sizes
    strategy = Strategy(
        pp=sizes["pp"],
        tp=sizes["tp"],
        dp=world_size // group,
        mbs=found.mbs,
        cp=sizes["cp"],
        ep=sizes["ep"],
        vpp=sizes["vpp"],
        zero=found.zero,
        sequence_parallel=found.sequence_parallel or sizes["tp"] == 1,
        tp_overlap="mc2" if found.fuses_products and found.sequence_parallel and sizes["tp"] > 1 else "",
    )
    if found.global_batch_size % (strategy.dp * strategy.mbs):
        raise PlanError(
            f"launch script {launch_script_path}: the global batch {found.global_batch_size} is no multiple of DP "
            f"{strategy.dp} x MBS {strategy.mbs}"
        )
    layers, recompute = read_placement(model_json_path, model, strategy.pp, strategy.vpp)
    return Plan(strategy, layers, recompute, found.global_batch_size)


def _without_hetero(script: LaunchScript) -> Callable[[str], bool]:
    """What the script passes beside --hetero-parallel, which is read and written for what it is."""
    return lambda flag: flag != flags.HETERO and script.has_flag(flag)


def _read_model(path: Path, script: LaunchScript) -> Model:
    return read_model_json(path, decoder_settings(list_arguments(script, None)))


def point_to(script: LaunchScript, source: Path, target: Path, flag: str = flags.MODEL) -> LaunchScript:
    """The script that names the file at `target` behind `flag` in place of that at `source`.

    Raises JobError where what it names is not known, or a shell would not take the new name as it is.
    """
    if target.resolve() == source.resolve():
        return script
    text = name_target(script.resolve(flag), source, target)
    if not _PLAIN.fullmatch(text):
        raise JobError(
            f"launch script {script.path}: {flag} would have to be {describe_value(text)}, which a shell would take "
            "apart or run; write to a folder whose name has letters, digits and _ . / @ % + = : , - alone"
        )
    return script.set_text(flag, text)


def name_target(named: str, source: Path, target: Path) -> str:
    """What names the file at `target` as `named` names that at `source`.

    Scripts are started in the checkout and name files from there; a target inside it is named the same way.
    """
    if target.resolve() == source.resolve():
        return named
    folder = source.resolve()
    for part in reversed(Path(os.path.normpath(named)).parts):
        folder = folder.parent if folder.name == part else Path(os.sep)
    new = target.resolve()
    inside = folder != Path(os.sep) and new.is_relative_to(folder) and not Path(named).is_absolute()
    return f"./{new.relative_to(folder)}" if inside else str(new)


def _approximations(plan: Plan, model: Model, script: LaunchScript) -> list[str]:
    told = [*filter(None, [describe_gradients(model, WORKLOAD, plan.strategy.of_decoder())])]
    told += list_conditions(plan.strategy) if plan.strategy.arrangement else []
    uneven = [m for m, counts in plan.recompute.items() if len({*counts}) > 1]
    if uneven:
        told.append(
            f"recompute of {' and '.join(uneven)} differs between stages, and MindSpeed-MM knows one number a part: by "
            "itself it recomputes the largest on every stage, which is slower than planned; the plan's own numbers "
            "stand beside it and are set by mm_autoparallel.hooks.mindspeed_mm"
        )
    return told + describe_devices(script, plan)


def describe_devices(script: LaunchScript, plan: Plan) -> list[str]:
    """A sentence for what a person must set or check in `script`, whose devices it works out by itself."""
    told = []
    broken = find_broken_arithmetic(script)
    if broken:
        told.append(
            f"{broken}; what it should come to stands as a number behind {flags.GLOBAL_BATCH}: check the shell's "
            "arithmetic before training"
        )
    return told + describe_other_devices(find_world_size(script), plan.strategy.world_size)


_REFUSED = frozenset(
    (
        *("partial_group", "gpipe", "low_memory_chunks", "split_backwards", "pieces"),
        *("ring", "all_to_all", "all_gather", "hierarchical"),
        *("whole_experts", "dispatcher", "token_overlap", "zero_2", "zero_3", "zero_2_pipeline", "zero_3_pipeline"),
        *("kept_weights", "shards", "selective_all", "selective_some", "activation", "offload", "recompute_offload"),
        *("swap_attention", "swap_some", "optimizer_offload", "rank_order", "precision", "graphs", "user_buffers"),
    )
)
PLAN_FILES = PlanFiles("model.json", write_plan, read_plan_back)
EXPORTER = Exporter(
    ("2.x",),
    "model.json pretrain.sh",
    None,
    export_patch,
    frozenset({"recompute_stages"}),
    _REFUSED,
    by_module="2.x",
)
