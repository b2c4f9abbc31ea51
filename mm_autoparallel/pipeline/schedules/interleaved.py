"""Interleaved 1F1B (Narayanan et al. 2021, arXiv:2104.04473, section 2.2): several chunks of the chain on each stage.

Micro-batches go in groups: a group passes through chunk 0, then chunk 1, and so on, before the next group starts.
A group has as many micro-batches as there are stages; where those do not divide, the first group takes the rest too.
The low-memory order starts its backwards sooner and keeps fewer activations, for more waiting.

Two stages, two chunks, four micro-batches: forwards of stage 0 are 0F0 1F0 0F1 1F1 2F0 3F0 2F1 3F1, its warm-up 4 of
them
(3 in the low-memory order).
"""

from __future__ import annotations

import numpy as np

from mm_autoparallel.pipeline.schedules.action import BACKWARD, FORWARD, StageOrder, actions, one_forward_one_backward


def interleaved_1f1b(num_stages: int, num_chunks: int, num_microbatches: int, stage: int) -> StageOrder:
    """Megatron's order: warm-up (chunks - 1) · first group + 2 (stages - stage - 1)."""
    return _interleaved(num_stages, num_chunks, num_microbatches, 2 * (num_stages - stage - 1))


def interleaved_1f1b_low_memory(num_stages: int, num_chunks: int, num_microbatches: int, stage: int) -> StageOrder:
    """The same orders with warm-up (chunks - 1) · first group + (stages - stage - 1)."""
    return _interleaved(num_stages, num_chunks, num_microbatches, num_stages - stage - 1)


def first_group_size(num_stages: int, num_microbatches: int) -> int:
    """Micro-batches of the first group: `num_stages` and what is left over, or all of them where there are fewer."""
    return min(num_microbatches, num_stages + num_microbatches % num_stages)


def _interleaved(num_stages: int, num_chunks: int, num_microbatches: int, lead: int) -> StageOrder:
    first = first_group_size(num_stages, num_microbatches)
    starts = [0, *range(first, num_microbatches, num_stages)]
    chunks, micro_batches = [], []
    for start in starts:
        group = np.arange(start, first if start == 0 else start + num_stages, dtype=np.int64)
        chunks.append(np.repeat(np.arange(num_chunks, dtype=np.int64), len(group)))
        micro_batches.append(np.tile(group, num_chunks))
    all_chunks, all_micro_batches = np.concatenate(chunks), np.concatenate(micro_batches)
    return one_forward_one_backward(
        actions(FORWARD, all_chunks, all_micro_batches),
        actions(BACKWARD, num_chunks - 1 - all_chunks, all_micro_batches),
        num_warmup=min(num_microbatches * num_chunks, (num_chunks - 1) * first + lead),
    )
