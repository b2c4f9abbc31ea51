"""`plan` over every layout of encoder and decoder against brute force, its space and figures by loops of its own.

    python tests/oracle/module_layouts.py --jobs 200 --seed 1 [--towers 2 [--same-images]] [--chunks 2] [--context]
        [--shards] [--cached]

Jobs are random: two to eight devices, a few layers, a tower that trains or not; or two of them, of images and of sounds
or of the same images, each of which trains or not; with --context encoders of several CP, with --shards ZeRO 2 and 3,
with --cached frozen ones whose features may be read.
The space and the law of each layout are written from docs/guide/layouts.md; a layout's problem is put together here
from those of plain chains under either module's sizes, as the oracle's documents, and each is solved by brute_force,
those in bubbles by `beside`. Wrong is: another set of lawful layouts; an answer that is called the best and is not; a
bound above the optimum, of the space or of one strategy; a strategy of which the search says that nothing fits, and
something does.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import brute_force
from beside import MOST_ACTIONS, best_beside, count_actions
from semantics import Document
from several_modules import (
    Decoder,
    Own,
    Sized,
    deals,
    form_several,
    in_pieces,
    limit,
    list_several,
    made_bytes,
    read_bytes,
    tokens_of,
)

from mm_autoparallel.errors import JobError, NoFeasiblePlan
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.costs.stage import build_problem
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.readers.job_file import parse_job
from mm_autoparallel.pipeline.problem import Problem
from mm_autoparallel.pipeline.problem_file import problem_document
from mm_autoparallel.planner.plan import PROVEN_GAP_FRACTION
from mm_autoparallel.planner.search.planner import search
from mm_autoparallel.planner.search.space import list_entries

SAME = 2e-5
MOST_STRATEGIES = 45
"""Jobs with more are replaced by the next one of their seed."""
MOST_OF_TWO = 400
"""The same of two towers, whose layouts are products."""
MOST_IN_PIECES = 16
"""Actions beside passes in pieces, whose orders are many more."""
OPEN_BYTES = 22 * 2**20
"""Of partly empty segments, on every device (docs: costs/held_once.py)."""


@dataclass(frozen=True)
class Meaning:
    """A strategy of the space: kind, way to run, the decoder's sizes, the encoder's."""

    kind: str
    run: str
    pp: int
    tp: int
    dp: int
    mbs: int
    encoder: tuple[int, ...] = (0, 0, 0, 0)
    """PP, TP, DP, MBS, and CP where it is not 1."""
    vpp: int = 1
    zero: int = 1
    pieces: int = 1
    modules: tuple[Own, ...] = ()
    """Of each encoder, where each is one; then kind and run are empty."""

    @property
    def sharing(self) -> int:
        """The encoder's CP."""
        return self.encoder[4] if len(self.encoder) > 4 else 1

    @property
    def runs(self) -> set[str]:
        return {self.run} | {own.run for own in self.modules}

    @property
    def in_bubbles(self) -> bool:
        return bool(self.runs & {"bubbles", "prefetch"})


def random_content(
    rng: random.Random,
    num_towers: int = 1,
    num_chunks: int = 1,
    same_images: bool = False,
    context: bool = False,
    shards: bool = False,
    pieces: bool = False,
    cached: bool = False,
) -> Document:
    """A job file's content."""
    content = _content_of_one(rng)
    if pieces:
        content["search"] |= {"encoder_pieces": rng.choice(([1, 2], [2], [1, 3])), "layouts": "all"}
        content["workload"].pop("stack", None)  # whose layouts have no bubbles
    if context:
        content["search"]["encoder_cp"] = rng.choice(([1, 2], [2], [1, 2, 4]))
        content["workload"]["context_parallel"] = rng.choice(("ring", "all_to_all", "all_gather"))
        content["workload"].pop("stack", None)  # whose encoders have CP 1
        for tower in content["model"]["encoders"] if rng.random() < 0.3 else ():
            tower["layers"] |= {"window": {"num_tokens": 64}}
    if num_chunks > 1:
        content["model"]["text"]["layers"]["num_layers"] = rng.choice((4, 4, 5))
        content["workload"]["global_batch_size"] = rng.choice((4, 4, 6))
        content["workload"].pop("stack", None)  # whose layouts have no bubbles
        content["search"] |= {"max_vpp": num_chunks, "modes": [], "layouts": rng.choice(("all", ["colocated"]))}
    if num_towers > 1:
        width, frozen = rng.choice((256, 512)), rng.random() < 0.5
        content["model"]["encoders"].append(
            {
                "name": "audio",
                "stem": {"type": "mel_frames", "num_mel_bins": 80},
                "layers": {
                    "num_layers": rng.randint(1, 2),
                    "hidden_size": width,
                    "ffn_size": 4 * width,
                    "num_heads": 8,
                    "norm": "layer",
                },
                "projector": {"layer_sizes": [width, 512], "freeze": frozen and rng.random() < 0.8},
                "freeze": frozen,
            }
        )
        content["model"]["text"]["layers"]["num_layers"] = rng.randint(1, 3)
        if same_images:
            _encode_again(rng, content)
        else:
            content["workload"]["audio_tokens_per_sample"] = rng.choice((64, 128))
        content["workload"].pop("stack", None)  # whose layouts have one encoder
        limit(rng, content)
    if shards:
        content["search"]["zero"] = rng.choice(([2], [3], [3], [1, 3], [2, 3]))
        content["search"]["layouts"] = rng.choice(("all", ["colocated"], ["disaggregated"]))
        content["workload"].pop("stack", None)  # whose layouts have ZeRO 0 and 1
        content["search"]["pp"] = [1, rng.choice((1, 2))]
        content["search"]["modes"] = []
    if cached:
        _cache_features(rng, content)
    return content


