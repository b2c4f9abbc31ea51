"""TracedTable: a block's bytes as they were traced, and its times from the operators that were traced.

Between two traced token counts figures are interpolated as those of profiles are (table.py). Nothing is extrapolated.
Times are the sum over the operators, one after the other as eager code runs them: nothing hides a collective. An
operator that an operator base knows takes what was measured, another one what its rates say.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from mm_autoparallel.errors import ProfileError
from mm_autoparallel.model.operators.analytic import Rates
from mm_autoparallel.model.profiles.operators.coverage import Coverage
from mm_autoparallel.model.profiles.operators.times import OperatorTimes
from mm_autoparallel.model.profiles.table import Point, Profiled, interpolate
from mm_autoparallel.model.profiles.traced import Phase, TracedEntry, TracedFile, TracedOperator

_SCORE_PRODUCTS = frozenset({"bmm", "baddbmm"})
"""Batched products, which in these models are those with score matrices of unfused attention."""

Division = tuple[str, int, bool, int, int]
"""kind, tp, sequence parallel, mbs, spans"""


@dataclass(frozen=True)
class TracedTable:
    """All traced entries by kind and division, each in the order of tokens. `paths`: the files they came from.

    times: of operators that were measured on the job's device; None without an operator base for it.
    """

    entries: Mapping[Division, tuple[TracedEntry, ...]] = field(default_factory=dict)
    paths: tuple[Path, ...] = ()
    commands: tuple[str, ...] = ()
    times: OperatorTimes | None = None

    def look_up(self, point: Point, sequence_parallel: bool, rates: Rates) -> Profiled | None:
        """The figures at `point`; None where its kind was never traced.

        Raises ProfileError where the kind was traced, but neither at this division nor around these tokens.
        """
        if all(kind != point.kind for kind, *_ in self.entries):
            return None
        below, *above = self._around(point, sequence_parallel)
        found = price_entry(below, rates, self.times)
        if not above:
            return found
        other = price_entry(above[0], rates, self.times)
        if other.time_source == "analytic":
            found = replace(found, time_source="analytic")
        return interpolate(found, other, below.tokens, above[0].tokens, point.tokens)

    def _around(self, point: Point, sequence_parallel: bool) -> tuple[TracedEntry, ...]:
        """The entry at `point`, or those below and above it. Raises ProfileError where neither is there."""
        division = (point.kind, point.tp, sequence_parallel and point.tp > 1, point.mbs, point.spans)
        series = self.entries.get(division, ()) if point.cp == 1 else ()
        index = bisect_left([entry.tokens for entry in series], point.tokens)
        if index < len(series) and series[index].tokens == point.tokens:
            return (series[index],)
        if index in (0, len(series)):
            raise self._missing(point, sequence_parallel)
        return series[index - 1], series[index]

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


def build_traced_table(
    files: Sequence[tuple[Path, TracedFile]],
    known_kinds: Sequence[str],
    times: Callable[[Mapping[str, str]], OperatorTimes | None] = lambda _: None,
) -> TracedTable:
    """The table of all entries of `files`; where two give one point, the first counts.

    times: those of operators that hold for the software of a trace; what does not hold for all of them counts for none.
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
        times=_common_times([times(trace.software) for _, trace in files]),
    )


def untraced(kind: str) -> ProfileError:
    """What is raised for a kind of block that nothing but traces tell of, where there are none of it."""
    return ProfileError(
        f"{kind} is known from traces alone, and the job's `profiles` have none of it; name the folder that "
        "`mm-autoparallel trace JOB` wrote beside the model's file"
    )


def _common_times(found: Sequence[OperatorTimes | None]) -> OperatorTimes | None:
    """Those that hold for the software of every trace."""
    places = {times.place if times else None for times in found}
    return found[0] if len(places) == 1 else None


def price_entry(entry: TracedEntry, rates: Rates, times: OperatorTimes | None = None) -> Profiled:
    """What `entry` says of memory, and the times of its operators: of `times` where these know them, else at `rates`.

    Where every one is known, collectives and all, the times count as interpolated: they are put together of measured
    ones, and so they hold what a host takes.
    """
    recomputed = any(operator.phase == "recompute" for operator in entry.operators)
    found = [(operator.phase, _find(operator, rates, times)) for operator in entry.operators]
    known = times is not None and not any(one.num_analytic for _, one in found)

    def phase_ms(phase: Phase) -> float:
        return sum(one.total_ms for at, one in found if at == phase)

    return Profiled(
        time_source="interpolated" if known else "analytic",
        memory_source="traced",
        forward_ms=phase_ms("forward"),
        backward_input_ms=phase_ms("backward_input"),
        backward_weight_ms=phase_ms("backward_weight"),
        activation_bytes=float(entry.activation_bytes),
        checkpoint_bytes=float(entry.checkpoint_bytes),
        transient_bytes=float(entry.transient_bytes),
        recompute_ms=phase_ms("recompute") if recomputed else None,
        parameter_count=float(entry.parameter_count),
        output_bytes=None if entry.output_bytes is None else float(entry.output_bytes),
        coverage=None if times is None else cover(entry.operators, rates, times),
    )


def cover(operators: Iterable[TracedOperator], rates: Rates, times: OperatorTimes | None) -> Coverage:
    """What the times of `operators` stand on; recomputation and collectives are left out."""
    once = (one for one in operators if one.kind != "collective" and one.phase != "recompute")
    return sum((_find(operator, rates, times) for operator in once), Coverage())


def _find(operator: TracedOperator, rates: Rates, times: OperatorTimes | None) -> Coverage:
    """All calls of `operator`, by where their times are from."""
    num_calls = operator.num_calls
    if times is None or operator.kind == "collective":
        return Coverage(num_analytic=num_calls, analytic_ms=num_calls * operator_ms(operator, rates))
    if not operator.forms:
        regressed_us = times.regress_kind_us(operator.name, operator.dtype, operator.flops, operator.moved_bytes)
        if regressed_us is None:
            return Coverage(num_analytic=num_calls, analytic_ms=num_calls * operator_ms(operator, rates))
        return Coverage(num_regressed=num_calls, regressed_ms=num_calls * regressed_us * 1e-3 * rates.compute_factor)
    found = Coverage()
    # a backward may have calls that none of its own forms tells: they take what those take on the mean
    part = num_calls / sum(calls.num_calls for calls in operator.forms)
    for calls in operator.forms:
        answer = times.find_us(calls.form)
        if answer is None:
            found += Coverage(
                num_analytic=calls.num_calls, analytic_ms=part * calls.num_calls * operator_ms(operator, rates)
            )
            continue
        time_ms = part * calls.num_calls * answer[0] * 1e-3 * rates.compute_factor
        if answer[1] == "measured":
            found += Coverage(num_measured=calls.num_calls, measured_ms=time_ms)
        else:
            found += Coverage(num_regressed=calls.num_calls, regressed_ms=time_ms)
    return found


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
