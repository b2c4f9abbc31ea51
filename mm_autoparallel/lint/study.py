"""Study: a plan with its job and simulation, other plans simulated beside it; Advice: what a rule finds there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from mm_autoparallel.errors import PlannerError
from mm_autoparallel.integrations.findings import Figures, Rule
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.planner.evaluate import Estimate, evaluate
from mm_autoparallel.planner.plan import Plan
from mm_autoparallel.planner.search.space import divisors
from mm_autoparallel.units import format_ms, format_percent


@dataclass(frozen=True)
class Advice:
    """What `rule` finds in a plan, whatever files say it.

    about: what decides it: a field of Strategy, or layers, recompute, global_batch_size, or a field of the workload.
    stage, figures: as in Finding. better: the plan that mends it; words: the same in the plan's own words.
    """

    rule: Rule
    message: str
    about: str
    stage: int | None = None
    figures: Figures = field(default_factory=dict)
    better: Plan | None = None
    words: str = ""


@dataclass(frozen=True)
class Study:
    """`job` under the plan of `estimate`. keeps_less: flags by which the training holds less than that."""

    job: Job
    estimate: Estimate
    keeps_less: tuple[str, ...] = ()

    @property
    def plan(self) -> Plan:
        """The plan that is looked at."""
        return self.estimate.plan

    @cached_property
    def _costs(self) -> CostModel:
        return CostModel.of(self.job)

    def simulate(self, plan: Plan, **workload: object) -> Estimate | None:
        """`plan`, on a workload with other choices where some are given; None where it cannot run."""
        try:
            if not workload:
                return evaluate(self._costs, plan)
            return evaluate(replace(self.job, workload=self.job.workload.model_copy(update=workload)), plan)
        except PlannerError:
            return None

    def capped(self, most: int) -> Plan:
        """The plan that recomputes at most `most` layers of a virtual stage and modality."""
        recompute = {name: tuple(min(most, one) for one in counts) for name, counts in self.plan.recompute.items()}
        return replace(self.plan, recompute=recompute)

    def raised(self, least: int) -> Plan:
        """The plan that recomputes `least` layers of a virtual stage and modality, or all where it holds fewer."""
        plan = self.plan
        recompute = {
            name: tuple(max(one, min(least, held)) for one, held in zip(counts, plan.layers[name], strict=True))
            for name, counts in plan.recompute.items()
        }
        return replace(plan, recompute=recompute, modes={})

    def moved(self, plan: Plan, modality: str, source: int, target: int) -> Plan | None:
        """`plan` with one layer of `modality` on virtual stage `target` in place of `source`; layers recompute as they
        did: all, as many as a stage holds up to one number, or the same on every stage. None where that is no plan."""
        held, again = [*plan.layers[modality]], plan.recompute[modality]
        most, everywhere = max(again), list(again) == held
        held[source] -= 1
        held[target] += 1
        if min(held) < 1 or plan.modes.get(modality):
            return None
        counts = held if everywhere else [min(most, one) for one in held]
        if not everywhere and tuple(again) != tuple(min(most, one) for one in plan.layers[modality]):
            return None
        layers = {**plan.layers, modality: tuple(held)}
        return replace(plan, layers=layers, recompute={**plan.recompute, modality: tuple(counts)})


def gains(study: Study, better: Estimate) -> float:
    """The fraction of the step that `better` saves."""
    return 1.0 - better.step_ms / study.estimate.step_ms


def describe_gain(study: Study, better: Estimate) -> str:
    """`12.30 s in place of 12.90 s a step (4.7 % less)`."""
    saved = format_percent(gains(study, better))
    return f"{format_ms(better.step_ms)} in place of {format_ms(study.estimate.step_ms)} a step ({saved} less)"


def list_lists(plan: Plan) -> str:
    """Layers of each modality as a plan's file has them: `text layers 8,8,8,8`."""
    return "; ".join(f"{name} layers {','.join(map(str, counts))}" for name, counts in plan.layers.items())


def whole_groups(number: int) -> Iterator[int]:
    """Divisors of `number` below it, the largest first."""
    return reversed(divisors(number)[:-1])
