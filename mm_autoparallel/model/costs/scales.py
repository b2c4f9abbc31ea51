"""CostScales: what the times of single cost sources are multiplied by, to see what a step owes to each of them.

A source is a kind of block (its name is the kind's), or one of the names below. Blocks that were measured have their
collectives inside, so that the groups inside blocks move analytic and traced blocks alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.operators.analytic import Rates
from mm_autoparallel.model.profiles.collectives import OPERATIONS, Group

TENSOR_PARALLEL = "tensor_parallel"
CONTEXT_PARALLEL = "context_parallel"
EXPERT_EXCHANGE = "expert_exchange"
PIPELINE = "pipeline"
GRADIENT_REDUCTION = "gradient_reduction"
PARAMETER_GATHER = "parameter_gather"
EXPERT_REDUCTION = "expert_gradient_reduction"
EXPERT_GATHER = "expert_parameter_gather"
TIED_TABLE = "tied_table"
OPTIMIZER = "optimizer"

AFTER_BACKWARD = (
    GRADIENT_REDUCTION,
    PARAMETER_GATHER,
    EXPERT_REDUCTION,
    EXPERT_GATHER,
    TIED_TABLE,
    OPTIMIZER,
)
"""What makes the tail of a stage."""

_OUTSIDE_BLOCKS = (PIPELINE, *AFTER_BACKWARD)


@dataclass(frozen=True)
class CostScales:
    """Times of a source, messages and work as they are, take `time_factor` times as long; others stay.

    time_factor: name of a source and its factor, at least 0.
    """

    time_factor: tuple[tuple[str, float], ...] = ()

    def factor(self, name: str) -> float:
        """What times of the source called `name` are multiplied by."""
        return dict(self.time_factor).get(name, 1.0)

    @property
    def of_blocks(self) -> CostScales:
        """The part that has a say in the cost of a block."""
        return CostScales(tuple(item for item in self.time_factor if item[0] not in _OUTSIDE_BLOCKS))

    def scale_rates(self, rates: Rates) -> Rates:
        """`rates` with the groups inside blocks as they are scaled."""
        return replace(
            rates,
            tp_group=scale_group(rates.tp_group, self.factor(TENSOR_PARALLEL)),
            cp_group=scale_group(rates.cp_group, self.factor(CONTEXT_PARALLEL)),
            dealing_group=rates.dealing_group and scale_group(rates.dealing_group, self.factor(CONTEXT_PARALLEL)),
            passing_group=rates.passing_group and scale_group(rates.passing_group, self.factor(CONTEXT_PARALLEL)),
            ep_group=scale_group(rates.ep_group, self.factor(EXPERT_EXCHANGE)),
        )

    def scale_replicas(self, group: Group, strategy: Strategy, expert: bool = False) -> Group:
        """The group among which parameters are replicated, `expert`: routed experts; gathers are told by ZeRO."""
        reduction = self.factor(EXPERT_REDUCTION if expert else GRADIENT_REDUCTION)
        gather = self.factor(EXPERT_GATHER if expert else PARAMETER_GATHER) if strategy.zero else reduction
        if reduction == gather == 1.0:
            return group
        return replace(
            group, operation_factor={"all_reduce": reduction, "reduce_scatter": reduction, "all_gather": gather}
        )


UNSCALED = CostScales()


def scale_all(names: Iterable[str], factor: float) -> CostScales:
    """Every source of `names` by one factor."""
    return CostScales(tuple((name, factor) for name in names))


def scale_group(group: Group, factor: float) -> Group:
    """`group` with all its times multiplied."""
    return group if factor == 1.0 else replace(group, operation_factor=dict.fromkeys(OPERATIONS, factor))
