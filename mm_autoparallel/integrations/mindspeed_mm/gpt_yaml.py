"""A plan into the one YAML of a training that has its arguments under gpt_args, and back.

A model under mindspeed_mm/mcore is built from two configurations, of the arguments and of its own section, and both
name the parallel sizes (qwen35_config.py); what differs between them ends in an error of Megatron. Recompute is
Megatron's `block`: the first layers of a stage, in the section of each part.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.files import describe_value, read_document, write_text_atomically
from mm_autoparallel.integrations.export import Export, write_files
from mm_autoparallel.integrations.megatron_core.flags import overlap_switches
from mm_autoparallel.integrations.mindspeed_mm import flags
from mm_autoparallel.integrations.mindspeed_mm.arguments import (
    as_mapping,
    find_count,
    find_size,
    find_switch,
    flag_of,
    key_of,
)
from mm_autoparallel.integrations.mindspeed_mm.plan_law import check_plan
from mm_autoparallel.integrations.yaml_text import KeyPath, set_file_values
from mm_autoparallel.model.job.model import Encoder, Model
from mm_autoparallel.model.job.overlaps import AS_SAID
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.readers.foreign import Section
from mm_autoparallel.model.readers.megatron_choices import read_megatron_choices
from mm_autoparallel.planner.plan import Plan

WHAT = "configuration"
_PARTS: dict[str, tuple[str, ...]] = {
    "vision": ("model", "image_encoder", "vision_encoder"),
    "text": ("model", "text_decoder"),
}
"""Part → where its layers stand."""

_SECTION_SIZES = ("tp", "cp", "ep", "pp")
"""Sizes that the text decoder's section names too."""


def write_gpt_yaml(plan: Plan, model: Model, path: Path, out: Path, overwrite: bool) -> Export:
    """Write the YAML at `path` with `plan` in it into the folder `out`, under its own name; all else byte for byte.

    overwrite: a file that is there already, the given one included, may be replaced. Raises JobError where the file
    cannot be edited or would be replaced unasked, PlanError where MindSpeed-MM cannot run the plan.
    """
    check_plan(plan, model, path)
    if plan.strategy.pp > 1:
        raise PlanError(
            f"plan: PP {plan.strategy.pp}: this model deals its layers out evenly and keeps its tower on the first "
            "stage, which no plan says; plan with PP 1"
        )
    text = set_file_values(path, WHAT, _list_changes(plan, model, read_document(path, WHAT)), aliases_follow=True)
    _check_written(text, plan, model, path)
    target = out / path.name
    write_files({target: text}, overwrite)
    told = () if target.resolve() == path.resolve() else (f"the launch script names {path}; let it name {target}",)
    return Export((target,), told)


