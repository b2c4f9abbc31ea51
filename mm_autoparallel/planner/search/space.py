"""The space: every strategy that a job's search limits allow, lawful or not.

All strategies use the whole cluster and process the same global batch. A list that the job leaves out means every value
that can be: PP, TP, CP and DP run over the divisors of the number of devices, MBS over those of the samples a replica
gets, chunks from 1 to max_vpp; EP, ETP, ZeRO and the choices beside them are the usual ones unless `search` names more.
What the model, the cluster or the framework forbid is not left out silently: it comes with its reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import product
from typing import Literal, NamedTuple

from mm_autoparallel.errors import JobError
from mm_autoparallel.model.job.job import Job, SearchSpace
from mm_autoparallel.model.job.overlaps import Overlaps, list_overlaps
from mm_autoparallel.model.job.precision import PRECISIONS, Precision
from mm_autoparallel.model.job.stacks import Dispatcher, FusedProducts, Graphs, StackFacts
from mm_autoparallel.model.job.step_end import step_end_reason
from mm_autoparallel.model.job.strategy import DEFAULT_RANK_ORDER, RANK_ORDERS, Strategy
from mm_autoparallel.model.job.strategy_law import Laws
from mm_autoparallel.model.job.workload import ContextParallel, Overlap
from mm_autoparallel.pipeline.schedules.catalog import GIVEN
from mm_autoparallel.planner.search.arrangements import Bough, Shape, Sizes, list_boughs

ONE_STAGE = "1f1b"
"""The order of one stage: a micro-batch forth and back, before the next."""


@dataclass(frozen=True)
class SpaceEntry:
    """One strategy of the space; `reason` says which rule it breaks, None where it is lawful."""

    strategy: Strategy
    reason: str | None


@lru_cache(maxsize=100_000)
def divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return tuple(dict.fromkeys((*small, *(number // n for n in reversed(small)))))


def strategy_key(strategy: Strategy) -> tuple[int | str, ...]:
    """The order of strategies: the plainer one first. Among equally fast plans the first in this order is taken."""
    return (
        strategy.vpp,
        strategy.pp,
        strategy.tp,
        strategy.cp,
        strategy.mbs,
        strategy.zero,
        strategy.ep,
        strategy.etp,
        not strategy.reshard,
        strategy.shard,
        strategy.cp_kind,
        strategy.optimizer_offload,
        not strategy.sequence_parallel,
        strategy.dispatcher,
        strategy.graphs,
        strategy.overlap_all_to_all,
        strategy.tp_overlap,
        *strategy.overlaps.key,
        PRECISIONS.index(strategy.precision) + 1 if strategy.precision else 0,
        strategy.schedule,
        list(RANK_ORDERS).index(strategy.rank_order),
        " ".join(layout.name for layout in strategy.layouts),
        strategy.arrangement.name if strategy.arrangement else "",
    )


def describe_strategy(strategy: Strategy) -> str:
    """`PP 8 TP 2 DP 4 MBS 1`, what else differs from 1 (ZeRO too), and choices and schedules that are unusual."""
    words = [f"PP {strategy.pp}", f"TP {strategy.tp}"]
    words += [f"CP {strategy.cp}"] if strategy.cp > 1 else []
    words += [f"DP {strategy.dp}", f"MBS {strategy.mbs}"]
    words += [f"EP {strategy.ep}"] if strategy.ep > 1 else []
    words += [f"ETP {strategy.etp}"] if strategy.etp not in (0, strategy.tp) else []
    words += [f"VPP {strategy.vpp}"] if strategy.vpp > 1 else []
    words += [f"ZeRO {strategy.zero}"] if strategy.zero != 1 else []
    words += strategy.choices
    plain = Strategy(strategy.pp, strategy.tp, strategy.dp, strategy.mbs, vpp=strategy.vpp)
    words += [strategy.schedule] if strategy.schedule != plain.schedule else []
    return " ".join(words)


def laws_of(job: Job) -> Laws:
    """What its strategies must obey."""
    return Laws(job.model, job.cluster, job.workload)


def judge(job: Job, strategy: Strategy, laws: Laws | None = None) -> SpaceEntry:
    """The strategy with the rule of `job` that it breaks, if it does. laws: the job's, where many are judged."""
    reason = (laws or laws_of(job)).unlawful_reason(strategy)
    return SpaceEntry(strategy, reason or step_end_reason(job.search.step_end, strategy))


def list_entries(
    job: Job,
    look: Callable[[], None] = lambda: None,
    boughs: Sequence[Bough] | None = None,
    with_several: bool = True,
) -> tuple[SpaceEntry, ...]:
    """Every strategy of `job` in the order of `strategy_key`, none or none that is lawful included. look: as below.
    boughs: whose strategies are meant, beside those of the chain (None: all). with_several: those too of a module for
    each encoder, of which there may be millions."""
    strategies = set()
    for num_devices in _numbers_of_devices(job) if "chain" in job.search.kinds else ():
        for strategy in _combine(job, num_devices):
            look()
            strategies.add(strategy)
    for strategy in _list_arranged(list_all_boughs(job, look) if boughs is None else boughs, with_several):
        look()
        strategies.add(strategy)
    in_order = sorted(strategies, key=lambda strategy: (strategy_key(strategy), strategy.world_size))
    entries, laws = [], laws_of(job)
    for strategy in in_order:
        look()
        entries.append(judge(job, strategy, laws))
    if job.search.layer_strategies:
        entries += [judge(job, strategy, laws) for strategy in sorted(_list_layer_wise(entries), key=strategy_key)]
    return tuple(entries)


