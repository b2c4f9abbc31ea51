"""What cannot fit by sums alone: found in microseconds, before stages are divided."""

from __future__ import annotations

import numpy as np

from mm_autoparallel.pipeline.laid_out import has_layouts
from mm_autoparallel.pipeline.placement.bounds.bound import available_bytes
from mm_autoparallel.pipeline.placement.bounds.one_chunk import count_in_order
from mm_autoparallel.pipeline.problem import Problem


def least_overflow_bytes(problem: Problem) -> float:
    """In every placement some stage exceeds its limit by so much or more; 0 where sums do not say that one does.

    Each block, in the mode that holds least, must fit on some stage, and all of one kind together on all stages: one
    that holds h bytes a block there and has room for r of them has r / h of these.
    """
    num_stages, room_bytes = problem.num_stages, available_bytes(problem)
    if has_layouts(problem):
        return 0.0
    in_flight = np.ones(num_stages)
    if problem.num_chunks == 1 and not problem.orders:
        in_flight = count_in_order(problem.schedule, num_stages, problem.num_microbatches)[0]
    overflow_bytes = 0.0
    for block in problem.chain:
        held_bytes = block.static_bytes + in_flight * block.activation_bytes
        freed_bytes = [
            in_flight * (block.activation_bytes - mode.activation_bytes) - mode.restored_bytes for mode in block.modes
        ]
        held_bytes -= np.maximum(np.max(freed_bytes, axis=0), 0.0) if freed_bytes else 0.0
        room = room_bytes - block.transient_bytes
        overflow_bytes = max(overflow_bytes, float(np.min(held_bytes - room)))
        if np.all(held_bytes > 0.0):
            over = float((block.count - np.sum(room / held_bytes)) / np.sum(1.0 / held_bytes))
            # where a stage had room for less than none, others would make up for it
            overflow_bytes = max(overflow_bytes, over) if np.all(room + over >= 0.0) else overflow_bytes
    return overflow_bytes
