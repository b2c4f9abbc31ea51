"""Choices, biases, intervals and chances as JSON: percentages signed where they can be, rows by their numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mm_autoparallel.measurements.breakdown import Bias, ChanceBin, Coverage
from mm_autoparallel.measurements.decisions import Decision, DecisionScore, Layout, score_decisions


def decisions_document(decisions: Sequence[Decision], each: bool = True) -> dict[str, Any] | None:
    """What the choices among `decisions` cost together, and `each` of them; None where there are none."""
    found = score_decisions(decisions)
    if found is None:
        return None
    document = _decision_score_part(found)
    return document | {"each": [_decision_part(decision) for decision in decisions]} if each else document


def biases_document(biases: Mapping[str, Mapping[str, Bias]]) -> dict[str, Any]:
    """Axis → value → rows, bias and mean absolute error."""
    return {
        axis: {
            value: {
                "rows": bias.num_rows,
                "bias_pct": percent(bias.bias_fraction),
                "mean_abs_pct": percent(bias.mean_abs_fraction),
            }
            for value, bias in by_value.items()
        }
        for axis, by_value in biases.items()
    }


def coverage_document(found: Coverage | None) -> dict[str, Any] | None:
    """How many steps lay inside their interval, and how wide it was."""
    if found is None:
        return None
    return {
        "rows": found.num_rows,
        "covered_pct": percent(found.covered_fraction),
        "half_width_pct": percent(found.half_width_fraction),
    }


def chances_document(bins: Sequence[ChanceBin]) -> list[dict[str, Any]]:
    """Told chances to run out of memory against what came of them, bin by bin."""
    return [
        {
            "from_pct": percent(found.low_fraction),
            "to_pct": percent(found.high_fraction),
            "rows": found.num_rows,
            "told_pct": percent(found.told_fraction) if found.num_rows else None,
            "failed_pct": percent(found.failed_fraction) if found.num_rows else None,
        }
        for found in bins
    ]


def percent(fraction: float) -> float:
    """In hundredths, as people read it."""
    return round(fraction * 100, 4)


def _decision_score_part(found: DecisionScore) -> dict[str, Any]:
    return {
        "groups": found.num_groups,
        "rows": found.num_rows,
        "failed": found.num_failed,
        "mean_pct": percent(found.mean_fraction),
        "worst_pct": percent(found.worst_fraction),
        "exact_pct": percent(found.exact_fraction),
        "ran": {"mean_pct": percent(found.ran_mean_fraction), "worst_pct": percent(found.ran_worst_fraction)},
        "best_of_three": {
            "mean_pct": percent(found.three_mean_fraction),
            "worst_pct": percent(found.three_worst_fraction),
        },
        "subsets": {"mean_pct": percent(found.subset_mean_fraction)},
    }


def _decision_part(found: Decision) -> dict[str, Any]:
    return {
        "group": found.name,
        "rows": found.num_rows,
        "layouts": found.num_layouts,
        "layouts_out_of_memory": found.num_failed,
        "best": _layout_part(found.best),
        "pick": found.pick and _layout_part(found.pick),
        "failed": found.pick_failed,
        "failed_picks": found.num_failed_picks,
        "exact": found.exact,
        "regret_pct": percent(found.regret_fraction),
        "ran_pct": percent(found.ran_regret_fraction),
        "best_of_three_pct": percent(found.three_regret_fraction),
        "subsets_pct": percent(found.subset_regret_fraction),
    }


def _layout_part(layout: Layout) -> dict[str, Any]:
    return {
        "layout": layout.name,
        "rows": list(layout.rows),
        "measured_ms": layout.measured_ms,
        "predicted_ms": layout.predicted_ms,
    }
