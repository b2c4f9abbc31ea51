"""Candidates of an ND search, each with its best pipeline, by the time of their step.

The number of chunks a stage is searched too. Every candidate runs the same global batch, so their steps compare.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mm_autoparallel.errors import Interrupted, JobError, NoFeasiblePlan, TableError, Unfinished
from mm_autoparallel.frameworks.mindformers.layout import Layout
from mm_autoparallel.frameworks.mindformers.pipeline_problem import build_pipeline_problem, layout_of
from mm_autoparallel.frameworks.mindformers.pretrain_yaml import Pretrain, read_pretrain
from mm_autoparallel.frameworks.mindformers.profile_table import Candidate, ProfiledCandidate, name_candidate
from mm_autoparallel.search.mindformers.division import MAX_CHUNKS
from mm_autoparallel.search.mindformers.layouts import Solver, solve
from mm_autoparallel.search.mindformers.sized_memory import size_memory
from mm_autoparallel.simulate.step import simulate


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
    """Raise TableError where a candidate has a YAML and no profile, a profile and no YAML, or is not listed."""
    for candidate, pretrain in yamls.items():
        if candidate not in profiled:
            raise TableError(
                f"{pretrain.path}: there is no profile of {name_candidate(candidate)} (no row in the profile table, no "
                "folder of profile data); add it"
            )
    for candidate in profiled:
        if candidate not in yamls:
            raise TableError(
                f"{name_candidate(candidate)} was profiled, and no YAML divides its model so; add its YAML"
            )
    for candidate in yamls if listed is not None else ():
        if candidate not in (listed or ()):
            raise TableError(f"{yamls[candidate].path}: {name_candidate(candidate)} is not in the candidate table")


def rank_candidates(
    yamls: Mapping[Candidate, Pretrain],
    profiled: Mapping[Candidate, ProfiledCandidate],
    global_batch_size: int,
    solver: Solver,
) -> list[RankedCandidate]:
    """Every candidate, the fastest first, those that fit nothing last.

    solver: for each number of chunks of each, whose model is called after both.

    Raises JobError where the global batch does not divide over a candidate's data parallel ranks and micro-batches.
    """
    ranked = [
        _best_of(candidate, _with_batch(pretrain, global_batch_size), profiled[candidate], solver)
        for candidate, pretrain in yamls.items()
    ]
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
) -> RankedCandidate:
    best: RankedCandidate | None = None
    nothing: list[NoFeasiblePlan | Unfinished] = []
    for vp in range(1, MAX_CHUNKS + 1):
        if solver.should_stop():
            nothing.append(Interrupted("the ranking was interrupted before this candidate's turn"))
            break
        divided = replace(pretrain, vp=vp)
        if vp > 1 and (divided.num_virtual_stages > divided.num_layers or divided.num_microbatches % divided.pp):
            continue
        problem = build_pipeline_problem(divided, profiled.ratios, size_memory(divided), "default")
        stem = solver.model_stem.with_name(f"{name_candidate(candidate)}_VP{vp}")
        try:
            solved = solve(problem, replace(solver, model_stem=stem))
        except (NoFeasiblePlan, Unfinished) as error:
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
        status, reason = ("unknown", open_ones[0]) if open_ones else ("infeasible", nothing[0])
        return RankedCandidate(candidate, pretrain, None, None, None, None, status, str(reason))
    return best
