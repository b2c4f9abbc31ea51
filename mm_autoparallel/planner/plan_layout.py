"""The result file's `layout`: where encoder and decoder have sizes of their own. The plain chain has none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mm_autoparallel.files import describe_value
from mm_autoparallel.model.job.arrangement import (
    ENCODER_RUNS,
    JOINED,
    MODULE_KINDS,
    UNPLANNED_RUNS,
    Arrangement,
    EncoderRun,
    ModuleKind,
    ModuleLayout,
)
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.planner.plan_lists import Refused, parse_integer, parse_mapping
from mm_autoparallel.validation import nearest

DECODER = "llm"
_SIZES = {"PP": "pp", "TP": "tp", "CP": "cp", "DP": "dp", "MBS": "mbs"}
_OFFSET = "rank_offset"


def layout_document(strategy: Strategy) -> dict[str, Any]:
    """`layout` as a key of the result file, where there is an arrangement."""
    arrangement, decoder = strategy.arrangement, strategy.of_decoder()
    if arrangement is None:
        return {}
    own = arrangement.encoder
    behind = own.num_ranks if arrangement.apart and own.rank_offset == 0 else 0
    sizes = {key: getattr(own, name) for key, name in _SIZES.items()} | {_OFFSET: own.rank_offset}
    modules = {
        **{part: dict(sizes) for part in own.parts},
        DECODER: {key: getattr(decoder, name) for key, name in _SIZES.items()} | {_OFFSET: behind},
    }
    return {"layout": {"kind": arrangement.kind, "encoder_run": arrangement.encoder_run, "modules": modules}}


def parse_layout_section(document: dict[str, Any], strategy: Strategy) -> Strategy:
    """`strategy` with the arrangement that `layout` tells; files of the chain have none.

    An MBS that is not said is the decoder's, or what a replica gets of its micro-batches. Raises Refused naming the key
    that is missing, malformed, or contradicts parallel_config.
    """
    if "layout" not in document:
        return strategy
    section = parse_mapping(document, "layout")
    kind: ModuleKind = _parse_word(section, "kind", MODULE_KINDS)
    if kind == "chain":
        return strategy
    if section.get("encoder_run") in UNPLANNED_RUNS:
        raise Refused(
            f"layout.encoder_run is {section['encoder_run']}, which nothing here plans or simulates yet; "
            f"{', '.join(ENCODER_RUNS)} are"
        )
    run: EncoderRun = _parse_word(section, "encoder_run", ENCODER_RUNS)
    modules = section.get("modules")
    if not isinstance(modules, dict) or len(modules) < 2 or DECODER not in modules:
        found = f"names {', '.join(modules)}" if isinstance(modules, dict) else f"is {describe_value(modules)}"
        raise Refused(
            f"layout.modules {found}; the sizes of one encoder, such as vision, and of {DECODER} are expected"
        )
    name, encoder = _parse_encoders(modules)
    if not encoder.mbs:
        samples = strategy.mbs * strategy.dp
        encoder = replace(encoder, mbs=strategy.mbs if run != "inline" else max(1, samples // encoder.dp))
    arranged = replace(strategy, arrangement=Arrangement(kind, run, encoder))
    if kind == "disaggregated" and strategy.pp <= encoder.pp:
        raise Refused(
            f"parallel_config.PP is {strategy.pp}; it counts all stages of the pipeline, those of layout.modules."
            f"{name} too, of which there are {encoder.pp}"
        )
    told, decoder = _parse_module(modules, DECODER), arranged.of_decoder()
    for key, field in _SIZES.items():
        if getattr(told, field) not in (getattr(decoder, field), 0):
            why = " (all stages but the encoder's)" if field == "pp" and kind == "disaggregated" else ""
            raise Refused(
                f"layout.modules.{DECODER}.{key} is {getattr(told, field)}, and parallel_config says "
                f"{getattr(decoder, field)}{why}; the two must agree"
            )
    behind = encoder.num_ranks if kind == "disaggregated" and encoder.rank_offset == 0 else 0
    if told.rank_offset != behind:
        raise Refused(
            f"layout.modules.{DECODER}.rank_offset is {told.rank_offset}; beside an encoder that begins at rank "
            f"{encoder.rank_offset} it is {behind}, so that the ranges neither overlap nor leave ranks idle"
        )
    return arranged


def _parse_encoders(modules: dict[str, Any]) -> tuple[str, ModuleLayout]:
    """The name of the first encoder, and the sizes that it has with all others. Raises Refused where they differ."""
    first, *others = (name for name in modules if name != DECODER)
    sizes = _parse_module(modules, first)
    for name in others:
        if replace(_parse_module(modules, name), name=first) != sizes:
            raise Refused(
                f"layout.modules.{name} has other sizes than {first}; encoders run one after the other on the same "
                "ranks here, with one size for all of them"
            )
    return first, replace(sizes, name=JOINED.join((first, *others)))


def _parse_module(modules: dict[str, Any], name: str) -> ModuleLayout:
    """The sizes of one module; an MBS of 0 is none."""
    where, sizes = f"layout.modules.{name}", modules[name]
    if not isinstance(sizes, dict):
        raise Refused(f"{where} is {describe_value(sizes)}; a mapping is expected")
    known = (*_SIZES, _OFFSET)
    for key in sizes:
        if key not in known:
            raise Refused(f"{where}.{key} is not known{nearest(key, known)}; known are {', '.join(known)}")
    found: dict[str, int] = {"mbs": 0, "cp": 1}
    for key, field in _SIZES.items():
        if key in sizes:
            found[field] = parse_integer(sizes[key], f"{where}.{key}", least=1)
        elif field not in found:
            raise Refused(f"{where}.{key} is missing; a whole number of at least 1 is expected")
    offset = parse_integer(sizes.get(_OFFSET, 0), f"{where}.{_OFFSET}", least=0)
    return ModuleLayout(name, **found, rank_offset=offset)


def _parse_word(section: dict[str, Any], key: str, known: tuple[Any, ...]) -> Any:
    value = section.get(key)
    if value not in known:
        told = "is missing" if value is None else f"is {describe_value(value)}"
        raise Refused(f"layout.{key} {told}; one of {', '.join(known)} is expected")
    return value
