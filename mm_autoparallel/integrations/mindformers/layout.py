"""Layout: how many layers every chunk of every stage holds and recomputes, as `offset` and `recompute` say it.

Both are lists `[chunk][stage]`. Chunk c of stage s holds num_layers // (stages · chunks) + offset[c][s] layers and
recomputes its first recompute[c][s] (MindFormers, mindformers/models/utils.py, LayerSetting).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

from mm_autoparallel.errors import PlanError
from mm_autoparallel.files import describe_value
from mm_autoparallel.integrations.mindformers.model_section import WHAT
from mm_autoparallel.integrations.mindformers.pretrain_yaml import Pretrain, recompute_config
from mm_autoparallel.integrations.mindformers.selected_operators import SELECT_KEYS, read_selected
from mm_autoparallel.integrations.mindformers.yaml_keys import written
from mm_autoparallel.integrations.yaml_text import KeyPath
from mm_autoparallel.records import MAX_LAYERS

Grid = tuple[tuple[int, ...], ...]
"""Whole numbers `[chunk][stage]`."""

RECOMPUTE: KeyPath = ("recompute_config", "recompute")


@dataclass(frozen=True)
class Layout:
    """layers, recompute: `[chunk][stage]`. selected: (key of SELECT_KEYS, pattern of operators, `[chunk][stage]` layers
    in which they are recomputed), where there are any; the pattern is empty where the key has counts alone, and in a
    layout that is to be written where they hold for whatever operators the YAML names.
    """

    layers: Grid
    recompute: Grid
    selected: tuple[tuple[str, str, Grid], ...] = ()


def read_layout(pretrain: Pretrain) -> Layout:
    """What offset and recompute say. Raises PlanError naming the key where shape, sum or counts are wrong."""
    offset = _offset_grid(pretrain)
    layers = tuple(tuple(pretrain.base_layers + shift for shift in row) for row in offset)
    total = sum(map(sum, layers))
    if total != pretrain.num_layers:
        raise _wrong(
            pretrain,
            written(pretrain.keys.offset),
            f"makes {total} layers and the model has {pretrain.num_layers} (multi-token prediction included): its sum "
            f"must be {pretrain.num_layers} % ({pretrain.pp} · {pretrain.vp}) = "
            f"{pretrain.num_layers % pretrain.num_virtual_stages}",
        )
    low = next(((c, s) for c, row in enumerate(layers) for s, held in enumerate(row) if held < 0), None)
    if low is not None:
        raise _wrong(
            pretrain, written(pretrain.keys.offset), f"leaves chunk {low[0]} of stage {low[1]} less than no layer"
        )
    config = recompute_config(pretrain)
    recompute = _count_grid(pretrain, config.get("recompute", False), layers, "recompute_config.recompute")
    selected = tuple(
        (key, pattern, _count_grid(pretrain, counts, layers, f"recompute_config.{key}.{pattern}"))
        for key in SELECT_KEYS
        for pattern, counts in _counted_patterns(config.get(key))
    )
    selected = tuple(entry for entry in selected if any(map(any, entry[2])))
    return Layout(layers, recompute, (*selected, *_beside_counts(pretrain, selected, layers)))


def _beside_counts(
    pretrain: Pretrain, selected: tuple[tuple[str, str, Grid], ...], layers: Grid
) -> Iterator[tuple[str, str, Grid]]:
    """Where one key has counts, the other may hold in all layers (`true`, or patterns), and then has counts too."""
    counted = {key for key, _, _ in selected}
    for key in _held_everywhere(pretrain, counted):
        yield key, "", layers


def _held_everywhere(pretrain: Pretrain, counted: AbstractSet[str]) -> list[str]:
    """Where keys have counts, those that have none and hold in all layers."""
    beside = (key for key in SELECT_KEYS if counted and key not in counted)
    return [key for key in beside if read_selected(pretrain, key).everywhere]


def layout_changes(pretrain: Pretrain, layout: Layout) -> dict[KeyPath, Any]:
    """The values that make the YAML say `layout`: path of keys → value. Lists of a single chunk stay as flat or nested
    as they were. Raises PlanError where the layout has another shape or sum than the YAML's model.
    """
    if _shape(layout.layers) != (pretrain.vp, pretrain.pp) or _shape(layout.recompute) != (pretrain.vp, pretrain.pp):
        raise PlanError(
            f"the layout has {len(layout.layers)} chunks of {len(layout.layers[0])} stages; {pretrain.path} has "
            f"{pretrain.vp} of {pretrain.pp}"
        )
    if sum(map(sum, layout.layers)) != pretrain.num_layers:
        raise PlanError(
            f"the layout holds {sum(map(sum, layout.layers))} layers; {pretrain.path} has {pretrain.num_layers}"
        )
    layout = with_counts(pretrain, layout, _held_everywhere(pretrain, {key for key, _, _ in layout.selected}))
    offset = [[held - pretrain.base_layers for held in row] for row in layout.layers]
    recompute = [list(row) for row in layout.recompute]
    config = recompute_config(pretrain)
    changes: dict[KeyPath, Any] = {
        pretrain.keys.offset: _as_before(offset, _said_offset(pretrain)),
        RECOMPUTE: _as_before(recompute, config.get("recompute")),
    }
    selected = {(key, pattern): [list(row) for row in grid] for key, pattern, grid in layout.selected}
    none = [[0] * pretrain.pp for _ in range(pretrain.vp)]
    for key in SELECT_KEYS:
        of_all = selected.pop((key, ""), None)
        if of_all is not None:
            changes |= _changes_of_all(pretrain, key, of_all)
            continue
        for pattern, counts in _counted_patterns(config.get(key)):
            changes[_path_of(key, pattern)] = _as_before(selected.pop((key, pattern), none), counts)
    for (key, pattern), grid in selected.items():
        if isinstance(config.get(key), list) or config.get(key) is True:
            raise _wrong(
                pretrain, f"recompute_config.{key}", f"names operators of all layers; {pattern} needs a mapping"
            )
        changes[_path_of(key, pattern)] = _as_before(grid, None)
    return changes


def _changes_of_all(pretrain: Pretrain, key: str, grid: list[list[int]]) -> dict[KeyPath, Any]:
    """The same counts for whatever operators `key` names; a list of patterns becomes a mapping of them."""
    held = recompute_config(pretrain).get(key)
    if isinstance(held, list) and held and isinstance(held[0], str):
        return {_path_of(key, ""): {pattern: _as_before(grid, None) for pattern in held}}
    if isinstance(held, dict) and held:
        patterns = read_selected(pretrain, key).patterns
        return {_path_of(key, pattern): _as_before(grid, held[pattern]) for pattern in patterns}
    return {_path_of(key, ""): _as_before(grid, held)}


def with_counts(pretrain: Pretrain, layout: Layout, keys: Sequence[str]) -> Layout:
    """`layout`, that also says of each of `keys` which `pretrain` has that its operators run again in no layer, where
    it says nothing of it.
    """
    said = {key for key, _, _ in layout.selected}
    config = recompute_config(pretrain)
    none = tuple((0,) * len(row) for row in layout.layers)
    more = [(key, "", none) for key in keys if key not in said and config.get(key)]
    return replace(layout, selected=(*layout.selected, *more))


def stale_selections(pretrain: Pretrain, changes: dict[KeyPath, Any]) -> list[str]:
    """A sentence for each key under which operators of some layers were recomputed before and are not any more."""
    config = recompute_config(pretrain)
    before = {
        key: any(any(_flatten(counts)) for _, counts in _counted_patterns(config.get(key)))
        for key in SELECT_KEYS
        if any(path[1] == key and not any(_flatten(value)) for path, value in changes.items())
    }
    return [
        f"{key}: its counts are set to 0; recompute is planned for whole layers" for key, had in before.items() if had
    ]


def selected_counts(layout: Layout, key: str) -> Grid | None:
    """`[chunk][stage]` layers in which the operators of `key` are recomputed; None where there are none.

    Raises PlanError where patterns of operators have different counts: they are recomputed together here.
    """
    grids = {grid for name, _, grid in layout.selected if name == key}
    if len(grids) > 1:
        raise PlanError(f"recompute_config.{key}: its patterns have different counts; give all of them the same")
    return next(iter(grids), None)


def _said_offset(pretrain: Pretrain) -> Any:
    """What stands in the YAML; 0 where nothing does."""
    node: Any = pretrain.document
    for key in pretrain.keys.offset:
        node = node.get(key) if isinstance(node, dict) else None
    return 0 if node is None else node


def _wrong(pretrain: Pretrain, key: str, problem: str) -> PlanError:
    return PlanError(f"{key} {problem}", where=f"{WHAT} {pretrain.path}", key=key)


def _shape(grid: Sequence[Sequence[int]]) -> tuple[int, int]:
    return len(grid), len(grid[0])


def _as_before(grid: list[list[int]], old: Any) -> Any:
    """A single chunk's list as people write it: flat, unless it was nested before."""
    was_nested = isinstance(old, list) and any(isinstance(row, list) for row in old)
    return grid if len(grid) > 1 or was_nested else grid[0]


