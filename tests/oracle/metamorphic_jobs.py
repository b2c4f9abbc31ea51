"""`plan` on random jobs and on the same ones put otherwise: what must not get better, or worse, does not.

    python tests/oracle/metamorphic_jobs.py --jobs 100 --seed 1

Jobs have what no brute force lists: 6 to 36 devices, towers, experts, schedules, layouts, kinds of nodes. Wrong is: an
answer whose sizes, layers or memory do not fit, that reads back as another or takes another step then; a plan below the
bound of the space that it lies in, be it edited from one that was found, or the answer of a part of that space, of
smaller devices or of slower ones; one that is there where the search says that nothing fits; a strategy that is left
out and does not say why; `explain --why-not` with a plan below the bound.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import math
import random
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from expert_jobs import rank_ms

from mm_autoparallel.errors import Interrupted, JobError, NoFeasiblePlan, PlanError, PlannerError, Unfinished
from mm_autoparallel.model.job.devices import DEVICES
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.readers.job_file import parse_job
from mm_autoparallel.planner.evaluate import Estimate, evaluate
from mm_autoparallel.planner.explain.why_not import explain_why_not
from mm_autoparallel.planner.first_plan import first_plan
from mm_autoparallel.planner.plan import Plan, read_plan, write_result
from mm_autoparallel.planner.search.planner import search
from mm_autoparallel.planner.search.result import SearchResult
from mm_autoparallel.planner.search.space import list_space

AS_FAST = 5e-3
"""By how much a step may grow on a faster device: a host that launches layers catches up while the device works on
embedding, head and loss (model/operators/host.py), and does so less where these take less. Steps of seeds 12 and 21
grow by 0.06 % and 0.1 % under recompute, which it does not count."""
DEVICE_NAMES = ("h100-80g", "a100-80g", "b200-192g", "ascend-910b-64g")
Content = dict[str, Any]


# --------------------------------------------------------------------------------------------------------- random jobs


def some(rng: random.Random, values: tuple[Any, ...], most: int) -> list[Any]:
    """One to `most` of `values`, in their order."""
    chosen = rng.sample(range(len(values)), rng.randint(1, min(most, len(values))))
    return [values[i] for i in sorted(chosen)]


def random_tower(rng: random.Random, name: str, hidden_size: int) -> Content:
    width = rng.choice((512, 768))
    stem: Content = {"type": "patches", "in_features": 588}
    if name == "audio":
        stem = {"type": "mel_frames", "num_mel_bins": 128}
    return {
        "name": name,
        "stem": stem,
        "layers": {
            "num_layers": rng.randint(1, 5),
            "hidden_size": width,
            "ffn_size": 4 * width,
            "num_heads": rng.choice((6, 8, 12, 16)),
            "head_size": 64,
        },
        "projector": {"norm": "layer", "norm_size": width, "merge_tokens": 4, "layer_sizes": [4 * width, hidden_size]},
        "freeze": rng.random() < 0.5,
    }


def random_content(rng: random.Random) -> Content:
    """A job file's content."""
    num_nodes, per_node = rng.choice(((1, 6), (1, 8), (2, 4), (2, 6), (2, 8), (3, 4), (3, 8), (4, 3), (4, 6), (6, 6)))
    hidden_size, heads = rng.choice(((768, 12), (1024, 16), (1536, 24)))
    layers: Content = {
        "num_layers": rng.choice((1, 2, 3, 5, 6, 7, 9, 12)),
        "hidden_size": hidden_size,
        "ffn_size": rng.choice((3, 4)) * hidden_size,
        "num_heads": heads,
        "num_kv_groups": rng.choice((heads, heads // 2, heads // 4)),
        "norm": "rms",
    }
    if rng.random() < 0.3:
        layers["experts"] = {
            "num_experts": rng.choice((6, 8, 12)),
            "top_k": 2,
            "ffn_size": 768,
            "dense_layers": some(rng, tuple(range(layers["num_layers"])), 1) if rng.random() < 0.3 else [],
        }
    text: Content = {"vocab_size": rng.choice((32000, 49152)), "tied": rng.random() < 0.3, "layers": layers}
    towers = rng.choice(((), ("vision",), ("vision",), ("vision", "audio")))
    seq_length = rng.choice((1152, 2304, 4608))
    workload: Content = {"global_batch_size": rng.choice((1, 6, 12, 24, 36, 48)), "seq_length": seq_length}
    workload |= {f"{'image' if t == 'vision' else t}_tokens_per_sample": seq_length // 4 for t in towers}
    optional: Content = {
        "expert_imbalance_factor": 1.2,
        "overlap_p2p": False,
        "recompute_operators": ["core_attn"],
        "length_spread_fraction": 0.1,
        "grad_bucket_parameters": 40_000_000,
        "attention": "unfused",
        "replicate_towers": True,
        "stack": rng.choice(("megatron-te", "megatron-local", "mindspeed", "megatron-deepspeed")),
        "micro_batch_scale": {"text": [0.8, 1.2]},
        "gradient_fusion": True,
        "variable_seq_lengths": True,
    }
    workload |= {key: value for key, value in optional.items() if rng.random() < 0.1}
    cluster: Content = {"num_nodes": num_nodes, "devices_per_node": per_node}
    cluster["device"] = {"based_on": rng.choice(DEVICE_NAMES)}
    special: Content = {
        "device_time_spread_fraction": 0.03,
        "slow_devices": [{"rank": rng.randrange(num_nodes * per_node), "time_factor": 1.3}],
        "host_memory_bytes": 64_000_000_000,
        "memory_fraction": 0.8,
    }
    cluster |= {key: value for key, value in special.items() if rng.random() < 0.1}
    if num_nodes > 1 and rng.random() < 0.15:
        cluster["node_groups"] = [{"num_nodes": num_nodes - 1}, {"num_nodes": 1, "time_factor": 1.5}]
    return {
        "model": {"text": text, "encoders": [random_tower(rng, name, hidden_size) for name in towers]},
        "cluster": cluster,
        "workload": workload,
        "search": random_limits(rng, num_nodes * per_node),
    }


def random_limits(rng: random.Random, num_devices: int) -> Content:
    """What is searched."""
    limits: Content = {"choice": "point"}
    sizes = tuple(size for size in range(1, num_devices + 1) if num_devices % size == 0)
    optional: Content = {
        "pp": some(rng, sizes, 4),
        "tp": some(rng, sizes, 3),
        "cp": some(rng, (1, 2, 3, 4), 2),
        "mbs": some(rng, (1, 2, 3, 4), 3),
        "ep": some(rng, (1, 2, 3, 4, 6), 3),
        "zero": some(rng, (0, 1, 2, 3), 2),
        "max_vpp": 2,
        "modes": some(rng, ("recompute", "selective", "offload"), 2),
        "schedule": some(rng, ("1f1b", "gpipe", "zb_h1", "zb_h2", "interleaved_1f1b", "zbv", "v_half"), 3),
        "rank_order": ["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"],
        "sequence_parallel": [True, False],
        "optimizer_offload": [False, True],
        "reshard": [True, False],
        "cp_kind": some(rng, ("ring", "all_gather", "all_to_all"), 2),
        "failure_price": rng.choice((0.0, 1.0)),
        "fit_probability": rng.choice((0.9, 0.99)),
        "layouts": rng.choice((["chain", "colocated"], ["all"], ["chain", "disaggregated"])),
        "devices": sorted({num_devices, max(1, num_devices - rng.choice((1, 2, num_devices // 2)))}),
        "layer_strategies": True,
        "tp_overlap": ["none", "user_buffers"],
        "precision": ["bf16", "fp8_delayed"],
        "overlap_grad_reduce": [True, False],
        "overlap_param_gather": [True, False],
        "overlap_p2p": [True, False],
    }
    often = {"pp": 0.4, "tp": 0.4, "cp": 0.7, "mbs": 0.5, "modes": 0.4, "max_vpp": 0.3}
    limits |= {key: value for key, value in optional.items() if rng.random() < often.get(key, 0.12)}
    limits.setdefault("cp", [1])
    return limits


def random_job(seed: int) -> tuple[Content, Job]:
    """A job with lawful strategies, its content too; memory often binds."""
    rng = random.Random(seed)
    while True:
        content = random_content(rng)
        try:
            job = parse_job(content, Path(f"job_{seed}.yaml"))
            peaks = [max(evaluate(job, plan).device_peak_bytes) for plan in first_plans(job, rng, 2)]
        except PlannerError:
            continue
        if not peaks:
            continue
        content["cluster"]["device"] |= _memory(int(min(peaks) * rng.choice((0.4, 0.7, 0.9, 1.2, 2.0, 8.0))))
        return content, parse_job(content, Path(f"job_{seed}.yaml"))


def _memory(memory_bytes: int) -> Content:
    return {"memory_bytes": memory_bytes, "context_bytes": memory_bytes // 20, "communicator_bytes": 0}


def first_plans(job: Job, rng: random.Random, most: int) -> Iterator[Plan]:
    """Plans of random lawful strategies of the chain, as they are met at once."""
    lawful = [entry.strategy for entry in list_space(job) if entry.reason is None]
    for strategy in rng.sample(lawful, min(most, len(lawful))):
        with contextlib.suppress(PlanError):
            yield first_plan(job, strategy)


def edits(plan: Plan, modes: Sequence[str], rng: random.Random, number: int) -> Iterator[Plan]:
    """Plans with layers moved, and others in `modes`, those that the space has."""
    for _ in range(number):
        layers = {name: list(counts) for name, counts in plan.layers.items()}
        for _ in range(rng.randint(0, 2)):
            counts = layers[rng.choice(list(layers))]
            source, target = rng.randrange(len(counts)), rng.randrange(len(counts))
            counts[source] -= 1
            counts[target] += 1
        in_mode: dict[str, dict[str, list[int]]] = {name: {mode: [] for mode in modes} for name in layers}
        for name, counts in layers.items():
            for count in counts:
                left = max(0, count)
                for mode in rng.sample(modes, len(modes)):
                    taken = rng.choice((0, 0, left, rng.randint(0, left)))
                    in_mode[name][mode].append(taken)
                    left -= taken
        recompute = {name: of.pop("recompute", [0] * len(layers[name])) for name, of in in_mode.items()}
        try:
            yield plan.edited(
                layers={name: _nested(counts, plan) for name, counts in layers.items()},
                recompute={name: _nested(counts, plan) for name, counts in recompute.items()},
                modes={
                    name: {mode: _nested(counts, plan) for mode, counts in of.items()} for name, of in in_mode.items()
                },
            )
        except PlanError:
            continue


def _nested(counts: list[int], plan: Plan) -> list[Any]:
    pp, vpp = plan.strategy.pp, plan.strategy.vpp
    return counts if vpp == 1 else [counts[c * pp : (c + 1) * pp] for c in range(vpp)]


# ------------------------------------------------------------------------------------------------------ looser jobs


def looser(content: Content, rng: random.Random) -> Iterator[tuple[str, Content]]:
    """The same job with something that no best plan can suffer from. A plan of it is one of the looser job too."""
    device = DEVICES[content["cluster"]["device"]["based_on"]]

    def changed(section: str, **values: Any) -> Content:
        other = copy.deepcopy(content)
        other[section] |= values
        return other

    def with_device(**figures: Any) -> Content:
        return changed("cluster", device=content["cluster"]["device"] | figures)

    yield "more memory", with_device(memory_bytes=int(content["cluster"]["device"]["memory_bytes"] * 1.25))
    yield "more FLOP/s", with_device(bf16_flops_per_s=device.bf16_flops_per_s * 1.5)
    yield "faster memory", with_device(memory_bytes_per_s=device.memory_bytes_per_s * 1.5)
    for name in ("node_link", "network_link"):
        link = getattr(device, name).model_dump(mode="json", exclude_none=True)
        pair = link.get("pair_bandwidth_bytes_per_s")
        faster = {"bandwidth_bytes_per_s": link["bandwidth_bytes_per_s"] * 2}
        faster |= {"pair_bandwidth_bytes_per_s": pair * 2} if pair else {}
        yield f"faster {name}", with_device(**{name: link | faster})
    yield "more memory fraction", changed("cluster", memory_fraction=0.99)
    limits = content["search"]
    wider: Content = {
        "max_vpp": limits.get("max_vpp", 1) + 1,
        "zero": sorted({*limits.get("zero", [1]), rng.choice((0, 2, 3))}),
        "modes": [*limits.get("modes", ["recompute"]), *({"selective", "offload"} - set(limits.get("modes", [])))],
        "ep": sorted({*limits.get("ep", [1]), 2, 3}),
        "cp": sorted({*limits["cp"], 2}),
        "optimizer_offload": [False, True],
        "rank_order": ["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"],
        "sequence_parallel": [True, False],
        "layouts": ["all"],
    }
    if "schedule" in limits:
        wider["schedule"] = [*limits["schedule"], *({"1f1b", "zb_h1"} - set(limits["schedule"]))]
    if "mbs" in limits:
        wider["mbs"] = sorted({*limits["mbs"], 1, 2})
    for key, value in wider.items():
        if value != limits.get(key):
            yield f"search.{key}={value}", changed("search", **{key: value})
    for key in ("pp", "tp", "mbs", "cp"):
        if key in limits:
            other = copy.deepcopy(content)
            del other["search"][key]
            yield f"search.{key} free", other
    if "slow_devices" in content["cluster"]:
        yield "no slow device", changed("cluster", slow_devices=[])


# ------------------------------------------------------------------------------------------------------------ verdicts


@dataclass
class Verdict:
    """wrong: a sentence each. ended: how the first search did. num_plans: held against bounds."""

    seed: int
    ended: str = ""
    num_plans: int = 0
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Found:
    """A search's answer, or None with what it says in its place."""

    job: Job
    result: SearchResult | None
    words: str = ""

    @property
    def bound_ms(self) -> float:
        """No plan ranks below; infinite where nothing fits, 0 where nothing is known."""
        if self.result is not None:
            return self.result.objective.rank_bound_ms
        return math.inf if self.words.startswith("NoFeasiblePlan") else 0.0


def find(content: Content, name: str, limit_s: float) -> Found:
    """What a search says of a job. Raises JobError where it is none."""
    job = parse_job(content, Path(name))
    try:
        return Found(job, search(job, time_limit_s=limit_s, num_workers=1, top_k=4))
    except (NoFeasiblePlan, Unfinished, Interrupted) as failure:
        return Found(job, None, f"{type(failure).__name__}: {failure}")


def check_lawful(found: Found, result: SearchResult, verdict: Verdict) -> None:
    """The answer by itself: sizes, layers, memory, and the file that it is written to."""
    one, job = result.estimates[0], found.job
    strategy = one.plan.strategy
    if strategy.arrangement is None and strategy.pp * strategy.tp * strategy.cp * strategy.dp != strategy.world_size:
        verdict.wrong.append(f"sizes of {strategy} multiply to another number than {strategy.world_size}")
    for modality in job.model.modalities:
        if sum(one.plan.layers.get(modality.name, ())) not in (0, modality.layers.num_layers):
            verdict.wrong.append(f"{modality.name} has {one.plan.layers[modality.name]}")
    if not one.fits or max(one.peak_memory_bytes) > job.cluster.device.memory_bytes:
        verdict.wrong.append("the answer does not fit")
    if result.objective.rank_bound_ms > rank_ms(job, one) * (1 + 1e-9):
        verdict.wrong.append(f"bound {result.objective.rank_bound_ms}, the answer ranks at {rank_ms(job, one)}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        write_result(path, one.plan, result.figures)
        again = evaluate(job, read_plan(path, job))
    if again.plan != one.plan or abs(again.step_ms / one.step_ms - 1.0) > 1e-9:
        verdict.wrong.append(f"read back as {again.plan}, a step of {again.step_ms}; it was {one.step_ms}")
    for candidate in result.candidates:
        if candidate.status in ("unlawful", "infeasible", "dominated", "unfinished") and not candidate.reason:
            verdict.wrong.append(f"{candidate.strategy} is {candidate.status} without a reason")


def check_plans(found: Found, rng: random.Random, verdict: Verdict) -> None:
    """Plans of the space, none of which may rank below what the search says."""
    plans = list(first_plans(found.job, rng, 8))
    plans += [estimate.plan for estimate in found.result.estimates] if found.result else []
    own = {c.strategy: c for c in found.result.candidates} if found.result else {}
    plans += [edited for known in plans for edited in edits(known, found.job.search.modes, rng, 6)]
    for plan in plans:
        try:
            estimate = evaluate(found.job, plan)
        except PlanError:
            continue
        hold(found, estimate, verdict, "a plan of the space")
        candidate = own.get(plan.strategy)
        rank = rank_ms(found.job, estimate)
        if candidate and candidate.status == "infeasible" and math.isfinite(rank):
            verdict.wrong.append(f"{plan} has a rank of {rank}, and is called infeasible: {candidate.reason}")
        if candidate and candidate.bound_ms is not None and candidate.bound_ms > rank * (1 + 1e-9):
            verdict.wrong.append(f"{plan} ranks at {rank}, its strategy's bound is {candidate.bound_ms}")


def hold(found: Found, estimate: Estimate, verdict: Verdict, words: str) -> None:
    """A plan of the space beside the bound of it."""
    verdict.num_plans += 1
    rank = rank_ms(found.job, estimate)
    if rank * (1 + 1e-9) < found.bound_ms:
        verdict.wrong.append(f"{words} ranks at {rank}, the bound is {found.bound_ms} ({found.words}): {estimate.plan}")


def check_why_not(found: Found, result: SearchResult, rng: random.Random, verdict: Verdict) -> None:
    """The best plan of some size, as `explain --why-not` has it."""
    entry = rng.choice(result.candidates)
    wanted = {"pp": entry.strategy.pp, "tp": entry.strategy.tp}
    answer = explain_why_not(found.job, result.estimates[0], wanted, time_limit_s=10.0)
    if answer.estimate is not None and not answer.outside:
        hold(found, answer.estimate, verdict, f"why not {wanted}")


def examine(seed: int, limit_s: float, number: int) -> Verdict:
    """All of it for one random job and `number` looser ones."""
    rng, verdict = random.Random(-seed - 1), Verdict(seed)
    content, _ = random_job(seed)
    found = find(content, f"job_{seed}.yaml", limit_s)
    verdict.ended = found.result.stopped if found.result else found.words.partition(":")[0]
    if found.result and not found.result.proven:
        verdict.ended += ", not proven"
    check_plans(found, rng, verdict)
    if found.result is None:
        return verdict
    check_lawful(found, found.result, verdict)
    check_why_not(found, found.result, rng, verdict)
    before_ms = found.result.objective.rank_ms
    others = list(looser(content, rng))
    for words, other in rng.sample(others, min(number, len(others))):
        try:
            more = find(other, f"job_{seed}.yaml", limit_s)
            same = evaluate(more.job, found.result.plan)
        except (JobError, PlanError):
            continue  # another law holds there: no such pair
        hold(more, same, verdict, f"with {words} the answer of before")
        if same.step_ms > found.result.estimates[0].step_ms * (1 + AS_FAST):
            verdict.wrong.append(
                f"with {words} the answer takes {same.step_ms}, before {found.result.estimates[0].step_ms}"
            )
        after_ms = more.result.objective.rank_ms if more.result and more.result.proven else 0.0
        if after_ms > before_ms * (1 + AS_FAST):
            verdict.wrong.append(f"with {words} the answer ranks at {after_ms}, before at {before_ms}")
    return verdict


def main() -> int:
    """Exit code 1 where anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--looser", type=int, default=3, help="other jobs of each")
    parser.add_argument("--time-limit", type=float, default=20.0, help="of each search, in seconds")
    args = parser.parse_args()
    began_s = time.monotonic()
    verdicts = []
    for seed in range(args.seed, args.seed + args.jobs):
        verdicts.append(examine(seed, args.time_limit, args.looser))
        for words in verdicts[-1].wrong:
            print(f"seed {seed}: {words}", flush=True)
    used = resource.getrusage(resource.RUSAGE_SELF)
    ends = ", ".join(f"{number} {end}" for end, number in Counter(verdict.ended for verdict in verdicts).items())
    print(
        f"{len(verdicts)} jobs, {sum(v.num_plans for v in verdicts):,} plans held against bounds: "
        f"{sum(bool(v.wrong) for v in verdicts)} wrong ({ends}); "
        f"{used.ru_utime + used.ru_stime:.0f} CPU s, {time.monotonic() - began_s:.0f} s"
    )
    return 1 if any(verdict.wrong for verdict in verdicts) else 0


if __name__ == "__main__":
    raise SystemExit(main())
