"""decide: of the layouts of one job that others ran, what would the planner have picked, and what would that have cost?

**Regret** is the measured step of the planner's pick over the least measured step, minus one. A small error of steps
does not make a good choice, nor does a large one spoil it: most pairs of a sweep are far apart, and the few best ones
are not. So the score shows regret beside the errors, and first.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.measurements.breakdown import count_model_parameters, describe_recompute
from mm_autoparallel.measurements.case import MeasuredCase
from mm_autoparallel.measurements.predict import Prediction
from mm_autoparallel.model.job.hashing import hash_job
from mm_autoparallel.model.job.job import USUAL_FAILURE_PRICE
from mm_autoparallel.model.job.stacks import StackFacts, facts_of
from mm_autoparallel.planner.chance_to_fit import failure_factor

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.intp]
Predicted = tuple[MeasuredCase, Prediction]

LEAST_LAYOUTS = 4
"""A group with fewer timed layouts is no choice worth scoring."""

SUBSET_SIZE, NUM_SUBSETS, _SEED = 5, 300, 0
"""Groups are few; the same decision asked on random fives of each tells models apart that all groups do not."""


@dataclass(frozen=True)
class Layout:
    """One way to lay out a job.

    rows: those that ran it, repeats included. measured_ms: of the fastest of them, since what disturbs a run slows it,
    whether or not a calibration was fitted to it; the median of releases of the software, where there are several; None
    where all ran out of memory. predicted_ms: a step; price_ms: what the planner ranks by, infinite where it does not
    fit.
    """

    name: str
    rows: tuple[int, ...]
    measured_ms: float | None
    predicted_ms: float
    price_ms: float


@dataclass(frozen=True)
class Decision:
    """A group of layouts of one job, and what choosing among them by prediction costs.

    name: what they have in common. num_rows: of the table. num_layouts: different ones that ran; num_failed: that did
    not. best, pick: the fastest measured layout, and the planner's own first pick, None where it says that nothing
    fits. pick_failed: that pick ran out of memory, or there was none. num_failed_picks: so many picks ran out before
    one ran. regret_fraction: of the first of the planner's picks that ran; of the fastest predicted where none did.
    ran_regret_fraction: of the fastest predicted of those that ran. three_regret_fraction: of the best of the three
    predicted fastest of those that ran. subset_regret_fraction: mean of ran_regret_fraction on random fives.
    """

    name: str
    num_rows: int
    num_layouts: int
    num_failed: int
    best: Layout
    pick: Layout | None
    pick_failed: bool
    num_failed_picks: int
    regret_fraction: float
    ran_regret_fraction: float
    three_regret_fraction: float
    subset_regret_fraction: float

    @property
    def exact(self) -> bool:
        """Whether the first pick is the fastest measured."""
        return self.pick is self.best


@dataclass(frozen=True)
class DecisionScore:
    """Decisions together. num_failed: groups whose first pick ran out of memory, or had none. Fractions as in Decision,
    their means and worst; exact_fraction: share of first picks that were the fastest measured.
    """

    num_groups: int
    num_rows: int
    num_failed: int
    mean_fraction: float
    worst_fraction: float
    exact_fraction: float
    ran_mean_fraction: float
    ran_worst_fraction: float
    three_mean_fraction: float
    three_worst_fraction: float
    subset_mean_fraction: float


def decide(predicted: Sequence[Predicted], least_layouts: int = LEAST_LAYOUTS) -> tuple[Decision, ...]:
    """The decision of each group of at least so many timed layouts of one job, in the table's order.

    A layout of which every run was fitted to is no choice: its prediction is no longer one.
    """
    found = (_decide_group(group, least_layouts) for group in group_by_job(predicted))
    return tuple(decision for decision in found if decision)


def score_decisions(decisions: Sequence[Decision]) -> DecisionScore | None:
    """Mean and worst of `decisions`; None where there are none."""
    if not decisions:
        return None
    own = [found.regret_fraction for found in decisions]
    ran = [found.ran_regret_fraction for found in decisions]
    three = [found.three_regret_fraction for found in decisions]
    return DecisionScore(
        num_groups=len(decisions),
        num_rows=sum(found.num_rows for found in decisions),
        num_failed=sum(found.pick_failed for found in decisions),
        mean_fraction=float(np.mean(own)),
        worst_fraction=max(own),
        exact_fraction=sum(found.exact for found in decisions) / len(decisions),
        ran_mean_fraction=float(np.mean(ran)),
        ran_worst_fraction=max(ran),
        three_mean_fraction=float(np.mean(three)),
        three_worst_fraction=max(three),
        subset_mean_fraction=float(np.mean([found.subset_regret_fraction for found in decisions])),
    )


# ------------------------------------------------------------------------------------------------------------- groups


def group_by_job(predicted: Sequence[Predicted]) -> list[list[Predicted]]:
    """Rows among which a planner may choose: of one model, cluster, workload, kernels and software.

    Sizes, placement, micro-batch, ZeRO, recompute and sequence parallelism are its choices, and of experts dispatcher,
    graphs, fused activations and what hides the exchange. So is what follows from them: a vocabulary that is padded to
    a multiple of 128 for each tensor parallel rank (Megatron-LM), whether groups of such ranks may span nodes, and
    whether embedding and head recompute too.
    """
    groups: dict[Hashable, list[Predicted]] = {}
    for job, pair in zip(name_jobs([case for case, _ in predicted]), predicted, strict=True):
        groups.setdefault(job, []).append(pair)
    return list(groups.values())


def name_jobs(cases: Sequence[MeasuredCase]) -> list[Hashable]:
    """Of each case what is asked of a planner: equal for those that group_by_job puts together."""
    padding = 128 * math.lcm(*(case.plan.strategy.tp for case in cases)) if cases else 1
    return [_asked(case, padding) for case in cases]


_CHOSEN_FACTS = {"recomputes_ends": False, "dispatcher": "", "graphs": "", "grouped_activation": False}
"""Facts of a run that it chose, or that follow from what it chose."""


def _asked(case: MeasuredCase, padding: int) -> Hashable:
    job = case.job
    levels = tuple(level.model_copy(update={"tensor_parallel": False}) for level in job.cluster.levels)
    cluster = job.cluster.model_copy(update={"levels": levels})
    facts = facts_of(case.software, job.workload.facts).model_copy(update=_CHOSEN_FACTS)
    chosen = {
        "sequence_parallel": True,
        "recompute_operators": (),
        "overlap_all_to_all": "none",
        "facts": StackFacts(**facts.model_dump()),
    }
    workload = job.workload.model_copy(update=chosen)
    vocab_size = -(-job.model.text.vocab_size // padding) * padding
    text = job.model.text.model_copy(update={"vocab_size": vocab_size})
    model = job.model.model_copy(update={"text": text})
    return hash_job(model, cluster, workload), case.software, case.kernels, case.plan.strategy.world_size


def _layout(case: MeasuredCase) -> Hashable:
    """What tells one layout of a job from another: without tensor parallelism there is no sequence parallelism."""
    plan, workload = case.plan, case.job.workload
    laid = tuple((modality, plan.layers[modality], plan.recompute[modality]) for modality in sorted(plan.layers))
    modes = tuple((modality, mode, counts) for modality, of in plan.modes.items() for mode, counts in of.items())
    facts = workload.known_facts
    of_stack = facts.dispatcher, facts.graphs, facts.grouped_activation, workload.overlap_all_to_all
    split = plan.strategy.divides_sequences(workload)
    return plan.strategy, laid, modes, split, workload.recompute_operators, of_stack


def _list_layouts(group: Sequence[Predicted]) -> list[Layout]:
    runs: dict[Hashable, list[Predicted]] = {}
    for case, found in group:
        if case.measured_ms is not None or case.out_of_memory:
            runs.setdefault(_layout(case), []).append((case, found))
    layouts = []
    for same in runs.values():
        if all(found.calibrated_on for _, found in same):
            continue
        case, found = same[0]
        layouts.append(
            Layout(
                name=describe_layout(case),
                rows=tuple(run.row for run, _ in same),
                measured_ms=_measured_ms([run for run, _ in same]),
                predicted_ms=found.step_ms,
                price_ms=price_ms(found),
            )
        )
    return layouts


def _measured_ms(runs: Sequence[MeasuredCase]) -> float | None:
    """Of runs of one layout."""
    fastest_ms: dict[str, float] = {}
    for run in runs:
        if run.measured_ms is not None:
            fastest_ms[run.release] = min(run.measured_ms, fastest_ms.get(run.release, math.inf))
    return float(np.median([*fastest_ms.values()])) if fastest_ms else None


def price_ms(found: Prediction) -> float:
    """What a planner ranks by: a step, dearer by what failed starts are expected to cost at USUAL_FAILURE_PRICE.

    Infinite where it says that the run does not fit.
    """
    if not found.fits:
        return math.inf
    return found.step_ms * failure_factor(found.oom_probability or 0.0, USUAL_FAILURE_PRICE)


def describe_layout(case: MeasuredCase) -> str:
    """`PP 4 TP 2 DP 8 MBS 1, ZeRO 1, recompute all, no SP`."""
    strategy = case.plan.strategy
    sizes = [("PP", strategy.pp), ("VPP", strategy.vpp), ("TP", strategy.tp), ("CP", strategy.cp), ("EP", strategy.ep)]
    shown = [f"{name} {size}" for name, size in sizes if size > 1 or name in ("PP", "TP")]
    words = [" ".join([*shown, f"DP {strategy.dp}", f"MBS {strategy.mbs}"]), f"ZeRO {strategy.zero}"]
    words.append(f"recompute {describe_recompute(case)}")
    workload, facts = case.job.workload, case.job.workload.known_facts
    if strategy.tp > 1 and not strategy.divides_sequences(workload):
        words.append("no SP")
    words += [facts.dispatcher] if facts.dispatcher else []
    words += [f"graphs {facts.graphs}"] if facts.graphs else []
    words += [f"all-to-all beside {workload.overlap_all_to_all}"] if workload.overlap_all_to_all != "none" else []
    return ", ".join(words)


# ---------------------------------------------------------------------------------------------------------- decisions


def _decide_group(group: Sequence[Predicted], least_layouts: int) -> Decision | None:
    layouts = _list_layouts(group)
    ran = [layout for layout in layouts if layout.measured_ms is not None]
    if len(ran) < least_layouts:
        return None
    measured_ms = np.array([layout.measured_ms for layout in ran], dtype=float)
    by_prediction = np.argsort([layout.predicted_ms for layout in ran], kind="stable")
    best_ms = float(measured_ms.min())
    picks = sorted((layout for layout in layouts if layout.price_ms < math.inf), key=lambda layout: layout.price_ms)
    first_ran = next((index for index, pick in enumerate(picks) if pick.measured_ms is not None), None)
    ran_ms = float(measured_ms[by_prediction[0]])
    own_ms = ran_ms if first_ran is None else picks[first_ran].measured_ms or ran_ms
    return Decision(
        name=_describe_group(group[0][0]),
        num_rows=sum(not found.calibrated_on for _, found in group),
        num_layouts=len(ran),
        num_failed=len(layouts) - len(ran),
        best=ran[int(np.argmin(measured_ms))],
        pick=picks[0] if picks else None,
        pick_failed=first_ran != 0,
        num_failed_picks=len(picks) if first_ran is None else first_ran,
        regret_fraction=own_ms / best_ms - 1,
        ran_regret_fraction=ran_ms / best_ms - 1,
        three_regret_fraction=float(measured_ms[by_prediction[:3]].min()) / best_ms - 1,
        subset_regret_fraction=_subset_regret(measured_ms, by_prediction),
    )


def _subset_regret(measured_ms: FloatArray, by_prediction: IntArray) -> float:
    """Mean regret of the fastest predicted over NUM_SUBSETS random subsets, the same ones in every run."""
    in_order_ms = measured_ms[by_prediction]
    random = np.random.default_rng(_SEED)
    keys = random.random((NUM_SUBSETS, len(in_order_ms)))
    drawn = np.sort(np.argsort(keys, axis=1)[:, :SUBSET_SIZE], axis=1)  # the fastest predicted stand first
    return float(np.mean(in_order_ms[drawn[:, 0]] / in_order_ms[drawn].min(axis=1))) - 1


def _describe_group(case: MeasuredCase) -> str:
    """`13.0 B parameters, 64 a100-80g, 2048 x 2048 tokens, torch`."""
    workload = case.job.workload
    words = [
        f"{count_model_parameters(case.job.model) / 1e9:.1f} B parameters",
        f"{case.plan.strategy.world_size} {case.job.cluster.device.name}",
        f"{workload.global_batch_size} x {workload.seq_length} tokens",
    ]
    return ", ".join([*words, case.kernels] if case.kernels else words)
