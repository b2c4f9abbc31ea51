"""Which ranks communicate with each other under a strategy: the one place that decides it.

The groups are those of Megatron-LM (core/parallel_state.py, RankGenerator): attention and all else that is not a routed
expert divide a stage into TP, CP and DP, routed experts divide the same ranks into ETP, EP and the replicas of a part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mm_autoparallel.model.job.strategy import Strategy

GroupName = Literal["TP", "CP", "DP", "EP", "expert DP", "shard", "copies"]


@dataclass(frozen=True)
class Ranks:
    """A group and all others like it: `size` ranks `stride` apart, and num_runs such runs, run_stride apart."""

    size: int
    stride: int
    num_runs: int = 1
    run_stride: int = 0

    @property
    def num_ranks(self) -> int:
        return self.size * self.num_runs


def group_ranks(strategy: Strategy, name: GroupName) -> Ranks:
    """The ranks of the group called `name`. DP: all that hold the same weights, context parallel ones included.

    shard: those that share one copy of the weights; copies: those that hold the same shard (Strategy.shard, PP 1).
    """
    if name == "TP":
        return Ranks(strategy.tp, strategy.stride_of("tp"))
    if name == "CP":
        return Ranks(strategy.cp, strategy.stride_of("cp"))
    if name == "EP":
        return Ranks(strategy.ep, strategy.expert_tp)
    if name == "shard":
        return Ranks(strategy.shard_ranks, strategy.tp)
    if name == "copies":
        return Ranks(strategy.dp * strategy.cp // strategy.shard_ranks, strategy.tp * strategy.shard_ranks)
    cp_stride, dp_stride, pp_stride = (strategy.stride_of("cp"), strategy.stride_of("dp"), strategy.stride_of("pp"))
    if name == "expert DP":
        inner = strategy.ep * strategy.expert_tp
        return Ranks(strategy.expert_dp, inner if dp_stride <= pp_stride else inner * strategy.pp)
    if strategy.cp == 1 or strategy.dp == 1 or dp_stride == strategy.cp * cp_stride:
        return Ranks(strategy.cp * strategy.dp, cp_stride if strategy.cp > 1 else dp_stride)
    return Ranks(strategy.cp, cp_stride, strategy.dp, dp_stride)
