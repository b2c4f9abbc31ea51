"""score_table: predictions of one table against what was measured. An error is predicted / measured - 1, signed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mm_autoparallel.measurements.breakdown import (
    Bias,
    ChanceBin,
    Coverage,
    find_biases,
    find_chances,
    find_coverage,
    find_coverages,
)
from mm_autoparallel.measurements.case import MeasuredCase, Refused
from mm_autoparallel.measurements.decisions import Decision, decide
from mm_autoparallel.measurements.document import (
    biases_document,
    chances_document,
    coverage_document,
    decisions_document,
    percent,
)
from mm_autoparallel.measurements.fingerprint import Fingerprint, fingerprint_document
from mm_autoparallel.measurements.outliers import find_outliers
from mm_autoparallel.measurements.predict import UNCALIBRATED, Prediction

TIE_FRACTION = 0.02
"""Measurements that differ by no more have no order: published runs repeat to 1 to 2 %."""

KINDS = ("uncalibrated", "calibrated")
"""The sets of figures that every row is scored by: those of its device alone, and as they ship."""


@dataclass(frozen=True)
class Score:
    """Errors of `num_values` figures of `num_rows` rows (several of one row where each stage was measured).

    worst_row: of the largest error, worst_fraction; None where several tables make the score. pairs_ordered_fraction:
    share of the pairs of figures whose measurements differ by more than TIE_FRACTION that are predicted in their order;
    None where there is no such pair.
    num_calibrated_on: rows that were left out because the calibration was fitted to them.
    """

    num_rows: int
    num_values: int
    mean_abs_fraction: float
    bias_fraction: float
    median_abs_fraction: float
    p95_abs_fraction: float
    worst_row: int | None
    worst_fraction: float
    pairs_ordered_fraction: float | None
    num_calibrated_on: int = 0


@dataclass(frozen=True)
class MemoryOutcomes:
    """Rows that ran out of memory or did not, and were predicted so (right); that did and were not (missed); that did
    not and were (false)."""

    right: int
    missed: int
    false: int


@dataclass(frozen=True)
class Fidelity:
    """One table under one set of figures, rows left out that these were fitted to: what choosing by it costs, errors of
    steps and where they lie, intervals, and who ran out of memory. None, or nothing, where nothing was measured.
    coverages: of intervals, by what widened them.
    """

    num_rows: int
    decisions: tuple[Decision, ...]
    time: Score | None
    biases: Mapping[str, Mapping[str, Bias]]
    coverage: Coverage | None
    outcomes: MemoryOutcomes | None
    chances: tuple[ChanceBin, ...]
    coverages: Mapping[str, Coverage]


@dataclass(frozen=True)
class TableScore:
    """One table: what was refused, the scores of what was measured (None for what was not), each case's prediction.

    outliers: rows whose measured time contradicts others of the table (outliers.py); time_without_outliers: the score
    of the rest, None where there are none. resting: of what stays allocated between steps. memory_stated: of the rows
    alone that say all that decides their memory; None where that is all of them. uncalibrated: all rows by the assumed
    figures of their devices; calibrated: those of which a calibration (or the job's own profiles) told more, which it
    was not fitted to; None where there is no such row. uncalibrated_predicted: predictions of the former. fingerprints:
    row → what its memory says of it; memory_consistent: without rows that their own memory contradicts, None without
    such.
    """

    file: str
    num_rows: int
    refused: tuple[Refused, ...]
    time: Score | None
    outliers: tuple[int, ...]
    time_without_outliers: Score | None
    memory: Score | None
    resting: Score | None
    memory_stated: Score | None
    outcomes: MemoryOutcomes | None
    predicted: tuple[tuple[MeasuredCase, Prediction], ...]
    uncalibrated: Fidelity | None = None
    calibrated: Fidelity | None = None
    uncalibrated_predicted: tuple[tuple[MeasuredCase, Prediction], ...] = ()
    fingerprints: Mapping[int, Fingerprint] = field(default_factory=dict)
    memory_consistent: Score | None = None


def score_table(
    file: str,
    predicted: Sequence[tuple[MeasuredCase, Prediction]],
    refused: Sequence[Refused],
    uncalibrated: Sequence[tuple[MeasuredCase, Prediction]] = (),
    fingerprints: Mapping[int, Fingerprint] | None = None,
) -> TableScore:
    """The scores of one table from its cases and their predictions, and from those by assumed figures alone.

    fingerprints: of rows, by their number: what their memory says of them.
    """
    found = fingerprints or {}
    contradicted = {row for row, one in found.items() if one.contradicted}
    outliers = find_outliers([case for case, _ in predicted])
    stated = [pair for pair in predicted if not pair[0].unstated]
    return TableScore(
        file=file,
        num_rows=len(predicted) + len(refused),
        refused=tuple(refused),
        time=_score_times(predicted),
        outliers=outliers,
        time_without_outliers=_score_times([pair for pair in predicted if pair[0].row not in outliers])
        if outliers
        else None,
        memory=_score_memory(predicted),
        resting=_score_resting(predicted),
        memory_stated=None if len(stated) == len(predicted) else _score_memory(stated),
        outcomes=_score_outcomes(predicted),
        predicted=tuple(predicted),
        uncalibrated=_judge(uncalibrated),
        calibrated=_judge(_calibrated(predicted)),
        uncalibrated_predicted=tuple(uncalibrated),
        fingerprints=found,
        memory_consistent=_score_memory([pair for pair in predicted if pair[0].row not in contradicted])
        if contradicted
        else None,
    )


def score_all(scores: Sequence[TableScore]) -> dict[str, Fidelity | None]:
    """By each set of figures of KINDS, all tables as one; choices are made within each."""
    pairs = {
        "uncalibrated": [pair for found in scores for pair in found.uncalibrated_predicted],
        "calibrated": [pair for found in scores for pair in _calibrated(found.predicted)],
    }
    together: dict[str, Fidelity | None] = {}
    for kind, of_kind in pairs.items():
        judged = _judge(of_kind, of_groups=False)
        if judged and judged.time:  # rows of several tables have the same numbers, and steps of unlike jobs no order
            time = replace(judged.time, num_rows=judged.time.num_values, worst_row=None, pairs_ordered_fraction=None)
            judged = replace(judged, time=time)
        together[kind] = judged and replace(judged, decisions=tuple(_all_decisions(scores, kind)))
    return together


def _all_decisions(scores: Sequence[TableScore], kind: str) -> Iterator[Decision]:
    for found in scores:
        judged: Fidelity | None = getattr(found, kind)
        yield from judged.decisions if judged else ()


def _calibrated(predicted: Sequence[tuple[MeasuredCase, Prediction]]) -> list[tuple[MeasuredCase, Prediction]]:
    return [pair for pair in predicted if pair[1].calibration != UNCALIBRATED]


def _judge(predicted: Sequence[tuple[MeasuredCase, Prediction]], of_groups: bool = True) -> Fidelity | None:
    scored = [pair for pair in predicted if not pair[1].calibrated_on]
    if not scored:
        return None
    return Fidelity(
        num_rows=len(scored),
        decisions=decide(predicted) if of_groups else (),
        time=_score_times(predicted),
        biases=find_biases(scored),
        coverage=find_coverage(scored),
        outcomes=_score_outcomes(scored),
        chances=find_chances(scored),
        coverages=find_coverages(scored),
    )


def _score_outcomes(predicted: Sequence[tuple[MeasuredCase, Prediction]]) -> MemoryOutcomes | None:
    outcomes = [(case.out_of_memory, not found.fits) for case, found in predicted if case.out_of_memory is not None]
    if not outcomes:
        return None
    return MemoryOutcomes(
        right=sum(measured == expected for measured, expected in outcomes),
        missed=sum(bool(measured) and not expected for measured, expected in outcomes),
        false=sum(expected and not measured for measured, expected in outcomes),
    )


def score(rows: Sequence[int], measured: Sequence[float], predicted: Sequence[float]) -> Score | None:
    """The score of figures in one unit, each with the row it is of; None where there is none.

    Quantiles lie between neighbours where they fall between two (numpy's default).
    """
    if not rows:
        return None
    errors = np.array(predicted, dtype=float) / np.array(measured, dtype=float) - 1.0
    sizes = np.abs(errors)
    worst = int(np.argmax(sizes))
    return Score(
        num_rows=len(set(rows)),
        num_values=len(rows),
        mean_abs_fraction=float(sizes.mean()),
        bias_fraction=float(errors.mean()),
        median_abs_fraction=float(np.median(sizes)),
        p95_abs_fraction=float(np.quantile(sizes, 0.95)),
        worst_row=rows[worst],
        worst_fraction=float(errors[worst]),
        pairs_ordered_fraction=_pairs_ordered(measured, predicted),
    )


def measured_peaks(case: MeasuredCase, found: Prediction) -> list[tuple[int | None, float, float]]:
    """(stage, measured, predicted) peak bytes of each measured stage, or (None, …) of the fullest."""
    if case.measured_bytes is None:
        return []
    if isinstance(case.measured_bytes, Mapping):
        peaks = found.peak_allocated_bytes
        return [(stage, measured, peaks[stage]) for stage, measured in sorted(case.measured_bytes.items())]
    return [(None, case.measured_bytes, max(found.peak_allocated_bytes))]


def _score_times(predicted: Sequence[tuple[MeasuredCase, Prediction]]) -> Score | None:
    timed = [(case, found) for case, found in predicted if case.measured_ms is not None]
    scored = [(case.row, case.measured_ms or 0.0, found.step_ms) for case, found in timed if not found.calibrated_on]
    result = score(*_columns(scored))
    return result and replace(result, num_calibrated_on=len(timed) - len(scored))


def _score_memory(predicted: Sequence[tuple[MeasuredCase, Prediction]]) -> Score | None:
    return score(
        *_columns(
            [
                (case.row, measured, expected)
                for case, found in predicted
                for _, measured, expected in measured_peaks(case, found)
            ]
        )
    )


def resting_bytes(case: MeasuredCase, found: Prediction) -> list[tuple[int, float, float]]:
    """(stage, measured, predicted) bytes that stay allocated between steps."""
    measured = sorted((case.resting_bytes or {}).items())
    return [(stage, size_bytes, found.resting_bytes[stage]) for stage, size_bytes in measured]


def _score_resting(predicted: Sequence[tuple[MeasuredCase, Prediction]]) -> Score | None:
    rows = [(case.row, *of_stage[1:]) for case, found in predicted for of_stage in resting_bytes(case, found)]
    return score(*_columns(rows))


def _columns(scored: Sequence[tuple[int, float, float]]) -> tuple[list[int], list[float], list[float]]:
    return [row for row, _, _ in scored], [measured for _, measured, _ in scored], [found for _, _, found in scored]


def _pairs_ordered(measured: Sequence[float], predicted: Sequence[float]) -> float | None:
    was, is_ = np.array(measured, dtype=float), np.array(predicted, dtype=float)
    first, second = np.triu_indices(len(was), k=1)
    differ = np.abs(was[first] - was[second]) > TIE_FRACTION * np.minimum(was[first], was[second])
    if not differ.any():
        return None
    right = np.sign(was[first] - was[second]) == np.sign(is_[first] - is_[second])
    return float(right[differ].mean())


# ------------------------------------------------------------------------------------------------------- as documents


def score_document(scores: Sequence[TableScore]) -> dict[str, Any]:
    """The document of `validate --json`: what choosing costs over all tables first, then table by table."""
    together = score_all(scores)
    return {
        "schema": "mm-autoparallel/validation/1",
        "decisions": {kind: found and decisions_document(found.decisions, False) for kind, found in together.items()},
        "all": {kind: _fidelity_part(found, each=False) for kind, found in together.items()},
        "tables": [_table_document(found) for found in scores],
    }


def _table_document(found: TableScore) -> dict[str, Any]:
    uncalibrated_ms = {case.row: prediction.step_ms for case, prediction in found.uncalibrated_predicted}
    num_calibrated_on = sum(prediction.calibrated_on for _, prediction in found.predicted)
    return {
        "file": found.file,
        "rows": found.num_rows,
        "refused": [{"row": refused.row, "reason": refused.reason} for refused in found.refused],
        "calibrated_on": num_calibrated_on,
        "time": _score_part(found.time),
        "strays": list(found.outliers),
        "time_without_strays": _score_part(found.time_without_outliers),
        "memory": _score_part(found.memory),
        "allocated": _score_part(found.resting),
        "memory_stated": _score_part(found.memory_stated),
        "memory_consistent": _score_part(found.memory_consistent),
        "oom": found.outcomes and vars(found.outcomes),
        **{kind: _fidelity_part(getattr(found, kind)) for kind in KINDS},
        "predictions": [
            _prediction_part(case, prediction, uncalibrated_ms.get(case.row), found.fingerprints.get(case.row))
            for case, prediction in found.predicted
        ],
    }


def _fidelity_part(found: Fidelity | None, each: bool = True) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "rows": found.num_rows,
        "decisions": decisions_document(found.decisions, each),
        "time": _score_part(found.time),
        "bias_by": biases_document(found.biases),
        "interval": coverage_document(found.coverage),
        "interval_by": {doubt: coverage_document(coverage) for doubt, coverage in found.coverages.items()},
        "oom": found.outcomes and vars(found.outcomes),
        "oom_chances": chances_document(found.chances),
    }


def _score_part(found: Score | None) -> dict[str, Any] | None:
    if found is None:
        return None
    ordered = found.pairs_ordered_fraction
    return {
        "rows": found.num_rows,
        "values": found.num_values,
        "calibrated_on": found.num_calibrated_on,
        "mean_abs_pct": percent(found.mean_abs_fraction),
        "bias_pct": percent(found.bias_fraction),
        "median_abs_pct": percent(found.median_abs_fraction),
        "p95_abs_pct": percent(found.p95_abs_fraction),
        "worst": {"row": found.worst_row, "error_pct": percent(found.worst_fraction)},
        "pairs_ordered_pct": None if ordered is None else percent(ordered),
    }


def _prediction_part(
    case: MeasuredCase, found: Prediction, uncalibrated_ms: float | None, fingerprint: Fingerprint | None
) -> dict[str, Any]:
    peaks = measured_peaks(case, found)
    _, measured_bytes, predicted_bytes = max(peaks, key=lambda peak: peak[1], default=(None, None, None))
    return {
        "row": case.row,
        "name": case.name,
        "measured_ms": case.measured_ms,
        "predicted_ms": found.step_ms,
        "interval_ms": list(found.interval_ms),
        "measured_bytes": measured_bytes,
        "predicted_bytes": max(found.peak_allocated_bytes) if predicted_bytes is None else predicted_bytes,
        "stages": [
            {
                "stage": stage,
                "measured_bytes": measured,
                "predicted_bytes": predicted,
                "interval_bytes": list(found.peak_interval_bytes[stage]),
            }
            for stage, measured, predicted in peaks
            if stage is not None
        ],
        "allocated_stages": [
            {"stage": stage, "measured_bytes": measured, "predicted_bytes": predicted}
            for stage, measured, predicted in resting_bytes(case, found)
        ],
        "fingerprint": fingerprint and fingerprint_document(fingerprint),
        "out_of_memory": case.out_of_memory,
        "predicted_out_of_memory": not found.fits,
        "oom_chance_pct": None if found.oom_probability is None else percent(found.oom_probability),
        "uncalibrated_ms": uncalibrated_ms,
        "calibration": found.calibration,
        "calibrated_on": found.calibrated_on,
        "unstated": list(case.unstated),
        "widened_by": list(found.doubts),
        "remarks": list(case.remarks),
        "source": case.source,
    }
