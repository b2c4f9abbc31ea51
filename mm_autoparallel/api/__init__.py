"""The functions of the face, `import mm_autoparallel as mmap`: each a few lines over what the rooms below do.

Command line and hooks call these for their verbs, and nothing else. Heavy packages (solver, compiler) are imported when
a function needs them. What is worth telling on the way goes to the logger `mm_autoparallel` (streams.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.planner.search import DEFAULT_TIME_LIMIT_S

if TYPE_CHECKING:
    from mm_autoparallel.api.encoded import EncodedPlaceResult
    from mm_autoparallel.api.explanation import Explanation
    from mm_autoparallel.api.placed import PlaceResult, VerifyResult
    from mm_autoparallel.api.report_page import ReportResult
    from mm_autoparallel.api.results import PlanResult, Simulation
    from mm_autoparallel.model.job.job import Job
    from mm_autoparallel.pipeline.certify.beside import EncodedCertificate
    from mm_autoparallel.pipeline.certify.certificate import Certificate
    from mm_autoparallel.pipeline.encoders import EncodedProblem
    from mm_autoparallel.pipeline.problem import Problem
    from mm_autoparallel.pipeline.solve.engines.ray_cluster import RayCluster
    from mm_autoparallel.planner.plan import Plan
    from mm_autoparallel.planner.search.candidate import Progress

EXPLAIN_LIMIT_S = 20.0
"""Of each search that `explain` needs. Assumed: three of them make a person wait a minute."""


def _never() -> bool:
    return False


def _quietly(_: object) -> None:
    return None


def load_solver(*, for_search: bool = True) -> None:
    """Import what `plan` and `explain`, or `place` alone, run. It takes a second or more, and programs that ask for the
    best so far on a signal do it before: there is nothing yet to ask for."""
    import mm_autoparallel.pipeline.placement.place

    if for_search:
        import mm_autoparallel.planner.search.watched  # noqa: F401  (kept in sys.modules)


def plan(
    job: Job,
    *,
    time_limit_s: float | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    top_k: int = 1,
    should_stop: Callable[[], bool] | None = None,
    engine: Literal["local", "ray"] = "local",
    ray_address: str | None = None,
    cache: str | Path | None = None,
) -> PlanResult:
    """The best plan of `job` over all strategies within its limits, and how much faster any could be at most.

    time_limit_s: wall time after which the best so far is returned; None: DEFAULT_TIME_LIMIT_S.
    on_progress: called now and then with how far the search is. top_k: how many of the best plans to return.
    should_stop: polled several times a second; true ends the search with the best so far. engine, ray_address: where
    candidates are solved. cache: a folder that keeps solved problems for later searches.
    Raises JobError where no strategy is lawful, ProfileError where a profile does not fit, NoFeasiblePlan where nothing
    fits, Unfinished where nothing was found in time, Interrupted where nothing was before should_stop.
    """
    from mm_autoparallel.api.results import PlanResult
    from mm_autoparallel.pipeline.solve.cache import SolvedCache
    from mm_autoparallel.planner.search.planner import search
    from mm_autoparallel.planner.search.watched import compile_search
    from mm_autoparallel.streams import warn

    cluster, solved = _connect(engine, ray_address), SolvedCache(Path(cache)) if cache is not None else None
    if solved:
        warn(solved.warnings)
        solved.warnings.clear()
    compile_search(job.schedules, job.search.max_vpp)
    limit_s = DEFAULT_TIME_LIMIT_S if time_limit_s is None else time_limit_s
    stop, tell = should_stop or _never, on_progress or _quietly
    return PlanResult(job, search(job, limit_s, stop, tell, top_k, cluster=cluster, cache=solved), cluster)


def _connect(engine: str, address: str | None) -> RayCluster | None:
    """The Ray cluster that is asked for. Raises JobError where there is none, or it cannot be used."""
    if engine != "ray":
        if address:
            raise JobError("--ray-address names a Ray cluster, and --engine is local; add --engine ray or leave it out")
        return None
    from mm_autoparallel.pipeline.solve.engines.ray_cluster import connect

    return connect(address)


def read_plan(path: str | Path, job: Job) -> Plan:
    """The plan in the result file at `path`, edited or not, checked against `job`. Raises PlanError naming the stage or
    key that does not fit."""
    from mm_autoparallel.planner.plan import read_plan as read

    return read(Path(path), job)


def simulate(job: Job, plan: Plan, *, name: str = "") -> Simulation:
    """One step of `job` under `plan`: its time and where it goes, and what every stage holds.

    Memory limits are reported, not enforced (`Simulation.fits`). name: what messages call the plan.
    Raises PlanError where the plan does not fit the job, ProfileError where a profile does not.
    """
    from mm_autoparallel.api.results import Simulation
    from mm_autoparallel.pipeline.simulate.compiled import announce_compilation
    from mm_autoparallel.planner.evaluate import evaluate

    announce_compilation("engine.play")
    try:
        return Simulation(job, evaluate(job, plan))
    except PlanError as error:
        raise PlanError(f"plan {name}: {error}" if name else str(error)) from None


def explain(
    job: Job,
    plan: Plan | Mapping[str, Plan],
    *,
    why_not: str | Mapping[str, int | str] | None = None,
    top_k: int | None = None,
    time_limit_s: float = EXPLAIN_LIMIT_S,
    should_stop: Callable[[], bool] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Explanation:
    """Where a step goes under `plan`, how sure that is, what would settle it, and why it is not another plan.

    plan: several by name, of which the first is held against the others. why_not: sizes of a strategy, `"PP=8,TP=4"` or
    `{"PP": 8}`, whose best plan it is held against. top_k: it is held against the best K plans of a search too.
    time_limit_s: of each search that this needs. Raises JobError where why_not is not understood or no strategy is
    lawful, PlanError where a plan does not fit the job, ProfileError where a profile does not.
    """
    from mm_autoparallel.api.explanation import explain_plans

    plans = dict(plan) if isinstance(plan, Mapping) else {"given": plan}
    wish = ",".join(f"{name}={value}" for name, value in why_not.items()) if isinstance(why_not, Mapping) else why_not
    return explain_plans(job, plans, wish, top_k, time_limit_s, should_stop or _never, on_progress or _quietly)


def report(
    job: Job,
    plans: Plan | Mapping[str, Plan] | None = None,
    *,
    found: PlanResult | None = None,
    search: bool = True,
    time_limit_s: float | None = None,
    should_stop: Callable[[], bool] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    texts: Mapping[str, str] | None = None,
    command: str = "",
) -> ReportResult:
    """One page about plans of `job` (`ReportResult.write`): timelines, memory, strategies, what the order hangs on.

    plans: several by name, of which the others are held against the first; None: the best of the search. found: a
    search that `plan` has made, in place of a new one. search: whether the space is searched where `found` is None;
    then the best plan is shown beside those that are given. time_limit_s, should_stop, on_progress: of that search, as
    `plan` has them. texts: of plans that were read from files, by name. command: what makes the page again. Raises as
    `plan` does where nothing else is to be shown, PlanError where a plan does not fit the job.
    """
    from mm_autoparallel.api.report_page import build_report
    from mm_autoparallel.errors import NoFeasiblePlan, Unfinished
    from mm_autoparallel.planner.explain.sensitivity import find_sensitivity
    from mm_autoparallel.streams import say

    given = {} if plans is None else dict(plans) if isinstance(plans, Mapping) else {"given": plans}
    shown = {name: simulate(job, one, name=name) for name, one in given.items()}
    if found is None and (search or not shown):
        try:
            found = plan(job, time_limit_s=time_limit_s, should_stop=should_stop, on_progress=on_progress)
        except (NoFeasiblePlan, Unfinished) as error:
            if not shown:
                raise
            say(f"the space is not shown: {error}")
    for rank, one in enumerate(found.best if found else (), start=1):
        if one.plan not in given.values():
            shown["the best plan" if rank == 1 else f"number {rank} of the search"] = one
    sensitivity = find_sensitivity(job, [one.plan for one in shown.values()])
    return build_report(job, shown, found, sensitivity, texts or {}, command)


def place(
    problem: Problem | EncodedProblem,
    *,
    time_limit_s: float | None = None,
    on_progress: Callable[[float], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> PlaceResult | EncodedPlaceResult:
    """The fastest placement of `problem`, a pipeline whose costs are given, with a bound on all others.

    Where it has encoders, the order of their work beside the decoder's is found as well.
    time_limit_s: wall time after which the best so far is returned with its gap; None for as long as it takes.
    on_progress: called with each better step, in ms. That nothing fits, or nothing was found in time, is a result too
    (`PlaceResult.status`). Raises JobError where the problem contradicts itself.
    """
    from mm_autoparallel.api.placed import PlaceResult
    from mm_autoparallel.pipeline.encoders import EncodedProblem
    from mm_autoparallel.pipeline.placement import compile_kernels
    from mm_autoparallel.pipeline.placement.place import place as solve

    compile_kernels()
    tell = on_progress or _quietly
    if isinstance(problem, EncodedProblem):
        from mm_autoparallel.api.encoded import EncodedPlaceResult
        from mm_autoparallel.pipeline.placement.bubbles.run import place_encoded

        return EncodedPlaceResult(problem, place_encoded(problem, time_limit_s, should_stop or _never, tell))
    return PlaceResult(
        problem,
        solve(
            problem,
            time_limit_s=time_limit_s,
            should_stop=should_stop or _never,
            on_better=lambda step_ms, _: tell(step_ms),
        ),
    )


def read_certificate(path: str | Path) -> Certificate | EncodedCertificate:
    """The proof that `PlaceResult.write_certificate` wrote to `path`. Raises PlanError where it contradicts itself."""
    from mm_autoparallel.pipeline.certify.beside import read_any_certificate as read

    return read(Path(path))


def verify(
    certificate: Certificate | EncodedCertificate | str | Path, *, time_limit_s: float | None = None
) -> VerifyResult:
    """Check a proof, or the file that `PlaceResult.write_certificate` wrote, without the solver that found it.

    time_limit_s: give the bound up after so long; None for as long as it takes.
    Raises PlanError naming what is refuted, or left open.
    """
    from mm_autoparallel.api.placed import VerifyResult
    from mm_autoparallel.pipeline.certify.certificate import Certificate
    from mm_autoparallel.pipeline.certify.confirm_beside import verify_beside
    from mm_autoparallel.pipeline.certify.verify import verify as check
    from mm_autoparallel.pipeline.simulate.compiled import announce_compilation

    proof = read_certificate(certificate) if isinstance(certificate, (str, Path)) else certificate
    announce_compilation("engine.play")
    limit_s = math.inf if time_limit_s is None else time_limit_s
    return VerifyResult(check(proof, limit_s) if isinstance(proof, Certificate) else verify_beside(proof, limit_s))
