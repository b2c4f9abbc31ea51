"""Which virtual stage is which chunk of which stage: the one place that knows it.

Data flows through chunk 0 of all stages, then chunk 1 of all, and so on. Chunks run through the stages in their order,
so virtual stage k is chunk k // P of stage k % P. Of a *V-shaped* schedule every second chunk runs back:

    stages      0  1  2  3
    chunk 0     0  1  2  3
    chunk 1     7  6  5  4      so the hop from virtual stage 3 to 4 stays on one stage and costs nothing
"""

from __future__ import annotations

from functools import lru_cache


def virtual_stage(chunk: int, stage: int, num_stages: int, v_shaped: bool) -> int:
    """The virtual stage that is `chunk` of `stage`."""
    return chunk * num_stages + (num_stages - 1 - stage if v_shaped and chunk % 2 else stage)


def stage_of(virtual: int, num_stages: int, v_shaped: bool) -> int:
    """The stage that holds a virtual stage."""
    chunk, place = divmod(virtual, num_stages)
    return num_stages - 1 - place if v_shaped and chunk % 2 else place


@lru_cache(maxsize=1024)
def list_stages(num_stages: int, num_chunks: int, v_shaped: bool) -> tuple[int, ...]:
    """[K] the stage that holds each virtual stage."""
    return tuple(stage_of(k, num_stages, v_shaped) for k in range(num_stages * num_chunks))


@lru_cache(maxsize=1024)
def list_virtual_stages(num_stages: int, num_chunks: int, v_shaped: bool) -> tuple[tuple[int, ...], ...]:
    """[P][V] the virtual stages that each stage holds, by chunk."""
    return tuple(
        tuple(virtual_stage(chunk, stage, num_stages, v_shaped) for chunk in range(num_chunks))
        for stage in range(num_stages)
    )
