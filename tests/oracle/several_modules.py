"""Layouts of a module for each of two encoders, by loops of its own: which are lawful, and the problem of each.

Written from docs/guide/layouts.md; a layout's problem is put together from those of plain chains under each module's
sizes. module_layouts.py solves them and holds the search against them.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from semantics import Document

from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.costs.stage import build_problem
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.pipeline.problem import Problem
from mm_autoparallel.pipeline.problem_file import problem_document

OPEN_BYTES = 22 * 2**20
WIDTH = 512
"""Of the decoder."""


class Own(NamedTuple):
    """One module: where and how it runs, PP, TP, DP, MBS, its first rank, CP."""

    name: str
    kind: str
    run: str
    pp: int
    tp: int
    dp: int
    mbs: int
    begin: int = 0
    cp: int = 1
    pieces: int = 1

    @property
    def chained(self) -> bool:
        return self.kind == "colocated" and self.run == "inline" and self.pp > 1

    @property
    def cached(self) -> bool:
        return self.run == "cached"

    @property
    def away(self) -> bool:
        return self.run != "inline"


@dataclass(frozen=True)
class Decoder:
    pp: int
    tp: int
    dp: int
    mbs: int
    vpp: int = 1
    zero: int = 1

    @property
    def world(self) -> int:
        return self.pp * self.tp * self.dp


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def limit(rng: random.Random, content: Document) -> None:
    """Make the job's space small enough for all its products."""
    content["cluster"] |= dict(
        zip(("num_nodes", "devices_per_node"), rng.choice(((1, 2), (1, 4), (2, 2))), strict=True)
    )
    content["workload"]["global_batch_size"] = rng.choice((2, 4, 4))
    chunks = content["search"].get("max_vpp", 1)
    content["model"]["text"]["layers"]["num_layers"] = 2 * chunks if chunks > 1 else rng.randint(1, 2)
    for tower in content["model"]["encoders"]:
        tower["layers"]["num_layers"] = rng.randint(1, 2)
    number = content["cluster"]["num_nodes"] * content["cluster"]["devices_per_node"]
    content["search"] |= {
        "mbs": [rng.choice((1, 1, 2))],
        "pp": [rng.choice((1, 2, 2))],
        "tp": [rng.choice((1, 1, 2))] if number > 2 else [1],
        "layouts": rng.choice(("all", "all", ["colocated"], ["disaggregated"], ["chain", "colocated"])),
    }


