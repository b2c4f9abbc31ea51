"""What lies before and after the layers, measured in forwards of the whole model whose layers hand on their input.

Times are those between the boundaries of the parts in a real forward, and of the backward of each part's own graph with
the gradients that come back to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from mm_autoparallel.profilers.clock import Mark, Stopwatch
from mm_autoparallel.profilers.meter import AllocationTrace
from mm_autoparallel.profilers.shard import Collective, CollectiveRecorder
from mm_autoparallel.profilers.split import Part, Split, backward_parts, run_cut
from mm_autoparallel.profilers.subject import Layout

Sign = TypeVar("Sign")
Value = TypeVar("Value")


@dataclass(frozen=True)
class Ways(Generic[Value]):
    """Something by part name, for its forward and its backward; a part without a backward has none of it there."""

    forward: Mapping[str, Value]
    backward: Mapping[str, Value]


class _Windows(Generic[Sign]):
    """Pairs of signs taken as each part opens and closes; a part may open more than once."""

    def __init__(self, sign: Callable[[], Sign]) -> None:
        self._sign = sign
        self._start: Sign | None = None
        self.pairs: dict[str, list[tuple[Sign, Sign]]] = {}

    def enter(self, _: Part) -> None:
        self._start = self._sign()

    def leave(self, part: Part) -> None:
        assert self._start is not None
        self.pairs.setdefault(part.name, []).append((self._start, self._sign()))


class Ends:
    """The ends of one model on one batch size."""

    def __init__(
        self, model: nn.Module, layout: Layout, split: Split, step: Callable[[], Tensor], device: torch.device
    ) -> None:
        self._model, self._layout, self._split, self._step = model, layout, split, step
        self._device = device
        self._stopwatch = Stopwatch(device)

    def time(self, inputs_only: bool = False) -> Ways[float]:
        """Milliseconds of one forward and one backward.

        inputs_only: backward to what a part is given alone, to none of its parameters.
        """
        forward, backward = _Windows(self._stopwatch.mark), _Windows(self._stopwatch.mark)
        self._run(forward, backward, inputs_only)
        self._stopwatch.settle()
        return Ways(self._sum_ms(forward), self._sum_ms(backward))

    def _sum_ms(self, windows: _Windows[Mark]) -> dict[str, float]:
        between_ms = self._stopwatch.between_ms
        return {name: sum(between_ms(*pair) for pair in pairs) for name, pairs in windows.pairs.items()}

    def trace_passing_bytes(self) -> dict[str, int]:
        """The most that each part holds beyond what stays, in its forward or its backward."""
        count = 0
        with AllocationTrace(self._device) as trace:

            def mark() -> int:
                nonlocal count
                count += 1
                trace.mark(str(count))
                return count

            forward, backward = _Windows(mark), _Windows(mark)
            self._run(forward, backward)
        return {
            name: max(trace.segments[str(start)].passing_bytes for start, _ in pairs + backward.pairs.get(name, []))
            for name, pairs in forward.pairs.items()
        }

    def record_collectives(self, inputs_only: bool = False) -> Ways[list[Collective]]:
        """The collectives of one forward and one backward, as `time` runs them."""
        with CollectiveRecorder() as recorder:
            issued = recorder.collectives
            forward, backward = _Windows(lambda: len(issued)), _Windows(lambda: len(issued))
            self._run(forward, backward, inputs_only)
        return Ways(
            *(
                {
                    name: [one for start, end in pairs for one in issued[start:end]]
                    for name, pairs in windows.pairs.items()
                }
                for windows in (forward, backward)
            )
        )

    def _run(self, forward: _Windows[Sign], backward: _Windows[Sign], inputs_only: bool = False) -> None:
        runs = run_cut(
            self._model, self._layout, self._step, forward.enter, forward.leave, stub_layers=True, split=self._split
        )
        backward_parts(runs, backward.enter, backward.leave, inputs_only)