def _cache_features(rng: random.Random, content: Document) -> None:
    """Freeze one tower at least, whose projector may train, and let its features be made before."""
    towers = content["model"]["encoders"]
    for tower in rng.sample(towers, rng.randint(1, len(towers))):
        tower["freeze"], tower["projector"]["freeze"] = True, rng.random() < 0.5
    frozen = [tower["name"] for tower in towers if tower["freeze"]]
    content["workload"]["cached_features"] = rng.sample(frozen, rng.randint(1, len(frozen)))
    content["workload"].pop("stack", None)  # whose layouts run every encoder
    if content["search"]["layouts"] == ["disaggregated"]:
        content["search"]["layouts"] = "all"


def _encode_again(rng: random.Random, content: Document) -> None:
    """The second tower encodes the first one's images: its tokens are added to them, or stand beside them."""
    second, total = content["model"]["encoders"][1], content["workload"]["image_tokens_per_sample"]
    second |= {"name": "sam", "stem": {"type": "patches", "in_features": 768, "num_positions": 64}}
    if rng.random() < 0.5:
        own = rng.choice((64, 128, 320))
        content["workload"]["image_tokens_per_sample"] = min(total, 640) + own
        content["workload"]["encoder_tokens_per_sample"] = {"vision": min(total, 640), "sam": own}


def _content_of_one(rng: random.Random) -> Document:
    num_devices = rng.choice((2, 3, 4, 4, 4, 6, 8))
    per_node = rng.choice([n for n in (2, 4, 8, num_devices) if num_devices % n == 0])
    frozen, projects = rng.random() < 0.4, rng.random() < 0.5
    width = rng.choice((256, 512))
    model = {
        "text": {
            "vocab_size": 4096,
            "layers": {
                "num_layers": rng.randint(1, 4),
                "hidden_size": 512,
                "ffn_size": 1536,
                "num_heads": 8,
                "norm": "rms",
            },
        },
        "encoders": [
            {
                "name": "vision",
                "stem": {"type": "patches", "in_features": 588},
                "layers": {
                    "num_layers": rng.randint(1, 3),
                    "hidden_size": width,
                    "ffn_size": 4 * width,
                    "num_heads": 8,
                    "norm": "layer",
                },
                "projector": {
                    "norm": "layer",
                    "norm_size": width,
                    "merge_tokens": 4,
                    "layer_sizes": [4 * width, 512],
                    "freeze": frozen and projects,
                },
                "freeze": frozen,
            }
        ],
    }
    return {
        "model": model,
        "cluster": {
            "num_nodes": num_devices // per_node,
            "devices_per_node": per_node,
            "device": {
                "based_on": "a100-80g",
                "memory_bytes": int(rng.choice((80e9, 1.4e9, 1.1e9, 0.9e9, 0.7e9))),
                "context_bytes": int(2e8),
                "communicator_bytes": 0,
                "matrix_workspace_bytes": 0,
            },
        },
        "workload": {
            "global_batch_size": rng.choice((4, 6, 8, 12)),
            "seq_length": 1024,
            "image_tokens_per_sample": rng.choice((128, 256, 512, 896)),
        }
        | ({"stack": "megatron-te"} if rng.random() < 0.25 else {}),
        "search": {
            "cp": [1],
            "mbs": rng.choice(([1], [2], [1, 2])),
            "modes": rng.choice(([], ["recompute"])),
            "layouts": rng.choice(("all", "all", ["chain", "colocated"], ["colocated"], ["disaggregated"])),
            "failure_price": 0.0,
            "choice": "point",
        },
    }


