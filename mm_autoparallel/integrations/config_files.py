"""What configuration files without a model in them share: the model that a person names, and what the training's code
says beside them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.files import describe_value
from mm_autoparallel.integrations.described import Described, Given
from mm_autoparallel.integrations.framework import Target
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.model.readers.model_file import read_model
from mm_autoparallel.planner.plan import Plan
from mm_autoparallel.validation import nearest

Totals = Mapping[str, int]
"""Modality → its layers."""


def totals_of(plan: Plan) -> Totals:
    """The layers of each modality that `plan` places."""
    return {modality: sum(counts) for modality, counts in plan.layers.items()}


def read_totals(path: Path, given: Given) -> Totals:
    """The layers of the model that a person names. Raises JobError where nobody names one with its sizes."""
    model = _read_named(path, given)
    return {modality.name: modality.layers.num_layers for modality in model.modalities}


def _read_named(path: Path, given: Given) -> Model:
    if given.model_config is None:
        raise JobError(f"{path} does not say what is trained; name the model's config.json with --model")
    model = read_model(given.model_config)
    if not isinstance(model, Model):
        raise JobError(f"model file {given.model_config}: it is known from traces alone; give one with its sizes")
    return model


def need(value: int | None, path: Path, flag: str) -> int:
    """`value`, which the training's code says. Raises JobError naming the flag that says it where nobody does."""
    if value is None:
        raise JobError(f"{path} leaves it to the training's code; say it with {flag} N")
    return value


def describe_config(
    path: Path, given: Given, stack: str, plan: Plan, workload: Mapping[str, Any], notes: Sequence[str] = ()
) -> Described:
    """The training of a configuration whose plan is `plan`. workload: what its files say, over the usual.

    Raises JobError where nobody names the model or its samples' length.
    """
    assert given.model_config is not None
    kinds = {"context_parallel": plan.strategy.cp_kind} if plan.strategy.cp_kind else {}
    said = {
        "global_batch_size": plan.global_batch_size,
        "seq_length": need(given.seq_length, path, "--seq-length"),
        "stack": stack,
        **({"image_tokens_per_sample": given.image_tokens} if given.image_tokens is not None else {}),
        **({"images_per_sample": given.images} if given.images is not None else {}),
        **kinds,
        **workload,
    }
    return Described(given.model_config, said, {}, world_size=plan.strategy.world_size, notes=tuple(notes))


def check_keys(section: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    """Raises JobError for the first key of `section` that is not known, with the nearest that is."""
    for key in section:
        if key not in known:
            raise JobError(f"{where}: {key} is not known there and would decide nothing{nearest(str(key), known)}")


def size_at(section: Mapping[str, Any], key: str, where: str, usual: int = 1) -> int:
    """A whole number of at least 1 under `key`, `usual` where it is missing or null. Raises PlanError."""
    value = section.get(key)
    if value is None:
        return usual
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PlanError(f"{where}: {key} is {describe_value(value)}; a whole number of at least 1 is expected")
    return value


def flag_at(section: Mapping[str, Any], key: str, where: str, usual: bool = False) -> bool:
    """True or false under `key`, as a word too; `usual` where it is missing or null. Raises PlanError."""
    value = section.get(key)
    if isinstance(value, str) and value.lower() in ("true", "false"):
        value = value.lower() == "true"
    if value is None:
        return usual
    if not isinstance(value, bool):
        raise PlanError(f"{where}: {key} is {describe_value(value)}; true or false is expected")
    return value


def section_at(document: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    """The mapping under `key`, empty where it is missing or null. Raises JobError where it is something else."""
    value = document.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise JobError(f"{where}: {key} is {describe_value(value)}; a mapping of keys to values is expected")
    return value


def round_recompute(plan: Plan, counts: Mapping[str, tuple[int, ...]], who: str) -> tuple[str, ...]:
    """A sentence where `counts`, which the files recompute, are more than the plan's. who: what has no finer switch."""
    there = sum(map(sum, counts.values()))
    meant = sum(sum(plan.recompute[modality]) for modality in plan.layers)
    if there == meant:
        return ()
    return (
        f"{who}: {there} layers are recomputed in place of {meant}, which takes longer and keeps less than planned",
    )


def spell_by(
    decide: Callable[[Plan, Target], Mapping[str, Any]], find_version: Callable[[Path], str] = lambda _: ""
) -> Callable[[Path, Plan, Plan, Job], str]:
    """How `lint` spells a better plan: the keys that `decide` gives another value than for the file's own.
    find_version: of the framework that a file is for, where its keys differ."""

    def spell(path: Path, plan: Plan, better: Plan, job: Job) -> str:
        target = Target(find_version(path), job, lambda _: ())
        before, after = (dict(_flatten(decide(each, target))) for each in (plan, better))
        changed = [f"{key}: {json.dumps(value)}" for key, value in after.items() if before.get(key) != value]
        return ", ".join(changed + [f"without {key}" for key in before if key not in after])

    return spell


def _flatten(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{above}{key}.")
        elif value is not None:
            yield f"{above}{key}", value
