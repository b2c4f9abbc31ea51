"""Encoder: one whose work runs beside a decoder's pipeline, numbers only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from mm_autoparallel.pipeline.dominance import Dominance

SAME, LESS, MORE = Dominance.SAME, Dominance.LESS, Dominance.MORE

EncoderRun = Literal["bubbles", "prefetch", "cached"]
"""bubbles: for this step, when the order says. prefetch: for the next step, at any time. cached: read, not run."""


@dataclass(frozen=True)
class Encoder:
    """One encoder, cut into J stages; times and bytes are of one of its passes through one stage. Where all are on one
    device, they are pieces of a pass: between two of them that device may run something else.

    forward_ms, backward_ms, static_bytes, activation_bytes: [J]; no backward at all: it is frozen.
    pipelines: [n][J] the devices of each, which take passes in turn; those from the decoder's `num_stages` on are its
    own. microbatches_per_pass: of the decoder's; the last pass takes what is left.
    first_stage: the decoder's stage whose forwards and backwards of its first chunk its features and gradients meet;
    stages before it are of others, and its pipelines on the decoder's devices lie from there on.
    feed_ms: from its last stage to that one, or to the encoder that follows it, and back: network and resharding, which
    occupy no device. stage_hop_ms: between its stages.
    activation_bytes: kept from a forward until its backward has ended; of a frozen one while the forward runs.
    output_bytes: of one pass that feeds the decoder, kept on that stage's device for as many passes as may be ahead.
    most_ahead: how many passes may be between the start of their forward and the end of the decoder's first forward of
    them (None: any number). follows: the encoder whose outputs it takes, empty: none.
    limit_bytes: what each device of its own holds at most. prefetch_depth: steps ahead. read_ms_per_byte: of its cache.
    """

    name: Annotated[str, SAME]
    forward_ms: Annotated[tuple[float, ...], LESS]
    backward_ms: Annotated[tuple[float, ...], LESS]
    pipelines: Annotated[tuple[tuple[int, ...], ...], SAME]
    run: Annotated[EncoderRun, SAME] = "bubbles"
    microbatches_per_pass: Annotated[int, SAME] = 1
    feed_ms: Annotated[float, LESS] = 0.0
    stage_hop_ms: Annotated[float, LESS] = 0.0
    static_bytes: Annotated[tuple[float, ...], LESS] = ()
    activation_bytes: Annotated[tuple[float, ...], LESS] = ()
    output_bytes: Annotated[float, LESS] = 0.0
    most_ahead: Annotated[int | None, SAME] = None
    follows: Annotated[str, SAME] = ""
    limit_bytes: Annotated[float, MORE] = float("inf")
    prefetch_depth: Annotated[int, SAME] = 1
    read_ms_per_byte: Annotated[float, LESS] = 0.0
    first_stage: Annotated[int, SAME] = 0

    @property
    def num_stages(self) -> int:
        return len(self.forward_ms)

    @property
    def in_pieces(self) -> bool:
        """Whether its stages are pieces of passes of one device each."""
        return self.num_stages > 1 and all(len(set(pipeline)) == 1 for pipeline in self.pipelines)

    @property
    def is_frozen(self) -> bool:
        return not any(self.backward_ms)

    def num_passes(self, num_microbatches: int) -> int:
        """Forwards of one step."""
        return -(-num_microbatches // self.microbatches_per_pass)

    def microbatches_of(self, index: int, num_microbatches: int) -> range:
        """The decoder's micro-batches of one pass."""
        first = index * self.microbatches_per_pass
        return range(first, min(first + self.microbatches_per_pass, num_microbatches))
