"""Columns: what a virtual stage may hold of each block in each mode, and what one of it costs; for programs over parts
of layers (`fractional`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.problem import Problem, list_host_links
from mm_autoparallel.pipeline.stage_memory import held_by

Floats = NDArray[np.float64]


class Columns(NamedTuple):
    """n counts: [n] where and of what each is, and what one of them costs.

    virtual, block: virtual stage and chain block. forward_ms, backward_ms, host_ms: [n, C] in each class of
    micro-batches, the stage's factor included.
    activation_bytes, host_bytes: of one micro-batch, on the device and on its host; held_bytes: static and restored,
    host_held_bytes: static on the host. is_layer.
    """

    virtual: NDArray[np.int64]
    block: NDArray[np.int64]
    forward_ms: Floats
    backward_ms: Floats
    host_ms: Floats
    activation_bytes: Floats
    held_bytes: Floats
    host_bytes: Floats
    host_held_bytes: Floats
    tail_ms: Floats
    is_layer: NDArray[np.bool_]


def find_main(problem: Problem) -> int:
    """The chain block with the most work."""
    return max(
        range(len(problem.chain)),
        key=lambda e: problem.chain[e].count * (problem.chain[e].forward_ms + problem.chain[e].backward_ms),
    )


def list_columns(problem: Problem, scales: Floats) -> Columns:
    """One for each virtual stage, block that may lie there and mode of it. scales: [E, C] of times."""
    num_stages, num_virtual = problem.num_stages, problem.num_virtual_stages
    links = list_host_links(problem)
    rows = []
    for k in range(num_virtual):
        factor, link = problem.time_factors[k % num_stages], links[k % num_stages]
        for e, block in enumerate(problem.chain):
            if not block.may_lie_on(k, num_virtual):
                continue
            always, held = (block.host_static_bytes, block.tail_ms, block.layer), held_by(block)
            times = (block.forward_ms * factor, block.backward_ms * factor, 0.0)
            rows.append((k, e, *times, held.kept_bytes, held.always_bytes, held.host_kept_bytes, *always))
            for mode in block.modes:
                forward_ms, backward_ms = (
                    block.forward_ms + mode.extra_forward_ms,
                    block.backward_ms + mode.extra_backward_ms,
                )
                times = (forward_ms * factor, backward_ms * factor, mode.host_bytes * link)
                held = held_by(block, mode)
                rows.append((k, e, *times, held.kept_bytes, held.always_bytes, held.host_kept_bytes, *always))
    virtual, of_block, forward, backward, host, *others = map(np.array, zip(*rows, strict=True))
    forward_ms, backward_ms, host_ms = (times_ms[:, None] * scales[of_block] for times_ms in (forward, backward, host))
    return Columns(virtual, of_block, forward_ms, backward_ms, host_ms, *others)


def least_transient_bytes(problem: Problem, has_classes: bool, ceiling_ms: float) -> Floats:
    """[P] bytes that pass on each stage at least where the step is below ceiling_ms.

    Every chunk has a layer, so the least of any layer passes everywhere. From some block on, the layers may pass more:
    let e be the block of layers with the most work. If stage s's last chunk has a layer from e on, so has the last
    chunk of every stage after it. If it has none, all of e, whose blocks are layers, lies behind it: on the last chunks
    of the stages after s alone, which pass micro-batches on to one another as with one chunk: stage j of them waits for
    one pass through those before and works n_j · M layers. Micro-batches must be equal for that.
    """
    chain, num_stages, num_microbatches = problem.chain, problem.num_stages, problem.num_microbatches
    layers = [e for e, block in enumerate(chain) if block.layer]
    if num_stages == 1 and not has_classes:
        return np.array([max(chain[e].transient_bytes for e in layers)])
    passing = np.full(num_stages, min(chain[e].transient_bytes for e in layers))
    if has_classes or np.isinf(ceiling_ms):
        return passing
    e = max(layers, key=lambda e: chain[e].count * (chain[e].forward_ms + chain[e].backward_ms))
    later = min(chain[other].transient_bytes for other in layers if other >= e)
    layer_ms = (chain[e].forward_ms + chain[e].backward_ms) * min(problem.time_factors)
    if chain[e].pinned or layer_ms <= 0.0:
        return passing
    held = 0.0  # on so many stages as lie behind s
    for s in range(num_stages - 1, -1, -1):
        if held < chain[e].count:
            passing[s] = max(passing[s], later)
        held += max(0.0, np.floor((ceiling_ms / layer_ms - held) / num_microbatches * (1.0 + 1e-9)))
    return passing
