"""The law of schedules: which of them a framework runs, and with how many chunks a stage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mm_autoparallel.model.job.workload import Stack, Workload
from mm_autoparallel.pipeline.schedules.catalog import OF_JOBS, OF_MICROBATCHES, SCHEDULES

if TYPE_CHECKING:
    from mm_autoparallel.model.job.strategy import Strategy

_RUNS: dict[Stack, tuple[str, ...]] = {
    "megatron-te": ("1f1b", "interleaved_1f1b"),
    "megatron-local": ("1f1b", "interleaved_1f1b"),
    "megatron-deepspeed": ("1f1b",),
    "mindspeed": ("1f1b", "interleaved_1f1b"),
    "mindspeed-mm": ("1f1b", "interleaved_1f1b"),
    "mindspeed-fsdp": ("1f1b",),
    "mindformers": OF_MICROBATCHES,
    "transformers": OF_JOBS,
    "galvatron": ("gpipe", "1f1b"),
}
"""Schedules of each framework: Megatron-LM's, and so MindSpeed's, by VPP alone (core/pipeline_parallel/schedules.py,
get_forward_backward_func); of DeepSpeed's pipeline engine 1F1B (deepspeedai/DeepSpeed, issues 1110 and 4035); MindSpore
takes GPipe, 1F1B and both interleaved orders; torch plays any order that it is given (torch/distributed/pipelining/
schedules.py, _PipelineScheduleRuntime); Galvatron GPipe and 1F1B (core/runtime/pipeline/pipeline.py)."""


def schedule_reasons(workload: Workload, strategy: Strategy) -> Iterator[str]:
    """A schedule that is not known or runs another number of chunks; or that the framework does not run, where the job
    names one: without a name, every schedule can be looked at.
    """
    name, vpp, stack = strategy.schedule, strategy.vpp, workload.stack
    schedule = SCHEDULES[name] if name in OF_JOBS else None
    if schedule is None:
        yield f"schedule {name!r} is not known; known are {', '.join(OF_JOBS)}"
    elif vpp > 1 and not schedule.interleaved:
        yield f"schedule {name} runs one chunk a stage, and VPP is {vpp}"
    elif schedule.v_shaped and vpp != 2:
        yield f"schedule {name} runs two chunks a stage, there and back, and VPP is {vpp}"
    elif "stack" not in workload.model_fields_set:
        return
    elif vpp == 1 and schedule.interleaved:
        yield f"schedule {name} runs several chunks a stage, and VPP is 1"
    elif name not in _RUNS[stack]:
        yield f"schedule {name} is none that workload.stack {stack} runs; it runs {', '.join(_RUNS[stack])}"
