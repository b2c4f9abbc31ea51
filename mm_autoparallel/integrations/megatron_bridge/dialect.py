"""Megatron-Bridge as a dialect of Megatron-LM: fields in the place of flags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.integrations.described import Described, Given
from mm_autoparallel.integrations.megatron_bridge import mimo
from mm_autoparallel.integrations.megatron_bridge.config import open_config, read_fields, read_known, to_script
from mm_autoparallel.integrations.megatron_bridge.recipes import read_adapters
from mm_autoparallel.integrations.megatron_core import flags
from mm_autoparallel.integrations.megatron_core.dialect import Dialect, without_mindspeed
from mm_autoparallel.integrations.megatron_core.launch import describe_launch, read_launch_plan, read_passed_plan
from mm_autoparallel.integrations.megatron_core.passed import Passed, read_passed
from mm_autoparallel.integrations.megatron_core.read import read_recompute
from mm_autoparallel.integrations.megatron_core.training import describe_training, read_trained_model
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.planner.plan import Plan

BRIDGE = Dialect("Megatron-Bridge", "0.3.1", lambda passed: passed, without_mindspeed, lambda _: (), open=open_config)


def describe_config(path: Path, given: Given) -> Described:
    """The training of the configuration at `path`, adapters included. Raises JobError or PlanError as `describe_launch`
    does."""
    fields = read_fields(path, given)
    if not mimo.is_mimo(fields):
        return replace(describe_launch(path, given, BRIDGE), adapters=read_adapters(fields))
    passed, modules, _ = _open_mimo(read_known(path, given), path, given)
    world_size = modules.world_size + modules.encoder.num_ranks
    alone = replace(given, world_size=modules.world_size, image_tokens=None, images=None)
    described = describe_training(passed, alone, BRIDGE)
    said = {"image_tokens_per_sample": given.image_tokens, "images_per_sample": given.images}
    images = {key: number for key, number in said.items() if number is not None}
    told = () if images else ("the images of a sample are not said, and none are planned; --image-tokens says them",)
    return replace(
        described,
        workload={**described.workload, **images},
        search={**described.search, "layouts": ["chain", "disaggregated"], "devices": [world_size]},
        world_size=world_size,
        notes=(*described.notes, *told),
    )


def read_config_plan(path: Path, given: Given) -> Plan:
    """The plan of the configuration at `path`. Raises JobError or PlanError where that is unknown."""
    fields = read_fields(path, given)
    if not mimo.is_mimo(fields):
        return read_launch_plan(path, given, BRIDGE)
    passed, modules, model = _open_mimo(read_known(path, given), path, given)
    (encoder,) = model.encoders
    decoder = read_passed_plan(passed, modules.world_size, given, BRIDGE)
    plan = join_modules(decoder, passed, modules, encoder.layers.num_layers)
    mimo.check_mimo(plan, None, passed.where)
    if given.world_size not in (None, plan.strategy.world_size):
        raise PlanError(
            f"{passed.where}: its modules have {modules.world_size} and {modules.encoder.num_ranks} ranks, and it is "
            f"started on {given.world_size} devices"
        )
    return plan


def join_modules(decoder: Plan, passed: Passed, modules: mimo.Modules, num_layers: int) -> Plan:
    """The plan of both modules, the encoder of `num_layers` recomputing as the decoder's flags `passed` say."""
    (recomputed,) = read_recompute(passed, (num_layers,))
    divides = passed.has(flags.SEQUENCE_PARALLEL) or max(decoder.strategy.tp, modules.encoder.tp) == 1
    decoder = replace(decoder, strategy=replace(decoder.strategy, sequence_parallel=divides))
    return mimo.join(decoder, modules.encoder, num_layers, recomputed)


def _open_mimo(fields: Mapping[str, Any], path: Path, given: Given) -> tuple[Passed, mimo.Modules, Model]:
    """The decoder's flags, both modules, and the model, which a person names."""
    if given.model_config is None:
        raise JobError(f"configuration {path}: MIMO's modules are those of a model; name its own file with --model")
    model = read_trained_model(read_passed(to_script({}, path), None), given)
    modules = mimo.take_apart(fields, f"configuration {path}", model.text.layers.experts is not None)
    ours = mimo.name_encoder(modules.encoder.name, tuple(encoder.name for encoder in model.encoders))
    modules = replace(modules, encoder=replace(modules.encoder, name=ours))
    passed = read_passed(to_script(modules.decoder, path), modules.world_size)
    return passed, modules, model
