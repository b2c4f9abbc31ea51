"""Job: a model on a cluster with a workload, and the limits of the search; read from one YAML or JSON file."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from mm_autoparallel.model.job.arrangement import MODULE_KINDS, ModuleKind
from mm_autoparallel.model.job.cluster import Cluster
from mm_autoparallel.model.job.layer_modes import LAYER_MODES, LayerMode
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.model.job.precision import Precision
from mm_autoparallel.model.job.schedule_law import ALL, is_order_file, searched_schedules
from mm_autoparallel.model.job.sharding import ZERO_STAGES
from mm_autoparallel.model.job.stacks import Dispatcher, Graphs
from mm_autoparallel.model.job.step_end import StepEnd
from mm_autoparallel.model.job.strategy import DEFAULT_RANK_ORDER, RankOrder, Strategy
from mm_autoparallel.model.job.workload import ContextParallel, Overlap, Workload
from mm_autoparallel.pipeline.schedules.catalog import OF_JOBS
from mm_autoparallel.records import Count, FailurePrice, FitProbability, Flag, Noun, Number
from mm_autoparallel.samples.table import SampleTable
from mm_autoparallel.validation import nearest

USUAL_FAILURE_PRICE = 0.1
"""A start that runs out of memory costs a tenth of the run it was for (assumed). At this price no first pick of
published runs failed (docs/validation/fidelity.md)."""


BatchObjective = Literal["mean", "p95", "cvar"]
"""Of the step over drawn batches."""


class SearchSpace(Noun):
    """Limits of the search. Of pp, tp, cp, dp and mbs a missing list means every lawful value, of all else the usual.

    ep: expert parallel sizes. etp: ranks that share an expert (0: as TP). max_vpp: the most chunks a stage. zero: ZeRO
    stages to try. reshard: true, false or both, of ZeRO 3. shard: ranks that share one copy of its weights (0: all).
    cp_kind: how context parallel ranks share attention. optimizer_offload: whether the host keeps the optimizer's
    states. modes: in which a layer may run beside its own way (job/layer_modes.py), in the order in which the first
    layers of a stage (and chunk) take them. rank_order: which ranks have which part, by Megatron's names
    (job/strategy.py). sequence_parallel: with false among them also without it, where the workload has it. precision:
    those to try, in place of the workload's. schedule: those to try, or `all` that the workload's stack runs; nothing
    for each strategy's default; one may be a CSV of torch's, FILE.csv, with an order of your own. dispatcher, graphs,
    overlap_all_to_all: what experts' tokens are exchanged by, which CUDA graphs there are, what hides the exchange;
    nothing: as the workload has them (model/job/stacks.py). tp_overlap: whether products take tensor parallel traffic
    in pieces (mc2: MindSpeed's; user_buffers: TransformerEngine's). overlap_grad_reduce, overlap_param_gather,
    overlap_p2p: true, false or both, of what Workload calls so; nothing: as it has them (job/overlaps.py).
    layer_strategies: strategies too in which layers of
    one stage are shared in several ways, in all that tp, cp, dp, zero and reshard allow (model/job/layer_layout.py).
    layouts: of encoders and decoder: chain, colocated, disaggregated or all (model/job/arrangement.py); nothing: chain.
    encoder_cp: context parallel sizes of encoders with sizes of their own, in such layouts. encoder_pieces: into how
    many pieces, of whole layers, their passes in bubbles and as prefetch may be cut.
    devices: how many of the cluster's a plan may use; nothing: all.
    failure_price: what a start that runs out of memory costs, as a part of the run (search/caution.py; nothing: 0.1, or
    0 where fit_probability is given). fit_probability: plans that fit with less are left out. choice: robust weighs the
    best plans against what may be wrong with the rates that times stand on, point does not. objective: what the best
    plans are ranked by once more, of the step over drawn batches of workload.samples: its mean, p95, or cvar, the mean
    of its worst 5 %; nothing: the step of mean samples alone. step_end: barrier ranks plans by their steps, and
    post_validation by how far apart these are where no stage waits for others at their end (job/step_end.py).
    """

    pp: tuple[Count, ...] | None = Field(None, min_length=1)
    tp: tuple[Count, ...] | None = Field(None, min_length=1)
    cp: tuple[Count, ...] | None = Field(None, min_length=1)
    dp: tuple[Count, ...] | None = Field(None, min_length=1)
    mbs: tuple[Count, ...] | None = Field(None, min_length=1)
    ep: tuple[Count, ...] = Field((1,), min_length=1)
    etp: tuple[Number, ...] = Field((0,), min_length=1)
    max_vpp: Count = 1
    zero: tuple[Number, ...] = Field((1,), min_length=1)
    reshard: tuple[Flag, ...] = Field((True,), min_length=1)
    shard: tuple[Number, ...] = Field((0,), min_length=1)
    cp_kind: tuple[ContextParallel, ...] | None = Field(None, min_length=1)
    optimizer_offload: tuple[Flag, ...] = Field((False,), min_length=1)
    modes: tuple[LayerMode, ...] = ("recompute",)
    schedule: tuple[str, ...] | None = Field(None, min_length=1)
    rank_order: tuple[RankOrder, ...] = Field((DEFAULT_RANK_ORDER,), min_length=1)
    sequence_parallel: tuple[Flag, ...] = Field((True,), min_length=1)
    dispatcher: tuple[Dispatcher, ...] | None = Field(None, min_length=1)
    graphs: tuple[Graphs, ...] | None = Field(None, min_length=1)
    overlap_all_to_all: tuple[Overlap, ...] | None = Field(None, min_length=1)
    tp_overlap: tuple[Literal["none", "mc2", "user_buffers"], ...] | None = Field(None, min_length=1)
    overlap_grad_reduce: tuple[Flag, ...] | None = Field(None, min_length=1)
    overlap_param_gather: tuple[Flag, ...] | None = Field(None, min_length=1)
    overlap_p2p: tuple[Flag, ...] | None = Field(None, min_length=1)
    precision: tuple[Precision, ...] | None = Field(None, min_length=1)
    layer_strategies: Flag = False
    layouts: tuple[ModuleKind, ...] | Literal["all"] = Field(("chain",), min_length=1)
    encoder_cp: tuple[Count, ...] = Field((1,), min_length=1)
    encoder_pieces: tuple[Count, ...] = Field((1,), min_length=1)
    devices: tuple[Count, ...] | None = Field(None, min_length=1)
    failure_price: FailurePrice | None = None
    fit_probability: FitProbability | None = None
    choice: Literal["robust", "point"] = "robust"
    objective: BatchObjective | None = None
    step_end: StepEnd = "barrier"

    @property
    def kinds(self) -> tuple[ModuleKind, ...]:
        """`layouts`, all of them told."""
        return MODULE_KINDS if self.layouts == "all" else self.layouts

    @property
    def price(self) -> float:
        """`failure_price`, or what stands for it."""
        if self.failure_price is not None:
            return self.failure_price
        return 0.0 if self.fit_probability is not None else USUAL_FAILURE_PRICE

    @field_validator("zero")
    @classmethod
    def _check_zero(cls, zero: tuple[int, ...]) -> tuple[int, ...]:
        for stage in zero:
            if stage not in ZERO_STAGES:
                raise ValueError(f"ZeRO {stage} is not understood; known are {', '.join(map(str, ZERO_STAGES))}")
        return zero

    @field_validator("modes")
    @classmethod
    def _check_modes(cls, modes: tuple[LayerMode, ...]) -> tuple[LayerMode, ...]:
        twice = next((mode for mode in modes if modes.count(mode) > 1), None)
        if twice:
            raise ValueError(f"{twice} stands there twice; layers take each mode once, in this order")
        return modes

    @field_validator("schedule", mode="before")
    @classmethod
    def _list_schedules(cls, schedule: Any) -> Any:
        return (schedule,) if isinstance(schedule, str) else schedule

    @field_validator("schedule")
    @classmethod
    def _check_schedules(cls, schedules: tuple[str, ...] | None) -> tuple[str, ...] | None:
        named = schedules or ()
        files = [name for name in named if is_order_file(name)]
        if len(files) > 1:
            raise ValueError(f"{files[0]} and {files[1]} are two orders; a job takes one, beside names")
        for name in named:
            if name not in (*OF_JOBS, ALL, *files):
                known = f"{', '.join(OF_JOBS)}, {ALL} for every one, and FILE.csv for an order of your own"
                raise ValueError(f"{name!r} is no schedule{nearest(name, (*OF_JOBS, ALL))}; known are {known}")
            if name == ALL and len(named) > 1:
                raise ValueError(f"{ALL} stands there beside others, and stands for every schedule; name it alone")
        return schedules


@dataclass(frozen=True)
class Job:
    """What is planned. `profiles`: folders of measured costs. `warnings`: what looks odd in it, a sentence each.

    calibration: name or path, from the folder of `path`, of what analytic times stand on; None: that of the device.

    unstated: keys that would state what decides a step and is not said (model/job/unstated.py).

    samples: those of workload.samples, read or drawn; None where it names none.

    orders: of each stage in the CSV that search.schedule names, as schedules/action.py writes them.

    sha256: of the content of model, cluster and workload that has a say in any figure; names and sources have none.
    """

    model: Model
    cluster: Cluster
    workload: Workload
    profiles: tuple[Path, ...]
    search: SearchSpace
    path: Path
    sha256: str
    warnings: tuple[str, ...] = ()
    calibration: str | None = None
    unstated: tuple[str, ...] = ()
    samples: SampleTable | None = None
    orders: tuple[str, ...] = ()

    @property
    def schedules(self) -> tuple[str, ...]:
        """The schedules that its search looks at; an empty name stands for each strategy's default."""
        return searched_schedules(self.search.schedule, self.workload)

    @property
    def asks_low(self) -> bool:
        """Whether any linear layer may multiply in less than BF16."""
        return asks_low(self.search, self.workload)

    def used_by(self, strategy: Strategy) -> Job:
        """The job on the part of its cluster that `strategy` uses; this very one where that is all of it."""
        number, arrangement = strategy.world_size, strategy.arrangement
        if number == self.cluster.num_devices or (arrangement and self.cluster.uneven_reason(number)):
            return self
        return replace(self, cluster=self.cluster.resized(number))

    def with_modes(self, used: Collection[str]) -> Job:
        """The job whose layers may run in the modes `used` too, behind those that its search allows."""
        more = tuple(mode for mode in LAYER_MODES if mode in used and mode not in self.search.modes)
        if not more:
            return self
        return replace(self, search=self.search.model_copy(update={"modes": (*self.search.modes, *more)}))


def asks_low(search: SearchSpace, workload: Workload) -> bool:
    """Whether linear layers of the decoder may multiply in less than BF16."""
    return any(precision != "bf16" for precision in search.precision or (workload.precision,))
