"""What a launch script of MindSpeed-MM and the model.json or YAML that it names say to `lint`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mm_autoparallel.errors import PlannerError
from mm_autoparallel.files import read_document
from mm_autoparallel.integrations.config_said import find_twice, read_sizes
from mm_autoparallel.integrations.described import Given
from mm_autoparallel.integrations.file_rules import CONTRADICTED, KEY_TWICE
from mm_autoparallel.integrations.findings import Finding, Linter
from mm_autoparallel.integrations.key_lines import read_key_lines
from mm_autoparallel.integrations.megatron_core.file_findings import find_choices, find_of_kind
from mm_autoparallel.integrations.megatron_core.file_rules import OF_KIND
from mm_autoparallel.integrations.megatron_core.linted_launch import CHOICES, locate
from mm_autoparallel.integrations.megatron_core.linted_launch import read_launch as read_flags
from mm_autoparallel.integrations.megatron_core.passed import read_passed
from mm_autoparallel.integrations.megatron_core.said import say
from mm_autoparallel.integrations.mindspeed_mm.arguments import find_argument, find_switch, key_of
from mm_autoparallel.integrations.mindspeed_mm.flags import MODEL
from mm_autoparallel.integrations.mindspeed_mm.launch import FSDP
from mm_autoparallel.integrations.mindspeed_mm.model_json import LAYERS_KEY, RECOMPUTE_KEY, SECTIONS
from mm_autoparallel.integrations.mindspeed_mm.script_files import Launch, read_launch
from mm_autoparallel.integrations.said import Place, Said
from mm_autoparallel.integrations.said_findings import find_sizes
from mm_autoparallel.integrations.shell_text import LaunchScript

_TEXT = ".".join(SECTIONS["text"])
_OF_MODEL = {
    "num_layers": "num_layers",
    "heads": "num_attention_heads",
    "query_groups": "num_query_groups",
    "experts": "num_moe_experts",
    "layers": LAYERS_KEY,
    "recompute": RECOMPUTE_KEY,
}
"""Quantity → key of the decoder's section."""


def find(path: Path, given: Given) -> Iterator[Finding]:
    """All findings in the script at `path` and the file that says its model. Raises JobError where a file cannot be
    read."""
    yield from find_of_kind(path, given)
    try:
        launch = read_launch(path, given.world_size)
    except PlannerError:
        return  # import says why
    if launch.config is not None:
        yield from _find_in_yaml(launch.config, launch, given)
    elif not find_switch(launch.arguments, FSDP):
        yield from _find_in_model(launch.find(find_argument(launch.arguments, MODEL) or ""), path, given)


def _find_in_model(model: Path, script: Path, given: Given) -> Iterator[Finding]:
    """What the model.json says wrongly for the sizes of the script; what the script alone says is found apart."""
    twice = [*find_twice(model)]
    yield from twice
    if twice:
        return
    document = read_document(model, "model file")
    lines, flags = read_key_lines(model), read_flags(script, given).said

    def place(key: str) -> Place:
        return (model, lines.find(key)) if key.startswith(_TEXT) else flags.place(key)

    numbers = {**flags.numbers, **dict(read_sizes(model))}
    keys = {**flags.keys, **{quantity: f"{_TEXT}.{key}" for quantity, key in _OF_MODEL.items()}}
    said = _with_lists(replace(flags, numbers=numbers, keys=keys, place=place, layers=None), document)
    told = {(one.rule, one.message) for one in find_sizes(flags)}
    yield from (one for one in find_sizes(said) if (one.rule, one.message) not in told)


def _with_lists(said: Said, document: Mapping[str, Any]) -> Said:
    """`said`, with the decoder's lists of layers and of those that recompute, [stage] or [chunk][stage]."""
    section = document.get(_TEXT)
    found = {}
    for key in (LAYERS_KEY, RECOMPUTE_KEY):
        value = section.get(key) if isinstance(section, Mapping) else None
        rows = value if isinstance(value, list) and all(isinstance(row, list) for row in value) else [value]
        flat = [count for row in rows if isinstance(row, list) for count in row]
        found[key] = tuple(flat) if flat and all(type(count) is int for count in flat) else None
    layers, total = found[LAYERS_KEY], said.number("num_layers")
    if layers and total and sum(layers) != total:
        return replace(said, layers=f"{LAYERS_KEY} sums to {sum(layers)}, and num_layers beside it is {total}")
    if layers and len(layers) % said.size("pp"):
        return replace(said, layers=f"{LAYERS_KEY} has {len(layers)} numbers, and PP is {said.size('pp')}")
    return replace(said, layers=layers, recompute=found[RECOMPUTE_KEY])


def _find_in_yaml(config: Path, launch: Launch, given: Given) -> Iterator[Finding]:
    """What a YAML's gpt_args, which are such flags, say."""
    twice = [*find_twice(config)]
    yield from twice
    if twice:
        return
    lines = read_key_lines(config)
    script = LaunchScript(config, f"torchrun {launch.entry} {shlex.join(launch.arguments)}\n")
    own = read_flags(launch.script.path, given).said
    world_size, per_node = own.number("world_size"), own.number("per_node")

    def name(flag: str) -> str:
        return f"gpt_args.{key_of(flag)}"

    said = say(read_passed(script, world_size), config, world_size, per_node,
               lambda key: (config, lines.find(key)), name)  # fmt: skip
    yield from find_sizes(said)
    yield from find_choices(said)


LINTER = Linter((*OF_KIND, CONTRADICTED, KEY_TWICE), find, locate, choices=CHOICES)