def _is_count(value: object) -> bool:
    """Whether it can be a number of layers, or by how many a stage has more or fewer."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MAX_LAYERS


def _offset_grid(pretrain: Pretrain) -> Grid:
    """A number stands for every chunk, a flat list for every chunk of its stages."""
    value = _said_offset(pretrain)
    key = written(pretrain.keys.offset)
    if _is_count(value):
        if value == 0 and pretrain.num_layers % pretrain.num_virtual_stages:
            raise _wrong(
                pretrain,
                key,
                f"is 0 and {pretrain.num_layers} layers do not divide evenly over {pretrain.pp} stages of "
                f"{pretrain.vp} chunks; `mm-autoparallel pipeline-search` finds the offset",
            )
        return ((value,) * pretrain.pp,) * pretrain.vp
    rows = _int_rows(pretrain, value, key)
    if len(rows) == 1 and not isinstance(value[0], list):
        rows = rows * pretrain.vp
    if len(rows) != pretrain.vp:
        raise _wrong(pretrain, key, f"has {len(rows)} chunks; pp_interleave_num is {pretrain.vp}")
    return rows


def _int_rows(pretrain: Pretrain, value: Any, key: str) -> Grid:
    rows = value if isinstance(value, list) and any(isinstance(row, list) for row in value) else [value]
    for row in rows:
        if not isinstance(row, list) or not all(_is_count(item) for item in row):
            raise _wrong(
                pretrain, key, f"holds {describe_value(row)}; lists of whole numbers [chunk][stage] are expected"
            )
        if len(row) != pretrain.pp:
            raise _wrong(pretrain, key, f"has a list of {len(row)} numbers; pipeline_stage is {pretrain.pp}")
    return tuple(tuple(row) for row in rows)


def stale_offset_notes(pretrain: Pretrain) -> list[str]:
    """A sentence where the YAML's offset is of other stages, chunks or layers: it is where a search begins, no more.

    Raises PlanError where it holds anything but whole numbers.
    """
    value, key = _said_offset(pretrain), written(pretrain.keys.offset)
    if value == 0:
        return []
    if not all(_is_count(item) for item in _flatten([value])):
        raise _wrong(pretrain, key, f"is {describe_value(value)}; whole numbers [chunk][stage] are expected")
    try:
        read_layout(pretrain)
    except PlanError as error:
        return [f"{error.reason}; it is found anew"]
    return []


def _counted_patterns(value: Any) -> list[tuple[str, list[Any]]]:
    """Operator patterns with counts of layers; an empty one for a list of counts without patterns. Patterns that hold

    in all layers or none are not the layout's.
    """
    if isinstance(value, list) and value and all(isinstance(item, int) for item in _flatten(value)):
        return [("", value)]
    entries = value.items() if isinstance(value, dict) else ()
    return [(pattern, counts) for pattern, counts in entries if isinstance(counts, list)]


def _path_of(key: str, pattern: str) -> KeyPath:
    return ("recompute_config", key, pattern) if pattern else ("recompute_config", key)


def _flatten(value: Any) -> list[Any]:
    return [item for entry in value for item in _flatten(entry)] if isinstance(value, list) else [value]


def _check_counts(pretrain: Pretrain, rows: Grid, key: str) -> None:
    negative = next((n for row in rows for n in row if n < 0), None)
    if negative is not None:
        raise _wrong(pretrain, key, f"holds {negative}; it must be at least 0")


def _numbers_of_flags(value: list[Any], layers: Grid) -> list[Any]:
    """Flags in lists of counts as numbers: true is every layer there, of a chunk of its stages."""
    most, none = sum(map(sum, layers)), [0] * len(layers[0])
    numbers: list[Any] = []
    nested = any(isinstance(row, list) for row in value)
    for index, item in enumerate(value):
        if isinstance(item, list):
            numbers.append([most * n if isinstance(n, bool) else n for n in item])
        elif isinstance(item, bool) and nested:
            numbers.append(list(layers[index]) if item and index < len(layers) else none)
        else:
            numbers.append(most * item if isinstance(item, bool) else item)
    return numbers


def _count_grid(pretrain: Pretrain, value: Any, layers: Grid, key: str) -> Grid:
    """Counts as MindFormers expands them: true is all, a flat list is dealt out over a stage's chunks in turn."""
    if value is None or isinstance(value, bool):
        return layers if value else tuple((0,) * len(row) for row in layers)
    if not isinstance(value, list):
        raise _wrong(pretrain, key, f"is {describe_value(value)}; true, false or a list [chunk][stage] is expected")
    value = _numbers_of_flags(value, layers)
    if any(isinstance(row, list) for row in value):
        rows = _int_rows(pretrain, value, key)
        if len(rows) != pretrain.vp:
            raise _wrong(pretrain, key, f"has {len(rows)} chunks; pp_interleave_num is {pretrain.vp}")
        _check_counts(pretrain, rows, key)
        return tuple(
            tuple(min(n, held) for n, held in zip(row, held_row, strict=True))
            for row, held_row in zip(rows, layers, strict=True)
        )
    (flat,) = _int_rows(pretrain, value, key)
    _check_counts(pretrain, (flat,), key)
    dealt = [[0] * pretrain.pp for _ in range(pretrain.vp)]
    for stage, count in enumerate(flat):
        left = min(count, sum(row[stage] for row in layers))
        while left > 0:
            for chunk in range(pretrain.vp):
                if left > 0 and dealt[chunk][stage] < layers[chunk][stage]:
                    dealt[chunk][stage] += 1
                    left -= 1
    return tuple(map(tuple, dealt))
