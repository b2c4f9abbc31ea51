"""What a plan decides, variable by variable: its range in a job, and whether a search or the job decides it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.planner.explain.modules import list_branches, list_new, list_owns
from mm_autoparallel.planner.search.space import list_all_boughs


@dataclass(frozen=True)
class Variable:
    """One of them. where: the key of a job or a plan that has it. values: what it may be in this job, in words; a
    search looks at them all where `searched`, else they are the job's."""

    name: str
    where: str
    values: str
    searched: bool

    def document(self) -> dict[str, Any]:
        """As `explain --space --json` prints it."""
        return {"name": self.name, "where": self.where, "values": self.values, "searched": self.searched}


_Figure = tuple[str, str, Callable[[Strategy], Any]]
"""A variable's name, where it stands, and what a strategy has."""

_OF_STRATEGY: tuple[_Figure, ...] = (
    ("tensor parallel size", "search.tp", lambda one: one.tp),
    ("sequence parallelism beside it", "search.sequence_parallel", lambda one: one.sequence_parallel),
    ("pipeline stages", "search.pp", lambda one: one.pp),
    ("chunks a stage", "search.max_vpp", lambda one: one.vpp),
    ("order of micro-batches", "search.schedule", lambda one: one.schedule),
    ("context parallel size", "search.cp", lambda one: one.cp),
    ("how attention is shared in it", "search.cp_kind", lambda one: one.cp_kind),
    ("expert parallel size", "search.ep", lambda one: one.ep),
    ("ranks that share an expert", "search.etp", lambda one: one.expert_tp),
    ("replicas", "search.dp", lambda one: one.dp),
    ("samples of a micro-batch", "search.mbs", lambda one: one.mbs),
    ("ZeRO stage", "search.zero", lambda one: one.zero),
    ("weights given up after the forward (ZeRO 3)", "search.reshard", lambda one: one.reshard),
    ("ranks that share a copy of the weights (ZeRO 3)", "search.shard", lambda one: one.shard),
    ("optimizer on the host", "search.optimizer_offload", lambda one: one.optimizer_offload),
    ("number type of linear layers", "search.precision", lambda one: one.precision),
    ("what takes tokens to experts", "search.dispatcher", lambda one: one.dispatcher),
    ("what hides that exchange", "search.overlap_all_to_all", lambda one: one.overlap_all_to_all),
    ("products in pieces beside TP's traffic", "search.tp_overlap", lambda one: one.tp_overlap),
    ("CUDA graphs", "search.graphs", lambda one: one.graphs),
    ("which rank has which part", "search.rank_order", lambda one: one.rank_order),
    ("devices in use", "search.devices", lambda one: one.world_size),
    (
        "layout of encoder and decoder",
        "search.layouts",
        lambda one: one.arrangement.kind if one.arrangement else "chain",
    ),
    (
        "context parallel size of encoders in such layouts",
        "search.encoder_cp",
        lambda one: max(each.encoder.cp for each in one.arrangement.each) if one.arrangement else 1,
    ),
    (
        "pieces of encoders' passes beside the pipeline",
        "search.encoder_pieces",
        lambda one: max(each.encoder.pieces for each in one.arrangement.each) if one.arrangement else 1,
    ),
    ("layers of one stage shared in several ways", "search.layer_strategies", lambda one: bool(one.layouts)),
)

_OF_OVERLAPS = {
    "overlap_grad_reduce": "gradients reduced behind the backward",
    "overlap_param_gather": "weights gathered behind the forward",
    "overlap_p2p": "transfers between stages beside compute",
}
_OF_ENCODER = (
    ("pipeline stages", "pp"),
    ("tensor parallel size", "tp"),
    ("context parallel size", "cp"),
    ("replicas", "dp"),
    ("samples at once", "mbs"),
    ("pieces of a pass", "pieces"),
)


