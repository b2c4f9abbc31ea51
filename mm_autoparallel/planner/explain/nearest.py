"""The strategy that a person means who changes some sizes of another: those, and else as little as may be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace

from mm_autoparallel.errors import PlanError
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.job.arrangement import ENCODER_RUNS, Arrangement
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.planner.explain.modules import LAYOUT, Own, Wish, list_branches
from mm_autoparallel.planner.explain.why_not import describe_wish, match_strategies
from mm_autoparallel.planner.first_plan import first_plan
from mm_autoparallel.planner.plan import Plan
from mm_autoparallel.planner.search.arrangements import Branch, combine, is_as_decoder, is_lawful_beside
from mm_autoparallel.planner.search.space import judge, strategy_key

_DERIVED = ("dp", "schedule", "orders", "arrangement")
"""What follows from the other fields, DP once all of these are alike, and so is no likeness; encoders are looked at one
by one."""


def resize_plan(job: Job | CostModel, present: Strategy, wish: Wish, flag: str = "--sizes") -> Plan:
    """A first plan of the strategy that `nearest_strategy` finds. Raises as it and `first_plan` do."""
    costs = CostModel.of(job)
    return first_plan(costs, nearest_strategy(costs.job, present, wish, flag))


def change_sizes(job: Job | CostModel, plan: Plan, wish: Wish, flag: str = "--sizes") -> Plan:
    """`plan` itself where the strategy that is meant is its own, else as resize_plan."""
    costs, present = CostModel.of(job), plan.strategy
    meant = nearest_strategy(costs.job, present, wish, flag)
    return plan if replace(meant, orders=()) == replace(present, orders=()) else first_plan(costs, meant)


def nearest_strategy(job: Job, present: Strategy, wish: Wish, flag: str = "--sizes") -> Strategy:
    """The lawful strategy with the sizes of `wish` that is most like `present`: in how its encoders run, then in the
    decoder's fields, then in the encoders' sizes; of equally near ones the plainest. flag: what messages call the wish.

    Raises PlanError with the law against it where none is lawful, JobError where no product of sizes makes the devices.
    """
    chain, boughs, _ = match_strategies(job, wish, flag, lazily=True)
    near = _Nearness(job, present, wish)
    lawful = (entry.strategy for entry in chain if entry.reason is None)
    best = min(lawful, key=near.distance, default=None)
    for branch in sorted(list_branches(boughs), key=near.least):
        if best is not None and near.least(branch) > near.distance(best)[:3]:
            break
        ways = sorted(filter(branch.is_meant, near.list_ways(branch)), key=near.distance)
        found = next((one for one in ways if judge(job, one).reason is None), None)
        best = min(filter(None, (best, found)), key=near.distance, default=None)
    if best is not None:
        return best
    entries, _, _ = match_strategies(job, wish, flag)
    if not entries:
        raise PlanError(f"{flag} {describe_wish(wish)}: no choice for the encoders is lawful together with it")
    closest = min(entries, key=lambda entry: near.distance(entry.strategy))
    raise PlanError(f"{flag} {describe_wish(wish)}: {closest.reason}")


class _Nearness:
    """How like `present` strategies are, but for what a wish names."""

    def __init__(self, job: Job, present: Strategy, wish: Wish) -> None:
        self._job, self._present, self._wish = job, present, wish
        self._kept = [field.name for field in fields(Strategy) if field.name not in (*wish, *_DERIVED)]
        self._own = {encoder.name: Own.of(present, encoder.name) for encoder in getattr(job.model, "encoders", ())}

    def distance(self, strategy: Strategy) -> tuple[int, int, bool, int, bool, tuple[int | str, ...]]:
        """Less is nearer."""
        unlike = [own.differs(Own.of(strategy, name)) for name, own in self._own.items()]
        runs, sizes = (sum(each) for each in zip(*unlike, strict=True)) if unlike else (0, 0)
        is_other = strategy.arrangement != self._present.arrangement
        return runs, *self._differs(strategy.of_decoder()), sizes, is_other, strategy_key(strategy)

    def _differs(self, decoder: Strategy) -> tuple[int, bool]:
        """How unlike decoders are: in what is kept, then whether in DP."""
        present = self._present.of_decoder()
        return sum(getattr(decoder, name) != getattr(present, name) for name in self._kept), decoder.dp != present.dp

    def least(self, branch: Branch) -> tuple[int, int, bool]:
        """Of distances of its strategies the first parts are no less."""
        runs = sum(self._runs_otherwise(name, own, name in branch.apart) for name, own in self._own.items())
        some = self._present.arrangement is None  # then some encoder is in the chain no more
        return max(runs, some), *self._differs(branch.decoder)

    def _runs_otherwise(self, name: str, own: Own, apart: bool) -> bool:
        """Whether an encoder, now `own`, runs otherwise where it is apart or not, and as the wish says."""
        wanted = self._wish.get(f"{name}.{LAYOUT}", "")
        return (own.layout == "disaggregated") != apart or wanted in {*ENCODER_RUNS[1:]} - {own.layout}

    def list_ways(self, branch: Branch) -> Iterator[Strategy]:
        """Of a branch's strategies those that may be nearest."""
        yield from branch.together()
        for options in branch.several():
            yield from combine(branch.decoder, tuple(self._list_nearest(branch.decoder, each) for each in options))

    def _list_nearest(self, decoder: Strategy, options: Sequence[Arrangement]) -> tuple[Arrangement, ...]:
        """Of one module's options the lawful one that is nearest, of each way to run and number of stages."""

        def unlike(one: Arrangement) -> tuple[int, int, bool, str]:
            present = self._present.arrangement.each if self._present.arrangement else ()
            own = self._own[one.encoder.name]
            return *own.differs(Own.beside(decoder, one)), one not in present, one.name

        found: dict[object, Arrangement] = {}
        for one in sorted(options, key=unlike):
            way = one.kind, one.encoder_run, one.num_stages_apart, is_as_decoder(decoder, one), one.in_chain
            if way not in found and is_lawful_beside(self._job, decoder, one):
                found[way] = one
        return tuple(found.values())
