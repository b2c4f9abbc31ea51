"""Marks on a chain by which every placement of it keeps to MindSpeed-MM's laws (model/job/mindspeed_mm_law.py).

Blocks that are attached lie on one virtual stage, and so do all of their count
(docs/reference/problem-file.md); bounds, solvers and checkers know both marks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from mm_autoparallel.model.job.mindspeed_mm_law import is_mindspeed_mm, list_whole, needs_even_text
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.pipeline.problem import ChainBlock


def hold_together(
    chain: Sequence[ChainBlock], model: Model, workload: Workload, strategy: Strategy
) -> tuple[ChainBlock, ...]:
    """`chain` with encoders whole where they must be, and text cut into equal parts where stages must hold such.

    An encoder is one piece where all its blocks but the last are attached to the next; with the text, all of them and
    all between are.
    """
    blocks = list(chain)
    begins = next(e for e, block in enumerate(blocks) if block.modality == "text")
    for whole in list_whole(model, workload, strategy):
        held = [e for e, block in enumerate(blocks) if block.modality == whole.modality]
        for e in range(held[0], begins if whole.with_text else held[-1]):
            blocks[e] = replace(blocks[e], attach="next")
    num_virtual = strategy.pp * strategy.vpp
    if is_mindspeed_mm(workload) and needs_even_text(model) and num_virtual > 1:
        return tuple(_divide_text(blocks, num_virtual))
    return tuple(blocks)


def _divide_text(blocks: Sequence[ChainBlock], num_virtual: int) -> Iterator[ChainBlock]:
    """The chain with its text layers in `num_virtual` pieces of equally many, the first and the last at their ends.

    Each virtual stage holds a layer, so those between have one piece each.
    """
    text = [block for block in blocks if block.layer and block.modality == "text"]
    size = sum(block.count for block in text) // num_virtual
    done = 0
    for block in blocks:
        if block not in text:
            yield block
            continue
        left = block.count
        while left:
            piece, room = divmod(done, size)[0], size - done % size
            count = min(left, room)
            ends_piece = count == room
            pinned = "first" if piece == 0 else "last" if piece == num_virtual - 1 else block.pinned
            for part, attach in ((count - ends_piece, "next"), (int(ends_piece), None)):
                if part:
                    name = f"{block.name}_{done}" if block.count > part else block.name
                    yield replace(block, name=name, count=part, attach=attach, pinned=pinned)  # type: ignore[arg-type]
                    done += part
            left -= count
