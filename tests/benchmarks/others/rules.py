"""Rules of thumb for a layout, each given perfect knowledge of memory: it never picks what ran out.

People choose like this where they have no planner. A rule orders layouts by a key, the least first; among equals
sequence parallelism is preferred.
"""

from __future__ import annotations

from collections.abc import Callable

from others.layout import Layout

Key = Callable[[Layout], tuple[float, ...]]

RULES: dict[str, Key] = {
    # whatever is divided or done twice costs time
    "no recomputation, then least TP, least PP, least micro-batch": lambda at: (at.recompute, at.tp, at.pp, at.mbs),
    # Narayanan et al. 2021, arXiv:2104.04473, takeaways 1 and 2
    "no recomputation, then least TP x PP, TP before PP, largest micro-batch": lambda at: (
        at.recompute, at.tp * at.pp, at.pp, -at.mbs,
    ),
    # keep the devices' matrix units busy, whatever it takes
    "largest micro-batch, then no recomputation, least TP, least PP": lambda at: (-at.mbs, at.recompute, at.tp, at.pp),
}  # fmt: skip
"""The rule in words, and its key."""


def rank(layouts: dict[int, Layout], key: Key) -> dict[int, int]:
    """Of each layout, by its index, its place in the order of `key`; equals share one."""
    keys = {index: (*key(layout), not layout.sequence_parallel) for index, layout in layouts.items()}
    places = {found: place for place, found in enumerate(sorted({*keys.values()}), start=1)}
    return {index: places[found] for index, found in keys.items()}
