"""Placements as plans tell them: how many layers of each modality every virtual stage holds, and in which modes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mm_autoparallel.errors import PlanError
from mm_autoparallel.pipeline.problem import RECOMPUTE, Placement, Problem, name_virtual_stage


def placement_from_modalities(
    problem: Problem,
    layers: Mapping[str, Sequence[int]],
    recompute: Mapping[str, Sequence[int]],
    modes: Mapping[str, Mapping[str, Sequence[int]]] | None = None,
) -> Placement:
    """The placement that holds `layers[modality][k]` layers per virtual stage, `recompute[modality][k]` of them
    recomputed.

    modes: of each modality the counts of modes by other names; layers take modes in the order in which blocks have
    them, the first layers first. Blocks that are no layers follow their `pinned` and `attach` marks, and where they
    have none the block before them.
    Raises PlanError where sums, order or counts do not fit the chain, naming stage and modality.
    """
    num_virtual, chain = problem.num_virtual_stages, problem.chain
    modalities = list(dict.fromkeys(block.modality for block in chain if block.layer))
    wanted: dict[str, dict[str, Sequence[int]]] = {modality: {RECOMPUTE: row} for modality, row in recompute.items()}
    for modality, of_mode in (modes or {}).items():
        wanted.setdefault(modality, {}).update(of_mode)
    given = [("layers", modality, row) for modality, row in layers.items()]
    given += [(name, modality, row) for modality, of_mode in wanted.items() for name, row in of_mode.items()]
    for what, modality, row in given:
        if modality not in modalities and any(row):
            raise PlanError(f"{what}: there is no modality {modality}; known are {', '.join(modalities)}")
        if len(row) != num_virtual:
            raise PlanError(f"{what} of {modality}: {len(row)} counts for {num_virtual} (virtual) stages")
        if any(count < 0 for count in row):
            k = next(k for k, count in enumerate(row) if count < 0)
            where = name_virtual_stage(problem, k)
            raise PlanError(f"{what} of {modality}: {where} has {row[k]}; it must be at least 0")
    rows: dict[str, Sequence[int]] = {}
    for modality in modalities:
        row = layers.get(modality, (0,) * num_virtual)
        held = sum(block.count for block in chain if block.layer and block.modality == modality)
        if sum(row) != held:
            raise PlanError(f"layers of {modality}: they sum to {sum(row)}, and the model has {held}")
        rows[modality] = row
    placed = [[0] * len(chain) for _ in range(num_virtual)]
    for e, held_by in enumerate(_assign_blocks(problem, rows)):
        for k, count in held_by.items():
            placed[k][e] = count
    return Placement(tuple(map(tuple, placed)), _take_modes(problem, placed, wanted))


def _take_modes(
    problem: Problem, placed: Sequence[Sequence[int]], wanted: Mapping[str, Mapping[str, Sequence[int]]]
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """[k][e][mode] counts, given those of each modality's modes [modality][name][k]. Raises PlanError where too few
    layers have such a mode.
    """
    chosen = [[[0] * len(block.modes) for block in problem.chain] for _ in placed]
    for modality, counts in wanted.items():
        able = [e for e, b in enumerate(problem.chain) if b.modality == modality and b.layer and b.modes]
        order = list(dict.fromkeys(mode.name for e in able for mode in problem.chain[e].modes))
        for name in sorted(counts, key=lambda name: order.index(name) if name in order else len(order)):
            for k, count in enumerate(counts[name]):
                left = count
                for e in able:
                    for m, mode in enumerate(problem.chain[e].modes):
                        if mode.name == name:
                            taken = min(left, placed[k][e] - sum(chosen[k][e]))
                            chosen[k][e][m] = taken
                            left -= taken
                if left:
                    done = f"recomputes {count}" if name == RECOMPUTE else f"runs {count} in this mode"
                    raise PlanError(
                        f"{name} of {modality}: {name_virtual_stage(problem, k)} {done}, and "
                        f"{count - left} of its {modality} layers can be "
                        f"(frozen layers with nothing trained before them keep nothing)"
                    )
    return tuple(tuple(tuple(counts) for counts in row) for row in chosen)


def _assign_blocks(problem: Problem, rows: Mapping[str, Sequence[int]]) -> list[dict[int, int]]:
    """Of each chain block: virtual stage → how many of it that holds, in order, given each modality's layers by stage.

    Raises PlanError where a layer would come before one that feeds it.
    """
    chain = problem.chain
    left = {modality: [(k, count) for k, count in enumerate(row) if count][::-1] for modality, row in rows.items()}
    held: dict[int, dict[int, int]] = {}
    latest, latest_modality = 0, ""
    for e, block in enumerate(chain):
        if block.layer:
            wanted, held[e] = block.count, {}
            while wanted:
                k, there = left[block.modality].pop()
                if k < latest:
                    raise PlanError(
                        f"layers: {name_virtual_stage(problem, k)} holds {block.modality} layers that follow "
                        f"{latest_modality} layers of {name_virtual_stage(problem, latest)}: data flows "
                        f"{' → '.join(rows)}, so {block.modality} may not begin on an earlier stage than "
                        f"{latest_modality} ends on"
                    )
                held[e][k] = taken = min(wanted, there)
                wanted -= taken
                latest, latest_modality = k, block.modality
                if taken < there:
                    left[block.modality].append((k, there - taken))
        elif block.pinned:
            held[e] = {0 if block.pinned == "first" else problem.num_virtual_stages - 1: block.count}
    following = problem.num_virtual_stages - 1
    for e, block in reversed([*enumerate(chain)]):
        if e not in held and block.attach == "next":
            held[e] = {following: block.count}
        following = min(held.get(e, {}), default=following)
    before = 0
    for e, block in enumerate(chain):
        before = max(held.setdefault(e, {before: block.count}), default=before)
    return [held[e] for e in range(len(chain))]
