"""Blocks of a model that is known from traces alone: as they stand in its file (model/job/traced_model.py)."""

from __future__ import annotations

from collections import Counter
from typing import Literal

from mm_autoparallel.model.blocks.chain import Block, Traced
from mm_autoparallel.model.job.traced_model import TracedBlock, TracedDecoder, TracedEncoder, TracedModel


def expand_traced(model: TracedModel) -> list[Block]:
    """Encoders, then text; an encoder depends on its own input alone, text on all that trains before it."""
    blocks = [block for encoder in model.encoders for block in _expand_part(encoder, False)]
    return blocks + _expand_part(model.text, any(block.trainable for block in blocks))


def _expand_part(part: TracedEncoder | TracedDecoder, upstream: bool) -> list[Block]:
    again = Counter(block.kind for block in part.blocks if block.role == "layer")
    found: list[Block] = []
    reached, layer = upstream, 0
    for block in part.blocks:
        trains = _trains(part, block)
        is_text = isinstance(part, TracedDecoder)
        name = block.kind if again[block.kind] < 2 or block.role != "layer" else f"{block.kind}_{layer}"
        layer += block.count if block.role == "layer" else 0
        found.append(
            Block(
                name=name,
                kind=block.kind,
                modality=part.name,
                role=block.role,
                structure=_structure(part, block),
                count=block.count,
                trainable=trains,
                propagates_gradient=reached and block.trains_with != "nothing",
                attach=None if block.role == "layer" else "next" if block.role == "pre" else _post_attach(is_text),
                pinned="last" if is_text and block.role == "post" else None,
            )
        )
        reached = reached or trains
    return found


def _post_attach(is_text: bool) -> Literal["previous"] | None:
    return None if is_text else "previous"


def _trains(part: TracedEncoder | TracedDecoder, block: TracedBlock) -> bool:
    if block.trains_with == "nothing":
        return False
    if block.trains_with == "projector" and isinstance(part, TracedEncoder):
        return not part.projector_freeze
    return not part.freeze


def _structure(part: TracedEncoder | TracedDecoder, block: TracedBlock) -> Traced:
    ends_table = isinstance(part, TracedDecoder) and block.kind in ("text_pre", "text_post")
    return Traced(
        hidden_size=part.hidden_size,
        parameter_count=block.parameter_count,
        table_count=part.table_count if isinstance(part, TracedDecoder) and ends_table else 0,
        holds_table=block.role == "pre",
        projects=block.role == "post" and block.trains_with == "projector",
    )
