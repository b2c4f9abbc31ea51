"""Rough: how close to the best levels of memory end as time runs out.

Chances to run out of memory make a pipeline many levels (search/caution.py). What a level shows leaves out what is
fuller, and the further below the best that may end, the more it leaves out.
"""

from __future__ import annotations

#: Once such a part of the time limit is gone, levels end this close to the best. Assumed.
FRACTIONS = {0.4: 0.004, 0.7: 0.006, 0.9: 0.008}
#: No further from it than the first, before a level had so many turns. Assumed.
MOST_SLICES = 2


def rough_fraction(elapsed_s: float, left_s: float) -> float:
    """How close below the best may be left out what no one bound rules out; left_s: until the time limit."""
    part = elapsed_s / (elapsed_s + left_s)
    return max((fraction for begin, fraction in FRACTIONS.items() if part > begin), default=0.0)


def of_level(fraction: float, num_slices: int) -> float:
    """The same of a level that had so many turns: one that gets on may still end closer."""
    return fraction if num_slices >= MOST_SLICES else min(fraction, min(FRACTIONS.values()))
