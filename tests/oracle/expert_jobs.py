"""`plan` against every plan of small jobs with experts: the space by loops of its own, every placement evaluated.

    python tests/oracle/expert_jobs.py --jobs 200 --seed 1

Jobs are random: two to eight devices, a few layers, experts, a tower at times; sizes, precision, kinds of context
parallelism, dispatcher, graphs, overlap, layer modes, chunks and ZeRO stages are searched, in some named orders of all
kinds too, under a price of failed starts or a least chance to fit. The space and its law are written from the
documentation (README, job/*.py's docstrings) alone, but for those of orders; a plan's figures come from `evaluate`, as
everywhere. Wrong is: another set of lawful strategies; a plan that ranks below what the search calls its bound, or
below a strategy's own; a plan of a strategy of which the search says that nothing fits; an answer that is not the best;
a search that ends without having finished.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import resource
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import brute_force
import nouns

from mm_autoparallel.errors import JobError, NoFeasiblePlan, Unfinished
from mm_autoparallel.model.costs.stage import build_problem
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.readers.job_file import parse_job
from mm_autoparallel.pipeline.problem import Placement, Problem
from mm_autoparallel.pipeline.problem_file import problem_document
from mm_autoparallel.planner.evaluate import Estimate, evaluate, plan_from_placement
from mm_autoparallel.planner.search.planner import search
from mm_autoparallel.planner.search.space import describe_strategy, list_space

CP_KINDS = ("ring", "all_gather", "all_to_all", "hierarchical")
MOST_STRATEGIES, MOST_PLANS = 150, 1_500
"""Jobs with more are replaced by the next one of their seed."""
SAME = 2e-5
"""Ranks that differ by less are the same: twice what a placement's optimum may differ by."""

ORDERS = (
    "1f1b",
    "gpipe",
    "interleaved_1f1b",
    "zb_h1",
    "zb_h2",
    "interleaved_zb",
    "zbv",
    "v_half",
    "v_min",
    "dualpipev",
)
LOW = ("fp8_delayed", "fp8_current", "fp8_blockwise", "mxfp8", "nvfp4")
RUNS: dict[str, tuple[str, ...]] = {
    "h100-80g": ("bf16", "fp8_delayed", "fp8_current", "fp8_blockwise"),
    "b200-192g": ("bf16", *LOW),
    "gb200-192g": ("bf16", *LOW),
    "a100-80g": ("bf16",),
}
"""Device → what TransformerEngine multiplies in on it."""


# --------------------------------------------------------------------------------------------------------- random jobs


def some(rng: random.Random, values: tuple[Any, ...], most: int) -> list[Any]:
    """One to `most` of `values`, in their order."""
    chosen = rng.sample(range(len(values)), rng.randint(1, min(most, len(values))))
    return [values[i] for i in sorted(chosen)]


