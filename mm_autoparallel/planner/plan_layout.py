"""The result file's `layout`: where encoders and decoder have sizes of their own. The plain chain has none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from mm_autoparallel.files import describe_value
from mm_autoparallel.model.job.arrangement import (
    ENCODER_RUNS,
    JOINED,
    MODULE_KINDS,
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
_OFFSET, _PIECES = "rank_offset", "pieces"
_RUN = {"kind", "encoder_run"}
"""What the section says of all encoders, or, where several are modules, each of its own."""
_SECTION = ("kind", "encoder_run", "modules")


def layout_document(strategy: Strategy) -> dict[str, Any]:
    """`layout` as a key of the result file, where there is an arrangement. Encoders that are one module stand there
    each, with equal sizes; several modules each say their own kind and run."""
    arrangement, decoder = strategy.arrangement, strategy.of_decoder()
    if arrangement is None:
        return {}
    sizes = {key: getattr(decoder, name) for key, name in _SIZES.items()} | {_OFFSET: arrangement.decoder_offset}
    if arrangement.others:
        each = {one.encoder.name: _run_document(one) | _sizes_document(one.encoder) for one in arrangement.each}
        return {"layout": {"modules": {**each, DECODER: sizes}}}
    parts = {part: _sizes_document(arrangement.encoder) for part in arrangement.encoder.parts}
    return {"layout": {**_run_document(arrangement), "modules": {**parts, DECODER: sizes}}}


def _run_document(one: Arrangement) -> dict[str, Any]:
    return {"kind": one.kind, "encoder_run": one.encoder_run}


def _sizes_document(own: ModuleLayout) -> dict[str, Any]:
    pieces = {_PIECES: own.pieces} if own.pieces > 1 else {}
    return {key: getattr(own, name) for key, name in _SIZES.items()} | {_OFFSET: own.rank_offset} | pieces


def parse_layout_section(document: dict[str, Any], strategy: Strategy) -> Strategy:
    """`strategy` with the arrangement that `layout` tells; files of the chain have none.

    An MBS that is not said is the decoder's, or what a replica gets of its micro-batches. Raises Refused naming the key
    that is missing, malformed, or contradicts parallel_config or the section's kind.
    """
    if "layout" not in document:
        return strategy
    section = parse_mapping(document, "layout")
    modules = section.get("modules")
    entries = modules if isinstance(modules, dict) else {}
    is_each = any(isinstance(sizes, dict) and _RUN & sizes.keys() for name, sizes in entries.items() if name != DECODER)
    if (not is_each or "kind" in section) and _parse_word(section, "layout", "kind", MODULE_KINDS) == "chain":
        _check_chain(section)
        return strategy
    if not is_each or "encoder_run" in section:
        _parse_word(section, "layout", "encoder_run", ENCODER_RUNS)
    if not isinstance(modules, dict) or len(modules) < 2 or DECODER not in modules:
        found = f"names {', '.join(modules)}" if isinstance(modules, dict) else f"is {describe_value(modules)}"
        raise Refused(
            f"layout.modules {found}; the sizes of one encoder, such as vision, and of {DECODER} are expected"
        )
    if is_each:
        first, *others = [_parse_each(section, modules, name, strategy) for name in modules if name != DECODER]
        arrangement = replace(first, others=tuple(others))
    else:
        encoder = _fill_samples(_parse_encoders(modules), section["encoder_run"], strategy)
        arrangement = Arrangement(section["kind"], section["encoder_run"], encoder)
    return _check_decoder(replace(strategy, arrangement=arrangement), modules)


def list_unread_layout(document: dict[str, Any]) -> Iterator[str]:
    """A sentence for each key of the section that nobody knows; what it holds for modules is read strictly."""
    for key in document.get("layout", {}):
        if key not in _SECTION:
            of_module = key in (*_SIZES, _OFFSET, _PIECES)
            hint = "; each of layout.modules has its own" if of_module else nearest(str(key), _SECTION)
            yield f"layout.{key} is not known here and decides nothing{hint}"


def _check_chain(section: dict[str, Any]) -> None:
    """A chain says nothing else: all its sizes are in parallel_config."""
    if section.get("modules"):
        raise Refused(
            "layout.kind is chain, and layout.modules stands beside it; in the chain every part has the sizes of "
            f"parallel_config, so leave modules out, or let kind be {' or '.join(MODULE_KINDS[1:])}"
        )
    if section.get("encoder_run", "inline") != "inline":
        raise Refused(
            f"layout.kind is chain, and layout.encoder_run is {describe_value(section['encoder_run'])}; in the chain "
            f"encoders run inline, so leave it out, or let kind be {' or '.join(MODULE_KINDS[1:])}"
        )


def _parse_each(section: dict[str, Any], modules: dict[str, Any], name: str, strategy: Strategy) -> Arrangement:
    """One of several modules, each with a kind and a run of its own or those of the section."""
    encoder, where = _parse_module(modules, name), f"layout.modules.{name}"
    told = {key: section[key] for key in _RUN if key in section} | modules[name]
    kind: ModuleKind = _parse_word(told, where, "kind", MODULE_KINDS[1:])
    run: EncoderRun = _parse_word(told, where, "encoder_run", ENCODER_RUNS)
    return Arrangement(kind, run, _fill_samples(encoder, run, strategy))


def _fill_samples(encoder: ModuleLayout, run: EncoderRun, strategy: Strategy) -> ModuleLayout:
    """With the MBS that stands for one that is not said."""
    if encoder.mbs:
        return encoder
    samples = strategy.mbs * strategy.dp
    return replace(encoder, mbs=strategy.mbs if run != "inline" else max(1, samples // encoder.dp))


def _check_decoder(arranged: Strategy, modules: dict[str, Any]) -> Strategy:
    """`arranged`, where what the section says of the decoder is what parallel_config does."""
    arrangement = arranged.arrangement
    assert arrangement is not None
    number = arrangement.num_stages_apart
    if number and arranged.pp <= number:
        names = ", ".join(one.encoder.parts[0] for one in arrangement.each if one.apart)
        raise Refused(
            f"parallel_config.PP is {arranged.pp}; it counts all stages of the pipeline, those of layout.modules."
            f"{names} too, of which there are {number}"
        )
    told, decoder = _parse_module(modules, DECODER), arranged.of_decoder()
    for key, field in _SIZES.items():
        if getattr(told, field) not in (getattr(decoder, field), 0):
            why = " (all stages but the encoder's)" if field == "pp" and number else ""
            raise Refused(
                f"layout.modules.{DECODER}.{key} is {getattr(told, field)}, and parallel_config says "
                f"{getattr(decoder, field)}{why}; the two must agree"
            )
    behind = arrangement.decoder_offset
    if told.rank_offset != behind:
        begins = ", ".join(str(one.encoder.rank_offset) for one in arrangement.each)
        raise Refused(
            f"layout.modules.{DECODER}.rank_offset is {told.rank_offset}; beside an encoder that begins at rank "
            f"{begins} it is {behind}, so that the ranges neither overlap nor leave ranks idle"
        )
    return arranged


def _parse_encoders(modules: dict[str, Any]) -> ModuleLayout:
    """The sizes that all encoders have, which are one module. Raises Refused where they differ."""
    first, *others = (name for name in modules if name != DECODER)
    sizes = _parse_module(modules, first)
    for name in others:
        if replace(_parse_module(modules, name), name=first) != sizes:
            raise Refused(
                f"layout.modules.{name} has other sizes than {first}; encoders of one kind and run for all are one "
                "module, one after the other on the same ranks; where each has its own sizes, give each its kind and "
                "encoder_run"
            )
    return replace(sizes, name=JOINED.join((first, *others)))


def _parse_module(modules: dict[str, Any], name: str) -> ModuleLayout:
    """The sizes of one module; an MBS of 0 is none."""
    where, sizes = f"layout.modules.{name}", modules[name]
    if not isinstance(sizes, dict):
        raise Refused(f"{where} is {describe_value(sizes)}; a mapping is expected")
    known = (*_SIZES, _OFFSET, *([_PIECES] if name != DECODER else []))
    for key in sizes:
        if key in _RUN and name != DECODER:
            continue
        if key not in known:
            raise Refused(f"{where}.{key} is not known{nearest(key, known)}; known are {', '.join(known)}")
    found: dict[str, int] = {"mbs": 0, "cp": 1}
    for key, field in _SIZES.items():
        if key in sizes:
            found[field] = parse_integer(sizes[key], f"{where}.{key}", least=1)
        elif field not in found:
            raise Refused(f"{where}.{key} is missing; a whole number of at least 1 is expected")
    offset = parse_integer(sizes.get(_OFFSET, 0), f"{where}.{_OFFSET}", least=0)
    pieces = parse_integer(sizes.get(_PIECES, 1), f"{where}.{_PIECES}", least=1)
    return ModuleLayout(name, **found, rank_offset=offset, pieces=pieces)


def _parse_word(section: dict[str, Any], where: str, key: str, known: tuple[Any, ...]) -> Any:
    value = section.get(key)
    if value not in known:
        told = "is missing" if value is None else f"is {describe_value(value)}"
        raise Refused(f"{where}.{key} {told}; one of {', '.join(known)} is expected")
    return value
