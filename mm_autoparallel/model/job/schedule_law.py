"""The law of schedules: which of them a framework runs, with how many chunks a stage, and which a search looks at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mm_autoparallel.errors import PlanError
from mm_autoparallel.model.job.workload import Stack, Workload
from mm_autoparallel.pipeline.schedules.catalog import (
    FREE,
    GIVEN,
    OF_JOBS,
    OF_MICROBATCHES,
    SCHEDULES,
    V_CHUNKS,
    Schedule,
)
from mm_autoparallel.pipeline.schedules.orders import count_sizes

if TYPE_CHECKING:
    from mm_autoparallel.model.job.strategy import Strategy

ALL = "all"
"""What search.schedule says for every schedule that the job can be run under."""


@dataclass(frozen=True)
class Runs:
    """Schedules that a framework runs, and where that was read."""

    schedules: tuple[str, ...]
    source: str


_MEGATRON = Runs(
    ("1f1b", "interleaved_1f1b"),
    "Megatron-LM, megatron/core/pipeline_parallel/schedules.py, get_forward_backward_func: by VPP alone",
)
RUNS: dict[Stack, Runs] = {
    "megatron-te": _MEGATRON,
    "megatron-local": _MEGATRON,
    "megatron-deepspeed": Runs(("1f1b",), "deepspeedai/DeepSpeed, issues 1110 and 4035: its pipeline engine"),
    "mindspeed": Runs(
        (*_MEGATRON.schedules, "dualpipev", "dualpipev_whole"),
        "as Megatron-LM, and MindSpeed, core/pipeline_parallel/dualpipev: --schedules-method dualpipev, which parts "
        "the last backwards with --dualpipev-dw-detach",
    ),
    "mindspeed-mm": _MEGATRON,
    "mindspeed-fsdp": Runs(("1f1b",), "MindSpeed-MM, mindspeed_mm/fsdp: it has no pipeline"),
    "mindformers": Runs(OF_MICROBATCHES, "MindSpore, pipeline_config: gpipe, 1f1b and both interleaved orders"),
    "transformers": Runs(
        OF_JOBS, "PyTorch, torch/distributed/pipelining/schedules.py, _PipelineScheduleRuntime: any order it is given"
    ),
    "galvatron": Runs(("gpipe", "1f1b"), "Hetu-Galvatron, galvatron/core/runtime/pipeline/pipeline.py"),
}
"""Schedules of each framework that a job can name."""


def is_order_file(name: str) -> bool:
    """Whether an entry of search.schedule names no schedule, and a file with the order of one."""
    return name.endswith(".csv")


def searched_schedules(named: Sequence[str] | None, workload: Workload) -> tuple[str, ...]:
    """The schedules that a search looks at. named: its search.schedule; an empty name stands for each strategy's
    default. With `all`: those of the framework that the job names, and where it names none, all that a job can name.
    """
    if named is None:
        return ("",)
    if tuple(named) != (ALL,):
        return tuple(GIVEN if is_order_file(name) else name for name in named)
    return RUNS[workload.stack].schedules if "stack" in workload.model_fields_set else OF_JOBS


def schedule_reasons(workload: Workload, strategy: Strategy) -> Iterator[str]:
    """A schedule that is not known, runs another number of chunks, or is none of the framework that the job names:
    without a name, every schedule can be looked at. An order that is found takes equal micro-batches and one layout a
    layer, and has one chunk a stage or two, there and back.
    """
    name, vpp = strategy.schedule, strategy.vpp
    if name not in (*OF_JOBS, GIVEN):
        yield f"schedule {name!r} is not known; known are {', '.join(OF_JOBS)}"
        return
    schedule = SCHEDULES[name]
    if name == GIVEN:
        yield from _order_reasons(workload, strategy)
    elif name == FREE and vpp > V_CHUNKS:
        yield f"schedule {name} runs one chunk a stage, or {V_CHUNKS} there and back, and VPP is {vpp}"
    elif vpp > 1 and not schedule.interleaved and name != FREE:
        yield f"schedule {name} runs one chunk a stage, and VPP is {vpp}"
    elif schedule.v_shaped and vpp != 2:
        yield f"schedule {name} runs two chunks a stage, there and back, and VPP is {vpp}"
    elif vpp == 1 and schedule.interleaved and (schedule.splits or "stack" in workload.model_fields_set):
        yield f"schedule {name} runs several chunks a stage, and VPP is 1"
    num_microbatches = strategy.num_microbatches(workload.global_batch_size)
    if num_microbatches < schedule.least_rounds * strategy.pp:
        yield (
            f"schedule {name} on {strategy.pp} stages needs {schedule.least_rounds * strategy.pp} micro-batches or "
            f"more, and there are {num_microbatches}"
        )
    if schedule.given_by != "rule" and strategy.layouts:
        yield f"schedule {name} takes layers of one stage in one layout, and the strategy has several"
    yield from workload_reasons(workload, schedule)


def _order_reasons(workload: Workload, strategy: Strategy) -> Iterator[str]:
    """An order that is given has so many stages, chunks and micro-batches."""
    if not strategy.orders:
        yield f"schedule {GIVEN} has no order: name its CSV in search.schedule"
        return
    try:
        pp, vpp, count = count_sizes(strategy.orders)
    except PlanError as error:
        yield str(error)
        return
    own = strategy.num_microbatches(workload.global_batch_size)
    if (pp, vpp, count) != (strategy.pp, strategy.vpp, own):
        yield (
            f"the order that is given has PP {pp}, VPP {vpp} and {count} micro-batches, and this is PP {strategy.pp}, "
            f"VPP {strategy.vpp} and {own}"
        )


def workload_reasons(workload: Workload, schedule: Schedule) -> Iterator[str]:
    """What of a schedule no strategy of the workload can run."""
    uneven = [name for name, factors in workload.micro_batch_scale.items() if len({*factors}) > 1]
    if schedule.given_by == "placement" and uneven:
        yield (
            f"schedule {schedule.name} takes equal micro-batches, and workload.micro_batch_scale makes those of "
            f"{uneven[0]} unequal"
        )
    # who runs orders that are found runs those that are given
    name = FREE if schedule.name == GIVEN else schedule.name
    if "stack" in workload.model_fields_set and name not in RUNS[workload.stack].schedules:
        known = ", ".join(RUNS[workload.stack].schedules)
        yield f"schedule {schedule.name} is none that workload.stack {workload.stack} runs; it runs {known}"