def list_all_boughs(job: Job, look: Callable[[], None] = lambda: None) -> tuple[Bough, ...]:
    """Every bough of `job`: none where search.layouts names the chain alone. look: as below."""
    found, given = [], (partial(_list_sizes, job), partial(_choose_all, job), divisors)
    for num_devices in _numbers_of_devices(job) if job.search.kinds != ("chain",) else ():
        for bough in list_boughs(job, num_devices, *given):
            look()
            found.append(bough)
    return tuple(found)


def decoders_of(job: Job, shape: Shape) -> Iterator[Strategy]:
    """Decoders of one stage and replica, of this TP, CP and MBS, with all that may be chosen beside, lawful or not."""
    tp, cp, mbs = shape
    return iter(dict.fromkeys(_choose_all(job, Sizes(1, tp, cp, 1, mbs))))


def _numbers_of_devices(job: Job) -> tuple[int, ...]:
    return job.search.devices or (job.cluster.num_devices,)


def _list_layer_wise(entries: Sequence[SpaceEntry]) -> Iterator[Strategy]:
    """Each lawful strategy once more with all layouts that other lawful ones of its stages and samples have."""
    alike: dict[Strategy, list[Strategy]] = {}
    for strategy in (entry.strategy for entry in entries if entry.reason is None):
        if strategy.vpp == 1 and not strategy.shard and not strategy.etp:
            devices, samples = strategy.layout.num_devices, strategy.mbs * strategy.dp
            shape = replace(strategy, tp=1, cp=1, cp_kind="", dp=devices, mbs=samples, zero=1, reshard=True)
            alike.setdefault(shape, []).append(strategy)
    for members in alike.values():
        kinds = list(dict.fromkeys(member.cp_kind for member in members if member.cp > 1)) or [members[0].cp_kind]
        for member, kind in product(members, kinds):
            if member.cp > 1 and member.cp_kind != kind:
                continue
            near = {other.layout for other in members if other.cp == 1 or other.cp_kind == kind} - {member.layout}
            if near:
                yield replace(member, cp_kind=kind, layouts=tuple(sorted(near)))


def _list_arranged(boughs: Sequence[Bough], with_several: bool = True) -> Iterator[Strategy]:
    branches = (branch for bough in boughs for branch in bough.branches())
    return (strategy for branch in branches for strategy in branch.strategies(with_several))


def list_space(
    job: Job, look: Callable[[], None] = lambda: None, boughs: Sequence[Bough] | None = None
) -> tuple[SpaceEntry, ...]:
    """Every strategy of `job` in the order of `strategy_key`. look: called for each, to raise what should end it.
    boughs: those of the job, whose strategies are left out; then none need be lawful of those that are listed, where
    one of theirs is.

    Raises JobError where no product of the limits makes the number of devices, or where not one strategy is lawful.
    """
    limits, num_devices = job.search, job.cluster.num_devices
    entries = list_entries(job, look, None if boughs is None else ())
    laws = laws_of(job)
    for one in _list_arranged(boughs or ()):
        look()
        if judge(job, one, laws).reason is None:
            return entries
    if boughs:
        entries = list_entries(job, look)
    if not entries:
        given = {"pp": limits.pp, "tp": limits.tp, "cp": limits.cp, "dp": limits.dp}
        named = ", ".join(f"search.{name} {list(sizes)}" for name, sizes in given.items() if sizes is not None)
        raise JobError(
            f"within {named} no PP x TP x CP x DP makes the cluster's {num_devices} devices; "
            f"sizes that divide {num_devices} would do",
            where=f"job file {job.path}",
        )
    if all(entry.reason for entry in entries):
        reasons = [entry.reason or "" for entry in entries]
        told = max(dict.fromkeys(reasons), key=reasons.count)
        raise JobError(
            f"none of the {len(entries)} strategies within the limits of search is lawful; "
            f"{reasons.count(told)} of them because {told}",
            where=f"job file {job.path}",
        )
    return entries


def _combine(job: Job, num_devices: int) -> Iterator[Strategy]:
    for sizes in _list_sizes(job, num_devices):
        yield from _choose_all(job, sizes)