def list_variables(job: Job, look: Callable[[], None] = lambda: None) -> tuple[Variable, ...]:
    """All variables of `job`. look: called for each strategy, to raise what should end it."""
    every = *_OF_STRATEGY, *_list_of_workload(job)
    found: list[set[Any]] = [set() for _ in every]

    def is_new(strategy: Strategy) -> bool:
        look()
        return any(value(strategy) not in values for values, (_, _, value) in zip(found, every, strict=True))

    def learn(strategies: Iterable[Strategy]) -> None:
        for strategy in strategies:
            for values, (_, _, value) in zip(found, every, strict=True):
                values.add(value(strategy))

    learn(list_new(job, is_new, look))
    return (
        *(_of_strategy(name, where, values) for values, (name, where, _) in zip(found, every, strict=True)),
        *_list_of_encoders(job, look), *_list_placed(job), *_list_fixed(job),
    )  # fmt: skip


def _list_of_workload(job: Job) -> Iterator[_Figure]:
    """What strategies have beside a workload; of overlaps what a search may choose, or what that has."""
    batch, where = job.workload.global_batch_size, "follows from replicas and samples"
    yield "micro-batches of a step", where, lambda one: one.num_microbatches(batch)
    for key, name in _OF_OVERLAPS.items():
        yield name, f"search.{key}", partial(_overlap, job.workload, key)


def _overlap(workload: Workload, key: str, strategy: Strategy) -> bool:
    return bool(getattr(strategy.overlaps.of(workload), key))


def _of_strategy(name: str, where: str, values: set[Any]) -> Variable:
    words = [_say(value) for value in sorted(values, key=lambda value: (isinstance(value, str), value))]
    return Variable(name, where, ", ".join(words) or "none is lawful", len(values) > 1)


def _say(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value) if value != "" else "as the workload has it"


def _list_of_encoders(job: Job, look: Callable[[], None]) -> Iterator[Variable]:
    """What layouts decide of each encoder by itself; nothing where the search has the chain alone."""
    chain = {"chain"} & set(job.search.kinds)
    for name, every in list_owns(job, list_branches(list_all_boughs(job, look)), look).items():
        if every:
            yield _of_strategy(f"how {name} runs", "search.layouts", {own.layout for own in every} | chain)
        for words, key in _OF_ENCODER if every else ():
            where = f"layout.modules.{name}.{key if key == 'pieces' else key.upper()}"
            yield _of_strategy(f"{words} of {name} in such a layout", where, {getattr(own, key) for own in every})


def _list_placed(job: Job) -> Iterator[Variable]:
    """What placement decides within a strategy."""
    for modality in job.model.modalities:
        number = modality.layers.num_layers
        yield Variable(
            f"{modality.name} layers of each stage and chunk",
            "layer_placement",
            f"0 to {number}, {number} in all",
            True,
        )
        for mode in job.search.modes:
            where = "layer_recompute" if mode == "recompute" else f"layer_modes.{mode}"
            name = f"{modality.name} layers of each stage and chunk in the mode {mode}"
            yield Variable(name, where, "0 to the layers there", True)
    yield Variable("what ends a step", "search.step_end", job.search.step_end, False)
    yield Variable("modes a layer may run in", "search.modes", ", ".join(job.search.modes) or "none", False)


def _list_fixed(job: Job) -> Iterator[Variable]:
    """What the workload or the code that trains has, and no search changes."""
    workload = job.workload

    def fixed(name: str, key: str, value: object) -> Variable:
        return Variable(name, f"workload.{key}", _say(value), searched=False)

    yield fixed("samples of a step", "global_batch_size", workload.global_batch_size)
    yield fixed(
        "operators that selective layers run again", "selective_operators", _words(workload.selective_operators)
    )
    yield fixed("operators that every layer runs again", "recompute_operators", _words(workload.recompute_operators))
    yield fixed("attention kernel", "attention", workload.attention)
    yield fixed("whose layer with experts runs", "ep_kind", workload.ep_kind)
    yield fixed("tokens rearranged before their experts", "token_rearrange", workload.token_rearrange)
    yield fixed("products beside TP's collectives", "fused_matmul_fraction", workload.fused_matmul_fraction)
    yield fixed("gradients summed inside products", "gradient_fusion", workload.gradient_fusion)
    yield fixed("loss", "cross_entropy", workload.cross_entropy)
    yield Variable("MLP fusion", "workload.stack", f"as {workload.stack} has it", False)
    yield Variable("bucket of gradients", "no key", "not planned: reductions are counted whole", False)


def _words(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "none"
