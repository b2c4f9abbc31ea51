"""The lists of a plan's file, one number a stage or, with chunks, [chunk][stage], and the words for what is wrong."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mm_autoparallel.files import describe_value
from mm_autoparallel.model.job.layer_layout import LayerLayout, list_layout_modes, parse_layout, split_mode
from mm_autoparallel.model.job.layer_modes import LAYER_MODES, OTHER_MODES, mode_reason
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.pipeline.schedules.catalog import FREE, GIVEN, SCHEDULES
from mm_autoparallel.validation import nearest

if TYPE_CHECKING:
    from mm_autoparallel.model.job.job import Job

MODES = "layer_modes"
"""Beside `layer_recompute`, where some layer runs in another mode: mode → part → counts as there."""

FILE_NAMES = {"vision": "vit", "text": "llm"}
"""Modality → its name in a plan's file, where that is another."""


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


def parse_layouts(given: Any, where: str) -> tuple[LayerLayout, ...]:
    """The layouts that a list of names at `where` names. Raises Refused where it is something else."""
    if not isinstance(given, list):
        raise Refused(f"{where} is {describe_value(given)}; a list of names such as tp4_dp2_zero1 is expected")
    layouts = set()
    for name in given:
        layout = parse_layout(name) if isinstance(name, str) else None
        if layout is None:
            raise Refused(f"{where} names {describe_value(name)}, which is none; one such as tp4_dp2_zero1 is expected")
        layouts.add(layout)
    return tuple(sorted(layouts))


def nearest_given(key: str, given: Mapping[str, Any], known: Collection[str]) -> str:
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


def edit_lists(
    before: Mapping[str, tuple[int, ...]], given: Mapping[str, Sequence[Any]], what: str, strategy: Strategy
) -> dict[str, tuple[int, ...]]:
    """`before` with the lists of `given` in the place of those of their modalities. what: `layers` or `recompute`.

    Raises Refused where a modality is not known, a list has another form, or layers add up to another number.
    """
    edited = dict(before)
    for modality, counts in given.items():
        _check_modality(modality, before, what, strategy)
        where = f"{what}[{modality!r}]"
        edited[modality] = parse_list(_plain(counts), where, strategy, last_may_miss=what == "recompute")
        wanted = sum(before[modality])
        if what == "layers" and sum(edited[modality]) != wanted:
            raise Refused(f"{where} sums to {sum(edited[modality])}; the model has {wanted} {modality} layers")
    return edited


def edit_modes(
    layers: Mapping[str, tuple[int, ...]],
    before: Mapping[str, Mapping[str, tuple[int, ...]]],
    given: Mapping[str, Mapping[str, Sequence[Any]]],
    strategy: Strategy,
) -> dict[str, dict[str, tuple[int, ...]]]:
    """`before` (modality → mode → counts) with the lists of `given` in the place of its own, without empty ones.

    Raises Refused where a modality or a mode is not known, or a list has another form.
    """
    edited = {modality: dict(of_mode) for modality, of_mode in before.items()}
    for modality, of_mode in given.items():
        _check_modality(modality, layers, "modes", strategy)
        for mode, counts in of_mode.items():
            known = (*list_layout_modes(strategy), *OTHER_MODES)
            if mode not in known:
                near = nearest(str(mode), known)
                raise Refused(f"modes names {mode!r}{near}; modes beside recompute are {', '.join(known)}")
            row = parse_list(_plain(counts), f"modes[{modality!r}][{mode!r}]", strategy, last_may_miss=False)
            edited.setdefault(modality, {})[mode] = row
    kept = {m: {mode: counts for mode, counts in of_mode.items() if any(counts)} for m, of_mode in edited.items()}
    return {modality: of_mode for modality, of_mode in kept.items() if of_mode}


def away_reason(modality: str, strategy: Strategy) -> str | None:
    """Why no stage holds layers of an encoder that runs before, after or beside the pipeline; None of other parts."""
    each = strategy.arrangement.each if strategy.arrangement else ()
    own = next((one for one in each if one.away and modality in one.encoder.parts), None)
    return f"no stage holds {modality} layers, for its layout is {own.words}" if own else None


