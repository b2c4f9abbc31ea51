"""TracedTable: a block's bytes as they were traced, and its times from the operators that were traced.

Between two traced token counts figures are interpolated as those of profiles are (table.py). Nothing is extrapolated.
Times are the sum over the operators, one after the other as eager code runs them: nothing hides a collective.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mm_autoparallel.errors import ProfileError
from mm_autoparallel.model.operators.analytic import Rates
from mm_autoparallel.model.profiles.table import Point, Profiled, interpolate
from mm_autoparallel.model.profiles.traced import Phase, TracedEntry, TracedFile, TracedOperator

_SCORE_PRODUCTS = frozenset({"bmm", "baddbmm"})
"""Batched products, which in these models are those with score matrices of unfused attention."""

Division = tuple[str, int, bool, int, int]
"""kind, tp, sequence parallel, mbs, spans"""


@dataclass(frozen=True)
class TracedTable:
    """All traced entries by kind and division, each in the order of tokens. `paths`: the files they came from."""

    entries: Mapping[Division, tuple[TracedEntry, ...]] = field(default_factory=dict)
    paths: tuple[Path, ...] = ()
    commands: tuple[str, ...] = ()

    def look_up(self, point: Point, sequence_parallel: bool, rates: Rates) -> Profiled | None:
        """The figures at `point`; None where its kind was never traced.

        Raises ProfileError where the kind was traced, but neither at this division nor around these tokens.
        """
        if all(kind != point.kind for kind, *_ in self.entries):
            return None
        division = (point.kind, point.tp, sequence_parallel and point.tp > 1, point.mbs, point.spans)
        series = self.entries.get(division, ()) if point.cp == 1 else ()
        index = bisect_left([entry.tokens for entry in series], point.tokens)
        if index < len(series) and series[index].tokens == point.tokens:
            return price_entry(series[index], rates)
        if index in (0, len(series)):
            raise self._missing(point, sequence_parallel)
        below, above = series[index - 1], series[index]
        return interpolate(
            price_entry(below, rates), price_entry(above, rates), below.tokens, above.tokens, point.tokens
        )

    def _missing(self, point: Point, sequence_parallel: bool) -> ProfileError:
        known = [
            Point(kind, tp, 1, mbs, entry.tokens, spans)
            for (kind, tp, divided, mbs, spans), series in self.entries.items()
            for entry in series
            if kind == point.kind and divided == (sequence_parallel and tp > 1)
        ]
        known.sort(key=lambda other: (other.tp != point.tp, other.mbs != point.mbs, other.tokens))
        listed = "; ".join(str(other) for other in known[:3]) + ("; …" if len(known) > 3 else "")
        with_or_without = "with" if sequence_parallel and point.tp > 1 else "without"
        made_by = f" (these were made by `{self.commands[-1]}`)" if self.commands else ""
        return ProfileError(
            f"{point.kind} was traced, but not at {point} {with_or_without} sequence parallel, nor at token counts on "
            f"both sides of it (there is: {listed or 'nothing of that kind'}). Trace it there with `mm-autoparallel "
            f"trace`{made_by} and name its folder in `profiles`; or limit the job's `search` to what was traced, or "
            "leave `profiles` out for costs from sizes alone"
        )


def build_traced_table(files: Sequence[tuple[Path, TracedFile]], known_kinds: Sequence[str]) -> TracedTable:
    """The table of all entries of `files`; where two give one point, the first counts.

    Raises ProfileError for an entry whose kind is not in `known_kinds`.
    """
    found: dict[tuple[Division, int], TracedEntry] = {}
    for path, trace in files:
        for index, entry in enumerate(trace.entries):
            if entry.kind not in known_kinds:
                raise ProfileError(
                    f"entries[{index}].kind is {entry.kind}, which the model does not have; its "
                    f"kinds are {', '.join(known_kinds)}",
                    where=f"trace file {path}",
                )
            division = (entry.kind, entry.tp, entry.sequence_parallel, entry.mbs, entry.spans)
            found.setdefault((division, entry.tokens), entry)
    series: dict[Division, list[TracedEntry]] = {}
    for (division, _), entry in sorted(found.items(), key=lambda item: item[0][1]):
        series.setdefault(division, []).append(entry)
    return TracedTable(
        entries={division: tuple(entries) for division, entries in series.items()},
        paths=tuple(path for path, _ in files),
        commands=tuple(dict.fromkeys(trace.command for _, trace in files)),
    )


def untraced(kind: str) -> ProfileError:
    """What is raised for a kind of block that nothing but traces tell of, where there are none of it."""
    return ProfileError(
        f"{kind} is known from traces alone, and the job's `profiles` have none of it; name the folder that "
        "`mm-autoparallel trace JOB` wrote beside the model's file"
    )


def price_entry(entry: TracedEntry, rates: Rates) -> Profiled:
    """What `entry` says of memory, and the times of its operators at `rates`."""
    recomputed = any(operator.phase == "recompute" for operator in entry.operators)
    return Profiled(
        time_source="analytic",
        memory_source="traced",
        forward_ms=_phase_ms(entry, "forward", rates),
        backward_input_ms=_phase_ms(entry, "backward_input", rates),
        backward_weight_ms=_phase_ms(entry, "backward_weight", rates),
        activation_bytes=float(entry.activation_bytes),
        checkpoint_bytes=float(entry.checkpoint_bytes),
        transient_bytes=float(entry.transient_bytes),
        recompute_ms=_phase_ms(entry, "recompute", rates) if recomputed else None,
        parameter_count=float(entry.parameter_count),
        output_bytes=None if entry.output_bytes is None else float(entry.output_bytes),
    )


def operator_ms(operator: TracedOperator, rates: Rates) -> float:
    """One call of `operator` at `rates`; a collective among the tensor parallel ranks."""
    backward = operator.phase in ("backward_input", "backward_weight")
    if operator.kind == "attention":
        return rates.attention_ms(operator.flops, backward)
    if operator.name in _SCORE_PRODUCTS:
        return rates.attention_ms(operator.flops, backward, fused=False)
    if operator.kind == "matrix_product":
        return rates.matrix_ms(operator.flops, operator.moved_bytes, grouped="grouped" in operator.name)
    if operator.kind == "memory_bound":
        return rates.memory_ms(operator.moved_bytes)
    group = rates.tp_group
    times = {
        "all_reduce": group.all_reduce_ms,
        "all_gather": group.all_gather_ms,
        "reduce_scatter": group.reduce_scatter_ms,
        "all_to_all": group.all_to_all_ms,
    }
    return times[operator.name](operator.moved_bytes)


def _phase_ms(entry: TracedEntry, phase: Phase, rates: Rates) -> float:
    return sum(one.num_calls * operator_ms(one, rates) for one in entry.operators if one.phase == phase)
