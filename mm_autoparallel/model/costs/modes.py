"""The modes of each block's layers (model/job/layer_modes.py) as times and bytes.

Full recompute is what was measured of it, else the layer's own forward. What selective and activation change is always
the difference between two analytic costs of the layer, one that runs the operators once more and one that does not; it
is taken off what was measured or traced. What goes to the host is read from the device's memory beside the forward, and
written there beside the backward: copies take their part of its bandwidth (TransformerEngine's documentation, CPU
offloading), however fast the link is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from mm_autoparallel.model.blocks.chain import Block
from mm_autoparallel.model.job.cluster import Device
from mm_autoparallel.model.job.layer_modes import FEED_FORWARD, HOST_MODES, LayerMode, rerun_operators
from mm_autoparallel.model.job.workload import RecomputeOperator, Workload
from mm_autoparallel.model.profiles.cost import BlockCost
from mm_autoparallel.pipeline.problem import RECOMPUTE, Mode

#: The analytic cost of the i-th block whose layers run these operators once more, beside what all layers do.
Estimate = Callable[[int, tuple[RecomputeOperator, ...]], BlockCost]


def list_modes(
    names: Sequence[LayerMode],
    blocks: Sequence[Block],
    costs: Sequence[BlockCost],
    workload: Workload,
    estimate: Estimate,
    copied_ms_per_byte: float = 0.0,
) -> list[tuple[Mode, ...]]:
    """Of each block the modes among `names`, in that order; none where it is no layer or keeps nothing.

    Except for full recompute, a mode by which no layer of a modality keeps less is left out there. copied_ms_per_byte:
    what a copy to the host, or from it, takes of the device's memory, which operators need beside it.
    """
    able = [index for index, block in enumerate(blocks) if block.role == "layer" and block.has_backward]
    found: list[tuple[Mode, ...]] = [()] * len(blocks)
    for index in able:
        found[index] = tuple(
            _form_mode(name, index, costs[index], workload, estimate, copied_ms_per_byte) for name in names
        )
    for modality in {blocks[index].modality for index in able}:
        mine = [index for index in able if blocks[index].modality == modality]
        helps = [
            name == RECOMPUTE or any(found[index][m].activation_bytes < costs[index].activation_bytes for index in mine)
            for m, name in enumerate(names)
        ]
        for index in mine:
            found[index] = tuple(mode for mode, does in zip(found[index], helps, strict=True) if does)
    return found


def host_ms_per_byte(names: Sequence[LayerMode], device: Device) -> tuple[float, ...]:
    """Of one stage's link to its host, each way; empty where no mode uses it."""
    if not set(names) & set(HOST_MODES) or device.host_link_bytes_per_s is None:
        return ()
    return (1e3 / device.host_link_bytes_per_s,)


def most_transient_bytes(
    block: Block, cost: BlockCost, names: Sequence[LayerMode], workload: Workload, mbs: int
) -> float:
    """The working set of one of a block, and what a layer that can be recomputed restores beside its input.

    A stage restores one layer at a time, so this is a largest, not a sum over recomputed layers as `restored_bytes` is.
    It is charged where nothing is recomputed too: that overstates by at most one layer, and never understates. No mode
    keeps less than the input, but for recompute_offload: then the inputs of two layers are there beside, that at work
    and that which goes or comes. Layers that run on parts of a micro-batch (workload.text_chunk_samples) restore as
    much; their working sets are charged whole. What was offloaded comes back into the room of the layer whose backward
    has just ended (TransformerEngine, pytorch/cpu_offload.py, _default_offload_sync_init).
    """
    if block.role != "layer" or not block.has_backward:
        return cost.transient_bytes
    inputs_bytes = 2 * cost.checkpoint_bytes if "recompute_offload" in names else 0.0
    restored_bytes = max(0.0, cost.activation_bytes - cost.checkpoint_bytes)
    if block.modality == "text" and workload.text_chunk_samples:
        restored_bytes *= min(1.0, workload.text_chunk_samples / mbs)
    return cost.transient_bytes + restored_bytes + inputs_bytes


def _form_mode(
    name: LayerMode,
    index: int,
    cost: BlockCost,
    workload: Workload,
    estimate: Estimate,
    copied_ms_per_byte: float,
) -> Mode:
    if name in ("recompute", "recompute_offload"):
        # its whole forward, collectives included; where that was measured it may skip what its backward does not need
        extra_ms = cost.forward_ms if cost.recompute_ms is None else cost.recompute_ms
        if name == "recompute_offload":
            return _copy(Mode(name, extra_backward_ms=extra_ms, host_bytes=cost.checkpoint_bytes), copied_ms_per_byte)
        return Mode(name, extra_backward_ms=extra_ms, activation_bytes=cost.checkpoint_bytes)
    least_bytes = min(cost.checkpoint_bytes, cost.activation_bytes)
    if name == "offload":
        # The input stays: the layer before, or a transfer between stages, may still hold it (assumed).
        mode = Mode(name, activation_bytes=least_bytes, host_bytes=cost.activation_bytes - least_bytes)
        return _copy(mode, copied_ms_per_byte)
    if name == "swap_attention":
        # of what was measured or traced the same part is attention's and norms' as of the analytic cost
        whole_bytes, others_bytes = (estimate(index, left).activation_bytes for left in ((), FEED_FORWARD))
        moved_bytes = cost.activation_bytes * others_bytes / whole_bytes - least_bytes if whole_bytes else 0.0
        kept_bytes = cost.activation_bytes - max(0.0, moved_bytes)
        mode = Mode(name, activation_bytes=kept_bytes, host_bytes=cost.activation_bytes - kept_bytes)
        return _copy(mode, copied_ms_per_byte)
    plain, lighter = estimate(index, ()), estimate(index, rerun_operators(name, workload))
    freed_bytes = max(0.0, plain.activation_bytes - lighter.activation_bytes)
    return Mode(
        name,
        extra_backward_ms=max(0.0, _backward_ms(lighter) - _backward_ms(plain)),
        activation_bytes=max(least_bytes, cost.activation_bytes - freed_bytes),
    )


def _copy(mode: Mode, copied_ms_per_byte: float) -> Mode:
    """`mode` with what its copies take of the device's memory, in either pass."""
    copied_ms = copied_ms_per_byte * mode.host_bytes
    return replace(
        mode,
        extra_forward_ms=mode.extra_forward_ms + copied_ms,
        extra_backward_ms=mode.extra_backward_ms + copied_ms,
    )


def _backward_ms(cost: BlockCost) -> float:
    return cost.backward_input_ms + cost.backward_weight_ms
