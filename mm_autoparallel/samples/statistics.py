"""What the samples of a table are like, in figures: mean, percentiles, and how much they differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.samples.sample import AUDIO_TOKENS_PER_S, PATCHES_A_TOKEN_SIDE
from mm_autoparallel.samples.table import SampleTable, add_up


@dataclass(frozen=True)
class Spread:
    """Of one quantity of samples, in the unit that `of` names. spread_fraction: standard deviation over mean."""

    of: str
    mean_count: float
    p50_count: float
    p95_count: float
    p99_count: float
    most_count: float
    spread_fraction: float

    def document(self) -> dict[str, Any]:
        """As a part of `--json`, without the unit, which the key has."""
        full = dict(vars(self))
        del full["of"]
        return {key.removesuffix("_count"): value for key, value in full.items()}


def describe(of: str, values: NDArray[Any]) -> Spread:
    """The figures of `values`, [n], one at least."""
    p50, p95, p99 = np.quantile(values, (0.5, 0.95, 0.99))
    mean = float(np.mean(values))
    spread_fraction = float(np.std(values)) / mean if mean else 0.0
    return Spread(of, mean, float(p50), float(p95), float(p99), float(np.max(values)), spread_fraction)


def describe_table(
    table: SampleTable,
    merge_tokens: int = PATCHES_A_TOKEN_SIDE**2,
    audio_tokens_per_s: float = AUDIO_TOKENS_PER_S,
    loads_ms: Mapping[str, NDArray[np.float64]] | None = None,
) -> list[Spread]:
    """Of each quantity that the samples have. loads_ms: what they take, by part of the model, [n] each."""
    rows = [describe("tokens", table.num_tokens(merge_tokens, audio_tokens_per_s))]
    if table.text_tokens.any():
        rows.append(describe("text_tokens", table.text_tokens))
    if len(table.patches):
        rows += [
            describe("images", table.num_images),
            describe("patches", add_up(table.patches, table.images)),
            describe("patches_of_an_image", table.patches),
        ]
    if len(table.audio_s):
        rows += [describe("audios", table.num_recordings), describe("audio_seconds", table.seconds)]
    return rows + [describe(f"{name}_ms", loads) for name, loads in (loads_ms or {}).items()]
