"""Problems whose layers may run in several layouts, in terms of problems without: laid out, relaxed, and their laws.

Once placed, such a problem is an ordinary one that has each block once in each layout, plus what resharding adds
(`lay_out`, `reshard_ms`). Where nothing is placed yet, the block that has the least of each figure of any layout bounds
it from below (`relaxed`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from mm_autoparallel.errors import JobError
from mm_autoparallel.pipeline.layout import Layout, Reshard
from mm_autoparallel.pipeline.problem import ChainBlock, Mode, Placement, Problem

#: Figures that a layout and a block both have, but for `step_shard_bytes`, whose default is another figure.
_SHARED = (
    "forward_ms",
    "backward_ms",
    "static_bytes",
    "activation_bytes",
    "transient_bytes",
    "tail_ms",
    "step_bytes",
    "step_once_bytes",
)


def has_layouts(problem: Problem) -> bool:
    """Whether any layer may run in another layout than its block's own."""
    return any(mode.layout is not None for block in problem.chain for mode in block.modes)


def list_layouts(block: ChainBlock) -> tuple[Layout, ...]:
    """The layouts of its modes, in their order; its own is none of them."""
    return tuple(dict.fromkeys(mode.layout for mode in block.modes if mode.layout is not None))


def block_in(block: ChainBlock, layout: Layout) -> ChainBlock:
    """The block as it would be if `layout` were its own: with the modes of that layout and no other."""
    return replace(
        block,
        name=f"{block.name} {layout.name}",
        modes=tuple(replace(mode, layout=None) for mode in block.modes if mode.layout == layout),
        step_shard_bytes=layout.step_shard_bytes,
        footprint=layout.footprint,
        reshards=(),
        **{name: getattr(layout, name) for name in _SHARED},
    )


def lay_out(problem: Problem, placement: Placement) -> tuple[Problem, Placement]:
    """An ordinary problem and placement that hold the same, each block once in each layout, its own last.

    Resharding is not in it. Problems without layouts come back as they are.
    """
    if not has_layouts(problem):
        return problem, placement
    chain: list[ChainBlock] = []
    layers: list[list[int]] = [[] for _ in placement.layers]
    modes: list[list[tuple[int, ...]]] = [[] for _ in placement.modes]
    for e, block in enumerate(problem.chain):
        for layout in list_layouts(block):
            its = [m for m, mode in enumerate(block.modes) if mode.layout == layout]
            chain.append(block_in(block, layout))
            for k, row in enumerate(placement.modes):
                counts = tuple(row[e][m] for m in its)
                layers[k].append(sum(counts))
                modes[k].append(counts)
        own = [m for m, mode in enumerate(block.modes) if mode.layout is None]
        chain.append(replace(block, modes=tuple(block.modes[m] for m in own), reshards=()))
        for k, row in enumerate(placement.modes):
            elsewhere = sum(count for m, count in enumerate(row[e]) if m not in own)
            layers[k].append(placement.layers[k][e] - elsewhere)
            modes[k].append(tuple(row[e][m] for m in own))
    placed = Placement(tuple(map(tuple, layers)), tuple(map(tuple, modes)))
    return replace(problem, chain=tuple(chain)), placed


def in_every_layout(problem: Problem) -> Problem:
    """The problem's blocks once in each layout, for what sums over all figures that may occur."""
    if not has_layouts(problem):
        return problem
    none = tuple((0,) * len(problem.chain) for _ in range(problem.num_virtual_stages))
    no_modes = tuple(tuple((0,) * len(block.modes) for block in problem.chain) for _ in none)
    return lay_out(problem, Placement(none, no_modes))[0]


def reshard_ms(problem: Problem, placement: Placement) -> tuple[tuple[float, float], ...]:
    """Of each virtual stage, what its layers' changes of layout add to its forward and backward."""
    return tuple(
        _sum_pairs(_changes(problem.chain, layers, modes))
        for layers, modes in zip(placement.layers, placement.modes, strict=True)
    )


def _sum_pairs(changes: Iterator[Reshard]) -> tuple[float, float]:
    forward_ms, backward_ms = 0.0, 0.0
    for change in changes:
        forward_ms, backward_ms = forward_ms + change.forward_ms, backward_ms + change.backward_ms
    return forward_ms, backward_ms


