"""What a configuration of Megatron-Bridge says to `lint`: Megatron-LM's rules, on fields in the place of flags."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from mm_autoparallel.errors import PlannerError
from mm_autoparallel.files import read_document
from mm_autoparallel.integrations.config_files import spell_by
from mm_autoparallel.integrations.config_said import RULES, find_twice, find_unknown, flatten, locate_by
from mm_autoparallel.integrations.described import Given
from mm_autoparallel.integrations.file_rules import PADDING
from mm_autoparallel.integrations.findings import Finding, Linter
from mm_autoparallel.integrations.key_lines import read_key_lines
from mm_autoparallel.integrations.megatron_bridge import mimo
from mm_autoparallel.integrations.megatron_bridge.config import NEAR, YAML, find_started_devices, read_known, to_script
from mm_autoparallel.integrations.megatron_bridge.fields import FIELDS, name_field
from mm_autoparallel.integrations.megatron_bridge.written import decide_values
from mm_autoparallel.integrations.megatron_core import flags
from mm_autoparallel.integrations.megatron_core.file_findings import find_choices
from mm_autoparallel.integrations.megatron_core.passed import read_passed
from mm_autoparallel.integrations.megatron_core.said import say
from mm_autoparallel.integrations.said import Place, Said
from mm_autoparallel.integrations.said_findings import find_sizes

KEYS = {
    "recompute": ("model.recompute_num_layers", "model.recompute_granularity"),
    "layers": (
        "model.pipeline_model_parallel_layout",
        "model.num_layers_in_first_pipeline_stage",
        "model.num_layers_in_last_pipeline_stage",
        "model.pipeline_model_parallel_size",
    ),
    "tp": ("model.tensor_model_parallel_size",),
    "pp": ("model.pipeline_model_parallel_size",),
    "cp": ("model.context_parallel_size",),
    "ep": ("model.expert_model_parallel_size",),
    "mbs": ("train.micro_batch_size",),
    "global_batch_size": ("train.global_batch_size",),
    "zero": ("ddp.use_distributed_optimizer",),
}
"""Field of a plan → fields of the configuration, for findings of simulated plans."""

_KNOWN: dict[str, list[str]] = {}
for _field in (name for names in FIELDS.values() for name in names):
    _KNOWN.setdefault(_field.partition(".")[0], []).append(_field.partition(".")[2])


def find(path: Path, given: Given) -> Iterator[Finding]:
    """All findings in the configuration at `path` and those beside it. Raises JobError where it cannot be read."""
    paths = (path, *given.beside)
    found: list[Finding] = []
    for each in paths:
        found += [*find_twice(each), *_find_misspelt(each)]
    yield from found
    if found:
        return  # what decides is not known
    fields = read_known(path, given)
    if mimo.is_mimo(fields):
        return
    nodes, per_node = find_started_devices(path)
    world_size = given.world_size or (nodes * per_node if nodes and per_node else None)
    passed = read_passed(to_script(fields, path), world_size)
    said = say(passed, path, world_size, per_node, _placer(paths, given.entry), name_field)
    idle = tuple(pair for pair in said.table.idle if pair[0] != flags.SHARDING)  # which every recipe's base sets
    said = replace(said, table=replace(said.table, idle=idle))
    yield from find_sizes(said)
    yield from find_choices(said)


def _find_misspelt(path: Path) -> Iterator[Finding]:
    """Fields of a YAML that are nearly ones that decide."""
    if path.suffix not in YAML:
        return
    try:
        fields = dict(flatten(read_document(path, "configuration")))
    except PlannerError:
        return  # which import says
    lines = read_key_lines(path)
    said = Said(path, {}, {}, lambda key: (path, lines.find(key)))
    yield from find_unknown(said, fields, _KNOWN, NEAR)


def _placer(paths: tuple[Path, ...], entry: str | None) -> Callable[[str], Place]:
    """Where a field stands: in the last of the files that has it, for later ones hold over earlier ones."""
    several = [(path, read_key_lines(path, entry)) for path in reversed(paths)]

    def place(field: str) -> Place:
        exact = ((path, lines.lines[field]) for path, lines in several if field in lines.lines)
        near = ((path, line) for path, lines in several if (line := lines.find(field)) is not None)
        return next(exact, next(near, (paths[0], None)))

    return place


LINTER = Linter((*RULES, PADDING), find, locate_by(KEYS), spell_by(decide_values))
