"""Modes that no best placement needs are left out before anything is placed: each one multiplies what to try."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mm_autoparallel.pipeline.dominance import Dominance, declared
from mm_autoparallel.pipeline.problem import ChainBlock, Mode, Problem

_COSTS = tuple(name for name, dominance in declared(Mode).items() if dominance is Dominance.LESS)


def drop_dominated_modes(problem: Problem) -> Problem:
    """The problem without modes in whose place another one of their group costs nothing more of any kind.

    Layers of a group take modes in order, so where its blocks differ the other one has to be next to it in that order;
    then whatever ran in the one can run in the other, layer by layer. The best step stays what it is.
    """
    chain = list(problem.chain)
    for group in dict.fromkeys(block.group for block in chain if len(block.modes) > 1):
        able = [e for e, block in enumerate(chain) if block.group == group and block.modes]
        while (dropped := _find_dominated([chain[e] for e in able])) is not None:
            for e in able:
                modes = chain[e].modes
                chain[e] = replace(chain[e], modes=(*modes[:dropped], *modes[dropped + 1 :]))
    return replace(problem, chain=tuple(chain)) if chain != [*problem.chain] else problem


def _find_dominated(blocks: Sequence[ChainBlock]) -> int | None:
    """The place of a mode of these blocks that another one makes needless; of equal ones the later."""
    num_modes = len(blocks[0].modes)
    for worse in reversed(range(num_modes)):
        others = range(num_modes) if len(blocks) == 1 else (worse - 1, worse + 1)
        for better in others:
            if better == worse or not 0 <= better < num_modes:
                continue
            if all(_is_no_worse(block.modes[better], block.modes[worse]) for block in blocks):
                return worse
    return None


def _is_no_worse(mode: Mode, other: Mode) -> bool:
    return mode.layout == other.layout and all(getattr(mode, name) <= getattr(other, name) for name in _COSTS)
