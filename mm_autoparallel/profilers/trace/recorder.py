"""Recorder: watches all operators of a run; keeps those of each window by name, with the window's peak of memory.

The peak is that of a Ledger: the bytes of all storages that are alive, as operators make them and the last user lets
them go.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mm_autoparallel.profilers.dispatch import asks_for_device, is_of_wrappers, tensors_in
from mm_autoparallel.profilers.meter import Segment
from mm_autoparallel.profilers.trace.tally import Tally


@dataclass
class _Window:
    """Bytes alive since `start_bytes` were."""

    start_bytes: int
    peak_bytes: int


class Ledger:
    """Counts storages that are made while it is told of operators; those that were there before do not count.

    What an operator needs inside, and what an allocator rounds up, is not seen.
    """

    def __init__(self) -> None:
        self._known: dict[int, weakref.ref[object]] = {}
        self._window: _Window | None = None
        self.level_bytes = 0

    def note(self, inputs: Iterable[Tensor], outputs: Iterable[Tensor]) -> None:
        """One operator has run."""
        for tensor in inputs:
            self._learn(tensor, counts=False)
        for tensor in outputs:
            self._learn(tensor, counts=True)

    def open(self) -> None:
        """Begin to watch for a peak."""
        self._window = _Window(self.level_bytes, self.level_bytes)

    def close(self) -> Segment:
        """The peak since `open`, and what is alive now, both over what was alive then."""
        window = self._window
        assert window is not None
        self._window = None
        return Segment(window.peak_bytes - window.start_bytes, self.level_bytes - window.start_bytes)

    def _learn(self, tensor: Tensor, counts: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size_bytes = storage.nbytes() if counts else 0
        self._known[key] = weakref.ref(storage, partial(self._forget, key, size_bytes))
        self.level_bytes += size_bytes
        if self._window is not None:
            self._window.peak_bytes = max(self._window.peak_bytes, self.level_bytes)

    def _forget(self, key: int, size_bytes: int, _: object) -> None:
        self._known.pop(key, None)
        self.level_bytes -= size_bytes


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
