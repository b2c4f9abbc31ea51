"""`plan` against every plan of small jobs whose order may be found, of one chunk a stage and of two there and back.

    python tests/oracle/free_jobs.py --jobs 100 --seed 1

Jobs are random: two to four devices, a few layers, a tower at times frozen, chunks, recompute, schedules with and
without names, memory that binds. Failed starts have no price, so plans rank by their steps. Of each lawful strategy the
best step is that of every placement with every word (`v_orders`, `free_orders`) or, of a schedule with a name, of every
placement. Wrong is: a plan that is slower than the best of all or called faster than another hand plays it; a bound
above the best; a strategy called infeasible of which a plan fits; a named order that is found faster than the free one
of the same sizes; a certificate of the winning problem that `verify` does not confirm, where it says more than work.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import brute_force
import free_orders
import v_orders
from expert_jobs import SAME, placements_of, with_memory
from semantics import Document

from mm_autoparallel.errors import JobError, NoFeasiblePlan, PlanError
from mm_autoparallel.model.costs.stage import build_problem
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.readers.job_file import parse_job
from mm_autoparallel.pipeline.certify.certificate import Certificate
from mm_autoparallel.pipeline.certify.verify import verify
from mm_autoparallel.pipeline.modalities import placement_from_modalities
from mm_autoparallel.pipeline.placement import place
from mm_autoparallel.pipeline.problem import Problem
from mm_autoparallel.pipeline.problem_file import problem_document
from mm_autoparallel.pipeline.simulate.loads import find_misfits
from mm_autoparallel.pipeline.simulate.step import simulate
from mm_autoparallel.planner.search.planner import search
from mm_autoparallel.planner.search.result import SearchResult
from mm_autoparallel.planner.search.space import describe_strategy, list_space

MOST_PLACEMENTS = 60
LIMIT_S, VERIFY_S = 20.0, 20.0
FREE = "free"
SCHEDULES = (["free"], ["free", "zbv"], ["free", "v_half", "1f1b"], ["zb_h1", "free", "v_min"], ["1f1b", "zbv", "free"])


def random_content(rng: random.Random) -> dict[str, Any]:
    """A job file's content."""
    num_devices = rng.choice((2, 2, 4))
    hidden = rng.choice((512, 1024))
    layers = {"num_layers": rng.randint(3, 5), "hidden_size": hidden, "ffn_size": 4 * hidden, "num_heads": 8}
    model: dict[str, Any] = {"text": {"vocab_size": rng.choice((2000, 32000)), "layers": layers | {"norm": "rms"}}}
    seq_length = rng.choice((512, 1024))
    workload: dict[str, Any] = {"seq_length": seq_length}
    if rng.random() < 0.4:
        tower = {"num_layers": rng.randint(1, 2), "hidden_size": 512, "ffn_size": 2048, "num_heads": 8}
        model["encoders"] = [
            {
                "name": "vision",
                "stem": {"type": "patches", "in_features": 588},
                "layers": tower,
                "projector": {"norm": "layer", "norm_size": 512, "merge_tokens": 4, "layer_sizes": [2048, hidden]},
                "freeze": rng.random() < 0.6,
            }
        ]
        workload["image_tokens_per_sample"] = seq_length // 4
        layers["num_layers"] = 3
    dp = num_devices // 2
    workload["global_batch_size"] = dp * rng.choice((2, 2, 3))
    return {
        "model": model,
        "cluster": {"num_nodes": 1, "devices_per_node": num_devices, "device": rng.choice(("h100-80g", "a100-80g"))},
        "workload": workload,
        "search": {
            "pp": rng.choice(([2], [2], [1, 2])),
            "tp": [1],
            "mbs": [1],
            "max_vpp": 2,
            "zero": [1],
            "modes": rng.choice(([], [], ["recompute"])),
            "schedule": rng.choice(SCHEDULES),
            "failure_price": 0.0,
            "choice": "point",
        },
    }


def random_job(seed: int) -> tuple[Job, dict[Strategy, Problem]]:
    """A job that brute force can do, and the problems of its lawful strategies; memory binds in half of them."""
    rng = random.Random(f"free-{seed}")
    while True:
        content = random_content(rng)
        try:
            job = parse_job(content, Path(f"job_{seed}.yaml"))
            strategies = [entry.strategy for entry in list_space(job) if entry.reason is None]
        except JobError:
            continue
        problems = {strategy: build_problem(job, strategy) for strategy in strategies}
        sizes = [brute_force.count_placements(problem_document(problem)) for problem in problems.values()]
        if not strategies or max(sizes) > MOST_PLACEMENTS or not any(one.vpp == 2 for one in strategies):
            continue
        if rng.random() < 0.6:
            problem = problems[rng.choice([one for one in strategies if one.pp == 2])]
            static = sum(block.static_bytes * block.count for block in problem.chain) / problem.num_stages
            kept = sum(block.activation_bytes * block.count for block in problem.chain) / problem.num_stages
            job = with_memory(job, 1.15 * (static + rng.uniform(1.2, 5.0) * kept))
            try:
                problems = {strategy: build_problem(job, strategy) for strategy in strategies}
            except JobError:
                continue
        return job, problems


def best_of(strategy: Strategy, problem: Problem) -> float:
    """The least step over every placement and, where it is to be found, every order; inf where none fits."""
    document: Document = problem_document(problem)
    if strategy.schedule == FREE and strategy.vpp == 2:
        return v_orders.best(document)
    if strategy.schedule == FREE:
        return free_orders.best_free(document).step_ms
    least_ms = math.inf
    for placement in placements_of(problem):
        timeline = simulate(problem, placement)
        if not find_misfits(problem, timeline.peak_memory_bytes, timeline.peak_host_bytes):
            least_ms = min(least_ms, timeline.step_ms)
    return least_ms