def _check_modality(modality: str, known: Mapping[str, Any], what: str, strategy: Strategy) -> None:
    if reason := away_reason(modality, strategy):
        raise Refused(f"{what} names {modality!r}: {reason}")
    if modality not in known:
        near = nearest(str(modality), list(known))
        raise Refused(f"{what} names {modality!r}{near}; the parts of the model are {', '.join(known)}")


def _plain(value: Any) -> Any:
    """`value` with tuples and arrays, at any depth, as the lists that a file has, numbers of numpy as Python's."""
    plain = value.tolist() if hasattr(value, "tolist") else value
    return [_plain(item) for item in plain] if isinstance(plain, (list, tuple)) else plain


def check_modes(
    modality: str,
    held: tuple[int, ...],
    recompute: tuple[int, ...],
    modes: Mapping[str, tuple[int, ...]],
    strategy: Strategy,
) -> None:
    """No more layers in modes than a stage holds."""
    for k, (recomputed, num_held) in enumerate(zip(recompute, held, strict=True)):
        if recomputed > num_held:
            raise Refused(
                f"layer_recompute.{list_key(modality, 'recompute')} recomputes {recomputed} layers on "
                f"{strategy.name_stage(k)}, which holds {num_held} {modality} layers"
            )
        told = {"recompute": recomputed} | {mode: counts[k] for mode, counts in modes.items()}
        if sum(told.values()) > num_held:
            listed = ", ".join(f"{count} in {mode}" for mode, count in told.items() if count)
            raise Refused(
                f"layer_recompute and {MODES} run {sum(told.values())} {modality} layers of "
                f"{strategy.name_stage(k)} in modes ({listed}), and it holds {num_held}"
            )


def check_order(layers: Mapping[str, tuple[int, ...]], strategy: Strategy) -> None:
    """Every virtual stage holds a layer, and a modality ends before the next begins (one stage may hold both ends)."""
    for k in range(strategy.pp * strategy.vpp):
        if not any(counts[k] for counts in layers.values()):
            raise Refused(f"layer_placement gives {strategy.name_stage(k)} no layer; every stage (and chunk) needs one")
    latest, latest_modality = 0, ""
    for modality, counts in layers.items():
        held = [k for k, count in enumerate(counts) if count]
        if held[0] < latest:
            raise Refused(
                f"layer_placement puts {modality} layers on {strategy.name_stage(held[0])}, before the "
                f"{latest_modality} layers of {strategy.name_stage(latest)}; data flows {' → '.join(layers)}, so "
                f"{latest_modality} must end before {modality} begins (one stage may hold both)"
            )
        latest, latest_modality = held[-1], modality


def list_key(modality: str, what: str) -> str:
    """`vit_layer_placement` and its like."""
    return f"{FILE_NAMES.get(modality, modality)}_layer_{what}"


def modality_of(name: str) -> str:
    """A part's own name, from that in a plan's file."""
    return next((modality for modality, of_file in FILE_NAMES.items() if of_file == name), name)


def parse_modes(document: dict[str, Any], strategy: Strategy) -> Iterator[tuple[str, str, str, tuple[int, ...]]]:
    """Of each list in `layer_modes`: mode, the list's place for messages, the part as the file names it, and one number
    per virtual stage. Raises Refused where a mode is not known or a list malformed."""
    for mode, lists in parse_mapping(document, MODES).items() if MODES in document else ():
        where = f"{MODES}.{mode}"
        if mode == "recompute":
            raise Refused(f"{where} stands there; layers that recompute are counted in layer_recompute")
        known = (*list_layout_modes(strategy), *OTHER_MODES)
        if mode not in known:
            raise Refused(f"{where} is no mode{nearest(mode, known)}; known are {', '.join(known)}")
        if not isinstance(lists, dict):
            raise Refused(f"{where} is {describe_value(lists)}; a mapping of the model's parts is expected")
        for name, value in lists.items():
            yield mode, f"{where}.{name}", name, parse_list(value, f"{where}.{name}", strategy, last_may_miss=False)


