"""impossible_reason: measured figures that no device can have reached, by the row's own model, batch and devices."""

from __future__ import annotations

from collections.abc import Mapping

from mm_autoparallel.measurements.case import MeasuredCase
from mm_autoparallel.model.blocks.chain import Block
from mm_autoparallel.model.blocks.expand import expand
from mm_autoparallel.model.blocks.tokens import count_tokens
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.precision import peak_flops_per_s
from mm_autoparallel.model.job.traced_model import TracedModel
from mm_autoparallel.model.operators.ends import list_operators
from mm_autoparallel.model.operators.operators import Operators, Share

LEAST_PEAK_FRACTION = 0.0005
"""Of the peak, that matrix products of a step reach at least. Assumed: the slowest published steps reach 0.0017 (a test
of a tiny model) and 0.007 of it; what is in a unit a thousand times smaller than its column says lies below.
"""


def impossible_reason(case: MeasuredCase) -> str | None:
    """Why its figures cannot have been measured: a peak above its device's memory, or matrix products alone that would
    be above the peak of its devices or below LEAST_PEAK_FRACTION of it; None: they can.

    Operations are the model's own: nothing that runs once more counts, nor attention, whose work depends on its kernel.
    """
    device, num_devices = case.job.cluster.device, case.plan.strategy.world_size
    peak_bytes = _most_bytes(case)
    if peak_bytes > device.memory_bytes:
        return (
            f"a peak of {peak_bytes / 1e9:.4g} GB is impossible: {device.name} has {device.memory_bytes / 1e9:.4g} GB; "
            "the peak, its unit or the device is wrong"
        )
    if case.measured_ms is None or isinstance(case.job.model, TracedModel):
        return None
    flops_per_s = count_step_flops(case.job) / (case.measured_ms / 1e3) / num_devices
    most_flops_per_s = fastest_flops_per_s(case)
    fraction = flops_per_s / most_flops_per_s
    if LEAST_PEAK_FRACTION <= fraction <= 1.0:
        return None
    found = "is impossible: by matrix products alone each" if fraction > 1.0 else "is of something else: each"
    return (
        f"a step of {case.measured_ms:g} ms {found} of {num_devices} devices would reach {flops_per_s / 1e12:.4g} "
        f"TFLOP/s, {fraction:.3g} times the peak of {device.name}; the step, its unit, the batch or the number of "
        "devices is wrong"
    )


def _most_bytes(case: MeasuredCase) -> float:
    """Of any stage's measured peak; 0 where none is told."""
    told = case.measured_bytes
    return max(told.values(), default=0.0) if isinstance(told, Mapping) else told or 0.0


def fastest_flops_per_s(case: MeasuredCase) -> float:
    """The peak of its device in the precision of the decoder's products."""
    device, precision = case.job.cluster.device, case.plan.strategy.precision_of(case.job.workload)
    return peak_flops_per_s(device, precision) or device.bf16_flops_per_s


def count_step_flops(job: Job) -> float:
    """Of the matrix products of one step, all devices together: two for each number of a weight and token in the
    forward, as many for gradients of inputs and of weights (Kaplan et al. 2020, arXiv:2001.08361, section 2.1).
    """
    tokens = {modality.name: count_tokens(modality, job.workload) for modality in job.model.modalities}
    share = Share()
    flops = 0.0
    for block in expand(job.model).blocks:
        of_block = tokens[block.modality]
        if of_block.layer_tokens:
            flops += block.count * _count_flops(block, list_operators(block.structure, of_block, share))
    return flops * job.workload.global_batch_size


def _count_flops(block: Block, operators: Operators) -> float:
    flops = 0.0
    for product in operators.products:
        passes = 1 + (block.has_backward and not product.entry) + (block.trainable and product.trains)
        flops += passes * product.flops
    return flops
