"""Colocated: an encoder of its own tensor and data parallel sizes on the decoder's devices, all of it on each.

inline: in every micro-batch it runs before the decoder, which is one stage, and after it. In phases it runs all of a
step's forwards before the decoder's pipeline and all its backwards behind it; outputs and activations are kept, or in
recomputed phases outputs alone, and it runs once more before its backwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from crossing import Crossing, arrive
from data import Batch
from model import Stage
from pipeline import Pipeline


class Colocated:
    """One rank's encoder, and its share of the decoder. again: the encoder runs once more before its backwards.

    crossing: of all that goes between them at once, a round; a step has one round in phases, and as many as
    micro-batches inline.
    """

    def __init__(self, encoder: Stage, crossing: Crossing, again: bool, device: torch.device) -> None:
        self._encoder, self._crossing, self._again, self._device = encoder, crossing, again, device
        self._waiting: Iterator[Tensor] = iter(())
        self._gradients: list[Tensor] = []

    def arrive(self) -> Tensor:
        """Features of the decoder's next micro-batch, where this rank holds its first stage."""
        return arrive(lambda: next(self._waiting), self._gradients.append)

    def run(self, pipeline: Pipeline, rounds: Sequence[tuple[Sequence[Batch], Batch]]) -> float | None:
        """Accumulate the gradients of a step; the mean loss where this rank holds the decoder's last stage.

        rounds: of each the encoder's calls, and what the decoder's replica gets.
        """
        losses = [self._run_round(pipeline, calls, batch) for calls, batch in rounds]
        return None if losses[0] is None else sum(loss or 0.0 for loss in losses)

    def _run_round(self, pipeline: Pipeline, calls: Sequence[Batch], batch: Batch) -> float | None:
        with torch.set_grad_enabled(not self._again):
            outputs = [self._encode(call) for call in calls]
        arrived = self._crossing.forward(torch.cat([output.detach() for output in outputs]))
        if arrived is not None:
            self._waiting = iter(arrived.chunk(pipeline.num_microbatches))
        loss = pipeline.run(batch)
        gradient = self._crossing.backward(torch.cat(self._gradients) if self._gradients else None)
        self._gradients.clear()
        assert gradient is not None, "every rank has encoded"
        for call, output, part in zip(calls, outputs, gradient.chunk(len(calls)), strict=True):
            (self._encode(call) if self._again else output).backward(part)
        return loss

    def _encode(self, batch: Batch) -> Tensor:
        return self._encoder(pixel_values=batch.pixel_values.to(self._device), image_grid=batch.image_grid)


def deal_samples(
    num_samples: int, decoder: tuple[int, int], encoder: tuple[int, int], replica: int, at_once: bool
) -> list[list[int]]:
    """Which samples of a global batch each call of an encoder's replica takes. decoder, encoder: DP and MBS.

    at_once: the encoder's replicas divide the whole batch, else each micro-batch of all the decoder's replicas.
    """
    (decoder_dp, mbs), (encoder_dp, each) = decoder, encoder
    if at_once:
        share = num_samples // encoder_dp
        return [list(range(first, first + each)) for first in range(replica * share, (replica + 1) * share, each)]
    of_replica = num_samples // decoder_dp
    places = [divmod(row, mbs) for row in range(replica * each, (replica + 1) * each)]
    return [[d * of_replica + first + place for d, place in places] for first in range(0, of_replica, mbs)]
