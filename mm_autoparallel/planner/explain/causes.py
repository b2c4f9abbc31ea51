"""What a step consists of, cause by cause, so that two plans can be told apart: every part is a mean over the stages.

What a group costs inside blocks, or after the last backward, is what its stage is busy for less if that group takes no
time at all (`evaluate` with scales of 0), one group after the other; so the parts add up to the step.
"""

from __future__ import annotations

import numpy as np

from mm_autoparallel.model.costs import scales
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.planner.evaluate import evaluate
from mm_autoparallel.planner.plan import Plan
from mm_autoparallel.reports.tables import TimeShares, share_time

_INSIDE = {
    "tensor parallel groups": (scales.TENSOR_PARALLEL,),
    "context parallel groups": (scales.CONTEXT_PARALLEL,),
    "exchange with experts": (scales.EXPERT_EXCHANGE,),
    "transfers between stages": (scales.PIPELINE,),
}
_TAIL = {
    "gradient reduction": (scales.GRADIENT_REDUCTION, scales.EXPERT_REDUCTION),
    "parameter gather": (scales.PARAMETER_GATHER, scales.EXPERT_GATHER),
    "tied table": (scales.TIED_TABLE,),
    "optimizer": (scales.OPTIMIZER,),
}

_ROUNDING_FRACTION = 1e-12
"""Of a step: what differences of sums leave where there is nothing."""


def divide_step(job: Job | CostModel, plan: Plan) -> dict[str, float]:
    """Cause → ms, the mean over the stages; together the step. Raises as `evaluate` does."""
    costs = CostModel.of(job)
    whole = share_time(evaluate(costs, plan).timeline)
    parts: dict[str, float] = {"compute": 0.0, "recompute": 0.0}
    silent: list[str] = []
    before = whole
    for cause, names in (_INSIDE | _TAIL).items():
        silent += names
        after = share_time(evaluate(costs, plan, scales.scale_all(silent, 0.0)).timeline)
        parts[cause] = _busy_ms(before) - _busy_ms(after)
        before = after
    parts["compute"] = _mean_ms(before.forward_ms + before.backward_ms + before.encoders_ms + before.tail_ms)
    parts["recompute"] = _mean_ms(before.recompute_ms)
    parts["transfers between stages"] += _mean_ms(whole.idle_communication_ms)
    parts["pipeline fills and drains"] = _mean_ms(whole.idle_warmup_ms + whole.idle_cooldown_ms)
    parts["waits for other stages"] = _mean_ms(whole.idle_imbalance_ms)
    step_ms = sum(parts.values())
    return {cause: part_ms if abs(part_ms) > _ROUNDING_FRACTION * step_ms else 0.0 for cause, part_ms in parts.items()}


def _busy_ms(shares: TimeShares) -> float:
    busy_ms = shares.forward_ms + shares.backward_ms + shares.recompute_ms + shares.encoders_ms + shares.tail_ms
    return _mean_ms(busy_ms)


def _mean_ms(values_ms: np.ndarray) -> float:
    return float(np.mean(values_ms))