def list_decoders(content: Document, number: int) -> list[Decoder]:
    limits, per_node = content["search"], content["cluster"]["devices_per_node"]
    layers, batch = content["model"]["text"]["layers"]["num_layers"], content["workload"]["global_batch_size"]
    return [
        Decoder(pp, tp, number // pp // tp, mbs, vpp, zero)
        for zero in dict.fromkeys(limits.get("zero", [1]))
        for vpp in range(1, limits.get("max_vpp", 1) + 1)
        for pp in limits.get("pp") or divisors(number)
        for tp in limits.get("tp") or divisors(number)
        for mbs in limits["mbs"]
        if number % (pp * tp) == 0
        and pp * vpp <= layers
        and (zero < 2 or pp == 1)
        and (vpp == 1 or (pp > 1 and batch // (number // pp // tp) // mbs >= pp))
        and 8 % tp == 0
        and min(number, per_node) % tp == 0
        and batch % (number // pp // tp * mbs) == 0
    ]


def list_several(content: Document) -> Iterator[tuple[Decoder, tuple[Own, ...]]]:
    """Every lawful layout of a module for each encoder."""
    limits, per_node = content["search"], content["cluster"]["devices_per_node"]
    world = content["cluster"]["num_nodes"] * per_node
    kinds = ("colocated", "disaggregated") if limits["layouts"] == "all" else limits["layouts"]
    towers = content["model"]["encoders"]
    names = [tower["name"] for tower in towers]
    if "colocated" in kinds:
        for decoder in list_decoders(content, world):
            yield from _combine(decoder, [list(_shared(content, decoder, tower)) for tower in towers])
    for apart in itertools.chain.from_iterable(itertools.combinations(names, n) for n in (1, 2)):
        if "disaggregated" not in kinds or (len(apart) == 1 and "colocated" not in kinds):
            continue
        for number in [n for n in range(1, world) if n <= per_node or n % per_node == 0]:
            for decoder in [each for each in list_decoders(content, number) if each.vpp == 1]:
                for numbers in _splits(world - number, len(apart)):
                    yield from _combine(decoder, _apart_options(content, decoder, apart, numbers))


def _splits(number: int, parts: int) -> list[tuple[int, ...]]:
    return [(number,)] if parts == 1 else [(n, number - n) for n in range(1, number)]


def _apart_options(
    content: Document, decoder: Decoder, apart: tuple[str, ...], numbers: tuple[int, ...]
) -> list[list[Own]]:
    per_node = content["cluster"]["devices_per_node"]
    begins: dict[str, int] = {}
    for order in itertools.permutations(range(len(apart))):
        at, found = decoder.world, {}
        for index in order:
            found[apart[index]] = at
            at += numbers[index]
        if all(
            found[n] % per_node == 0 or found[n] % per_node + c <= per_node for n, c in zip(apart, numbers, strict=True)
        ):
            begins = found
            break
    if not begins:
        return [[]]
    count = dict(zip(apart, numbers, strict=True))
    options = []
    for tower in content["model"]["encoders"]:
        name = tower["name"]
        if name not in apart:
            options.append(list(_shared(content, decoder, tower)))
            continue
        samples = decoder.mbs * decoder.dp
        options.append(
            [
                Own(name, "disaggregated", "inline", pp, tp, dp, samples // dp, begins[name], cp)
                for dp in divisors(count[name])
                for tp in divisors(count[name] // dp)
                for cp in content["search"].get("encoder_cp", [1])
                for pp in (count[name] // dp // tp // cp,)
                if samples % dp == 0
                and pp * dp * tp * cp == count[name]
                and deals(content, tp, cp)
                and max(dp, decoder.dp) % min(dp, decoder.dp) == 0
                and 8 % tp == 0
                and per_node % tp == 0
                and begins[name] % tp == 0
                and pp <= tower["layers"]["num_layers"]
                and (decoder.zero < 2 or pp == 1)
            ]
        )
    return options


def _combine(decoder: Decoder, options: list[list[Own]]) -> Iterator[tuple[Decoder, tuple[Own, ...]]]:
    for modules in itertools.product(*options):
        plain = [
            own.kind == "colocated"
            and not own.away
            and (own.chained or (own.tp, own.cp, own.dp) == (decoder.tp, 1, decoder.dp))
            for own in modules
        ]
        if not all(plain):
            yield decoder, modules


def tokens_of(content: Document, name: str) -> int:
    """What a tower hands the decoder of a sample: its own tokens, or all of its medium."""
    workload = content["workload"]
    medium = "audio" if name == "audio" else "image"
    tokens: int = workload.get("encoder_tokens_per_sample", {}).get(name, workload[f"{medium}_tokens_per_sample"])
    return tokens


def deals(content: Document, tp: int, cp: int) -> bool:
    """Whether ranks that deal heads have whole ones; all towers have eight. Their tokens divide by 4."""
    dealt = cp > 1 and content["workload"].get("context_parallel") == "all_to_all"
    return not dealt or 8 % (tp * cp) == 0


def trains(tower: Document) -> bool:
    return not (tower["freeze"] and tower["projector"]["freeze"])


def made_bytes(content: Document, tower: Document, mbs: int, tp: int) -> float:
    """Of a tower's features of one micro-batch, what one rank of `tp` sends on."""
    return 2.0 * mbs * tokens_of(content, tower["name"]) * WIDTH / tp


def read_bytes(content: Document, tower: Document, mbs: int) -> float:
    """What is read of one micro-batch where a tower does not run: what it makes, or what its projector takes in."""
    if tower["projector"]["freeze"]:
        return made_bytes(content, tower, mbs, 1)
    return 2.0 * mbs * tokens_of(content, tower["name"]) * float(tower["projector"]["layer_sizes"][0])


def _shared(content: Document, decoder: Decoder, tower: Document) -> Iterator[Own]:
    per_node, batch = content["cluster"]["devices_per_node"], content["workload"]["global_batch_size"]
    name, world, count = tower["name"], decoder.world, batch // decoder.dp // decoder.mbs
    if name in content["workload"].get("cached_features", ()):
        yield Own(name, "colocated", "cached", 1, decoder.tp, decoder.dp, decoder.mbs)
    if decoder.pp > 1:
        yield Own(name, "colocated", "inline", decoder.pp, decoder.tp, decoder.dp, decoder.mbs)
    for tp, cp in itertools.product(divisors(min(world, per_node)), content["search"].get("encoder_cp", [1])):
        dp = world // tp // cp
        fits = world % (tp * cp) == 0 and 8 % tp == 0 and max(dp, decoder.dp) % min(dp, decoder.dp) == 0
        if not fits or not deals(content, tp, cp) or (tp > 1 and decoder.tp % tp and tp % decoder.tp):
            continue
        if decoder.pp == 1 and decoder.mbs * decoder.dp % dp == 0:
            yield Own(name, "colocated", "inline", 1, tp, dp, decoder.mbs * decoder.dp // dp, 0, cp)
        for run in ("phases", "recomputed_phases") if trains(tower) else ("phases",):
            for mbs in divisors(batch // dp) if batch % dp == 0 else ():
                yield Own(name, "colocated", run, 1, tp, dp, mbs, 0, cp)
        for run in ("bubbles",) if trains(tower) else ("bubbles", "prefetch"):
            pieces = [n for n in content["search"].get("encoder_pieces", [1]) if n <= tower["layers"]["num_layers"]]
            fitting = divisors(count) if decoder.pp > 1 and decoder.tp % (tp * cp) == 0 else []
            for taken, cut in itertools.product(fitting, pieces):
                mbs = taken * decoder.mbs * tp * cp // decoder.tp
                if taken * decoder.mbs * tp * cp % decoder.tp == 0 and taken * decoder.pp <= count:
                    yield Own(name, "colocated", run, 1, tp, dp, mbs, 0, cp, cut)


# ----------------------------------------------------------------------------------------------------------- problems


class Sized(NamedTuple):
    """The whole chain under the sizes of one module."""

    costs: CostModel
    strategy: Strategy
    problem: Problem

    def list_blocks(self) -> list[tuple[str, Any]]:
        """Modality and footprint of each block. What ZeRO 2 and 3 make whole is counted from what blocks hold without
        ZeRO: a block's own and the larger of its neighbours' in its modality; frozen ones have no gradients."""
        found = [(block.modality, block.footprint) for block in self.problem.chain]
        strategy = self.strategy
        if strategy.zero < 2:
            return found
        plain = build_problem(self.costs, replace(strategy, zero=0)).chain
        prints, told = [block.footprint for block in plain], []
        for at, (modality, held) in enumerate(found):
            near = [n for n in (at - 1, at + 1) if 0 <= n < len(plain) and plain[n].modality == modality]
            near += [at] if plain[at].count > 1 else []
            whole = []
            for sizes in ([each.weight_bytes for each in prints], [each.gradient_bytes for each in prints]):
                both = sizes[at] + max((sizes[n] for n in near), default=0.0) if sizes[at] else 0.0
                whole.append(both if strategy.dp * strategy.cp > 1 else 0.0)
            names = {"gathered weights": whole[0]} if strategy.zero == 3 else {}
            names |= {"gradients being reduced": whole[1]} if held.gradient_bytes else {}
            others = [each for each in held.held_once_bytes if "gather" not in each[0] and "reduced" not in each[0]]
            told.append((modality, replace(held, held_once_bytes=(*others, *names.items()))))
        return told


class _Priced(NamedTuple):
    """A module: its blocks as documents, their footprints, the plain problem, what crosses of a micro-batch, or is read
    of it; of one that does not run its projector's block, where that trains."""

    own: Own
    blocks: list[Document]
    prints: list[Any]
    problem: Problem
    size: float
    returns: bool


def _price(job: Job, costs: CostModel, content: Document, decoder: Decoder, own: Own) -> _Priced:
    (tower,) = [tower for tower in content["model"]["encoders"] if tower["name"] == own.name]
    sized = Strategy(own.pp, own.tp, own.dp, own.mbs, cp=own.cp, zero=decoder.zero)
    if own.cached:
        sized = replace(sized, pp=decoder.pp, vpp=decoder.vpp, schedule="")
    if own.run in ("bubbles", "prefetch"):
        whole = job.workload.model_copy(update={"global_batch_size": own.dp * own.mbs})
        costs = CostModel(replace(job, workload=whole))
    problem = build_problem(costs, sized)
    blocks = Sized(costs, sized, problem).list_blocks()
    pairs = [
        (dict(document), held)
        for document, (modality, held) in zip(problem_document(problem)["chain"], blocks, strict=True)
        if modality == own.name
        and (not own.cached or (document["name"].endswith("_post") and not tower["projector"]["freeze"]))
    ]
    size = read_bytes(content, tower, decoder.mbs) if own.cached else made_bytes(content, tower, decoder.mbs, 1)
    returns = any(document["backward_ms"] for document, _ in pairs)
    return _Priced(own, [d for d, _ in pairs], [p for _, p in pairs], problem, size, returns)


def _features(problem: Problem) -> dict[str, float]:
    """What one rank has of each encoder's outputs, by what is ready at the end of each in the plain chain."""
    ends = {block.modality: block.output_bytes for block in problem.chain if block.modality != "text"}
    before, found = 0.0, {}
    for name, ready in ends.items():
        found[name], before = ready - before, ready
    return found


def _set_cuts(towers: list[Document], modules: list[_Priced], plain: Problem) -> None:
    """What crosses a cut behind each block of an encoder, and whether gradients come back there."""
    by_name = {tower["name"]: tower for tower in towers}
    there, apart_returns = _features(plain), False
    elsewhere = [m.own.name for m in modules if not m.own.chained and not (m.own.cached and m.blocks)]
    for module in modules:
        own, tower = module.own, by_name[module.own.name]
        mine = _features(module.problem)
        earlier = sum(mine[name] for name in mine if list(mine).index(name) < list(mine).index(own.name))
        staged = own.chained or own.cached
        more = sum(there[name] for name in elsewhere) if staged else 0.0
        before = any(trains(by_name[name]) for name in elsewhere) if staged else apart_returns
        for block in module.blocks:
            is_last = block["name"].endswith("_post")
            moves = not tower["freeze"] or (is_last and not tower["projector"]["freeze"])
            block["output_bytes"] = block.get("output_bytes", 0.0) - earlier + more
            block["sends_gradient"] = before or moves
        if own.kind == "disaggregated":
            apart_returns = apart_returns or trains(tower)
        elif staged and module.blocks:  # all behind it on the stages carry its features too
            elsewhere.append(own.name)


def form_several(
    job: Job, costs: CostModel, content: Document, decoder: Decoder, owns: tuple[Own, ...], network: Any, once: Any
) -> Document:
    """The oracle's document. network, once: what module_layouts has to price what crosses, and what is held once."""
    plain = Strategy(decoder.pp, decoder.tp, decoder.dp, decoder.mbs, vpp=decoder.vpp, zero=decoder.zero)
    second = build_problem(costs, plain)
    document, batch = problem_document(second), content["workload"]["global_batch_size"]
    held = Sized(costs, plain, second).list_blocks()
    text = [(dict(d), h) for d, (name, h) in zip(document["chain"], held, strict=True) if name == "text"]
    modules = [_price(job, costs, content, decoder, own) for own in owns]
    _set_cuts(content["model"]["encoders"], modules, second)
    fixed = float(job.cluster.device.context_bytes) + OPEN_BYTES
    document |= {"memory_limit_bytes": job.cluster.device.memory_bytes * job.cluster.memory_fraction}

    apart = [m for m in modules if m.own.kind == "disaggregated"]
    inside = [m for m in modules if m.own.kind == "colocated" and (not m.own.away or m.own.cached)]
    away = [m for m in modules if m.own.away]
    for module in inside:
        if not module.own.chained and not module.own.cached:
            _gather_inline(module, decoder, network)
    shared_prints = [p for m in inside + away for p in m.prints] + [p for _, p in text]
    stages = [block for m in inside for block in m.blocks] + [block for block, _ in text]
    tails = list(second.stage_tail_ms)
    for module in inside:
        if not module.own.chained and not module.own.cached:
            tails = [max(tails[0], module.problem.stage_tail_ms[0])]
    count = batch // decoder.dp // decoder.mbs
    static = [fixed + once([(None, p) for p in shared_prints])] * decoder.pp
    before, encoders = 0.0, {}
    if away:
        tails, static, before, encoders = _add_away(away, inside, stages, decoder, network, batch, tails, static)
    if not apart:
        return document | {"chain": stages, "stage_tail_ms": tails, "stage_static_bytes": static} | encoders
    assert count
    crossings = [_cross(m, decoder, network) for m in apart]
    if len(crossings) == 2:
        crossings[0] = max(0.0, crossings[0] - crossings[1])
    chain, hops, per_byte, all_tails, all_static = [], [], [], [], []
    at = 0
    for module, crossing in zip(apart, crossings, strict=True):
        for block in module.blocks:
            block["within"] = [at, at + module.own.pp]
            chain.append(block)
        at += module.own.pp
        inner = module.own.pp - 1
        hops += [*_spread(module.problem.p2p_ms, inner), crossing]
        per_byte += [*_spread(module.problem.p2p_ms_per_byte, inner), 0.0]
        all_tails += [tail + before for tail in module.problem.stage_tail_ms]
        all_static += [fixed + once([(None, p) for p in module.prints])] * module.own.pp
    for block in stages:
        block["within"] = [at, at + decoder.pp]
    for encoder in encoders.get("encoders", ()):
        encoder["first_stage"] = at
    return (
        document
        | encoders
        | {
            "num_stages": at + decoder.pp,
            "chain": [*chain, *stages],
            "p2p_ms": [*hops, *_spread(second.p2p_ms, decoder.pp - 1)],
            "p2p_ms_per_byte": [*per_byte, *_spread(second.p2p_ms_per_byte, decoder.pp - 1)],
            "stage_tail_ms": [*all_tails, *tails],
            "stage_static_bytes": [*all_static, *static],
        }
    )


def _spread(value: Any, number: int) -> list[float]:
    return list(value) if isinstance(value, (list, tuple)) else [float(value)] * number


def _cross(module: _Priced, decoder: Decoder, network: Any) -> float:
    own = module.own
    last = own.begin + (own.pp - 1) * own.tp * own.cp * own.dp
    ranks = [last, last + own.tp * own.cp * own.dp - 1, 0, decoder.tp * decoder.dp - 1]
    cells = min(own.dp, decoder.dp)
    senders, receivers = own.dp // cells, decoder.dp // cells
    lanes = min(senders * own.tp * own.cp, receivers * decoder.tp)
    moved: float = network.hop_ms(ranks, receivers * module.size / lanes)
    return moved + float(network.gather_ms(decoder.tp, 1, module.size))


def _fan(module: _Priced, decoder: Decoder, network: Any, count: int = 1) -> tuple[float, float]:
    """What ranks gather of `count` micro-batches on shared ranks: forth among those that have a decoder replica's
    samples, or a part of their tokens; back among decoder replicas whose samples are one encoder replica's."""
    own, size = module.own, count * module.size
    few, many = max(1, own.dp // decoder.dp), max(1, decoder.dp // own.dp)
    there = float(network.gather_ms(few * own.cp, own.tp, many * size))
    return there, float(network.gather_ms(many, decoder.tp, many * size)) if module.returns else 0.0


def _gather_inline(module: _Priced, decoder: Decoder, network: Any) -> None:
    there, back = _fan(module, decoder, network)
    module.blocks[-1]["forward_ms"] += there
    if module.returns:
        [block for block in module.blocks if block["backward_ms"]][-1]["backward_ms"] += back


def in_pieces(blocks: list[Document], key: str, pieces: int) -> Any:
    """What blocks of a module come to, in pieces of as many layers each as goes: what stands before a first layer is of
    the first piece, and everything else that is no layer of that of the layer before it."""
    units = [block for block in blocks for _ in range(block["count"])]
    num_layers = sum(bool(block.get("layer", True)) for block in units)
    sums, seen = [0.0] * pieces, 0
    for block in units:
        seen += bool(block.get("layer", True))
        sums[max(0, seen - 1) * pieces // num_layers] += block.get(key, 0.0)
    return sums if pieces > 1 else sums[0]


def _add_away(
    away: list[_Priced],
    inside: list[_Priced],
    stages: list[Document],
    decoder: Decoder,
    network: Any,
    batch: int,
    tails: list[float],
    static: list[float],
) -> tuple[list[float], list[float], float, Document]:
    """Tails, static bytes, what runs before the pipeline, and encoders, with what is away; stages' layers get room."""
    ahead = 0.0
    kept, passing, largest, held, encoders = [0.0, 0.0], 0.0, 0.0, 0.0, []
    count = batch // decoder.dp // decoder.mbs
    inline_alone = {m.own.name for m in inside if not m.own.chained}
    roomy = [b for b in stages if b.get("layer", True) and b["modality"] not in inline_alone]
    for module in away:
        own, blocks = module.own, module.blocks
        if own.cached:
            kept[0] += module.size
            continue

        def total(key: str, blocks: list[Document] = blocks) -> float:
            return math.fsum(block["count"] * block.get(key, 0.0) for block in blocks)

        held += total("static_bytes")
        passing += total("step_bytes")
        largest = max(largest, *(block.get("step_once_bytes", 0.0) for block in blocks))
        working = max(block.get("transient_bytes", 0.0) for block in blocks)
        more = total("tail_ms")
        if own.run in ("bubbles", "prefetch"):
            number = decoder.tp // own.tp // own.cp * own.mbs // decoder.mbs
            world = decoder.world
            moved = network.hop_ms([0, world - 1], number * module.size / decoder.tp)
            kept = [kept[0] + count * module.size, kept[1] + number * module.size]
            encoders.append(
                {
                    "name": own.name,
                    "run": own.run,
                    "forward_ms": in_pieces(blocks, "forward_ms", own.pieces),
                    "backward_ms": in_pieces(blocks, "backward_ms", own.pieces),
                    "feed_ms": moved + network.gather_ms(decoder.tp, 1, number * module.size),
                    "activation_bytes": in_pieces(blocks, "activation_bytes", own.pieces),
                    "pieces": own.pieces,
                    "microbatches_per_pass": number,
                }
            )
            spare = False
        else:
            calls, again = batch // (own.dp * own.mbs), own.run == "recomputed_phases"
            forward, backward, activations = total("forward_ms"), total("backward_ms"), total("activation_bytes")
            ahead += calls * forward
            more += calls * (forward + backward + (forward if again and module.returns else 0.0))
            if decoder.pp == 1:
                more += sum(_fan(module, decoder, network, count))
                ahead += _fan(module, decoder, network, count)[0]
            else:
                moved = network.hop_ms([0, decoder.world - 1], count * module.size / decoder.tp)
                more += moved + network.gather_ms(decoder.tp, 1, count * module.size)
                ahead += moved + network.gather_ms(decoder.tp, 1, count * module.size)
                more += moved if module.returns else 0.0
            mine = calls * own.mbs * module.size / decoder.mbs / own.cp
            stored = 0.0 if again else calls * activations
            kept = [kept[0] + stored + max(mine, count * module.size), kept[1] + stored + mine]
            working += activations if again else 0.0
            spare = True
        tails = [tail + more for tail in tails]
        for block in roomy:
            modes = [*block.get("modes", ()), *([block["recompute"]] if block.get("recompute") else [])]
            least = min([block.get("activation_bytes", 0.0), *(mode.get("activation_bytes", 0.0) for mode in modes)])
            needed = working - (least if spare else 0.0)
            block["transient_bytes"] = max(block.get("transient_bytes", 0.0), needed)
    static = [own + held + max(kept[min(s, 1)], passing + largest) for s, own in enumerate(static)]
    return tails, static, ahead, {"encoders": encoders} if encoders else {}
