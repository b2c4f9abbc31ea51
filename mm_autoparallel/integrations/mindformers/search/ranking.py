"""Candidates of an ND search, each with its best pipeline, by the time of their step.

The number of chunks a stage is searched too. Every candidate runs the same global batch, so their steps compare.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mm_autoparallel.errors import (
    Interrupted,
    JobError,
    NoFeasiblePlan,
    PlanError,
    PlannerError,
    TableError,
    Unfinished,
)
from mm_autoparallel.integrations.mindformers.layout import Layout
from mm_autoparallel.integrations.mindformers.pipeline_problem import build_pipeline_problem, layout_of
from mm_autoparallel.integrations.mindformers.pretrain_yaml import Pretrain, read_pretrain
from mm_autoparallel.integrations.mindformers.profile_table import Candidate, ProfiledCandidate, name_candidate
from mm_autoparallel.integrations.mindformers.search.division import MAX_CHUNKS
from mm_autoparallel.integrations.mindformers.search.layouts import Solver, solve
from mm_autoparallel.integrations.mindformers.search.lowest_memory import with_causes
from mm_autoparallel.integrations.mindformers.search.sized_memory import size_memory
from mm_autoparallel.pipeline.simulate.step import simulate


@dataclass(frozen=True)
class RankedCandidate:
    """A candidate with its best pipeline. cost_ms: its step, in the unit of the profile table's `moe_bw`.

    status: optimal, feasible (stopped before it was proven), infeasible or unknown (stopped before one was found); with
    the last two, layout and cost_ms are None and `reason` says why. gap_fraction: how much shorter its step could be at
    most. peak_bytes: of the fullest stage.
    """

    candidate: Candidate
    pretrain: Pretrain
    layout: Layout | None
    cost_ms: float | None
    gap_fraction: float | None
    peak_bytes: float | None
    status: str
    reason: str = ""


def read_candidate_yamls(folder: Path) -> dict[Candidate, Pretrain]:
    """The pretrain YAMLs in `folder` by what they divide. Raises JobError where there are none or two are alike."""
    found: dict[Candidate, Pretrain] = {}
    for path in sorted([*folder.glob("*.yaml"), *folder.glob("*.yml")]):
        pretrain = read_pretrain(path)
        candidate = (pretrain.dp, pretrain.tp, pretrain.pp, pretrain.ep)
        if candidate in found:
            raise JobError(f"{path} and {found[candidate].path} are both {name_candidate(candidate)}; keep one of them")
        found[candidate] = pretrain
    if not found:
        raise JobError(f"{folder}: there are no YAML files; a folder of candidates' pretrain YAMLs is expected")
    return found


def check_candidates(
    yamls: Mapping[Candidate, Pretrain],
    profiled: Mapping[Candidate, ProfiledCandidate],
    listed: Sequence[Candidate] | None,
) -> None:
    """Raise TableError, naming all, where candidates have a YAML and no profile or the reverse, or are not listed."""
    missing = [candidate for candidate in yamls if candidate not in profiled]
    if missing:
        raise TableError(
            f"{yamls[missing[0]].path.parent}: there is no profile of {_listed(missing)} (no row in the profile table "
            f"of --parser_result, no folder in --profile_data_dir); add {'it' if len(missing) == 1 else 'them'}, or "
            f"take the YAML{'' if len(missing) == 1 else 's'} of what cannot be profiled out of that folder"
        )
    foreign = [candidate for candidate in profiled if candidate not in yamls]
    if foreign:
        raise TableError(f"{_listed(foreign)}: it was profiled, and no YAML divides its model so; add its YAML")
    unlisted = [candidate for candidate in yamls if listed is not None and candidate not in listed]
    if unlisted:
        raise TableError(
            f"{yamls[unlisted[0]].path.parent}: {_listed(unlisted)} "
            f"{'is' if len(unlisted) == 1 else 'are'} not in the candidate table"
        )


def _listed(candidates: Sequence[Candidate]) -> str:
    return ", ".join(map(name_candidate, candidates))


def rank_candidates(
    yamls: Mapping[Candidate, Pretrain],
    profiled: Mapping[Candidate, ProfiledCandidate],
    global_batch_size: int,
    solver: Solver,
    reserve_bytes: float | None = None,
) -> list[RankedCandidate]:
    """Every candidate, the fastest first, those that fit nothing last.

    solver: for each number of chunks of each, whose model is called after both. reserve_bytes: see sized_memory.py,
    reserve_of.

    Raises JobError where the global batch does not divide over a candidate's data parallel ranks and micro-batches, or
    every candidate's YAML is wrong; the mistake of one becomes its reason.
    """
    ranked: list[RankedCandidate] = []
    wrong: list[JobError | PlanError] = []
    for candidate, pretrain in yamls.items():
        divided = _with_batch(pretrain, global_batch_size)
        try:
            ranked.append(_best_of(candidate, divided, profiled[candidate], solver, reserve_bytes))
        except (JobError, PlanError) as error:
            wrong.append(error)
            ranked.append(_without_layout(candidate, divided, error))
    if len(wrong) == len(ranked):
        raise wrong[0]
    return sorted(ranked, key=lambda entry: (entry.cost_ms is None, entry.cost_ms or 0.0, entry.candidate))


def _with_batch(pretrain: Pretrain, global_batch_size: int) -> Pretrain:
    samples = pretrain.dp * pretrain.mbs * pretrain.interleave_num * pretrain.gradient_accumulation_steps
    if global_batch_size % samples:
        raise pretrain.error(
            "parallel_config.data_parallel",
            f"{pretrain.dp} with runner_config.batch_size {pretrain.mbs} takes {samples} samples at once, and a global "
            f"batch of {global_batch_size} is no multiple of that",
        )
    return replace(pretrain, num_microbatches=global_batch_size // samples)


def _best_of(
    candidate: Candidate,
    pretrain: Pretrain,
    profiled: ProfiledCandidate,
    solver: Solver,
    reserve_bytes: float | None,
) -> RankedCandidate:
    """Raises JobError or PlanError where the YAML is wrong with one chunk a stage already."""
    best: RankedCandidate | None = None
    nothing: list[NoFeasiblePlan | Unfinished] = []
    for vp in range(1, MAX_CHUNKS + 1):
        if solver.should_stop():
            nothing.append(Interrupted("the ranking was interrupted before this candidate's turn"))
            break
        divided = replace(pretrain, vp=vp)
        if vp > 1 and (divided.num_virtual_stages > divided.num_layers or divided.num_microbatches % divided.pp):
            continue
        try:
            memory = size_memory(divided, reserve_bytes=reserve_bytes)
            problem = build_pipeline_problem(divided, profiled.ratios, memory, "default")
        except (JobError, PlanError):
            if vp > 1:  # more chunks than this division can have
                continue
            raise
        stem = solver.model_stem.with_name(f"{name_candidate(candidate)}_VP{vp}")
        try:
            solved = solve(problem, replace(solver, model_stem=stem))
        except NoFeasiblePlan as error:
            nothing.append(with_causes(error, divided, memory))
            continue
        except Unfinished as error:
            nothing.append(error)
            continue
        timeline = simulate(problem, solved.placement)
        cost_ms = timeline.step_ms * profiled.expert_forward_ms * pretrain.gradient_accumulation_steps
        if best is None or best.cost_ms is None or cost_ms < best.cost_ms:
            bound_ms = solved.lower_bound_ms
            best = RankedCandidate(
                candidate,
                divided,
                layout_of(problem, solved.placement),
                cost_ms,
                None if bound_ms is None else max(0.0, 1.0 - bound_ms / timeline.step_ms),
                float(max(timeline.peak_memory_bytes)),
                solved.status.lower(),
            )
    if best is None:
        open_ones = [error for error in nothing if isinstance(error, Unfinished)]
        return _without_layout(candidate, pretrain, open_ones[0] if open_ones else nothing[0])
    return best


def _without_layout(candidate: Candidate, pretrain: Pretrain, reason: PlannerError) -> RankedCandidate:
    status = "unknown" if isinstance(reason, Unfinished) else "infeasible"
    return RankedCandidate(candidate, pretrain, None, None, None, None, status, str(reason))
