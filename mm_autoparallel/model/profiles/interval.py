"""How far measured steps lie from predicted ones."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from mm_autoparallel.records import Factor, Noun


class Interval(Noun):
    """Where a measured step lies around a predicted one: from low_factor to high_factor times it. widened_by: what is
    not known of a step beside its calibration (model/costs/doubt.py); nothing in a file.
    """

    low_factor: Annotated[Factor, Field(le=1)]
    high_factor: Annotated[Factor, Field(ge=1)]
    source: str
    widened_by: tuple[str, ...] = ()


WIDE = Interval(
    low_factor=0.82,
    high_factor=1.22,
    source="assumed: 86 to 100 of 100 rows of nine published tables lie inside with nothing fitted; under a "
    "stack that waits for its host, or overlaps in its own way, fewer do (docs/validation/fidelity.md)",
)
"""Of steps under assumed figures."""

NEAR = Interval(
    low_factor=0.922,
    high_factor=1.085,
    source="assumed: 9 of 10 published steps of three models on five devices lie inside, of families that rates were "
    "not fitted to, where graphs, dispatcher and overlap are stated; what is not stated widens it (costs/doubt.py)",
)
"""Of steps under the figures of all precisions and the stack whose steps they were set near."""
