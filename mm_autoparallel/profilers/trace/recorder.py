"""Recorder: watches all operators of a run; keeps those of each window by name, with the window's peak of memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from mm_autoparallel.profilers.dispatch import asks_for_device, is_of_wrappers, tensors_in
from mm_autoparallel.profilers.meter import Segment
from mm_autoparallel.profilers.trace.ledger import Ledger
from mm_autoparallel.profilers.trace.tally import Tally


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Use as a context around everything whose memory counts; windows may open more than once.

    tallies: operators by the name of their window. segments: of each time that a window was open.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tallies: dict[str, Tally] = {}
        self.segments: dict[str, list[Segment]] = {}
        self._ledger = Ledger()
        self._open: str | None = None

    def open(self, name: str) -> None:
        """What runs from here on belongs to `name`."""
        self._open = name
        self.tallies.setdefault(name, Tally())
        self._ledger.open()

    def close(self) -> None:
        """End the open window."""
        assert self._open is not None
        self.segments.setdefault(self._open, []).append(self._ledger.close())
        self._open = None

    def passing_bytes(self, name: str) -> int:
        """The most that was alive in windows of `name` beyond what stays; nothing where there was none."""
        return max((segment.passing_bytes for segment in self.segments.get(name, [])), default=0)

    def tally(self, name: str) -> Tally:
        """The operators in windows of `name`; nothing where there was none."""
        return self.tallies.get(name, Tally())

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Lets tensor subclasses go first: what they make of an operator comes by here again, on plain tensors."""
        if is_of_wrappers(tuple(types)):
            return NotImplemented
        if asks_for_device(func):
            return func(*args)
        named = dict(kwargs or {})
        result = func(*args, **named)
        inputs, outputs = tensors_in(args, named), tensors_in(result)
        self._ledger.note(inputs, outputs)
        if self._open is not None:
            self.tallies[self._open].add(func, args, named, result, inputs, outputs)
        return result
