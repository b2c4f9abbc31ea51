"""Every planner on the same rows and groups: regret as `validate` tells it, errors of steps, who ran out of memory."""

from __future__ import annotations

import contextlib
import io
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from others.layout import Answer, Layout, Predict, Unsaid, layout_of
from others.rules import RULES, rank

from mm_autoparallel.measurements.case import MeasuredCase
from mm_autoparallel.measurements.decisions import (
    LEAST_LAYOUTS,
    Decision,
    DecisionScore,
    decide,
    group_by_job,
    score_decisions,
)
from mm_autoparallel.measurements.predict import Prediction

Asked = tuple[MeasuredCase, Layout]
PredictCases = Callable[[Sequence[MeasuredCase]], Sequence[tuple[MeasuredCase, Prediction]]]


@dataclass(frozen=True)
class Row:
    """One planner. decisions: None for none. error_fraction: mean of |predicted / measured − 1| over the timed rows
    that it predicts; fitted_error_fraction: after all its steps are divided by the median of predicted / measured.
    num_missed of num_out_of_memory: rows that ran out of memory and were told to fit; num_false of num_ran: that ran
    and were told not to. cpu_s: of one prediction, in the mean. unsaid: rows that its options cannot say, by reason;
    crashed: rows on which it failed, by its words. Rules of thumb have decisions alone, and know who ran out.
    """

    name: str
    decisions: tuple[Decision, ...]
    total: DecisionScore | None
    num_predicted: int = 0
    error_fraction: float | None = None
    fitted_error_fraction: float | None = None
    num_missed: int = 0
    num_out_of_memory: int = 0
    num_false: int = 0
    num_ran: int = 0
    cpu_s: float | None = None
    unsaid: Mapping[str, int] | None = None
    crashed: Mapping[str, int] | None = None


def list_asked(cases: Sequence[MeasuredCase], device: str) -> tuple[list[Asked], Counter[str]]:
    """Rows of groups that pose a choice, with their layouts, and why others are left out.

    device: the one that planners have a description of. A row is left out where no planner can say it, and where it has
    fewer than LEAST_LAYOUTS timed companions.
    """
    said: list[Asked] = []
    left_out: Counter[str] = Counter()
    for case in cases:
        if case.job.cluster.device.name != device:
            left_out[f"the device is not {device}"] += 1
            continue
        try:
            said.append((case, layout_of(case)))
        except Unsaid as reason:
            left_out[str(reason)] += 1
    of_case = {id(case): layout for case, layout in said}
    asked: list[Asked] = []
    for group in group_by_job([(case, _unknown()) for case, _ in said]):
        if decide(group):
            asked += [(case, of_case[id(case)]) for case, _ in group]
        else:
            left_out[f"its job has fewer than {LEAST_LAYOUTS} timed layouts"] += len(group)
    return asked, left_out


def ask(name: str, predict: Predict, asked: Sequence[Asked]) -> Row:
    """What `predict` says of every row, scored. What it prints is dropped."""
    answers: dict[int, Answer] = {}
    unsaid: Counter[str] = Counter()
    crashed: Counter[str] = Counter()
    start_s = time.process_time()
    for index, (_, layout) in enumerate(asked):
        found = _try_to_ask(predict, layout)
        if isinstance(found, Answer):
            answers[index] = found
        elif isinstance(found, Unsaid):
            unsaid[str(found)] += 1
        else:
            crashed[f"{type(found).__name__}: {found}"[:200]] += 1
    cpu_s = (time.process_time() - start_s) / max(1, len(asked))
    predictions = {index: _as_prediction(name, answer) for index, answer in answers.items()}
    return score(name, asked, predictions, cpu_s, unsaid, crashed)


def _try_to_ask(predict: Predict, layout: Layout) -> Answer | Exception:
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            found = predict(layout)
    except Exception as failure:  # noqa: BLE001 - others' code may raise anything; it is counted and shown
        return failure
    if not 0 < found.step_ms < math.inf:
        return ArithmeticError(f"a step of {found.step_ms} ms")
    return found


def score(
    name: str,
    asked: Sequence[Asked],
    predictions: Mapping[int, Prediction],
    cpu_s: float | None = None,
    unsaid: Mapping[str, int] | None = None,
    crashed: Mapping[str, int] | None = None,
) -> Row:
    """Scores predictions, by the index of their row; rows without one are never picked and have no error.

    A row that a prediction was fitted to is left out of the errors, not out of the choices.
    """
    told = [(case, predictions.get(index, _unknown())) for index, (case, _) in enumerate(asked)]
    known = [(case, predictions[index]) for index, (case, _) in enumerate(asked) if index in predictions]
    ratios = np.array(
        [found.step_ms / case.measured_ms for case, found in known if case.measured_ms and not found.calibrated_on]
    )
    decisions = decide(told)
    ended = [(bool(case.out_of_memory), found.fits) for case, found in known]
    return Row(
        name=name,
        decisions=decisions,
        total=score_decisions(decisions),
        num_predicted=len(known),
        error_fraction=float(np.abs(ratios - 1).mean()) if ratios.size else None,
        fitted_error_fraction=float(np.abs(ratios / np.median(ratios) - 1).mean()) if ratios.size else None,
        num_missed=sum(failed and fits for failed, fits in ended),
        num_out_of_memory=sum(failed for failed, _ in ended),
        num_false=sum(not failed and not fits for failed, fits in ended),
        num_ran=sum(not failed for failed, _ in ended),
        cpu_s=cpu_s,
        unsaid=unsaid or {},
        crashed=crashed or {},
    )


def ask_ours(name: str, predict_cases: PredictCases, asked: Sequence[Asked]) -> Row:
    """The same of this project, whose predictions take rows as they are. The first is made twice, to compile."""
    cases = [case for case, _ in asked]
    predict_cases(cases[:1])
    start_s = time.process_time()
    found = {id(case): prediction for case, prediction in predict_cases(cases)}
    cpu_s = (time.process_time() - start_s) / len(asked)
    predictions = {index: found[id(case)] for index, case in enumerate(cases) if id(case) in found}
    refused = {"`validate` says why": len(cases) - len(predictions)} if len(predictions) < len(cases) else {}
    return score(name, asked, predictions, cpu_s, refused)


def follow_rules(asked: Sequence[Asked]) -> list[Row]:
    """What each rule of thumb picks among the rows that ran."""
    layouts = dict(enumerate(layout for _, layout in asked))
    rows = []
    for name, key in RULES.items():
        places = rank(layouts, key)
        predictions = {
            index: _as_prediction(name, Answer(places[index], 0.0, not case.out_of_memory))
            for index, (case, _) in enumerate(asked)
        }
        decisions = decide([(case, predictions[index]) for index, (case, _) in enumerate(asked)])
        rows.append(Row(name, decisions, score_decisions(decisions)))
    return rows


def _as_prediction(name: str, answer: Answer) -> Prediction:
    span_ms = (answer.step_ms, answer.step_ms)
    peaks = (answer.peak_bytes,)
    return Prediction(answer.step_ms, span_ms, peaks, ((peaks[0], peaks[0]),), answer.fits, name, calibrated_on=False)


def _unknown() -> Prediction:
    """Of a row that a planner has no answer for: slower than all, and said not to fit."""
    return _as_prediction("", Answer(math.inf, math.inf, fits=False))
