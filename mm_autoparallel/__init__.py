"""mm_autoparallel plans the distributed training of large multimodal models.

A job (model, cluster, workload) goes in; a plan comes out: the parallel strategy, the layers each pipeline stage holds
and recomputes, the step it will take, and a bound that says how far from the best it can be.

    import mm_autoparallel as mmap

    job = mmap.read_job("job.yaml")
    best = mmap.plan(job)
    mmap.simulate(job, best.plan.edited(recompute={"text": [5, 10, 9, 9]}))

The names below are the stable interface (docs/reference/python.md); api/ holds what they do. Each is fetched when it is
first asked for, so that `import mm_autoparallel` costs nothing and needs neither torch nor a solver.
"""

from __future__ import annotations

__version__ = "0.1.0"

TYPE_CHECKING = False  # as typing's, whose import would cost something
if TYPE_CHECKING:
    from mm_autoparallel.api import explain, place, plan, read_plan, report, simulate, verify
    from mm_autoparallel.api.explanation import Explanation
    from mm_autoparallel.api.jobs import Job, read_job
    from mm_autoparallel.api.placed import PlaceResult, VerifyResult, read_problem
    from mm_autoparallel.api.report_page import ReportResult
    from mm_autoparallel.api.results import PlanResult, Simulation
    from mm_autoparallel.errors import (
        BackendError,
        Interrupted,
        JobError,
        NoFeasiblePlan,
        PlanError,
        PlannerError,
        ProfileError,
        TableError,
        Unfinished,
    )
    from mm_autoparallel.pipeline.problem import Problem
    from mm_autoparallel.planner.balanced_sampler import DistributedBalancedBatchSampler
    from mm_autoparallel.planner.balancer import Assignment, BatchBalancer
    from mm_autoparallel.planner.plan import Plan
    from mm_autoparallel.planner.search.candidate import Progress
    from mm_autoparallel.samples.sample import Sample, SampleCost

_ERRORS = (
    "PlannerError",
    "JobError",
    "ProfileError",
    "PlanError",
    "TableError",
    "NoFeasiblePlan",
    "Unfinished",
    "Interrupted",
    "BackendError",
)
_HOMES = {
    **dict.fromkeys(("plan", "simulate", "explain", "report", "place", "verify", "read_plan"), "api"),
    **dict.fromkeys(("read_job", "Job"), "api.jobs"),
    **dict.fromkeys(("PlanResult", "Simulation"), "api.results"),
    **dict.fromkeys(("PlaceResult", "VerifyResult", "read_problem"), "api.placed"),
    "Explanation": "api.explanation",
    "ReportResult": "api.report_page",
    "Plan": "planner.plan",
    "Problem": "pipeline.problem",
    "Progress": "planner.search.candidate",
    **dict.fromkeys(("Assignment", "BatchBalancer"), "planner.balancer"),
    "DistributedBalancedBatchSampler": "planner.balanced_sampler",
    **dict.fromkeys(("Sample", "SampleCost"), "samples.sample"),
    **dict.fromkeys(_ERRORS, "errors"),
}
"""Name → the module that it lives in."""

__all__ = [
    "read_job",
    "Job",
    "plan",
    "simulate",
    "explain",
    "report",
    "place",
    "verify",
    "read_plan",
    "read_problem",
    "Plan",
    "Problem",
    "Progress",
    "PlanResult",
    "Simulation",
    "Explanation",
    "ReportResult",
    "PlaceResult",
    "VerifyResult",
    "BatchBalancer",
    "Assignment",
    "Sample",
    "SampleCost",
    "DistributedBalancedBatchSampler",
    "PlannerError",
    "JobError",
    "ProfileError",
    "PlanError",
    "TableError",
    "NoFeasiblePlan",
    "Unfinished",
    "Interrupted",
    "BackendError",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    found: object = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