def random_content(rng: random.Random) -> dict[str, Any]:
    """A job file's content."""
    num_devices = rng.choice((2, 2, 4, 4, 8))
    per_node = rng.choice([n for n in (2, 4, 8) if n <= num_devices])
    hidden = rng.choice((512, 1024))
    num_layers = rng.randint(2, 4)
    experts: dict[str, Any] = {
        "num_experts": rng.choice((2, 4, 6, 8)),
        "top_k": rng.choice((1, 2)),
        "ffn_size": rng.choice((256, 1024, 1026)),
    }
    if rng.random() < 0.4:
        experts["shared_ffn_size"] = rng.choice((512, 1024))
    if rng.random() < 0.3:
        experts["dense_layers"] = [0]
    layers = {
        "num_layers": num_layers,
        "hidden_size": hidden,
        "ffn_size": 4 * hidden,
        "num_heads": rng.choice((4, 8)),
        "num_kv_groups": rng.choice((2, 4)),
        "norm": "rms",
        "experts": experts,
    }
    seq_length = rng.choice((1024, 2048, 4096))
    workload: dict[str, Any] = {"global_batch_size": rng.choice((4, 8, 16)), "seq_length": seq_length}
    model: dict[str, Any] = {"text": {"vocab_size": rng.choice((32000, 32002)), "layers": layers}}
    if rng.random() < 0.25:
        model["encoders"] = [
            {
                "name": "vision",
                "stem": {"type": "patches", "in_features": 588},
                "layers": {"num_layers": rng.randint(1, 2), "hidden_size": 512, "ffn_size": 2048, "num_heads": 8},
                "projector": {"norm": "layer", "norm_size": 512, "merge_tokens": 4, "layer_sizes": [2048, hidden]},
                "freeze": rng.random() < 0.5,
            }
        ]
        workload["image_tokens_per_sample"] = seq_length // 4
    if rng.random() < 0.3:
        workload["expert_imbalance_factor"] = 1.3
    if rng.random() < 0.3:
        workload["stack"] = rng.choice(("megatron-te", "megatron-local"))
    if rng.random() < 0.25:
        workload["overlap_all_to_all"] = "shared_experts"
    facts = {"dispatcher": rng.choice(("alltoall", "deepep")), "graphs": rng.choice(("none", "full"))}
    if rng.random() < 0.4:
        workload["facts"] = {name: facts[name] for name in some(rng, tuple(facts), 2)}
    device = rng.choice(tuple(RUNS))
    search_limits: dict[str, Any] = {
        "ep": some(rng, (1, 2, 4, 8), 3),
        "etp": some(rng, (0, 1, 2), 2),
        "max_vpp": rng.choice((1, 1, 2)),
        "zero": some(rng, (0, 1, 2, 3), 2),
        "modes": some(rng, ("recompute", "selective", "activation", "offload"), 2),
        "choice": "point",
    }
    optional = {
        "cp": some(rng, (1, 2, 4), 2),
        "mbs": some(rng, (1, 2), 2),
        "cp_kind": some(rng, ("ring", "all_gather", "all_to_all", "hierarchical"), 2),
        "precision": some(rng, ("bf16", *LOW), 2),
        "dispatcher": some(rng, ("alltoall", "deepep", "hybridep"), 2),
        "graphs": some(rng, ("none", "partial", "full"), 2),
        "overlap_all_to_all": some(rng, ("none", "shared_experts", "micro_batches"), 2),
        "reshard": [True, False],
    }
    search_limits |= {key: value for key, value in optional.items() if rng.random() < 0.5}
    if rng.random() < 0.4:
        search_limits |= {"schedule": some(rng, ORDERS, 4), "max_vpp": 2}
    mood = rng.random()
    if mood < 0.25:
        search_limits["failure_price"] = 0.0
    elif mood < 0.4:
        search_limits["failure_price"] = 1.0
    elif mood < 0.65:
        search_limits["fit_probability"] = rng.choice((0.9, 0.99, 0.999))
    return {
        "model": model,
        "cluster": {"num_nodes": num_devices // per_node, "devices_per_node": per_node, "device": device},
        "workload": workload,
        "search": search_limits,
    }


def with_memory(job: Job, memory_bytes: float) -> Job:
    """The same on devices of so much memory, of which a context takes a twentieth."""
    figures = {"memory_bytes": int(memory_bytes), "context_bytes": int(memory_bytes / 20), "communicator_bytes": 0}
    device = job.cluster.device.model_copy(update=figures)
    return replace(job, cluster=job.cluster.model_copy(update={"device": device}))


# ------------------------------------------------------------------------------------------------- space and its law


@dataclass(frozen=True)
class Meaning:
    """A strategy in full: every choice as it takes effect, whatever the workload says anyway."""

    pp: int
    tp: int
    cp: int
    dp: int
    mbs: int
    ep: int
    etp: int
    vpp: int
    zero: int
    reshard: bool
    cp_kind: str
    precision: str
    dispatcher: str
    graphs: str
    overlap: str


def meaning_of(job: Job, strategy: Strategy) -> Meaning:
    """What a strategy of the package means, by the docstring of Strategy."""
    facts = job.workload.facts
    said = {name: getattr(facts, name) if facts else "" for name in ("dispatcher", "graphs")}
    return Meaning(
        strategy.pp,
        strategy.tp,
        strategy.cp,
        strategy.dp,
        strategy.mbs,
        strategy.ep,
        strategy.etp or strategy.tp,
        strategy.vpp,
        strategy.zero,
        strategy.reshard,
        (strategy.cp_kind or "ring") if strategy.cp > 1 else "",
        strategy.precision or "bf16",
        strategy.dispatcher or said["dispatcher"],
        strategy.graphs or said["graphs"],
        (strategy.overlap_all_to_all or job.workload.overlap_all_to_all) if strategy.ep > 1 else "",
    )


def lawful_meanings(content: dict[str, Any]) -> set[Meaning]:
    """Every lawful strategy of a job file's content."""
    limits, workload, cluster = content["search"], content["workload"], content["cluster"]
    num_devices = cluster["num_nodes"] * cluster["devices_per_node"]
    sizes = range(1, num_devices + 1)
    facts = workload.get("facts", {})
    found = set()
    for pp, tp, cp, dp in itertools.product(sizes, sizes, limits.get("cp", sizes), sizes):
        if pp * tp * cp * dp != num_devices:
            continue
        for mbs, ep, etp, vpp, zero in itertools.product(
            limits.get("mbs", range(1, workload["global_batch_size"] + 1)),
            limits["ep"],
            limits["etp"],
            range(1, limits["max_vpp"] + 1),
            limits["zero"],
        ):
            if zero == 0 and 1 in limits["zero"] and dp * cp == 1 and (etp or tp) == tp:
                continue  # one replica has nothing to divide: the same as ZeRO 1
            for reshard, cp_kind, precision, dispatcher, graphs, overlap in itertools.product(
                limits.get("reshard", [True]) if zero == 3 else [True],
                limits.get("cp_kind", ["ring"]) if cp > 1 else [""],
                limits.get("precision", ["bf16"]),
                limits.get("dispatcher", [facts.get("dispatcher", "")]),
                limits.get("graphs", [facts.get("graphs", "")]),
                limits.get("overlap_all_to_all", [workload.get("overlap_all_to_all", "none")]) if ep > 1 else [""],
            ):
                one = Meaning(
                    pp,
                    tp,
                    cp,
                    dp,
                    mbs,
                    ep,
                    etp or tp,
                    vpp,
                    zero,
                    reshard,
                    cp_kind,
                    precision,
                    dispatcher,
                    graphs,
                    overlap,
                )
                if is_lawful(content, one):
                    found.add(one)
    return found


def is_lawful(content: dict[str, Any], one: Meaning) -> bool:
    """The law of Megatron-LM with TransformerEngine, or without it (megatron-local), as the package states it."""
    workload, cluster, text = content["workload"], content["cluster"], content["model"]["text"]
    towers = [encoder["layers"] for encoder in content["model"].get("encoders", [])]
    layers, experts = text["layers"], text["layers"]["experts"]
    stack = workload.get("stack", "megatron-te")
    kv_groups = layers["num_kv_groups"]
    tp, cp, ep, etp = one.tp, one.cp, one.ep, one.etp
    near = {"gb200-192g": 72}.get(cluster["device"], cluster["devices_per_node"])
    near = min(near, cluster["num_nodes"] * cluster["devices_per_node"])  # devices that node links join
    num_layers = layers["num_layers"] + sum(tower["num_layers"] for tower in towers)
    num_microbatches = workload["global_batch_size"] // (one.dp * one.mbs)
    dealing = {"all_to_all": cp, "hierarchical": max(1, math.gcd(cluster["devices_per_node"], cp * tp) // tp)}.get(
        one.cp_kind, 1
    )
    heads = [layers["num_heads"], kv_groups, *(tower["num_heads"] for tower in towers)]
    widths = [experts.get("shared_ffn_size", 0), text["vocab_size"], *(tower["ffn_size"] for tower in towers)]
    widths += [layers["ffn_size"]] if experts.get("dense_layers") else []
    deals_tokens = workload["seq_length"] % (2 * cp) if cp > 1 else 0
    return not any(
        (
            tp > near or near % tp,
            any(size % tp for size in (*heads, *widths)),
            experts["ffn_size"] % etp,
            one.pp * one.vpp > num_layers,
            # experts
            experts["num_experts"] % ep,
            etp not in (1, tp),
            (tp * cp * one.dp) % (ep * etp),
            ep > 1 and one.overlap == "micro_batches" and one.pp > 1 and one.vpp == 1,
            ep > 1
            and one.overlap == "shared_experts"
            and not experts.get("shared_ffn_size")
            and workload.get("overlap_all_to_all", "none") != "shared_experts",
            # context parallelism
            deals_tokens,
            cp > 1 and one.cp_kind not in (("ring", "all_to_all") if stack == "megatron-local" else CP_KINDS),
            one.cp_kind == "hierarchical" and (cp % dealing or not 1 < dealing < cp),
            any(size % (tp * dealing) for size in heads),
            # ZeRO: Megatron-FSDP with PP 1, torch FSDP2 with PP 1 and EP 1
            one.zero >= 2 and one.reshard and one.pp > 1,
            not one.reshard and (one.pp > 1 or ep > 1),
            # precision
            one.precision not in RUNS[cluster["device"]],
            one.precision != "bf16" and stack != "megatron-te",
            # batch, sequence, chunks
            workload["global_batch_size"] % (one.dp * one.mbs),
            workload["seq_length"] % (cp * tp),
            one.vpp > 1 and (one.pp == 1 or num_microbatches < one.pp),
        )
    )


# ------------------------------------------------------------------------------------------------------- brute force


def rank_ms(job: Job, estimate: Estimate) -> float:
    """Expected time: step * (1 + price * P / (1 - P)); infinite for what does not fit, or too seldom."""
    limits, chance = job.search, estimate.oom_probability
    if not estimate.fits or (limits.fit_probability is not None and 1.0 - chance < limits.fit_probability):
        return math.inf
    price = limits.failure_price
    if price is None:
        price = 0.1 if limits.fit_probability is None else 0.0
    return estimate.step_ms * (1.0 + (price * chance / (1.0 - chance) if price else 0.0))


def placements_of(problem: Problem) -> Iterator[Placement]:
    """Every placement that the chain allows, whether it fits or not."""
    document = problem_document(problem)
    for cut in brute_force.cuts(document):
        layers = [brute_force.held_between(document, *ends) for ends in itertools.pairwise(cut)]
        for modes in itertools.product(*(brute_force.mode_counts(document, held) for held in layers)):
            yield nouns.placement_of({"layers": layers, "modes": list(modes)})


def list_estimates(job: Job, strategy: Strategy, most: int | None = None) -> list[Estimate]:
    """Every plan of a strategy, or the first ones."""
    problem, batch = build_problem(job, strategy), job.workload.global_batch_size
    plans = (plan_from_placement(problem, placement, strategy, batch) for placement in placements_of(problem))
    with mock.patch("mm_autoparallel.planner.evaluate.build_problem", return_value=problem):  # built once for all
        return [evaluate(job, plan) for plan in itertools.islice(plans, most)]


@dataclass
class Verdict:
    """wrong: a sentence each. least_ms: by brute force. ended: how the search did."""

    seed: int
    num_strategies: int = 0
    num_plans: int = 0
    least_ms: float = math.inf
    ended: str = ""
    wrong: list[str] = field(default_factory=list)


def random_job(seed: int, most: int = MOST_PLANS) -> tuple[dict[str, Any], Job, tuple[Strategy, ...]]:
    """A job with experts and at most so many plans, its content and its lawful strategies; memory often binds."""
    rng = random.Random(seed)
    while True:
        content = random_content(rng)
        try:
            job = parse_job(content, Path(f"job_{seed}.yaml"))
            strategies = tuple(entry.strategy for entry in list_space(job) if entry.reason is None)
        except JobError:
            continue
        if not 1 <= len(strategies) <= MOST_STRATEGIES:
            continue
        num_plans = 0
        for strategy in strategies if len(strategies) <= most else ():
            num_plans += brute_force.count_placements(problem_document(build_problem(job, strategy)))
            if num_plans > most:
                break
        if not 1 <= num_plans <= most:
            continue
        some_plans = list_estimates(job, rng.choice(strategies), 1)
        if some_plans:
            memory_bytes = max(some_plans[0].device_peak_bytes) * rng.uniform(0.5, 1.6)
            return content, with_memory(job, memory_bytes), strategies


def compare_spaces(theirs: list[Meaning], ours: set[Meaning]) -> list[str]:
    """What is wrong with the search's strategies."""
    wrong = ["a strategy has two forms"] if len(set(theirs)) != len(theirs) else []
    for words, more in (("lawful, and not by the search", ours - set(theirs)), ("unlawful", set(theirs) - ours)):
        if more:
            wrong.append(f"{len(more)} strategies are {words}, one of them {min(map(repr, more))}")
    return wrong


def compare(seed: int, most: int = MOST_PLANS) -> Verdict:
    """What the search says of one random job of at most so many plans, held against brute force."""
    content, job, strategies = random_job(seed, most)
    verdict = Verdict(seed, len(strategies))
    if "schedule" not in content["search"]:
        verdict.wrong += compare_spaces(
            [meaning_of(job, strategy) for strategy in strategies], lawful_meanings(content)
        )
    least: dict[Strategy, float] = {}
    fits: set[Strategy] = set()
    for strategy in strategies:
        for estimate in list_estimates(job, strategy):
            verdict.num_plans += 1
            least[strategy] = min(least.get(strategy, math.inf), rank_ms(job, estimate))
            if estimate.fits:
                fits.add(strategy)
    verdict.least_ms = min(least.values(), default=math.inf)
    search_room = "mm_autoparallel.planner.search"
    with (
        mock.patch(f"{search_room}.planner.EXACT_S", math.inf),
        mock.patch(f"{search_room}.slices.FIRST_SLICE_S", 1e3),
    ):
        try:
            found = search(job, time_limit_s=None, num_workers=1)
        except (NoFeasiblePlan, Unfinished) as failure:
            verdict.ended = type(failure).__name__
            if math.isfinite(verdict.least_ms) or isinstance(failure, Unfinished):
                verdict.wrong.append(
                    f"{verdict.ended}, and the best of all plans ranks at {verdict.least_ms}: {failure}"
                )
            return verdict
    verdict.ended = found.stopped
    best = rank_ms(job, found.estimates[0])
    told = found.objective
    if found.stopped != "finished" or not found.proven:
        verdict.wrong.append(f"ended as {found.stopped}, gap {found.gap_fraction}")
    if best > verdict.least_ms * (1 + SAME) or abs(told.rank_ms / best - 1.0) > 1e-9:
        verdict.wrong.append(f"its plan ranks at {best}, told as {told.rank_ms}, the best at {verdict.least_ms}")
    if told.rank_bound_ms > verdict.least_ms * (1 + 1e-9):
        verdict.wrong.append(f"its bound is {told.rank_bound_ms}, the best plan ranks at {verdict.least_ms}")
    for candidate in found.candidates:
        known = least.get(candidate.strategy, math.inf)
        name = describe_strategy(candidate.strategy)
        if candidate.bound_ms is not None and candidate.bound_ms > known * (1 + 1e-9):
            verdict.wrong.append(f"{name}: bound {candidate.bound_ms} by {candidate.bounded_by}, and one has {known}")
        if candidate.status == "infeasible" and math.isfinite(known):
            verdict.wrong.append(f"{name} is called infeasible ({candidate.reason}), and one has {known}")
    return verdict


def main() -> int:
    """Exit code 1 where anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    began_s = time.monotonic()
    verdicts = []
    for seed in range(args.seed, args.seed + args.jobs):
        verdicts.append(compare(seed))
        for words in verdicts[-1].wrong:
            print(f"seed {seed}: {words}", flush=True)
    used = resource.getrusage(resource.RUSAGE_SELF)
    ends = ", ".join(f"{number} {end}" for end, number in Counter(verdict.ended for verdict in verdicts).items())
    print(
        f"{len(verdicts)} jobs, {sum(v.num_strategies for v in verdicts):,} lawful strategies, "
        f"{sum(v.num_plans for v in verdicts):,} plans: {sum(bool(v.wrong) for v in verdicts)} wrong ({ends}); "
        f"{used.ru_utime + used.ru_stime:.0f} CPU s, {time.monotonic() - began_s:.0f} s"
    )
    return 1 if any(verdict.wrong for verdict in verdicts) else 0


if __name__ == "__main__":
    raise SystemExit(main())