def by_modality(
    parsed: Iterable[tuple[str, str, str, tuple[int, ...]]],
) -> dict[str, dict[str, tuple[int, ...]]]:
    """What `parse_modes` gives as modality → mode → one number per virtual stage, without those that are all zero."""
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for mode, _, name, counts in parsed:
        if any(counts):
            found.setdefault(modality_of(name), {})[mode] = counts
    return found


def parse_modes_of(document: dict[str, Any], job: Job, strategy: Strategy) -> dict[str, dict[str, tuple[int, ...]]]:
    """`layer_modes` as modality → mode → one number per virtual stage; without those that are all zero. Raises Refused
    as `parse_modes`, and where the job has no such part or cannot run a mode."""
    modalities = {FILE_NAMES.get(modality.name, modality.name): modality.name for modality in job.model.modalities}
    for mode, where, name, counts in parse_modes(document, strategy):
        if name not in modalities:
            raise Refused(f"{where} is no part of {job.model.name}; its parts are {', '.join(modalities)}")
        own = next((name for name in LAYER_MODES if name == split_mode(mode)[1]), None)
        reason = mode_reason(own, job.workload, job.cluster.device) if own and any(counts) else None
        if reason:
            raise Refused(f"{MODES}.{mode} does not fit the job: {reason}")
    return by_modality(parse_modes(document, strategy))


def modes_document(modes: Mapping[str, Mapping[str, tuple[int, ...]]], strategy: Strategy) -> dict[str, Any]:
    """`layer_modes`, where some layer runs in another mode than recompute. modes: modality → mode → numbers."""
    known = (*list_layout_modes(strategy), *OTHER_MODES)
    lists = {
        mode: {
            FILE_NAMES.get(modality, modality): nest(of_mode[mode], strategy)
            for modality, of_mode in modes.items()
            if mode in of_mode
        }
        for mode in known
        if any(mode in of_mode for of_mode in modes.values())
    }
    return {MODES: lists} if lists else {}


def parse_orders(document: dict[str, Any], strategy: Strategy) -> tuple[str, ...]:
    """`order` as `parse_order` has it, where it was found together with the placement; else nothing."""
    what = _found_with_placement(strategy)
    return parse_order(document, strategy.pp, what) if what else ()


def _found_with_placement(strategy: Strategy) -> str:
    """For what plans of the strategy have an order that was found; empty where they have none."""
    if strategy.arrangement and strategy.arrangement.has_orders:
        return "an encoder in bubbles"
    schedule = SCHEDULES.get(strategy.schedule)
    return f"schedule {strategy.schedule}" if schedule and schedule.given_by == "placement" else ""


def list_unread_order(document: dict[str, Any], strategy: Strategy) -> Iterator[str]:
    """A sentence where `order` stands there and is not read."""
    if "order" in document and strategy.schedule != GIVEN and not _found_with_placement(strategy):
        yield (
            f"order decides nothing here: schedule {strategy.schedule} says by its name what each stage runs; order is "
            f"read with schedule {FREE} or {GIVEN}, and with an encoder in bubbles or as prefetch"
        )


def parse_order(document: dict[str, Any], num_stages: int, what: str) -> tuple[str, ...]:
    """`order`, which plans with `what` have, as one text a stage. Raises Refused where it is missing or no lists of
    words; whether they are a whole order that ends, the simulator says."""
    order = document.get("order")
    if not isinstance(order, list) or len(order) != num_stages:
        told = "is missing" if order is None else f"is {describe_value(order)}"
        raise Refused(
            f'order {told}; with {what} a list of actions ("0F0") for each of the {num_stages} stages is expected'
        )
    for stage, words in enumerate(order):
        if not isinstance(words, list) or not all(isinstance(word, str) and word.strip() for word in words):
            raise Refused(f'order: stage {stage} has {describe_value(words)}; a list of actions ("0F0") is expected')
    return tuple(" ".join(words) for words in order)
