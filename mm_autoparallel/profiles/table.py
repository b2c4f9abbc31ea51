"""ProfileTable: a block kind's figures from profile files, exact where measured, interpolated between token counts.

Between two measured token counts the cost per token is taken as linear in tokens, which is exact for a linear and a
quadratic term (products, and attention over whole sequences) and meets both measurements. Nothing is extrapolated:
a kind that was profiled, but not there, is an error that names the missing run; a kind never profiled has no entry.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mm_autoparallel.errors import ProfileError
from mm_autoparallel.profiles.cost import Source
from mm_autoparallel.profiles.store import ProfileEntry, ProfileFile


@dataclass(frozen=True)
class Point:
    """Where a block is looked up: a kind, and how one micro-batch is divided. tokens, spans: see ProfileEntry."""

    kind: str
    tp: int
    cp: int
    mbs: int
    tokens: int
    spans: int

    def __str__(self) -> str:
        spans = f" in {self.spans} spans" if self.spans > 1 else ""
        return f"TP {self.tp}, CP {self.cp}, MBS {self.mbs}, {self.tokens} tokens{spans}"


@dataclass(frozen=True)
class Profiled:
    """What a profile knows of a block; fields as in BlockCost."""

    source: Source
    forward_ms: float
    backward_input_ms: float
    backward_weight_ms: float
    activation_bytes: float
    checkpoint_bytes: float
    transient_bytes: float


@dataclass(frozen=True)
class ProfileTable:
    """All entries by kind and division, each in the order of tokens. `paths`: the files they came from."""

    entries: Mapping[tuple[str, int, int, int, int], tuple[ProfileEntry, ...]]
    paths: tuple[Path, ...] = ()

    def look_up(self, point: Point) -> Profiled | None:
        """The figures at `point`; None where its kind is in no profile.

        Raises ProfileError where the kind was profiled, but neither at this division nor around these tokens.
        """
        series = self.entries.get((point.kind, point.tp, point.cp, point.mbs, point.spans), ())
        if not series:
            if not any(kind == point.kind for kind, *_ in self.entries):
                return None
            raise self._missing(point)
        index = bisect_left([entry.tokens for entry in series], point.tokens)
        if index < len(series) and series[index].tokens == point.tokens:
            return Profiled("measured", *_figures(series[index]))
        if index in (0, len(series)):
            raise self._missing(point)
        return _interpolate(series[index - 1], series[index], point.tokens)

    def _missing(self, point: Point) -> ProfileError:
        known = [
            Point(entry.kind, entry.tp, entry.cp, entry.mbs, entry.tokens, entry.spans)
            for series in self.entries.values()
            for entry in series
            if entry.kind == point.kind
        ]
        known.sort(key=lambda other: (other.tp != point.tp, other.cp != point.cp, other.mbs != point.mbs, other.tokens))
        listed = "; ".join(str(other) for other in known[:3]) + ("; …" if len(known) > 3 else "")
        return ProfileError(
            f"{point.kind} was profiled, but not at {point}, nor at token counts on both sides of it (there is: "
            f"{listed}; files: {', '.join(map(str, self.paths))}). Profile it there with `mm-autoparallel profile`, "
            "limit the job's `search` to what was profiled, or leave `profiles` out for analytic costs"
        )


def build_table(files: Sequence[tuple[Path, ProfileFile]], known_kinds: Sequence[str]) -> ProfileTable:
    """The table of all entries of `files`.

    Raises ProfileError for an entry whose kind is not in `known_kinds`, and for two entries at one point.
    """
    found: dict[Point, tuple[Path, ProfileEntry]] = {}
    for path, profile in files:
        for index, entry in enumerate(profile.entries):
            if entry.kind not in known_kinds:
                raise ProfileError(
                    f"profile file {path}: entries[{index}].kind is {entry.kind}, which the model does not have; its "
                    f"kinds are {', '.join(known_kinds)}"
                )
            point = Point(entry.kind, entry.tp, entry.cp, entry.mbs, entry.tokens, entry.spans)
            if point in found:
                raise ProfileError(
                    f"profile file {path}: entries[{index}] gives {entry.kind} at {point}, and so does "
                    f"{found[point][0]}; keep one of the two"
                )
            found[point] = (path, entry)
    series: dict[tuple[str, int, int, int, int], list[ProfileEntry]] = {}
    for _, entry in sorted(found.values(), key=lambda item: item[1].tokens):
        series.setdefault((entry.kind, entry.tp, entry.cp, entry.mbs, entry.spans), []).append(entry)
    return ProfileTable({key: tuple(entries) for key, entries in series.items()}, tuple(path for path, _ in files))


def _figures(entry: ProfileEntry) -> tuple[float, ...]:
    return (
        entry.forward_ms.median_ms,
        entry.backward_input_ms.median_ms,
        entry.backward_weight_ms.median_ms,
        entry.activation_bytes,
        entry.checkpoint_bytes,
        entry.transient_bytes,
    )


def _interpolate(below: ProfileEntry, above: ProfileEntry, tokens: int) -> Profiled:
    """y/tokens linear between both, so y = a·tokens + b·tokens² through both."""
    weight = (tokens - below.tokens) / (above.tokens - below.tokens)
    figures = (
        tokens * ((1 - weight) * low / below.tokens + weight * high / above.tokens)
        for low, high in zip(_figures(below), _figures(above), strict=True)
    )
    return Profiled("interpolated", *figures)