@dataclass
class Verdict:
    """wrong: a sentence each. least_ms: by brute force. ended: how the search did; winner: the schedule and VPP."""

    seed: int
    num_strategies: int = 0
    least_ms: float = math.inf
    ended: str = ""
    winner: str = ""
    confirmed: str = ""
    wrong: list[str] = field(default_factory=list)


def compare(seed: int) -> Verdict:
    """What the search says of one random job, held against brute force."""
    job, problems = random_job(seed)
    verdict = Verdict(seed, len(problems))
    least = {strategy: best_of(strategy, problem) for strategy, problem in problems.items()}
    verdict.least_ms = min(least.values())
    for strategy, step_ms in least.items():
        free = replace(strategy, schedule=FREE)
        if free in least and step_ms < least[free] * (1 - 1e-9):
            verdict.wrong.append(f"{describe_strategy(strategy)} takes {step_ms}, in any order {least[free]}")
    try:
        found = search(job, time_limit_s=LIMIT_S, num_workers=1)
    except NoFeasiblePlan as failure:
        verdict.ended = "nothing fits"
        if math.isfinite(verdict.least_ms):
            verdict.wrong.append(f"nothing fits, and one plan takes {verdict.least_ms}: {failure}")
        return verdict
    verdict.ended = found.stopped
    best = found.estimates[0]
    verdict.winner = f"{best.plan.strategy.schedule} VPP {best.plan.strategy.vpp}"
    if found.proven and best.step_ms > verdict.least_ms * (1 + 1e-3):
        verdict.wrong.append(f"{best.step_ms} is called proven, and {verdict.least_ms} is possible")
    if found.gap_fraction == 0.0 and best.step_ms > verdict.least_ms * (1 + SAME):
        verdict.wrong.append(f"{best.step_ms} is called optimal, and {verdict.least_ms} is possible")
    if best.step_ms < verdict.least_ms * (1 - 1e-9):
        verdict.wrong.append(f"{best.step_ms} is below the best of all, {verdict.least_ms}")
    if found.lower_bound_ms > verdict.least_ms * (1 + 1e-9):
        verdict.wrong.append(f"its bound is {found.lower_bound_ms}, and {verdict.least_ms} is possible")
    for candidate in found.candidates:
        known, name = least.get(candidate.strategy, math.inf), describe_strategy(candidate.strategy)
        if candidate.bound_ms is not None and candidate.bound_ms > known * (1 + 1e-9):
            verdict.wrong.append(f"{name}: bound {candidate.bound_ms} by {candidate.bounded_by}, one has {known}")
        if candidate.status == "infeasible" and math.isfinite(known):
            verdict.wrong.append(f"{name} is called infeasible ({candidate.reason}), and one has {known}")
    _check_winner(verdict, found, problems, least)
    return verdict


def _check_winner(
    verdict: Verdict, found: SearchResult, problems: dict[Strategy, Problem], least: dict[Strategy, float]
) -> None:
    """Play it by another hand where it is a V, and let `verify` confirm what `place` proves of its problem."""
    plan = found.estimates[0].plan
    problem = problems[plan.strategy]
    if plan.strategy.schedule != FREE:
        return
    placement = placement_from_modalities(problem, plan.layers, plan.recompute, plan.modes)
    placement = replace(placement, orders=plan.orders)
    if plan.strategy.vpp == 2:
        held = {"layers": placement.layers, "modes": placement.modes, "order": placement.orders}
        played_ms = v_orders.play(problem_document(problem), held)
        if not math.isclose(played_ms, found.estimates[0].step_ms, rel_tol=1e-9):
            verdict.wrong.append(f"its plan takes {played_ms}, and is said to take {found.estimates[0].step_ms}")
    placed = place(problem, time_limit_s=LIMIT_S)
    if placed.placement is None or placed.lower_bound_ms > least[plan.strategy] * (1 + 1e-9):
        verdict.wrong.append(f"placed by itself: {placed.status}, {placed.step_ms} and {placed.lower_bound_ms}")
        return
    held_out = placed.step_ms, placed.lower_bound_ms, placed.gap_fraction
    try:
        verify(Certificate(problem, placed.placement, *held_out, method="orders"), VERIFY_S)
        verdict.confirmed = "confirmed"
    except PlanError as refusal:
        verdict.confirmed = "not confirmed"
        if "another placement" in str(refusal):
            verdict.wrong.append(f"`verify` refuses what `place` proves: {refusal}")


def main() -> int:
    """Exit code 1 where anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    began_s = time.monotonic()
    verdicts = []
    for seed in range(args.seed, args.seed + args.jobs):
        verdicts.append(compare(seed))
        for words in verdicts[-1].wrong:
            print(f"seed {seed}: {words}", flush=True)
    for told in ("ended", "winner", "confirmed"):
        counts = Counter(getattr(verdict, told) or "none" for verdict in verdicts)
        print(f"{told}: " + ", ".join(f"{number} {name}" for name, number in counts.most_common()))
    print(
        f"{len(verdicts)} jobs, {sum(v.num_strategies for v in verdicts):,} lawful strategies: "
        f"{sum(bool(v.wrong) for v in verdicts)} wrong; {time.monotonic() - began_s:.0f} s"
    )
    return 1 if any(verdict.wrong for verdict in verdicts) else 0


if __name__ == "__main__":
    raise SystemExit(main())
