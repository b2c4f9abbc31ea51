"""An encoder as `encoders` of a problem file has it."""

from __future__ import annotations

from math import isfinite
from typing import Any

from mm_autoparallel.pipeline.encoder import Encoder


def encoder_document(encoder: Encoder, num_stages: int) -> dict[str, Any]:
    """What encoders_file.py reads. num_stages: of the decoder, whose devices come first.

    Which devices take which pass stands in no file: it reads back as it was where pipelines are dealt as
    encoders.deal_pipelines deals them, one turn further for each encoder on the decoder's devices.
    """
    own = any(device >= num_stages for pipeline in encoder.pipelines for device in pipeline)
    document: dict[str, Any] = {
        "name": encoder.name,
        "run": encoder.run,
        **({"pieces": encoder.num_stages} if encoder.in_pieces else {"num_stages": encoder.num_stages}),
        "devices": "own" if own else "decoder",
    }
    for key in ("forward_ms", "backward_ms", "static_bytes", "activation_bytes"):
        document[key] = list(getattr(encoder, key))
    for key in ("microbatches_per_pass", "feed_ms", "stage_hop_ms", "output_bytes"):
        document[key] = getattr(encoder, key)
    if own:
        document["num_pipelines"] = len(encoder.pipelines)
        if isfinite(encoder.limit_bytes):
            document["memory_limit_bytes"] = encoder.limit_bytes
    if encoder.run == "prefetch":
        document["prefetch_depth"] = encoder.prefetch_depth
    if encoder.run == "cached":
        document["read_ms_per_byte"] = encoder.read_ms_per_byte
    document |= {"first_stage": encoder.first_stage} if encoder.first_stage else {}
    document |= {"most_ahead": encoder.most_ahead} if encoder.most_ahead is not None else {}
    return document | ({"follows": encoder.follows} if encoder.follows else {})
