"""One term of the cost model after another taken out, with nothing fitted: what each buys in error, bias and regret.

    python tests/benchmarks/ablate_costs.py [--modern] [--tables TABLE.csv...] [--terms NAME...] [--json]

A term is taken out by changing the figures that are assumed of a device, the facts of a stack, or the job, through
their public types; nothing else of a prediction changes and nothing is fitted again. Tables count alike in error and
bias, groups of layouts alike in regret, whose pick is the fastest predicted of those that ran. --modern: terms of low
precision, experts and their like, on tables of Hopper and Blackwell, where jobs of two layouts count too. Nothing is
asserted.
Exit code 2: a table or a name of a term is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from mm_autoparallel.errors import JobError, PlannerError
from mm_autoparallel.measurements.case import MeasuredCase
from mm_autoparallel.measurements.catalog import read_table
from mm_autoparallel.measurements.decisions import LEAST_LAYOUTS, decide, score_decisions
from mm_autoparallel.measurements.predict import Prediction, predict_all
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.stacks import FACTS, UNKNOWN, StackFacts, software_of
from mm_autoparallel.model.profiles.calibration import Calibration, assume_calibration, plain_calibration
from mm_autoparallel.model.profiles.figures import HOST_FIGURES
from mm_autoparallel.validation import nearest

PUBLISHED = Path(__file__).parents[2] / "examples" / "published_measurements"
TABLES = (
    "aleph_alpha_llama_2k_a100",
    "aleph_alpha_llama_8k_a100",
    "bloom_network",
    "deepspeed_zero3_a100",
    "internevo_7b_a100",
    "korthikanti2022",
    "llm_foundry_fsdp_a100",
    "llm_foundry_fsdp_h100",
    "mindspeed_llm_readme_ascend",
    "sc21",
    "vtrain",
)
"""Tables of whole training steps whose hosts keep up: of others a host constant decides, and no term beside it."""
SMALL_VOCABULARY = 1024


@dataclass(frozen=True)
class Term:
    """What is taken out. figures, facts, workload: what they become; base: whose figures these replace."""

    name: str
    figures: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    workload: Mapping[str, Any] = field(default_factory=dict)
    base: Callable[[str, str], Calibration] = assume_calibration
    small_vocabulary: bool = False
    any_groups: bool = False
    full_clock: bool = False

    def job_of(self, job: Job) -> Job:
        """`job` without the term."""
        workload, update = job.workload, dict[str, Any]()
        if self.facts or self.workload:
            stated = workload.facts.model_dump(include=workload.facts.model_fields_set) if workload.facts else {}
            changed = {"facts": StackFacts(**stated | self.facts)} if self.facts else {}
            update["workload"] = workload.model_copy(update=changed | dict(self.workload))
        text = job.model.text
        if self.small_vocabulary:
            text = text.model_copy(update={"vocab_size": SMALL_VOCABULARY})
        if self.any_groups and text.layers.experts:
            experts = text.layers.experts.model_copy(update={"max_groups": 0, "num_groups": 0})
            text = text.model_copy(update={"layers": text.layers.model_copy(update={"experts": experts})})
        if text is not job.model.text:
            update["model"] = job.model.model_copy(update={"text": text})
        if self.full_clock:
            device = job.cluster.device.model_copy(update={"clock_fraction": None})
            update["cluster"] = job.cluster.model_copy(update={"device": device})
        return replace(job, **update) if update else job

    def calibration_of(self, device_name: str, software: str) -> Calibration:
        """What is assumed of a device under a stack, without the term."""
        found = self.base(device_name, software)
        return found.model_copy(update={"figures": found.figures.model_copy(update=dict(self.figures))})


def beside_x86(device_name: str, software: str) -> Calibration:
    """What is assumed of a device, with the host of its twin beside another processor."""
    twin = device_name.removeprefix("g") if device_name.startswith("gb") else device_name
    return assume_calibration(twin, software).model_copy(update={"device": device_name})


OPEN_TRAFFIC = {"overlap_grad_reduce": False, "overlap_param_gather": False}
HIDDEN_TRAFFIC = dict.fromkeys(OPEN_TRAFFIC, True)

TERMS = (
    Term("nothing"),
    Term("waves of tiles", {"waves": False}),
    Term("edges of products", {"edge_count": 0}),
    Term("scale of ranks", {"scale_ranks": 0}),
    Term("gaps between operators", {"layer_gap_ms": 0.0}),
    Term("constant of a micro-batch", {"micro_batch_ms": 0.0}),
    Term("constant of a step", {"step_ms": 0.0}),
    Term("hosts that launch layers", dict.fromkeys(HOST_FIGURES, 0.0)),
    Term("memory below what it states", {"memory_fraction": 1.0}),
    Term("links of a node below what they state", {"node_fraction": 1.0, "node_latency_ms": 0.0}),
    Term("network below what it states", {"network_fraction": 1.0}),
    Term("sums beside weight gradients", {"hidden_fraction": 0.0}),
    Term("sums in the open", {"hidden_fraction": 1.0}),
    Term("reductions behind compute", workload=OPEN_TRAFFIC),
    Term("reductions in the open", workload=HIDDEN_TRAFFIC),
    Term("a part of reductions hidden otherwise", facts={"hidden_reduction_fraction": 0.0}),
    Term("hops in front of compute", facts={"waits_for_hops": False}),
    Term("contention of ZeRO 3", {"shard_hidden_fraction": 1.0}),
    Term("tensors of ZeRO 3 one by one", facts={"shards": "unit"}),
    Term("attention by kernel", {"triton_attention_factor": 1.0}, {"attention": ""}),
    Term("unfused norms", facts={"norms": "fused"}),
    Term("unfused activations and rotations", facts={"elementwise": "fused"}),
    Term("weight gradients written apart", facts={"writes_gradients": False}),
    Term("passes over gradients once a step", facts={"step_bytes": 0.0}),
    Term("a sum for each linear", facts={"linear_sums": False}),
    Term("gathers in the norm", facts={"gathers": "matrix"}),
    Term("gathered logits", facts={"gathered_logits": False}),
    Term("width of reduced gradients", facts={"reduction_bytes": 0.0}),
    Term("all-reduces of ZeRO 1", facts={"all_reduces": False}),
    Term("recomputed ends", facts={"recomputes_ends": False}),
    Term("early stop of checkpoints", facts={"stops_early": False}),
    Term("head and loss", small_vocabulary=True),
    Term("all facts of stacks", facts=UNKNOWN.model_dump(), workload=OPEN_TRAFFIC),
    Term("all shapes, gaps and ranks (plain figures)", base=plain_calibration),
)
MODERN_TABLES = ("megatron_bridge_performance", "megatron_bridge", "megatron_lm_readme_h100", "torchtitan")
LEAST_OF_MODERN = 2
MODERN_TERMS = (
    Term("nothing"),
    Term("power (all of the clock)", full_clock=True),
    Term("products in low precision", workload={"precision": "bf16"}),
    Term("half of quantisation", facts={"fused_casts": True}),
    Term("attention by length", {"attention_forward_half_count": 0, "attention_backward_half_count": 0}),
    Term("attention of uneven and small heads", {"uneven_attention_factor": 1.0, "small_attention_factor": 1.0}),
    Term("attention core in FP8", facts={"fp8_attention": False}),
    Term("edges of products", {"edge_factor": 0.0}),
    Term("waves of tiles", {"waves": False}),
    Term("memory below what it states", {"memory_fraction": 1.0}),
    Term("exchange below what links state", {"exchange_node_fraction": 1.0, "exchange_network_fraction": 1.0}),
    Term("once to each domain (all alltoall)", facts={"dispatcher": "alltoall"}),
    Term("groups that routers pick from", any_groups=True),
    Term("what runs beside the exchange", workload={"overlap_all_to_all": "none"}),
    Term("what stays open beside it", {"exposed_exchange_fraction": 0.0}),
    Term("hosts (all graphs full)", facts={"graphs": "full"}, figures={"layer_launch_ms": 0.0}),
    Term("hosts beside Grace", base=beside_x86),
    Term("hosts that run ahead", {"host_runs_ahead": False}),
    Term("dropped tokens", facts={"drops_tokens": False}),
    Term("early releases", facts={"early_experts": False}),
    Term("joined heads", facts={"joined_heads": False}),
    Term("fused activation of experts", facts={"grouped_activation": False}),
    Term("tensor parallel overlap", facts={"tp_overlap": ""}),
    Term("links of a node below what they state", {"node_fraction": 1.0, "node_latency_ms": 0.0}),
    Term("network below what it states", {"network_fraction": 1.0}),
    Term("scale of ranks", {"scale_ranks": 0}),
    Term("constants of micro-batch and step", {"micro_batch_ms": 0.0, "step_ms": 0.0}),
    Term("reductions behind compute", workload=OPEN_TRAFFIC),
    Term("compute that waits for hops", facts={"exchanges_hops": False}),
    Term("contention of ZeRO 3", {"shard_hidden_fraction": 1.0}),
    Term("operators that run again", workload={"recompute_operators": ()}),
    Term("compiled layers", facts={"compiled": False}),
    Term("fused norms and activations", facts={"norms": "operators", "elementwise": "operators"}),
    Term("context parallel attention of torch", facts={"split_attention_factor": 1.0}),
    Term("head and loss", small_vocabulary=True),
)
"""`sums beside weight gradients` leaves none hidden, `sums in the open` all; likewise with reductions. Head and loss:
what a vocabulary of SMALL_VOCABULARY leaves of them."""


@dataclass(frozen=True)
class Effect:
    """Without one term: means over tables of mean |error| and of bias, and the table whose error changes most, by how
    much; regret over groups, worst, and over random fives. moved: rows whose step changes by a thousandth or more."""

    name: str
    moved: int
    error_fraction: float
    bias_fraction: float
    most_table: str
    most_change_fraction: float
    regret_fraction: float | None
    worst_regret_fraction: float | None
    subset_regret_fraction: float | None


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tables", type=Path, nargs="+", help="tables of measurements (default: published ones)")
    parser.add_argument("--terms", nargs="+", metavar="NAME", help="terms to take out (default: all)")
    parser.add_argument("--modern", action="store_true", help="terms and tables of low precision and experts")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    arguments = parser.parse_args()
    try:
        terms = choose_terms(arguments.terms or (), MODERN_TERMS if arguments.modern else TERMS)
        named = MODERN_TABLES if arguments.modern else TABLES
        tables = arguments.tables or [PUBLISHED / f"{name}.csv" for name in named]
        cases = [case for table in tables for case in read_table(table)[0]]
    except PlannerError as failure:
        print(failure, file=sys.stderr)
        return 2
    effects = list_effects(cases, terms, LEAST_OF_MODERN if arguments.modern else LEAST_LAYOUTS)
    if arguments.json:
        print(json.dumps([asdict(effect) for effect in effects], indent=1))
    else:
        print("\n".join(describe(effects, len(cases))))
    return 0


def choose_terms(names: Sequence[str], terms: Sequence[Term] = TERMS) -> tuple[Term, ...]:
    """Those of `terms` called `names`, the whole model first; all without names. Raises JobError where one is
    unknown."""
    known = {term.name: term for term in terms}
    for name in names:
        if name not in known:
            raise JobError(f"--terms: {name!r} is no term{nearest(name, list(known))}; known are {', '.join(known)}")
    return (terms[0], *(known[name] for name in names if name != terms[0].name)) if names else tuple(terms)


def list_effects(
    cases: Sequence[MeasuredCase], terms: Sequence[Term], least_layouts: int = LEAST_LAYOUTS
) -> list[Effect]:
    """The effect of each term, the first of which is nothing. least_layouts: of a job, to count in regret."""
    whole = predict_without(cases, terms[0])
    return [
        judge(term.name, whole, whole if term is terms[0] else predict_without(cases, term), least_layouts)
        for term in terms
    ]


Predicted = list[tuple[MeasuredCase, Prediction]]


def predict_without(cases: Sequence[MeasuredCase], term: Term) -> Predicted:
    """Each case that can be predicted, as it was read, with what is expected without `term`."""
    found: Predicted = []
    assumed = lru_cache(maxsize=None)(term.calibration_of)
    for case in cases:
        software = case.software if case.software in FACTS else software_of(case.job.workload.stack)
        changed = replace(case, job=term.job_of(case.job), alternatives=())
        predicted, _ = predict_all([changed], assumed(case.job.cluster.device.name, software))
        found += [(case, prediction) for _, prediction in predicted]
    return found


def judge(name: str, whole: Predicted, without: Predicted, least_layouts: int = LEAST_LAYOUTS) -> Effect:
    """What predictions `without` a term are worth beside those of the whole model, of the same rows."""
    steps_ms = {id(case): found.step_ms for case, found in whole}
    moved = sum(abs(found.step_ms / steps_ms[id(case)] - 1) >= 1e-3 for case, found in without if id(case) in steps_ms)
    before, after = errors_of(whole), errors_of(without)
    change = {table: float(np.abs(after[table]).mean() - np.abs(before[table]).mean()) for table in after}
    most = max(change, key=lambda table: abs(change[table]))
    regret = score_decisions(decide(without, least_layouts))
    return Effect(
        name=name,
        moved=moved,
        error_fraction=float(np.mean([np.abs(errors).mean() for errors in after.values()])),
        bias_fraction=float(np.mean([errors.mean() for errors in after.values()])),
        most_table=most if change[most] else "",
        most_change_fraction=change[most],
        regret_fraction=regret.ran_mean_fraction if regret else None,
        worst_regret_fraction=regret.ran_worst_fraction if regret else None,
        subset_regret_fraction=regret.subset_mean_fraction if regret else None,
    )


def errors_of(predicted: Predicted) -> dict[str, np.ndarray]:
    """Table → predicted / measured − 1 of its rows with a step time."""
    found: dict[str, list[float]] = {}
    for case, prediction in predicted:
        if case.measured_ms is not None:
            found.setdefault(case.table, []).append(prediction.step_ms / case.measured_ms - 1)
    return {table: np.array(errors) for table, errors in found.items()}


def describe(effects: Sequence[Effect], num_rows: int) -> list[str]:
    """The lines of a Markdown table."""
    lines = [
        f"{num_rows} rows",
        "",
        "| without | error | bias | changes most | regret mean / worst | random fives | rows moved |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in effects:
        most = f"{one.most_table.removesuffix('.csv')} {one.most_change_fraction * 100:+.1f}" if one.most_table else "–"
        regret = f"{_percent(one.regret_fraction)} / {_percent(one.worst_regret_fraction)}"
        lines.append(
            f"| {one.name} | {_percent(one.error_fraction)} | {one.bias_fraction * 100:+.1f} % | {most} | {regret} | "
            f"{_percent(one.subset_regret_fraction)} | {one.moved} |"
        )
    return lines


def _percent(fraction: float | None) -> str:
    return "–" if fraction is None else f"{fraction * 100:.1f} %"


if __name__ == "__main__":
    sys.exit(main())