def read_gpt_yaml(arguments: Sequence[str], model: Model, path: Path, world_size: int) -> Plan:
    """The plan that the YAML at `path`, whose gpt_args make `arguments`, trains under on `world_size` devices.

    Raises JobError where a value is malformed, PlanError where the sizes do not divide the devices or the batch.
    """
    sizes = {name: find_size(arguments, flag) for flag, name in flags.SIZES.items()}
    group = sizes["pp"] * sizes["tp"] * sizes["cp"]
    mbs, batch = find_count(arguments, flags.MICRO_BATCH), find_count(arguments, flags.GLOBAL_BATCH)
    if world_size % group or batch % (world_size // group * mbs):
        raise PlanError(
            f"{WHAT} {path}: {world_size} devices and a global batch of {batch} are no whole number of PP x TP x CP "
            f"{group} and of the samples of their data parallel ranks at MBS {mbs}"
        )
    strategy = Strategy(
        pp=sizes["pp"],
        tp=sizes["tp"],
        cp=sizes["cp"],
        ep=sizes["ep"],
        vpp=sizes["vpp"],
        dp=world_size // group,
        mbs=mbs,
        zero=int(find_switch(arguments, flags.SHARDED_OPTIMIZER)),
        sequence_parallel=find_switch(arguments, flags.SEQUENCE_PARALLEL) or sizes["tp"] == 1,
    )
    if strategy.pp * strategy.vpp > 1:
        raise PlanError(f"{WHAT} {path}: it trains with PP {strategy.pp}, and such a model is planned with PP 1 alone")
    top = Section(read_document(path, WHAT), path, what=WHAT)
    layers, recompute = {}, {}
    for modality in model.modalities:
        name, num_layers = modality.name, modality.layers.num_layers
        layers[name], recompute[name] = (num_layers,), (_read_recompute(top, name, num_layers),)
        if isinstance(modality, Encoder) and modality.freeze:
            recompute[name] = (0,)  # nothing of it is kept
    return Plan(strategy, layers, recompute, batch)


def _list_changes(plan: Plan, model: Model, document: Mapping[str, Any]) -> dict[KeyPath, Any]:
    strategy = plan.strategy
    divided = strategy.tp > 1 and strategy.sequence_parallel
    changes: dict[KeyPath, Any] = {
        ("gpt_args", key_of(flags.MICRO_BATCH)): strategy.mbs,
        ("gpt_args", key_of(flags.GLOBAL_BATCH)): plan.global_batch_size,
        ("gpt_args", key_of(flags.SHARDED_OPTIMIZER)): strategy.zero > 0,
    }
    arguments, decoder = document["gpt_args"], document["model"]["text_decoder"]
    for flag, name in flags.SIZES.items():
        value = getattr(strategy, name)
        if value > 1 or key_of(flag) in arguments:
            changes[("gpt_args", key_of(flag))] = value
        if name in _SECTION_SIZES and (value > 1 or key_of(flag) in decoder):
            changes[(*_PARTS["text"], key_of(flag))] = value
    for place in (("gpt_args",), _PARTS["text"]):
        changes[(*place, key_of(flags.SEQUENCE_PARALLEL))] = divided
        if strategy.dispatcher:
            changes[(*place, key_of(flags.DISPATCHER))] = strategy.dispatcher
        if strategy.overlap_all_to_all:
            changes[(*place, key_of(flags.SHARED_OVERLAP))] = strategy.overlap_all_to_all == "shared_experts"
    for flag, passed in overlap_switches(strategy.overlaps.chosen).items():
        changes[("gpt_args", key_of(flag))] = passed
    if strategy.tp_overlap:
        changes[("gpt_args", key_of(flags.FUSED))] = strategy.tp_overlap == "mc2"
    for modality in model.modalities:
        name, count = modality.name, plan.recompute[modality.name][0]
        if isinstance(modality, Encoder) and modality.freeze:
            continue
        if count == _read_recompute(Section(document, Path(), what=WHAT), name, modality.layers.num_layers):
            continue
        changes[(*_PARTS[name], "recompute_num_layers")] = count
        if count:
            changes[(*_PARTS[name], "recompute_granularity")] = "full"
            changes[(*_PARTS[name], "recompute_method")] = "block"
    return changes


def _read_recompute(top: Section, name: str, num_layers: int) -> int:
    """Layers that recompute whole; `uniform` takes them all, in groups."""
    part = top
    for key in _PARTS[name]:
        part = part.section(key)
    if part.text("recompute_granularity", "") != "full":
        return 0
    if part.text("recompute_method", "") == "uniform":
        return num_layers
    return min(num_layers, part.number("recompute_num_layers", 0))


def _check_written(text: str, plan: Plan, model: Model, path: Path) -> None:
    """What was written is read back, because a person will train with it for weeks."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "written.yaml"
        write_text_atomically(copy, text)
        arguments = config_arguments(copy)
        found = read_gpt_yaml(arguments, model, copy, plan.strategy.world_size)
    choices = read_megatron_choices(as_mapping(arguments))
    switches = overlap_switches(plan.strategy.overlaps.chosen).items()
    strategy = replace(
        found.strategy,
        dispatcher=choices.dispatcher if plan.strategy.dispatcher else "",
        overlap_all_to_all=choices.overlap if plan.strategy.overlap_all_to_all else "",
        tp_overlap=("mc2" if flags.FUSED in arguments else "none") if plan.strategy.tp_overlap else "",
        graphs=plan.strategy.graphs,  # none, and bf16: by no flag
        precision=plan.strategy.precision,
        overlaps=plan.strategy.overlaps if all((flag in arguments) == passed for flag, passed in switches) else AS_SAID,
    )
    if (strategy, found.recompute, found.global_batch_size) != (plan.strategy, plan.recompute, plan.global_batch_size):
        raise JobError(
            f"{WHAT} {path}: with the plan in it, it would train {strategy} and not {plan.strategy}; its anchors share "
            "values that the plan needs apart: write them out"
        )


def config_arguments(path: Path) -> list[str]:
    """The command line that MindSpeed-MM makes of a YAML: `gpt_args`, underscores for dashes, true for a switch."""
    document = read_document(path, "configuration")
    if not isinstance(document.get("gpt_args"), Mapping):
        raise JobError(
            f"configuration {path}: gpt_args is {describe_value(document.get('gpt_args'))}; a mapping of Megatron's "
            "arguments is expected, as pretrain_transformers.py reads it"
        )
    arguments: list[str] = []
    for key, value in _flat({**document["gpt_args"], **(document.get("lora_args") or {})}):
        for one in value if isinstance(value, list) else [value]:
            if one is not False and one is not None:
                arguments += [flag_of(key)] if one is True else [flag_of(key), str(one)]
    return [*arguments, flags.MODEL, str(path), "--mm-data", str(path)]


def _flat(section: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [
        pair
        for key, value in section.items()
        for pair in (_flat(value) if isinstance(value, Mapping) else [(str(key), value)])
    ]