# ------------------------------------------------------------------------------------------------------------- space


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def list_meanings(content: Document) -> set[Meaning]:
    """Every lawful strategy of the job, by the guide."""
    several: set[Meaning] = set()
    limits, workload, cluster = content["search"], content["workload"], content["cluster"]
    layers = content["model"]["text"]["layers"]["num_layers"]
    towers = content["model"]["encoders"]
    before = sum(tower["layers"]["num_layers"] for tower in towers)
    if len(towers) > 1:
        for decoder, modules in list_several(content):
            apart = sum(own.pp for own in modules if own.kind == "disaggregated")
            sizes = decoder.pp + apart, decoder.tp, decoder.dp, decoder.mbs
            several.add(Meaning("", "", *sizes, vpp=decoder.vpp, zero=decoder.zero, modules=modules))
    batch, per_node = workload["global_batch_size"], cluster["devices_per_node"]
    world = cluster["num_nodes"] * per_node
    named = "stack" in workload
    kinds = ("chain", "colocated", "disaggregated") if limits["layouts"] == "all" else limits["layouts"]
    trains = any_trains(content)
    found = several

    def plain(number: int, most_layers: int) -> list[tuple[int, int, int, int]]:
        """PP, TP, DP, MBS of a pipeline of so many layers on so many devices."""
        return [
            (pp, tp, number // pp // tp, mbs)
            for pp in divisors(number)
            for tp in divisors(number // pp)
            for mbs in limits["mbs"]
            if pp <= most_layers
            and pp in limits.get("pp", (pp,))
            and tp in limits.get("tp", (tp,))
            and 8 % tp == 0
            and tp <= per_node
            and min(number, per_node) % tp == 0
            and batch % (number // pp // tp * mbs) == 0
        ]

    def in_chunks(number: int, most_layers: int) -> list[tuple[tuple[int, int, int, int], int]]:
        """The same, and chunks of each stage, each of which holds a layer."""
        return [
            (sizes, vpp)
            for vpp in range(1, limits.get("max_vpp", 1) + 1)
            for sizes in plain(number, most_layers // vpp)
            if vpp == 1 or (sizes[0] > 1 and batch // sizes[2] // sizes[3] >= sizes[0])
        ]

    sharing = limits.get("encoder_cp", [1])
    whole = [n for n in range(1, world + 1) if n <= per_node or n % per_node == 0]
    for sizes, vpp in in_chunks(world, layers + before) if "chain" in kinds else ():
        found.add(Meaning("chain", "", *sizes, vpp=vpp))
    for (pp, tp, dp, mbs), vpp in in_chunks(world, layers) if "colocated" in kinds else ():
        if {tower["name"] for tower in towers} <= set(workload.get("cached_features", ())):
            found.add(Meaning("colocated", "cached", pp, tp, dp, mbs, (1, tp, dp, mbs), vpp))
        for tp_e, cp_e in itertools.product(divisors(min(world, per_node)), sharing):
            dp_e = world // tp_e // cp_e
            fits = 8 % tp_e == 0 and world % (tp_e * cp_e) == 0 and max(dp, dp_e) % min(dp, dp_e) == 0
            if not fits or (tp_e > 1 and tp % tp_e and tp_e % tp) or not deals(content, tp_e, cp_e):
                continue
            powers = not (named and (tp & (tp - 1) or tp_e & (tp_e - 1)))
            if pp == 1 and (mbs * dp) % dp_e == 0 and (tp_e, cp_e, dp_e) != (tp, 1, dp) and powers:
                own = sized(1, tp_e, dp_e, mbs * dp // dp_e, cp_e)
                found.add(Meaning("colocated", "inline", pp, tp, dp, mbs, own))
            for run in () if named else ("phases", "recomputed_phases") if trains else ("phases",):
                for mbs_e in divisors(batch // dp_e) if batch % dp_e == 0 else ():
                    own = sized(1, tp_e, dp_e, mbs_e, cp_e)
                    found.add(Meaning("colocated", run, pp, tp, dp, mbs, own, vpp))
            for run in ("bubbles",) if trains else ("bubbles", "prefetch"):
                count = batch // dp // mbs
                cuts = [cut for cut in limits.get("encoder_pieces", [1]) if cut <= before]
                takes = divisors(count) if pp > 1 and tp % (tp_e * cp_e) == 0 and not named else []
                for number, cut in itertools.product(takes, cuts):
                    if number * mbs * tp_e * cp_e % tp == 0 and number * pp <= count:
                        own = sized(1, tp_e, dp_e, number * mbs * tp_e * cp_e // tp, cp_e)
                        found.add(Meaning("colocated", run, pp, tp, dp, mbs, own, vpp, pieces=cut))
    for number in whole if "disaggregated" in kinds else ():
        rest = world - number
        begin = number  # behind the decoder's
        if not rest or (begin % per_node and begin % per_node + rest > per_node):
            continue
        for pp, tp, dp, mbs in plain(number, layers):
            for dp_e, tp_e, cp_e in itertools.product(divisors(rest), divisors(rest), sharing):
                if rest % (dp_e * tp_e * cp_e) or (mbs * dp) % dp_e or max(dp, dp_e) % min(dp, dp_e) or 8 % tp_e:
                    continue
                if not deals(content, tp_e, cp_e):
                    continue
                pp_e = rest // dp_e // tp_e // cp_e
                bad = pp_e > before or per_node % tp_e or begin % tp_e
                if not bad and not (named and (tp & (tp - 1) or tp_e & (tp_e - 1))):
                    sizes = sized(pp_e, tp_e, dp_e, mbs * dp // dp_e, cp_e)
                    found.add(Meaning("disaggregated", "inline", pp_e + pp, tp, dp, mbs, sizes))
    return {each for one in found for each in _share_out(one, limits.get("zero", [1]))}


def _share_out(one: Meaning, stages: list[int]) -> list[Meaning]:
    """The same under each ZeRO stage: 2 and 3 go with modules of one stage each."""
    if one.modules:
        return [one]  # list_several has done so
    own = one.encoder[0] if one.kind == "disaggregated" else 0
    alone = one.pp - own == 1 and own <= 1
    return [replace(one, zero=zero) for zero in dict.fromkeys(stages) if zero < 2 or alone]


def sized(pp: int, tp: int, dp: int, mbs: int, cp: int) -> tuple[int, ...]:
    """As Meaning.encoder."""
    return (pp, tp, dp, mbs) if cp == 1 else (pp, tp, dp, mbs, cp)


def any_trains(content: Document, name: str = "") -> bool:
    """Whether a tower, or that one, or its projector does."""
    towers = [tower for tower in content["model"]["encoders"] if name in ("", tower["name"])]
    return not all(tower["freeze"] and tower["projector"]["freeze"] for tower in towers)


def meaning_of(strategy: Strategy) -> Meaning:
    """What a strategy of the package means."""
    sizes = (strategy.pp, strategy.tp, strategy.dp, strategy.mbs)
    if strategy.arrangement is None:
        return Meaning("chain", "", *sizes, vpp=strategy.vpp, zero=strategy.zero)
    if strategy.arrangement.others:
        modules = tuple(
            Own(e.name, one.kind, one.encoder_run, e.pp, e.tp, e.dp, e.mbs, e.rank_offset, e.cp, e.pieces)
            for one in strategy.arrangement.each
            for e in (one.encoder,)
        )
        return Meaning("", "", *sizes, vpp=strategy.vpp, zero=strategy.zero, modules=modules)
    own, run = strategy.arrangement.encoder, strategy.arrangement.encoder_run
    encoder = sized(own.pp, own.tp, own.dp, own.mbs, own.cp)
    return Meaning(strategy.arrangement.kind, run, *sizes, encoder, strategy.vpp, strategy.zero, own.pieces)


# ----------------------------------------------------------------------------------------------------------- problems


class Network:
    """Node and network as they are reached, and what a collective or a transfer takes there (docs: costs.md)."""

    def __init__(self, costs: CostModel) -> None:
        self.levels = costs.cluster.levels

    def gather_ms(self, number: int, stride: int, size_bytes: float) -> float:
        """All-gather of size_bytes, whole, among `number` ranks that stand `stride` apart."""
        if number == 1:
            return 0.0
        inside, slowest, latency = 1, math.inf, 0.0
        for level in self.levels:
            reach = (
                number if level is self.levels[-1] else max(1, math.gcd(level.num_devices, number * stride) // stride)
            )
            if reach > inside:
                sharing = 1.0 + number / level.scale_ranks if level.scale_ranks else 1.0
                slowest = min(slowest, inside * level.bandwidth_bytes_per_s / sharing)
                latency += level.latency_ms
                inside = reach
        return (number - 1) / number * size_bytes / slowest * 1e3 + latency

    def hop_ms(self, ranks: list[int], size_bytes: float, num_starts: int = 1) -> float:
        """One rank sends size_bytes to another, of which `ranks` are examples."""
        for level in self.levels:
            if level is self.levels[-1] or len({rank // level.num_devices for rank in ranks}) == 1:
                return num_starts * level.latency_ms + size_bytes / level.bandwidth_bytes_per_s * 1e3
        raise AssertionError


def part(sized: Sized, decodes: bool) -> list[tuple[Document, Any]]:
    """The blocks of one module, as documents, each with its footprint."""
    blocks = zip(problem_document(sized.problem)["chain"], sized.list_blocks(), strict=True)
    return [(document, held) for document, (modality, held) in blocks if (modality == "text") == decodes]


def held_once(parts: list[tuple[Document, Any]]) -> float:
    names: dict[str, float] = {}
    for _, held in parts:
        for name, size in held.held_once_bytes:
            names[name] = max(names.get(name, 0.0), size)
    return sum(names.values())


def spread(value: Any, number: int) -> list[float]:
    return list(value) if isinstance(value, (list, tuple)) else [float(value)] * number


def form_problem(job: Job, costs: CostModel, content: Document, one: Meaning) -> Document:
    """The oracle's document of one strategy."""
    if one.modules:
        apart = sum(own.pp for own in one.modules if own.kind == "disaggregated")
        sized = Decoder(one.pp - apart, one.tp, one.dp, one.mbs, one.vpp, one.zero)
        return form_several(job, costs, content, sized, one.modules, Network(costs), held_once)
    stages = one.pp - (one.encoder[0] if one.kind == "disaggregated" else 0)
    decoder = Strategy(stages, one.tp, one.dp, one.mbs, vpp=one.vpp, zero=one.zero)
    if one.kind == "chain":
        return problem_document(build_problem(costs, decoder))
    if one.run == "cached":
        return _form_cached(job, costs, content, decoder)
    encoder = Strategy(*one.encoder[:4], cp=one.sharing, zero=one.zero)
    second = build_problem(costs, decoder)
    own = costs
    if one.run in ("bubbles", "prefetch"):  # passes may be dealt unevenly: costs of one are those of any whole batch
        whole = job.workload.model_copy(update={"global_batch_size": one.encoder[2] * one.encoder[3]})
        own = CostModel(replace(job, workload=whole))
    first = build_problem(own, encoder)
    before, behind = part(Sized(own, encoder, first), False), part(Sized(costs, decoder, second), True)
    document, network, workload = problem_document(second), Network(costs), content["workload"]
    tokens = sum(tokens_of(content, tower["name"]) for tower in content["model"]["encoders"])
    size = 2.0 * one.mbs * tokens * 512  # of a decoder replica's micro-batch
    limit = job.cluster.device.memory_bytes * job.cluster.memory_fraction
    context, batch = float(job.cluster.device.context_bytes), workload["global_batch_size"]
    blocks = [dict(block) for block, _ in before], [dict(block) for block, _ in behind]
    returns = any(block["backward_ms"] for block in blocks[0])
    document |= {"memory_limit_bytes": limit}

    if one.kind == "disaggregated":
        world, rest = decoder.world_size, encoder.world_size
        begin, text = world, 0
        last = begin + rest - one.encoder[1] * one.encoder[2] * one.sharing
        ranks = [last, begin + rest - 1, text, text + one.tp * one.dp - 1]
        shared = min(one.encoder[2], one.dp)
        senders, receivers = one.encoder[2] // shared, one.dp // shared
        hop = 0.0
        if "stack" in workload:  # leader to leader, shapes before, then a broadcast; both stand still
            busiest = size * max(1.0, receivers / senders)
            inner = network.gather_ms(one.tp, 1, size * one.tp / (one.tp - 1)) if one.tp > 1 else 0.0
            wait = network.hop_ms(ranks, busiest, 3) + inner
            for block in (blocks[0][-1], blocks[1][0]):
                block["forward_ms"] += wait
                block["backward_ms"] += wait if block["backward_ms"] and returns else 0.0
        else:
            lanes = min(senders * one.encoder[1] * one.sharing, receivers * one.tp)
            hop = network.hop_ms(ranks, receivers * size / lanes) + network.gather_ms(one.tp, 1, size)
        for block in blocks[0]:
            block["within"] = [0, one.encoder[0]]
        for block in blocks[1]:
            block["within"] = [one.encoder[0], one.pp]
        inner_hops = [
            (spread(of.p2p_ms, of.num_stages - 1), spread(of.p2p_ms_per_byte, of.num_stages - 1))
            for of in (first, second)
        ]
        once = [held_once(before), held_once(behind)]
        return document | {
            "num_stages": one.pp,
            "chain": [*blocks[0], *blocks[1]],
            "stage_static_bytes": [context + OPEN_BYTES + once[stage >= one.encoder[0]] for stage in range(one.pp)],
            "stage_tail_ms": [*first.stage_tail_ms, *second.stage_tail_ms],
            "p2p_ms": [*inner_hops[0][0], hop, *inner_hops[1][0]],
            "p2p_ms_per_byte": [*inner_hops[0][1], 0.0, *inner_hops[1][1]],
        }

    # encoder replicas that together have a decoder replica's samples, and the other way
    few, many = max(1, one.encoder[2] // one.dp), max(1, one.dp // one.encoder[2])
    if one.run == "inline":
        blocks[0][-1]["forward_ms"] += network.gather_ms(few * one.sharing, one.encoder[1], many * size)
        if returns:
            back = [block for block in blocks[0] if block["backward_ms"]][-1]
            back["backward_ms"] += network.gather_ms(many, one.tp, many * size)
        return document | {
            "chain": [*blocks[0], *blocks[1]],
            "stage_static_bytes": [context + OPEN_BYTES + held_once([*before, *behind])],
            "stage_tail_ms": [max(first.stage_tail_ms[0], second.stage_tail_ms[0])],
        }

    if one.run in ("bubbles", "prefetch"):
        return _form_beside(one, document, network, blocks, second, (before, behind), size, batch, context)

    calls, again = batch // (one.encoder[2] * one.encoder[3]), one.run == "recomputed_phases"
    count, steps = batch // (one.dp * one.mbs), sum
    forward = steps(block["count"] * block["forward_ms"] for block in blocks[0])
    backward = steps(block["count"] * block["backward_ms"] for block in blocks[0])
    phases = calls * (forward + backward + (forward if again and returns else 0.0))
    phases += steps(block["count"] * block.get("tail_ms", 0.0) for block in blocks[0])
    if one.pp == 1:
        phases += network.gather_ms(few * one.sharing, one.encoder[1], count * many * size)
        phases += network.gather_ms(many, one.tp, count * many * size) if returns else 0.0
    else:
        world = one.pp * one.tp * one.dp
        moved = network.hop_ms([0, world - 1], count * size / one.tp)
        phases += moved + network.gather_ms(one.tp, 1, count * size) + (moved if returns else 0.0)
    kept = steps(block["count"] * block.get("activation_bytes", 0.0) for block in blocks[0])
    static = steps(block["count"] * block.get("static_bytes", 0.0) for block in blocks[0])
    own = 2.0 * 512 * tokens * calls * one.encoder[3] / one.sharing
    passing = steps(block["count"] * block.get("step_bytes", 0.0) for block in blocks[0])
    passing += max(block.get("step_once_bytes", 0.0) for block in blocks[0])
    held = [(0.0 if again else calls * kept) + (own if stage else max(own, count * size)) for stage in range(one.pp)]
    working = max(block.get("transient_bytes", 0.0) for block in blocks[0]) + (kept if again else 0.0)
    for block in blocks[1]:
        if block.get("layer", True):
            modes = [*block.get("modes", ()), *([block["recompute"]] if block.get("recompute") else [])]
            least = min([block.get("activation_bytes", 0.0), *(mode.get("activation_bytes", 0.0) for mode in modes)])
            block["transient_bytes"] = max(block.get("transient_bytes", 0.0), working - least)
    once_bytes = held_once([*before, *behind])
    return document | {
        "chain": blocks[1],
        "stage_static_bytes": [context + OPEN_BYTES + once_bytes + static + max(each, passing) for each in held],
        "stage_tail_ms": [tail + phases for tail in second.stage_tail_ms],
    }


def _form_cached(job: Job, costs: CostModel, content: Document, decoder: Strategy) -> Document:
    """Of the towers' blocks projectors that train are left, and a micro-batch's features lie on the first stage."""
    second = build_problem(costs, decoder)
    document, prints = problem_document(second), Sized(costs, decoder, second).list_blocks()
    towers = {tower["name"]: tower for tower in content["model"]["encoders"]}
    size = sum(read_bytes(content, tower, decoder.mbs) for tower in towers.values())
    frozen = (tower for tower in towers.values() if tower["projector"]["freeze"])
    left, ready = [], sum(made_bytes(content, tower, decoder.mbs, decoder.tp) for tower in frozen)
    for block, (name, held) in zip(document["chain"], prints, strict=True):
        if name != "text" and (towers[name]["projector"]["freeze"] or not block["name"].endswith("_post")):
            continue
        if name != "text":
            ready += made_bytes(content, towers[name], decoder.mbs, decoder.tp)
            block["output_bytes"] = ready
        left.append((block, held))
    context = float(job.cluster.device.context_bytes) + OPEN_BYTES + held_once(left)
    return document | {
        "memory_limit_bytes": job.cluster.device.memory_bytes * job.cluster.memory_fraction,
        "chain": [block for block, _ in left],
        "stage_static_bytes": [context + (0.0 if stage else size) for stage in range(decoder.pp)],
    }


def _form_beside(
    one: Meaning,
    document: Document,
    network: Network,
    blocks: tuple[list[Document], list[Document]],
    second: Problem,
    parts: tuple[list[tuple[Document, Any]], list[tuple[Document, Any]]],
    size: float,
    batch: int,
    context: float,
) -> Document:
    count = batch // (one.dp * one.mbs)
    number = one.tp // one.encoder[1] // one.sharing * one.encoder[3] // one.mbs
    moved = network.hop_ms([0, one.pp * one.tp * one.dp - 1], number * size / one.tp)
    total = {
        key: sum(block["count"] * block.get(key, 0.0) for block in blocks[0])
        for key in ("forward_ms", "backward_ms", "tail_ms", "activation_bytes", "static_bytes", "step_bytes")
    }
    passing = total["step_bytes"] + max(block.get("step_once_bytes", 0.0) for block in blocks[0])
    working = max(block.get("transient_bytes", 0.0) for block in blocks[0])
    for block in blocks[1]:
        if block.get("layer", True):
            block["transient_bytes"] = max(block.get("transient_bytes", 0.0), working)
    fixed = context + OPEN_BYTES + held_once([*parts[0], *parts[1]]) + total["static_bytes"]
    encoder = {
        "name": "vision",
        "run": one.run,
        "forward_ms": in_pieces(blocks[0], "forward_ms", one.pieces),
        "backward_ms": in_pieces(blocks[0], "backward_ms", one.pieces),
        "pieces": one.pieces,
        "feed_ms": moved + network.gather_ms(one.tp, 1, number * size),
        "activation_bytes": in_pieces(blocks[0], "activation_bytes", one.pieces),
        "microbatches_per_pass": number,
    }
    return document | {
        "chain": blocks[1],
        "stage_static_bytes": [fixed + max(passing, (number if s else count) * size) for s in range(one.pp)],
        "stage_tail_ms": [tail + total["tail_ms"] for tail in second.stage_tail_ms],
        "encoders": [encoder],
    }


def solve(document: Document) -> float:
    """The least step of a strategy; infinite where nothing fits."""
    return best_beside(document) if "encoders" in document else brute_force.brute_force(document, prune=True).step_ms


# ------------------------------------------------------------------------------------------------------------ verdict


def check(content: Document, where: str) -> tuple[int, list[str]]:
    """How many strategies a job has, and what is wrong with what the search makes of them, a sentence each."""
    job = parse_job(content, Path(where))
    meanings = list_meanings(content)
    costs = CostModel(job)
    formed = {one: form_problem(job, costs, content, one) for one in meanings}
    best = {one: solve(document) for one, document in formed.items()}
    optimum = min(best.values(), default=math.inf)
    try:
        result = search(job, time_limit_s=60.0, num_workers=1)
    except NoFeasiblePlan:
        return len(meanings), [] if math.isinf(optimum) else [f"nothing fits, and {optimum} does"]
    except JobError:
        return len(meanings), [] if not meanings else [f"no strategy is lawful, and {len(meanings)} are"]
    wrong = []
    told = {meaning_of(c.strategy): c for c in result.candidates if c.status != "unlawful"}
    lawful = {meaning_of(entry.strategy) for entry in list_entries(job) if entry.reason is None}
    if lawful != meanings or not told.keys() <= meanings:
        wrong.append(f"lawful there alone: {lawful - meanings}; here alone: {meanings - lawful}")
    in_bubbles = any(one.in_bubbles for one in meanings)  # whose gap may stay open
    step_ms, most_ms = result.estimates[0].step_ms, math.inf if in_bubbles and not result.proven else optimum
    if not optimum * (1 - SAME) <= step_ms <= most_ms * (1 + max(SAME, result.gap_fraction * in_bubbles)):
        wrong.append(f"the answer takes {step_ms}, and {optimum} is possible")
    if result.lower_bound_ms > optimum * (1 + SAME) or not (result.proven or in_bubbles):
        wrong.append(f"its bound is {result.lower_bound_ms}, and {optimum} is possible; proven: {result.proven}")
    for entry in list_entries(job):
        if entry.reason is None and (one := meaning_of(entry.strategy)) in meanings:
            found = replace(build_problem(costs, entry.strategy), encoders=(), beside=())
            wrong += _differ(one, problem_document(found), formed[one])
    for one in told.keys() & meanings:
        step_ms, candidate = best[one], told[one]
        allowed = PROVEN_GAP_FRACTION if one.in_bubbles else 0.0
        if candidate.status == "infeasible" and math.isfinite(step_ms):
            wrong.append(f"{one} does not fit, and does in {step_ms}: {candidate.reason}")
        elif candidate.bound_ms is not None and candidate.bound_ms > step_ms * (1 + SAME):
            wrong.append(f"{one} is bounded by {candidate.bound_ms}, and takes {step_ms}")
        elif candidate.step_ms is not None and candidate.step_ms < step_ms * (1 - SAME):
            wrong.append(f"{one} takes {candidate.step_ms}, and nothing takes less than {step_ms}")
        elif candidate.status == "solved" and (candidate.step_ms or 0.0) * (1 - allowed) > step_ms * (1 + SAME):
            wrong.append(f"{one} takes {candidate.step_ms}, and {step_ms} is possible")
    return len(meanings), wrong


def _differ(one: Meaning, found: Document, formed: Document) -> list[str]:
    """What the package's problem of a strategy says otherwise than the one that is put together here."""
    number, told = found["num_stages"], []
    for key in ("stage_static_bytes", "stage_tail_ms"):
        mine, theirs = (spread(document.get(key, 0.0), number) for document in (formed, found))
        if not all(math.isclose(*pair, rel_tol=1e-9, abs_tol=1e-6) for pair in zip(mine, theirs, strict=True)):
            told.append(f"{one} has {key} {theirs}, and {mine} are right")
    cuts = ["output_bytes"] if "cached" in one.runs else []
    for key in ("forward_ms", "backward_ms", "static_bytes", "activation_bytes", "transient_bytes", *cuts):
        mine, theirs = ([block.get(key, 0.0) for block in document["chain"]] for document in (formed, found))
        if len(mine) != len(theirs) or not all(map(math.isclose, mine, theirs)):
            told.append(f"{one} has blocks of {key} {theirs}, and {mine} are right")
    return told


def is_small(content: Document, num_chunks: int = 1) -> bool:
    """Whether all strategies of the job, and all orders of each, can be looked at; and whether there are such with an
    encoder in bubbles beside so many chunks."""
    meanings, batch = list_meanings(content), content["workload"]["global_batch_size"]
    most_actions = MOST_IN_PIECES if max(content["search"].get("encoder_pieces", [1])) > 1 else MOST_ACTIONS
    for one in meanings:
        beside = [own for own in one.modules if own.run in ("bubbles", "prefetch")]
        if beside:
            count, actions = batch // (one.dp * one.mbs), 2 * one.pp * one.vpp * (batch // (one.dp * one.mbs))
            frozen = {tower["name"]: not any_trains(content, tower["name"]) for tower in content["model"]["encoders"]}
            for own in beside:
                passes = own.pieces * count * one.mbs * own.tp * own.cp // (one.tp * own.mbs)
                actions += passes * (1 if frozen[own.name] else 2)
            if actions > most_actions:
                return False
        elif one.in_bubbles:
            count, trains = (
                batch // (one.dp * one.mbs),
                not all(tower["freeze"] for tower in content["model"]["encoders"]),
            )
            passes = one.pieces * count * one.mbs * one.encoder[1] * one.sharing // (one.tp * one.encoder[3])
            if count_actions(one.pp, count, passes, trains, one.vpp) > most_actions:
                return False
    most = MOST_STRATEGIES if len(content["model"]["encoders"]) == 1 else MOST_OF_TWO
    wanted = [one for one in meanings if one.vpp == num_chunks and one.in_bubbles]
    cut = any(one.pieces > 1 or any(own.pieces > 1 for own in one.modules) for one in meanings)
    is_wanted = cut or max(content["search"].get("encoder_pieces", [1])) == 1
    return 1 <= len(meanings) <= most and (num_chunks == 1 or bool(wanted)) and is_wanted


def has_beside_apart(content: Document) -> bool:
    """Whether some strategy has one module in bubbles or prefetch and another on ranks of its own."""
    return any(
        one.in_bubbles and any(own.kind == "disaggregated" for own in one.modules) for one in list_meanings(content)
    )


def checked_jobs(
    number: int,
    seed: int,
    num_towers: int = 1,
    num_chunks: int = 1,
    same_images: bool = False,
    context: bool = False,
    shards: bool = False,
    beside_apart: bool = False,
    pieces: bool = False,
    cached: bool = False,
) -> dict[str, list[str]]:
    """name → what is wrong, of `number` jobs that are small enough; with chunks, that have some in bubbles; of two
    towers beside_apart, some with one of them in bubbles or prefetch and the other on ranks of its own."""
    found: dict[str, list[str]] = {}
    for index in range(seed, seed + number):
        of = (f" of {num_towers} towers" if num_towers > 1 else "") + (" of one" if same_images else "")
        of += (f" in {num_chunks}" if num_chunks > 1 else "") + (" with CP" if context else "")
        of += (" in shards" if shards else "") + (" beside apart" if beside_apart else "")
        of += (" in pieces" if pieces else "") + (" of cached features" if cached else "")
        rng = random.Random(f"module layouts {index}{of}")
        kinds = num_towers, num_chunks, same_images, context, shards, pieces, cached
        content = random_content(rng, *kinds)
        while not is_small(content, num_chunks) or (beside_apart and not has_beside_apart(content)):
            content = random_content(rng, *kinds)
        found[f"job {index}"] = check(content, f"job {index}")[1]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--towers", type=int, choices=(1, 2), default=1)
    parser.add_argument("--same-images", action="store_true", help="both of two towers encode the same images")
    parser.add_argument("--chunks", type=int, choices=(1, 2), default=1, help="of the decoder's stages at most")
    parser.add_argument("--context", action="store_true", help="encoders of several context parallel sizes")
    parser.add_argument("--beside-apart", action="store_true", help="of two towers: bubbles beside ranks of their own")
    parser.add_argument("--pieces", action="store_true", help="passes cut into pieces")
    parser.add_argument("--shards", action="store_true", help="ZeRO 2 and 3")
    parser.add_argument("--cached", action="store_true", help="features of frozen encoders may be read")
    arguments = parser.parse_args()
    if arguments.same_images and arguments.towers < 2:
        parser.error("--same-images is of two towers")
    if arguments.beside_apart and arguments.towers < 2:
        parser.error("--beside-apart is of two towers")
    kinds = (
        *(arguments.towers, arguments.chunks, arguments.same_images, arguments.context, arguments.shards),
        *(arguments.beside_apart, arguments.pieces, arguments.cached),
    )
    found = checked_jobs(arguments.jobs, arguments.seed, *kinds)
    wrong = {name: told for name, told in found.items() if told}
    for name, told in wrong.items():
        print(name, *told, sep="\n  ")
    print(f"{arguments.jobs} jobs, {len(wrong)} wrong")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
