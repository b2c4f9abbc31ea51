"""The lists of a plan's file, one number a stage or, with chunks, [chunk][stage], and how what is wrong is told."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from mm_autoparallel.files import describe_value
from mm_autoparallel.job.strategy import Strategy


class Refused(Exception):
    """What is wrong with a plan, before its file is named."""


def parse_mapping(document: dict[str, Any], key: str) -> dict[str, Any]:
    """The mapping under `key`. Raises Refused where it is missing or something else."""
    if key not in document:
        raise Refused(f"{key} is missing{nearest_given(key, document, ())}")
    value = document[key]
    if not isinstance(value, dict):
        raise Refused(f"{key} is {describe_value(value)}; a mapping is expected")
    return value


def parse_integer(value: Any, where: str, least: int) -> int:
    """The whole number `value`, which stands at `where`. Raises Refused where it is none or below `least`."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise Refused(f"{where} is {describe_value(value)}; a whole number is expected")
    if value < least:
        raise Refused(f"{where} is {value}; it must be at least {least}")
    return value


def nearest_given(key: str, given: Mapping[str, Any], known: Mapping[str, Any] | tuple[()]) -> str:
    """A hint at the given key that `key` was probably meant to be."""
    strangers = [name for name in given if name not in known]
    near = difflib.get_close_matches(key, strangers, n=1)
    return f"; the key {near[0]!r} stands there, which is not known" if near else ""


def parse_list(value: Any, where: str, strategy: Strategy, last_may_miss: bool) -> tuple[int, ...]:
    """[stage] or, with chunks, [chunk][stage] → one number per virtual stage; the last one of a row may miss, then 0.

    Raises Refused where it has another form.
    """
    if strategy.vpp == 1:
        return _parse_row(value, where, strategy, last_may_miss)
    if not isinstance(value, list) or any(not isinstance(row, list) for row in value):
        raise Refused(
            f"{where} must nest [chunk][stage], {strategy.vpp} lists of {strategy.pp}, because VPP is {strategy.vpp}"
        )
    if len(value) != strategy.vpp:
        raise Refused(f"{where} has {len(value)} chunks, and VPP is {strategy.vpp}")
    rows = [_parse_row(row, f"{where}[{chunk}]", strategy, last_may_miss) for chunk, row in enumerate(value)]
    return tuple(count for row in rows for count in row)


def _parse_row(value: Any, where: str, strategy: Strategy, last_may_miss: bool) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise Refused(
            f"{where} is {describe_value(value)}; a list of {strategy.pp} whole numbers is expected, one per stage"
        )
    if value and isinstance(value[0], list):
        raise Refused(f"{where} is nested, and parallel_config.VPP is {strategy.vpp}: give one whole number per stage")
    counts = tuple(parse_integer(count, f"{where}, stage {stage},", least=0) for stage, count in enumerate(value))
    if last_may_miss and len(counts) == strategy.pp - 1:
        counts = (*counts, 0)
    if len(counts) != strategy.pp:
        or_less = f" or {strategy.pp - 1}" if last_may_miss else ""
        raise Refused(f"{where} has {len(counts)} entries; PP is {strategy.pp}, so it needs {strategy.pp}{or_less}")
    return counts


def nest(counts: tuple[int, ...], strategy: Strategy) -> list[int] | list[list[int]]:
    """One number per virtual stage → [stage] or, with chunks, [chunk][stage]."""
    if strategy.vpp == 1:
        return list(counts)
    return [list(counts[chunk * strategy.pp : (chunk + 1) * strategy.pp]) for chunk in range(strategy.vpp)]
