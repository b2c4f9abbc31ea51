"""Prefetch: a frozen encoder on the decoder's devices, which makes the features of the next step while this one runs.

Its passes stand between the pipeline's actions where the plan's order has them. Nothing of it trains, so that features
of a step before are those of this one. The first step of a run has none yet, and makes its own in front.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from crossing import Crossing
from data import Batch
from failures import TrainingError
from model import Stage
from pipeline import Pipeline


class Prefetch:
    """One rank's encoder. order: what this rank's stage of the pipeline runs, passes of the encoder among it.

    crossing: of all features of a step at once, behind it.
    """

    def __init__(self, encoder: Stage, crossing: Crossing, order: str, device: torch.device) -> None:
        self._encoder, self._crossing, self._device = encoder, crossing, device
        self._passes_before = count_passes(order)
        self._made_for: int | None = None
        self._features: Tensor | None = None
        self._waiting: Iterator[Tensor] = iter(())
        self._calls: Iterator[Batch] = iter(())
        self._outputs: list[Tensor] = []

    def arrive(self) -> Tensor:
        """Features of the decoder's next micro-batch, where this rank holds its first stage."""
        return next(self._waiting)

    def run(
        self,
        pipeline: Pipeline,
        iteration: int,
        make_calls: Callable[[int], Sequence[Batch]],
        batch: Batch,
        is_last: bool,
    ) -> float | None:
        """Accumulate the gradients of a step; the mean loss where this rank holds the decoder's last stage.

        make_calls: what the encoder takes in each of its passes for an iteration. is_last: no step follows.
        """
        if self._made_for != iteration:
            self._begin(make_calls(iteration))
            self._hand_over(iteration)
        if self._features is not None:
            self._waiting = iter(self._features.chunk(pipeline.num_microbatches))
        self._begin([] if is_last else make_calls(iteration + 1))
        loss = pipeline.run(batch, before=self._run_passes)
        if not is_last:
            self._hand_over(iteration + 1)
        return loss

    def _begin(self, calls: Sequence[Batch]) -> None:
        """These passes are next."""
        if calls and len(calls) != sum(self._passes_before):
            raise TrainingError(
                f"the plan's order has {sum(self._passes_before)} passes of the encoder on a stage, and of its "
                f"replicas and MBS each makes {len(calls)}; plan again"
            )
        self._calls = iter(calls)

    def _run_passes(self, action: int) -> None:
        """Those that stand in front of this rank's action of that number."""
        for _ in range(self._passes_before[action]):
            self._encode()

    def _encode(self) -> bool:
        """Run the next pass; whether there was one."""
        call = next(self._calls, None)
        if call is not None:
            with torch.no_grad():
                pixels = call.pixel_values.to(self._device)
                self._outputs.append(self._encoder(pixel_values=pixels, image_grid=call.image_grid))
        return call is not None

    def _hand_over(self, iteration: int) -> None:
        """Run the passes that remain, and bring all features to the decoder's first stage for that iteration."""
        while self._encode():
            pass
        self._features, self._made_for = self._crossing.forward(torch.cat(self._outputs)), iteration
        self._outputs.clear()


def count_passes(order: str) -> list[int]:
    """Of each action of the decoder in `order` (`0F0 0F0@vision 0B0`), how many passes stand in front of it; at the end
    those that follow the last."""
    counts = [0]
    for word in order.split():
        if "@" in word:
            counts[-1] += 1
        else:
            counts.append(0)
    return counts
