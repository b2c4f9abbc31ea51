"""MindSpeed's DualPipeV, and its exchange of tokens beside other micro-batches, as a launch script says them.

What they ask for: DualpipeVFeature and MoEFwdBwdOverlapFeature (mindspeed/features_manager, 26.1.0_core_r0.12.1). The
order of stages is that of pipeline/schedules/dualpipev.py; stages hold equal chunks, the second of which counts back
(core/pipeline_parallel/dualpipev, get_transformer_layer_offset).
"""

from __future__ import annotations

from collections.abc import Iterator

from mm_autoparallel.errors import PlanError
from mm_autoparallel.integrations.megatron_core import flags
from mm_autoparallel.integrations.megatron_core.decided import RECOMPUTE_BESIDE, TEXT, Decided
from mm_autoparallel.integrations.megatron_core.passed import Passed
from mm_autoparallel.model.job.strategy import Strategy

METHOD, PARTED, BESIDE = "--schedules-method", "--dualpipev-dw-detach", "--moe-fb-overlap"
SWITCHES = (PARTED, BESIDE)
MARKS = (METHOD, *SWITCHES)
CHUNKS = 2
"""Of each stage under DualPipeV."""
_DUALPIPEV, _WHOLE = "dualpipev", "dualpipev_whole"
ALLOWS = frozenset({_DUALPIPEV, _WHOLE, RECOMPUTE_BESIDE})
"""What of a plan MindSpeed runs and Megatron-LM does not."""

_OTHER_CHUNKS = (
    *(flags.CHUNKS, flags.LAYERS_PER_CHUNK, flags.LAYOUT, "--num-layer-list", "--pipeline-num-transformer-layers"),
    "--virtual-pipeline-model-parallel-size",
)
_APART = f"goes with gradients that are reduced after the last backward; take {flags.OVERLAP_REDUCE} out"


def is_v(passed: Passed) -> bool:
    """Whether its stages run DualPipeV. Raises PlanError for another order, and beside what its parser refuses."""
    said = passed.text(METHOD)
    if said is None:
        return False
    if said != _DUALPIPEV:
        raise PlanError(f"{passed.where}: {METHOD} is {said}; {_DUALPIPEV} is expected")
    other = next((flag for flag in _OTHER_CHUNKS if passed.has(flag)), None)
    if other:
        raise PlanError(f"{passed.where}: {METHOD} {said} divides layers by itself; take {other} out")
    for flag in (flags.PIPELINE, flags.CONTEXT):
        size = passed.number(flag) or 1
        if (size == 1) == (flag == flags.PIPELINE):
            bound = "above 1" if flag == flags.PIPELINE else "1"
            raise PlanError(f"{passed.where}: {METHOD} {said} asks for {flag} {bound}, and it is {size}")
    return True


def read(passed: Passed, layout: flags.Values) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Order and overlap in the flags of this package. layout: what says the chunks' layers otherwise, empty: nothing.

    Raises PlanError as `is_v`, and for gradients that are reduced on their way.
    """
    if passed.has(flags.OVERLAP_REDUCE):
        first = next((flag for flag in (METHOD, BESIDE) if passed.has(flag)), None)
        if first:
            raise PlanError(f"{passed.where}: {first} {_APART}")
    if is_v(passed):
        yield flags.SCHEDULE, (_DUALPIPEV if passed.has(PARTED) else _WHOLE,)
        if not layout:
            yield flags.CHUNKS, (str(CHUNKS),)
    if passed.has(BESIDE):
        yield flags.BATCH_OVERLAP, ()


def write_schedule(values: dict[str, tuple[str, ...] | None], decided: Decided) -> dict[str, tuple[str, ...] | None]:
    """`values` with the plan's order. Raises PlanError where MindSpeed's DualPipeV cannot run the plan."""
    plan = decided.plan
    strategy, counts = plan.strategy, plan.layers[TEXT]
    if strategy.schedule not in (_DUALPIPEV, _WHOLE):
        return values | dict.fromkeys((METHOD, PARTED))
    if len({*counts}) > 1:
        raise PlanError(
            f"plan: under {strategy.schedule} its chunks hold {', '.join(map(str, counts))} layers, and MindSpeed's "
            "DualPipeV gives each as many; edit the plan so"
        )
    if strategy.cp > 1:
        raise PlanError(f"plan: CP {strategy.cp} under {strategy.schedule}, which MindSpeed refuses; plan with CP 1")
    if values.get(flags.OVERLAP_REDUCE) is not None:
        raise PlanError(f"plan: {METHOD} {_DUALPIPEV} {_APART}, or plan with workload.overlap_grad_reduce false")
    values |= dict.fromkeys((flags.CHUNKS, flags.LAYERS_PER_CHUNK, flags.LAYOUT))
    return values | {METHOD: (_DUALPIPEV,), PARTED: () if strategy.schedule == _DUALPIPEV else None}


def write_overlap(values: flags.Values, strategy: Strategy) -> dict[str, tuple[str, ...] | None]:
    """The exchange beside other micro-batches. Raises PlanError for what MindSpeed refuses beside it."""
    if strategy.expert_tp > 1:
        raise PlanError(
            f"plan: it hides the experts' exchange ({BESIDE}) with ETP {strategy.expert_tp}, and MindSpeed asks for "
            "whole experts beside it; plan with search.etp [1]"
        )
    if values.get(flags.OVERLAP_REDUCE) is not None:
        raise PlanError(f"plan: {BESIDE} {_APART}, or plan with workload.overlap_grad_reduce false")
    return {BESIDE: (), flags.GROUPED: (), flags.DISPATCHER: ("alltoall",)}


def note(passed: Passed) -> Iterator[str]:
    """What the simulated step leaves out of either."""
    if passed.has(BESIDE) and not passed.has(METHOD) and (passed.number(flags.PIPELINE) or 1) > 1:
        yield f"{BESIDE} runs one forward more ahead on each stage than is simulated, and holds it"
    if passed.has(METHOD) and not passed.has(BESIDE):
        yield f"{METHOD} without {BESIDE} runs pairs one after the other; they are simulated as done together"
