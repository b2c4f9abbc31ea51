"""Ledger: the bytes of all storages that are alive, as operators make them and the last user lets them go."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from mm_autoparallel.profilers.meter import Segment


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