def _list_sizes(job: Job, num_devices: int, breaks: Callable[[Sizes], bool] = lambda _: False) -> Iterator[Sizes]:
    """Those within the limits, without those of which a law breaks even the smallest micro-batch."""
    limits, batch, every = job.search, job.workload.global_batch_size, divisors(num_devices)
    for pp in limits.pp or every:
        for tp in limits.tp or every:
            for cp in (limits.cp or every) if num_devices % (pp * tp) == 0 else ():
                dp, rest = divmod(num_devices, pp * tp * cp)
                if rest or (limits.dp is not None and dp not in limits.dp) or breaks(Sizes(pp, tp, cp, dp, 1)):
                    continue
                for mbs in limits.mbs or divisors(batch // dp if batch % dp == 0 else 1):
                    yield Sizes(pp, tp, cp, dp, mbs)


def _choose_all(job: Job, sizes: Sizes, is_meant: Callable[[str], bool] = lambda _: True) -> Iterator[Strategy]:
    """All strategies of these sizes, under those of the search's schedules that are meant."""
    limits, schedules = job.search, job.schedules
    most_chunks = min(limits.max_vpp, job.model.num_layers)  # each chunk holds a layer
    pp, tp, cp, dp, mbs = sizes
    for ep, vpp in product(limits.ep, range(1, most_chunks + 1)):
        plain = Strategy(pp, tp, dp, mbs, cp=cp, ep=ep, vpp=vpp, schedule=ONE_STAGE)
        chosen = [vars(strategy) for strategy in dict.fromkeys(_choose_beside(job, plain))]
        # in one stage no order is faster than this one, or keeps less
        one_stage = pp == 1 and ONE_STAGE in schedules
        for schedule in (ONE_STAGE,) if one_stage else schedules:
            if is_meant(schedule):
                of_order = {"schedule": schedule, "orders": job.orders if schedule == GIVEN else ()}
                for fields in chosen:
                    yield Strategy(**{**fields, **of_order})


def _choose_beside(job: Job, plain: Strategy) -> Iterator[Strategy]:
    """All that may be chosen beside a strategy's sizes, whatever its schedule."""
    limits, facts = job.search, job.workload.known_facts
    no_overlap: tuple[Overlap | Literal[""], ...] = ("",)
    not_fused: tuple[FusedProducts, ...] = ("",)
    of_stacks = tuple(
        product(
            limits.dispatcher or ("",),
            limits.graphs or ("",),
            limits.overlap_all_to_all or no_overlap,
            limits.tp_overlap or not_fused,
            list_overlaps(limits),
        )
    )
    for choices in _Choices.every(limits):
        chosen = _choose(job, plain, choices)
        for of_stack in of_stacks:
            yield _choose_of_stack(job, chosen, facts, *of_stack)


class _Choices(NamedTuple):
    """What may be chosen beside sizes, by the names that the search's limits and strategies have for it."""

    zero: int
    etp: int
    reshard: bool
    shard: int
    cp_kind: ContextParallel | Literal[""]
    optimizer_offload: bool
    rank_order: str
    sequence_parallel: bool
    precision: Precision | Literal[""]

    @classmethod
    def every(cls, limits: SearchSpace) -> list[_Choices]:
        """All within the limits, the last choice changing first."""
        return [cls(*each) for each in product(*(getattr(limits, name) or ("",) for name in cls._fields))]


def _choose(job: Job, sized: Strategy, choices: _Choices) -> Strategy:
    """`sized` with choices that mean nothing for it at their defaults, so that no strategy has two forms."""
    zero = choices.zero
    if zero == 0 and 1 in job.search.zero and sized.dp * sized.cp == 1 and choices.etp in (0, sized.tp):
        zero = 1  # one replica has nothing to divide
    return replace(
        sized,
        zero=zero,
        etp=0 if choices.etp == sized.tp else choices.etp,
        reshard=choices.reshard or zero != 3,
        shard=0 if zero != 3 or choices.shard == sized.dp * sized.cp else choices.shard,
        cp_kind=choices.cp_kind if sized.cp > 1 else "",
        optimizer_offload=choices.optimizer_offload,
        # with one stage or one replica every order is the same
        rank_order=choices.rank_order if sized.pp > 1 and sized.dp > 1 else DEFAULT_RANK_ORDER,
        sequence_parallel=choices.sequence_parallel or not sized.divides_sequences(job.workload),
        precision="" if choices.precision == job.workload.precision else choices.precision,
    )


def _choose_of_stack(
    job: Job,
    strategy: Strategy,
    facts: StackFacts,
    dispatcher: Dispatcher,
    graphs: Graphs,
    overlap: Overlap | Literal[""],
    fused: FusedProducts,
    overlaps: Overlaps,
) -> Strategy:
    """`strategy` with what its stack does by choice; what the workload does anyway (its `facts`), or nothing is
    exchanged for, is left empty."""
    if not (dispatcher or graphs or overlap or fused or overlaps.chosen):
        return strategy
    overlap = overlap if strategy.ep > 1 and overlap != job.workload.overlap_all_to_all else ""
    return replace(
        strategy,
        dispatcher=dispatcher if dispatcher != facts.dispatcher else "",
        graphs=graphs if graphs != facts.graphs else "",
        overlap_all_to_all=overlap,
        tp_overlap=fused if strategy.tp > 1 and fused != (facts.tp_overlap or "none") else "",
        overlaps=overlaps.meant_for(strategy),
    )
