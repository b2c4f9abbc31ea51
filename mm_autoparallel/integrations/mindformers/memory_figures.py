"""What a dry run measures of a model's layers, in the names and the files of the pipeline search.

A file holds `name=value` lines, or a JSON or YAML mapping of the same names (at its top or under `memory_mb`). Values
are MB of 2^20 bytes, as MindSpore counts them: `mem_lim_stage0` is `max_device_memory` less `static_mem0`.

    layer_mem012, layer_mem      static of a dense and of an expert layer (weights, gradients, optimizer)
    act_mem0, act_mem            activations kept of one micro-batch by a dense and by an expert layer
    re_comp_mem0, re_comp_mem    the same of a layer that is recomputed
    select_mem0, select_mem      the same of a layer of which select_recompute's operators are recomputed
    static_mem0, static_mem, lm_head_mem          held besides by the first, any middle and the last stage
    mem_lim_stage0, mem_lim_others, mem_lim_last  what is left to layers there (else max_device_memory less the static)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mm_autoparallel.errors import JobError
from mm_autoparallel.files import describe_value, read_document, read_text
from mm_autoparallel.integrations.mindformers.pretrain_yaml import Pretrain
from mm_autoparallel.integrations.mindformers.recompute_kinds import SELECT
from mm_autoparallel.units import MIB
from mm_autoparallel.validation import nearest

WHAT = "memory file"
_STATIC = ("static_mem0", "static_mem", "lm_head_mem")
_LIMITS = ("mem_lim_stage0", "mem_lim_others", "mem_lim_last")
_DENSE = ("layer_mem012", "act_mem0", "re_comp_mem0")
_EXPERT = ("layer_mem", "act_mem", "re_comp_mem")
_TWINS = {"act_mem12": "act_mem0", "re_comp_mem12": "re_comp_mem0", "select_mem12": "select_mem0"}
"""Dense layers beyond the first have names of their own; the chain knows one kind of dense layer."""
_LARGEST_MB = 1e12
"""An exabyte. Assumed."""
_NAMES = (*_STATIC, *_LIMITS, *_DENSE, *_EXPERT, *_TWINS, "select_mem0", "select_mem")


@dataclass(frozen=True)
class OtherRecompute:
    """Recompute of less than a layer. kind: of recompute_kinds.py. kept_bytes: of a micro-batch in flight with it.

    extra_factor: what it adds to the layer's backward, as a share of its forward; None: memory alone was measured.
    """

    kind: str
    kept_bytes: float
    extra_factor: float | None = None


Causes = dict[str, float]
"""Bytes by what they are for."""


@dataclass(frozen=True)
class LayerMemory:
    """Of one layer: held always, kept of a micro-batch in flight, and kept of it where the layer is recomputed; the
    same of what else may be recomputed. extra_factor: what its operators that always run again add to its backward, as
    a share of its forward. causes: what static_bytes are for, where that is known.
    """

    static_bytes: float
    activation_bytes: float
    recomputed_bytes: float
    others: tuple[OtherRecompute, ...] = ()
    extra_factor: float = 0.0
    causes: Causes = field(default_factory=dict)


@dataclass(frozen=True)
class MemoryFigures:
    """stage_static_bytes, limit_bytes: of the first, any middle and the last stage. source: what they are from.

    stage_kept_bytes: what micro-batches in flight keep beside layers, of every stage in turn (empty: nothing).
    stage_causes: what stage_static_bytes are for, where that is known.
    """

    dense: LayerMemory | None
    expert: LayerMemory
    stage_static_bytes: tuple[float, float, float]
    limit_bytes: tuple[float, float, float]
    source: str
    notes: tuple[str, ...] = ()
    stage_kept_bytes: tuple[float, ...] = ()
    stage_causes: tuple[Causes, Causes, Causes] = field(default_factory=lambda: ({}, {}, {}))


def read_memory_figures(path: Path, pretrain: Pretrain, with_select: bool = False) -> MemoryFigures:
    """The figures in the file at `path` for the model of `pretrain`. with_select: those of select recompute too.

    Raises JobError naming file and key where one is missing, unknown, negative, or recompute keeps more than it saves.
    """
    values = _read_values(path)
    needed = (*_EXPERT, *(_DENSE if pretrain.num_dense else ()))
    if with_select:
        needed += ("select_mem", *(("select_mem0",) if pretrain.num_dense else ()))
    missing = [name for name in needed if name not in values]
    if missing:
        raise JobError(f"{WHAT} {path}: {', '.join(missing)} missing; {pretrain.path} needs {', '.join(needed)}")
    notes = []
    for twin, name in _TWINS.items():
        if pretrain.num_dense and name in values and values.get(twin, values[name]) != values[name]:
            notes.append(
                f"{path} gives {name} {values[name]:g} and {twin} {values[twin]:g}: the larger counts for both"
            )
            values[name] = max(values[name], values[twin])
    statics = [values.get(name, 0.0) for name in _STATIC]
    if all(name in values for name in _LIMITS):
        limits = [values[name] + static for name, static in zip(_LIMITS, statics, strict=True)]
        if pretrain.max_memory_bytes is not None and any(limit != pretrain.max_memory_bytes / MIB for limit in limits):
            notes.append(
                f"{path} limits stages to {_listed(limits)} MB; context.max_device_memory says "
                f"{pretrain.max_memory_bytes / MIB:g} MB and is not used"
            )
    elif pretrain.max_memory_bytes is None:
        raise JobError(
            f"{WHAT} {path}: {', '.join(_LIMITS)} are not all there, and {pretrain.path} has no "
            "context.max_device_memory to take the limit from; give one of them"
        )
    else:
        absent = [name for name in _STATIC if name not in values]
        if absent:
            raise JobError(f"{WHAT} {path}: {', '.join(absent)} missing; without {', '.join(_LIMITS)} it is needed")
        limits = [pretrain.max_memory_bytes / MIB] * 3

    def layer(names: tuple[str, str, str], select: str) -> LayerMemory:
        static, kept, recomputed = (values[name] for name in names)
        if recomputed > kept:
            raise JobError(
                f"{WHAT} {path}: {names[2]} {recomputed:g} is more than {names[1]} {kept:g}, so recompute would cost "
                "memory; measure both again (a dry run with and one without recompute)"
            )
        kinds = (OtherRecompute(SELECT, min(values[select], kept) * MIB),) if with_select else ()
        return LayerMemory(static * MIB, kept * MIB, recomputed * MIB, kinds)

    first, others, last = (static * MIB for static in statics)
    limit_first, limit_others, limit_last = (limit * MIB for limit in limits)
    return MemoryFigures(
        layer(_DENSE, "select_mem0") if pretrain.num_dense else None,
        layer(_EXPERT, "select_mem"),
        (first, others, last),
        (limit_first, limit_others, limit_last),
        str(path),
        tuple(notes),
    )


def _read_values(path: Path) -> dict[str, float]:
    if path.suffix.lower() in (".json", ".yaml", ".yml"):
        document = read_document(path, WHAT)
        found: Mapping[str, Any] = document.get("memory_mb", document)
        if not isinstance(found, dict):
            raise JobError(f"{WHAT} {path}: memory_mb is {describe_value(found)}; a mapping of names to MB is expected")
        entries = list(found.items())
    else:
        entries = []
        for number, line in enumerate(read_text(path, WHAT, "text of name=value lines").splitlines(), start=1):
            name, equals, text = (part.strip() for part in line.partition("="))
            if not line.strip() or name.startswith("#"):
                continue
            try:
                entries.append((name, float(text)))
            except ValueError:
                equals = ""
            if not equals:
                raise JobError(f"{WHAT} {path}: line {number} is {describe_value(line)}; name=value in MB is expected")
    values: dict[str, float] = {}
    for name, value in entries:
        if name not in _NAMES:
            raise JobError(f"{WHAT} {path}: {name} is not known{nearest(name, _NAMES)}; known are {', '.join(_NAMES)}")
        if name in values:
            raise JobError(f"{WHAT} {path}: {name} stands there twice; keep one of the two")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _LARGEST_MB:
            raise JobError(
                f"{WHAT} {path}: {name} is {describe_value(value)}; a number of MB from 0 to {_LARGEST_MB:g} is "
                "expected"
            )
        values[name] = float(value)
    return values


def _listed(numbers: list[float]) -> str:
    return ", ".join(f"{number:g}" for number in dict.fromkeys(numbers))
