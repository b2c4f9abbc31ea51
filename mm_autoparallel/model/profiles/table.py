"""ProfileTable: a block kind's figures from profile files, exact where measured, interpolated between token counts.

Between two measured token counts the cost per token is taken as linear in tokens, which is exact for a linear and a
quadratic term (products, and attention over whole sequences) and meets both measurements. Nothing is extrapolated:
a kind that was profiled, but not there, is an error that names the missing run; a kind never profiled has no entry.
What ran out of memory does so too with more to do, or with fewer devices that share it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from mm_autoparallel.errors import ProfileError
from mm_autoparallel.model.profiles.cost import BlockCost, Source
from mm_autoparallel.model.profiles.operators.coverage import Coverage
from mm_autoparallel.model.profiles.store import FIGURES, ProfileEntry, ProfileFile, Timing

_GROWING = (*FIGURES, "recompute_ms", "output_bytes", "split_extra_ms", "kept_for_weight_bytes")
"""What grows with tokens; time of the optimizer and count of parameters do not."""


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

    def is_heavier(self, other: Point) -> bool:
        """Whether a device has no less to hold here than at `other`."""
        return (
            self.kind == other.kind
            and self.tp <= other.tp
            and self.cp <= other.cp
            and self.mbs >= other.mbs
            and self.tokens >= other.tokens
            and self.spans == other.spans
        )


@dataclass(frozen=True)
class Profiled:
    """What a profile or a trace knows of a block; fields as in BlockCost, None where they were not measured."""

    time_source: Source
    memory_source: Source
    forward_ms: float
    backward_input_ms: float
    backward_weight_ms: float
    activation_bytes: float
    checkpoint_bytes: float
    transient_bytes: float
    recompute_ms: float | None = None
    optimizer_ms: float | None = None
    parameter_count: float | None = None
    output_bytes: float | None = None
    arrangement: str = ""
    error_fraction: float = 0.0
    split_extra_ms: float | None = None
    kept_for_weight_bytes: float | None = None
    coverage: Coverage | None = None

    def slowed(self, factor: float) -> Profiled:
        """The same block with its passes `factor` times as long; its optimizer step is no pass."""
        return replace(
            self,
            forward_ms=factor * self.forward_ms,
            backward_input_ms=factor * self.backward_input_ms,
            backward_weight_ms=factor * self.backward_weight_ms,
            recompute_ms=None if self.recompute_ms is None else factor * self.recompute_ms,
            split_extra_ms=None if self.split_extra_ms is None else factor * self.split_extra_ms,
        )

    def carried(self, there: BlockCost, here: BlockCost) -> Profiled:
        """What was measured under one division of the work, under another: each figure times the ratio of the analytic
        ones, `here` over `there`, or the analytic one where there was nothing to measure. A recompute goes by the
        forward, an optimizer step by its parameters, what splitting costs by the weights' gradients, and what these
        keep by all that is kept.
        """
        goes_by = {name: name for name in (*_GROWING, "parameter_count")}
        goes_by |= {"recompute_ms": "forward_ms", "optimizer_ms": "parameter_count"}
        goes_by |= {"split_extra_ms": "backward_weight_ms", "kept_for_weight_bytes": "activation_bytes"}

        def carry(name: str, by: str) -> float | None:
            value, first, second = getattr(self, name), getattr(there, by), getattr(here, by)
            if value is None or first > 0:
                return None if value is None else float(value) * second / first
            return float(second) if name == by else float(value)

        grown = {name: carry(name, by) for name, by in goes_by.items()}
        time_source: Source = "interpolated" if self.time_source == "measured" else self.time_source
        return replace(self, time_source=time_source, memory_source="interpolated", **grown)  # type: ignore[arg-type]

    def instead_of(self, estimate: BlockCost, trains: bool, returns: bool) -> BlockCost:
        """`estimate` with what is known here in its place; a block that does not train, or returns no gradient, has no
        such backward.
        """
        parameter_count = _or(self.parameter_count, estimate.parameter_count)
        known_fraction = parameter_count / estimate.parameter_count if estimate.parameter_count else 1.0
        return replace(
            estimate,
            forward_ms=self.forward_ms,
            backward_input_ms=self.backward_input_ms if returns else 0.0,
            backward_weight_ms=self.backward_weight_ms if trains else 0.0,
            parameter_count=parameter_count,
            frozen_count=estimate.frozen_count * known_fraction,
            activation_bytes=self.activation_bytes if returns else 0.0,
            checkpoint_bytes=self.checkpoint_bytes if returns else 0.0,
            transient_bytes=self.transient_bytes,
            output_bytes=_or(self.output_bytes, estimate.output_bytes),
            time_source=self.time_source,
            memory_source=self.memory_source,
            recompute_ms=self.recompute_ms,
            split_extra_ms=self.split_extra_ms,
            kept_for_weight_bytes=self.kept_for_weight_bytes,
            optimizer_ms=self.optimizer_ms,
            arrangement=self.arrangement,
            error_fraction=self.error_fraction,
            coverage=self.coverage,
        )


def _or(measured: float | None, estimated: float) -> float:
    return estimated if measured is None else measured


@dataclass(frozen=True)
class ProfileTable:
    """All entries with figures by kind and division, each in the order of tokens. `paths`: the files they came from.

    overfull: the points that ran out of memory, and the file of each. commands: those that made the files.
    """

    entries: Mapping[tuple[str, int, int, int, int], tuple[ProfileEntry, ...]]
    paths: tuple[Path, ...] = ()
    overfull: Mapping[Point, Path] = field(default_factory=dict)
    commands: tuple[str, ...] = ()

    def look_up(self, point: Point) -> Profiled | None:
        """The figures at `point`; None where its kind is in no profile.

        Raises ProfileError where the kind was profiled, but neither at this division nor around these tokens.
        """
        series = self.entries.get((point.kind, point.tp, point.cp, point.mbs, point.spans), ())
        if not series:
            known = {kind for kind, *_ in self.entries} | {other.kind for other in self.overfull}
            if point.kind not in known:
                return None
            raise self._missing(point)
        index = bisect_left([entry.tokens for entry in series], point.tokens)
        if index < len(series) and series[index].tokens == point.tokens:
            return _profiled(series[index])
        if index in (0, len(series)):
            raise self._missing(point)
        below, above = series[index - 1], series[index]
        return interpolate(_profiled(below), _profiled(above), below.tokens, above.tokens, point.tokens)

    def has_division(self, point: Point) -> bool:
        """Whether the kind was measured at this TP, CP, MBS and number of spans, at any number of tokens."""
        return (point.kind, point.tp, point.cp, point.mbs, point.spans) in self.entries

    def overfull_reason(self, point: Point) -> str | None:
        """Why no device can hold `point`, where it or a lighter one ran out of memory when it was profiled."""
        series = self.entries.get((point.kind, point.tp, point.cp, point.mbs, point.spans), ())
        if any(entry.tokens >= point.tokens for entry in series):
            return None
        for other, path in self.overfull.items():
            if point == other:
                return f"{point}: {point.kind} ran out of memory when it was profiled (file {path})"
            if point.is_heavier(other):
                return f"{point}: {point.kind} ran out of memory when it was profiled at {other} (file {path})"
        return None

    def _missing(self, point: Point) -> ProfileError:
        known = [
            Point(entry.kind, entry.tp, entry.cp, entry.mbs, entry.tokens, entry.spans)
            for series in self.entries.values()
            for entry in series
            if entry.kind == point.kind
        ]
        known.sort(key=lambda other: (other.tp != point.tp, other.cp != point.cp, other.mbs != point.mbs, other.tokens))
        listed = "; ".join(str(other) for other in known[:3]) + ("; …" if len(known) > 3 else "")
        files = ", ".join(str(path) for path in self.paths[:3]) + (", …" if len(self.paths) > 3 else "")
        made_by = f" (they were made by `{self.commands[-1]}`)" if self.commands else ""
        return ProfileError(
            f"{point.kind} was profiled, but not at {point}, nor at token counts on both sides of it (there is: "
            f"{listed or 'what ran out of memory'}; files: {files}). Profile it there by the command that made these "
            f"files{made_by}, with these sizes; or limit the job's `search` to what was profiled, or leave `profiles` "
            "out for analytic costs"
        )


def build_table(files: Sequence[tuple[Path, ProfileFile]], known_kinds: Sequence[str]) -> ProfileTable:
    """The table of all entries of `files`. Of files that say their workload the first counts where two give one point.

    Raises ProfileError for an entry whose kind is not in `known_kinds`, and for other entries at one point.
    """
    found: dict[Point, tuple[Path, ProfileEntry, bool]] = {}
    for path, profile in files:
        in_this_file: set[Point] = set()
        for index, entry in enumerate(profile.entries):
            if entry.kind not in known_kinds:
                raise ProfileError(
                    f"entries[{index}].kind is {entry.kind}, which the model does not have; its "
                    f"kinds are {', '.join(known_kinds)}",
                    where=f"profile file {path}",
                )
            point = Point(entry.kind, entry.tp, entry.cp, entry.mbs, entry.tokens, entry.spans)
            says_workload = profile.workload is not None
            if point in found and not (says_workload and found[point][2] and point not in in_this_file):
                raise ProfileError(
                    f"entries[{index}] gives {entry.kind} at {point}, and so does "
                    f"{found[point][0]}; keep one of the two",
                    where=f"profile file {path}",
                )
            found.setdefault(point, (path, entry, says_workload))
            in_this_file.add(point)
    series: dict[tuple[str, int, int, int, int], list[ProfileEntry]] = {}
    for _, entry, _ in sorted(found.values(), key=lambda item: item[1].tokens):
        if not entry.out_of_memory:
            series.setdefault((entry.kind, entry.tp, entry.cp, entry.mbs, entry.spans), []).append(entry)
    return ProfileTable(
        entries={key: tuple(entries) for key, entries in series.items()},
        paths=tuple(path for path, _ in files),
        overfull={point: path for point, (path, entry, _) in found.items() if entry.out_of_memory},
        commands=tuple(dict.fromkeys(profile.command for _, profile in files)),
    )


def _profiled(entry: ProfileEntry) -> Profiled:
    forward_ms, input_ms, weight_ms, activation_bytes, checkpoint_bytes, transient_bytes = _figures(entry)
    return Profiled(
        time_source="measured",
        memory_source="measured",
        forward_ms=forward_ms,
        backward_input_ms=input_ms,
        backward_weight_ms=weight_ms,
        activation_bytes=activation_bytes,
        checkpoint_bytes=checkpoint_bytes,
        transient_bytes=transient_bytes,
        recompute_ms=_median_ms(entry.recompute_ms),
        optimizer_ms=_median_ms(entry.optimizer_ms),
        split_extra_ms=_median_ms(entry.split_extra_ms),
        kept_for_weight_bytes=entry.kept_for_weight_bytes,
        parameter_count=entry.parameter_count,
        output_bytes=entry.output_bytes,
        arrangement=entry.arrangement or "",
        error_fraction=_error_fraction([entry.forward_ms, entry.backward_input_ms, entry.backward_weight_ms]),
    )


def _figures(entry: ProfileEntry) -> tuple[float, ...]:
    """In the order of FIGURES; an entry that did not run out of memory has them all."""
    values = [getattr(entry, name) for name in FIGURES]
    return tuple(float(value.median_ms if isinstance(value, Timing) else value) for value in values)


def _error_fraction(timings: Sequence[Timing | None]) -> float:
    """Standard error of a sum of medians, relative to it. Of normal errors a median's is √(π/2) = 1.2533 standard
    deviations over the root of its samples, and a deviation is 1/Φ⁻¹(3/4) = 1.4826 times the median distance.
    """
    found = [timing for timing in timings if timing]
    error_ms = sum((1.2533 * 1.4826 * one.mad_ms) ** 2 / one.num_samples for one in found) ** 0.5
    total_ms = sum(one.median_ms for one in found)
    return error_ms / total_ms if total_ms > 0 else 0.0


def _median_ms(timing: Timing | None) -> float | None:
    return timing.median_ms if timing else None


def interpolate(below: Profiled, above: Profiled, below_tokens: int, above_tokens: int, tokens: int) -> Profiled:
    """y/tokens linear between both, so y = a·tokens + b·tokens² through both; what tokens do not change is as below.

    What was measured or traced on both sides is `interpolated`; times that were analytic stay that.
    """
    weight = (tokens - below_tokens) / (above_tokens - below_tokens)

    def between(low: float | None, high: float | None) -> float | None:
        if low is None or high is None:
            return None
        return tokens * ((1 - weight) * low / below_tokens + weight * high / above_tokens)

    grown = {name: between(getattr(below, name), getattr(above, name)) for name in _GROWING}
    time_source: Source = "analytic" if below.time_source == "analytic" else "interpolated"
    # figures that both have are floats again
    return replace(below, time_source=time_source, memory_source="interpolated", **grown)  # type: ignore[arg-type]
