"""What a configuration file says, as Said, by a table of which key has which quantity; and the linter made of it."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mm_autoparallel.errors import PlanError, PlannerError
from mm_autoparallel.integrations import file_rules as rules
from mm_autoparallel.integrations.described import Given
from mm_autoparallel.integrations.findings import Finding, Linter, Rule
from mm_autoparallel.integrations.key_lines import read_key_lines
from mm_autoparallel.integrations.said import KeyTable, Said
from mm_autoparallel.integrations.said_findings import find_pairs, find_sizes
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.model.readers.model_file import read_model
from mm_autoparallel.planner.plan import Plan

Fields = Mapping[str, Any]
"""Dotted key → its value, of all sections."""

Keys = Mapping[str, Sequence[str]]
"""Quantity of Said, or field of a plan → dotted keys that may say it; the first that is there does, else the first."""

_BESIDE = {
    "world_size": "--world-size",
    "seq_length": "--seq-length",
    "global_batch_size": "--global-batch-size",
    "micro_batch_size": "--micro-batch-size",
}
"""What a person says beside the file → the option that says it."""

BATCHES = ("global_batch_size", "micro_batch_size")
"""What a person says where the training's code does."""

_NEAR = 0.9
"""How alike an unknown key is to a known one of its section to be that one misspelt; assumed."""

_INSTEAD = {
    "global_batch_size": ("micro_batches", "mbs"),
    "mbs": ("micro_batches", "global_batch_size"),
    "recompute": ("mbs", "micro_batches", "tp", "zero"),
    "layers": ("pp",),
    "zero": ("tp", "dp"),
}
"""Where a file has no key of its own for a choice, whose line a finding names."""

RULES = (*rules.SIZES, rules.CONTRADICTED, rules.IDLE, rules.MISSPELT, rules.KEY_TWICE)


def flatten(document: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key → value, of every mapping in `document` and of what they hold."""
    for key, value in document.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping):
            yield from flatten(value, f"{name}.")
        yield name, value


def say(
    path: Path,
    given: Given,
    fields: Fields,
    keys: Keys,
    numbers: Mapping[str, int | None] | None = None,
    *,
    table: KeyTable = KeyTable(),  # noqa: B008 - frozen
    takes: Collection[str] = (),
) -> Said:
    """What the configuration at `path`, whose content is `fields`, says. numbers: what its keys do not say as they
    stand, in their place; None: leave it out. takes: those of BATCHES that a person may say."""
    told: dict[str, int | None] = dict(read_sizes(given.model_config))
    names: dict[str, str] = {}
    for quantity, candidates in keys.items():
        key = next((each for each in candidates if fields.get(each) is not None), next(iter(candidates), ""))
        names[quantity] = key
        value = fields.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            told[quantity] = value
    for field, option in _BESIDE.items():
        quantity = {"micro_batch_size": "mbs"}.get(field, field)
        value = getattr(given, field)
        is_taken = field in ("world_size", "seq_length", *takes)
        if value is not None and is_taken and (field == "world_size" or told.get(quantity) is None):
            told[quantity] = value
            names[quantity] = option
    told |= numbers or {}
    lines = read_key_lines(path, given.entry)
    return Said(
        path,
        {quantity: number for quantity, number in told.items() if number is not None},
        names,
        lambda key: (path, None if key.startswith("--") else lines.find(key)),
        partial(_holds, fields),
        table=table,
    )


def _holds(fields: Fields, condition: str) -> bool:
    key, sign, values = condition.partition("!=" if "!=" in condition else "=")
    value = fields.get(key)
    if values:
        return value is not None and (str(value).lower() in values.lower().split("|")) == (sign == "=")
    return value not in (None, False, 0, "", [], {}) and str(value).lower() not in ("false", "none", "no")


def read_sizes(path: Path | None) -> Iterator[tuple[str, int]]:
    """Quantity → number of the model that the file at `path` has; nothing where it cannot be read."""
    try:
        model = read_model(path) if path else None
    except PlannerError:
        return
    if not isinstance(model, Model):
        return
    layers = model.text.layers
    yield "num_layers", layers.num_layers
    yield "heads", layers.num_heads
    yield "query_groups", layers.num_kv_groups
    if layers.experts:
        yield "experts", layers.experts.num_experts
    if model.text.num_positions:
        yield "positions", model.text.num_positions


def deal(where: str, count: Callable[[], Sequence[int]]) -> tuple[int, ...] | str:
    """Layers of each virtual stage as `count` gives them, or what is wrong with them: its PlanError's reason. where:
    how that begins."""
    try:
        return tuple(count())
    except PlanError as failure:
        return failure.reason.removeprefix(f"{where}: ")


def find_unknown(
    said: Said, fields: Fields, known: Mapping[str, Sequence[str]], nearness: float = _NEAR
) -> Iterator[Finding]:
    """Keys that nobody knows and that are nearly known ones. known: section, empty for the top → its keys. nearness:
    how alike they are at least, of 1."""
    for section, names in known.items():
        above = f"{section}." if section else ""
        for field in fields:
            key = field.removeprefix(above)
            if not field.startswith(above) or "." in key or key in names:
                continue
            near = difflib.get_close_matches(key, names, n=1, cutoff=nearness)
            if near:
                yield said.found(rules.MISSPELT, f"{field} is no key; {above}{near[0]} is one", field, near[0])


def find_twice(path: Path) -> Iterator[Finding]:
    """Keys that stand twice in one mapping of JSON or YAML."""
    for key, line in read_key_lines(path).twice:
        yield Finding(rules.KEY_TWICE, f"{key} stands twice in one mapping; one of the two is not read", path, line)


def make_linter(
    read: Callable[[Path, Given], tuple[Said, Fields]],
    keys: Keys,
    spell: Callable[[Path, Plan, Plan, Job], str] | None = None,
    known: Mapping[str, Sequence[str]] | None = None,
    more: Sequence[Rule] = (),
) -> Linter:
    """The linter of configurations. read: (path, what a person says beside it) → what it says, and its fields; raises
    PlannerError where it cannot be read. spell: as in Linter. known: as find_unknown. more: rules of its table
    beside RULES."""

    def find(path: Path, given: Given) -> Iterator[Finding]:
        twice = [*find_twice(path)]
        yield from twice
        if twice:
            return  # nobody knows which of the two holds
        said, fields = read(path, given)
        yield from find_sizes(said)
        yield from find_pairs(said)
        yield from find_unknown(said, fields, known or {})

    return Linter((*RULES, *more), find, locate_by(keys), spell)


def locate_by(keys: Keys) -> Callable[[Path, str, str | None], int | None]:
    """How `lint` finds the line of a choice of a simulated plan: that of the first of its keys that is in the file."""

    def locate(path: Path, about: str, entry: str | None) -> int | None:
        lines = read_key_lines(path, entry)
        found = (lines.find(key) for name in (about, *_INSTEAD.get(about, ())) for key in keys.get(name, ()))
        return next((line for line in found if line is not None), None)

    return locate