def _changes(
    chain: tuple[ChainBlock, ...], layers: tuple[int, ...], modes: tuple[tuple[int, ...], ...]
) -> Iterator[Reshard]:
    """The changes of layout along one virtual stage: a layout's layers, in the order of data, are the group's next."""
    at, block_at = "", chain[0]
    for block, held, counts in zip(chain, layers, modes, strict=True):
        if not held:
            continue
        if block_at.group != block.group and at:
            yield find_reshard(block_at, at, "")
            at = ""
        runs = [_layout_name(mode) for mode, count in zip(block.modes, counts, strict=True) if count]
        for name in (*runs, *([""] if held > sum(counts) else [])):
            if name != at:
                yield find_reshard(block if block.reshards else block_at, at, name)
            at, block_at = name, block
    if at:
        yield find_reshard(block_at, at, "")


def _layout_name(mode: Mode) -> str:
    return mode.layout.name if mode.layout else ""


def find_reshard(block: ChainBlock, source: str, target: str) -> Reshard:
    """That of the block between two of its layouts, "" being its own. Raises JobError where it has none."""
    for each in block.reshards:
        if (each.source, each.target) == (source, target):
            return each
    names = " to ".join(f'layout "{name}"' if name else "its own layout" for name in (source, target))
    raise JobError(f'block "{block.name}": reshards does not say what going from {names} takes')


def relaxed(problem: Problem) -> Problem:
    """A problem without layouts of which no figure is above the true one, in whatever layout a layer runs.

    Each block has the least of each figure of its layouts; a layer in a mode adds what it takes beyond these.
    Resharding is left out. So its placements fit where the true ones do, and take no longer.
    """
    if not has_layouts(problem):
        return problem
    return replace(problem, chain=tuple(_relaxed_block(block) for block in problem.chain))


def _relaxed_block(block: ChainBlock) -> ChainBlock:
    layouts = list_layouts(block)
    if not layouts:
        return block
    least = {name: min(getattr(each, name) for each in (block, *layouts)) for name in _SHARED}
    shard_bytes = min(block_in(block, each).shard_bytes for each in layouts)
    modes = []
    for mode in block.modes:
        own = mode.layout or block
        modes.append(
            replace(
                mode,
                extra_forward_ms=own.forward_ms + mode.extra_forward_ms - least["forward_ms"],
                extra_backward_ms=own.backward_ms + mode.extra_backward_ms - least["backward_ms"],
                layout=None,
            )
        )
    footprint = None  # bytes of several layouts have no one cause
    return replace(
        block,
        modes=tuple(modes),
        step_shard_bytes=min(shard_bytes, block.shard_bytes),
        footprint=footprint,
        reshards=(),
        **least,
    )


def check_layouts(problem: Problem) -> None:
    """Raise JobError, naming block and mode, where layouts contradict one another or the rest of the problem."""
    if not has_layouts(problem):
        return
    if problem.num_chunks > 1:
        raise JobError(
            f"modes with a layout need one chunk a stage, and num_chunks is {problem.num_chunks}: no stack is known "
            "that has both"
        )
    if problem.splits:
        raise JobError(
            f"modes with a layout need whole backwards, and schedule {problem.schedule} parts them: a layout does not "
            "say how much of its backward is weight gradient"
        )
    groups: dict[tuple[str, str], ChainBlock] = {}
    before: ChainBlock | None = None
    for block in problem.chain:
        if block.microbatch_scale:
            raise JobError(
                f'block "{block.name}" has a microbatch_scale, and modes have layouts, which need equal ones'
            )
        for mode in block.modes:
            if mode.host_bytes:
                raise JobError(
                    f'block "{block.name}": mode "{mode.name}" moves bytes to the host, and modes have layouts'
                )
        _check_order(block)
        first = groups.setdefault(block.group, block) if block.modes else block
        apart = before is None or before.group != block.group
        if first is not block and (first.reshards != block.reshards or (first.reshards and apart)):
            raise JobError(
                f'block "{block.name}": blocks of one recompute_group whose modes have layouts follow one another, '
                f'with the same reshards; those of "{first.name}" are others'
            )
        before = block if block.modes else None


def _check_order(block: ChainBlock) -> None:
    """Raise JobError where the modes of one block are not those of one layout after another, its own last."""
    names = [_layout_name(mode) for mode in block.modes]
    runs = [name for name, last in zip(names, ["", *names], strict=False) if name and name != last]
    if any(not name and after for name, after in pairwise(names)):
        raise JobError(f'block "{block.name}": modes with a layout come before those of the block\'s own')
    if len(set(runs)) < len(runs) or len(list_layouts(block)) != len(runs):
        raise JobError(f'block "{block.name}": modes of one layout follow one another and tell the same figures of it')
    for source, target in ((a, b) for a in ("", *runs) for b in ("", *runs) if a != b):
        find_reshard(block, source, target)
