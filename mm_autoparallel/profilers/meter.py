"""Bytes of memory: what autograd keeps from forward until backward, and what passes in between.

Kept bytes are counted by storage, so that views and tensors saved by several operators count once, as they occupy
memory once. Passing bytes come from the allocator: its statistics on an accelerator, on CPU the memory events of
PyTorch's profiler.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import record_function
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from mm_autoparallel.profilers.torch_releases import device_module, memory_profile, start_ns


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that hold memory behind `tensor`: its local part where it is a DTensor, itself where it is plain."""
    given: Any = tensor  # which the type checker takes for a plain tensor for good
    if is_traceable_wrapper_subclass(given):
        named: Any = given.__tensor_flatten__()[0]
        for name in named:
            inner = getattr(given, name) if isinstance(name, str) else name  # torch 2.1 gives the tensor itself
            if isinstance(inner, torch.Tensor):  # a DTensor names its mesh as well
                yield from plain_tensors(inner)
    else:
        yield tensor


def count_numbers(tensors: Iterable[torch.Tensor]) -> int:
    """Numbers that this rank holds of `tensors`."""
    return sum(plain.numel() for tensor in tensors for plain in plain_tensors(tensor))


def count_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the values of `tensors` that this rank holds; not those of larger storages that they are views of."""
    return sum(plain.numel() * plain.element_size() for tensor in tensors for plain in plain_tensors(tensor))


class KeptActivations:
    """Bytes of the storages that autograd keeps right now for backward passes to come, each storage once.

    Counts what is saved while it is entered (as a context, as often as one likes: around every forward of a pipeline
    stage) until its backward frees it, entered or not. Parameters and buffers of `modules` do not count. Layers under
    torch.utils.checkpoint count with their checkpoint; what their recomputation saves passes by uncounted.
    """

    def __init__(self, *modules: nn.Module) -> None:
        self._modules = modules
        self._own: set[int] = set()
        self._held: dict[int, _Held] = {}
        self._hooks: list[saved_tensors_hooks] = []
        self.kept_bytes = 0
        self.peak_bytes = 0

    def __enter__(self) -> KeptActivations:
        for module in self._modules:
            for tensor in (*module.parameters(), *module.buffers()):
                self._own.update(plain.untyped_storage()._cdata for plain in plain_tensors(tensor))
        hooks = saved_tensors_hooks(self._pack, _unpack)
        hooks.__enter__()
        self._hooks.append(hooks)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.pop().__exit__(kind, failure, trace)

    def count_beside(self, tensors: Iterable[torch.Tensor]) -> int:
        """Bytes of the storages of `tensors` that are neither kept nor the modules' own, each once."""
        storages = (plain.untyped_storage() for tensor in tensors for plain in plain_tensors(tensor))
        found = {storage._cdata: storage.nbytes() for storage in storages}
        return sum(size_bytes for key, size_bytes in found.items() if key not in self._held and key not in self._own)

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        # a result that its own operator saves would hold that operator: a cycle, hence detached
        tensor = tensor.detach()
        keys = []
        for plain in plain_tensors(tensor):
            storage = plain.untyped_storage()
            key = storage._cdata
            if key in self._own:
                continue
            keys.append(key)
            held = self._held.get(key)
            if held is None:
                self._held[key] = _Held(storage.nbytes(), 1)
                self.kept_bytes += storage.nbytes()
                self.peak_bytes = max(self.peak_bytes, self.kept_bytes)
            else:
                held.num_savers += 1
        return _Saved(tensor, keys, self._release)

    def _release(self, keys: list[int]) -> None:
        for key in keys:
            held = self._held[key]
            held.num_savers -= 1
            if held.num_savers == 0:
                self.kept_bytes -= held.size_bytes
                del self._held[key]


@dataclass
class _Held:
    """One storage and how many saved tensors lie in it."""

    size_bytes: int
    num_savers: int


class _Saved:
    """A saved tensor; autograd drops it as soon as backward has used it."""

    def __init__(self, tensor: torch.Tensor, keys: list[int], release: Callable[[list[int]], None]) -> None:
        self.tensor = tensor
        self._keys, self._release = keys, release

    def __del__(self) -> None:
        self._release(self._keys)


def _unpack(saved: _Saved) -> torch.Tensor:
    return saved.tensor


@dataclass(frozen=True)
class Segment:
    """Bytes allocated between two marks, over what was allocated at the first: the most, and at the second mark."""

    peak_bytes: int
    end_bytes: int

    @property
    def passing_bytes(self) -> int:
        """The most that was allocated beyond what stays."""
        return self.peak_bytes - max(0, self.end_bytes)


class AllocationTrace:
    """What the allocator of `device` does between marks. Use as a context; `segments` are there when it has ended."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._profile: Any = None
        self._names: list[str] = []
        self._start_bytes = 0
        self.segments: dict[str, Segment] = {}

    def __enter__(self) -> AllocationTrace:
        if self._device.type == "cpu":
            self._profile = memory_profile()
            with _muted_stderr():
                self._profile.__enter__()
        return self

    def mark(self, name: str) -> None:
        """Ends the segment before and begins the one called `name`; names are unique."""
        self._close_segment()
        self._names.append(name)
        if self._device.type == "cpu":
            with record_function(_MARK + name):
                return
        memory = device_module(self._device.type)
        self._start_bytes = memory.memory_allocated(self._device)
        memory.reset_peak_memory_stats(self._device)

    def _close_segment(self) -> None:
        if self._names and self._device.type != "cpu":
            memory = device_module(self._device.type)
            self.segments[self._names[-1]] = Segment(
                memory.max_memory_allocated(self._device) - self._start_bytes,
                memory.memory_allocated(self._device) - self._start_bytes,
            )

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close_segment()
        if self._profile is not None:
            with _muted_stderr():
                self._profile.__exit__(kind, failure, trace)
            if kind is None:
                self._read_events()
            self._profile = None

    def _read_events(self) -> None:
        events = [
            (start_ns(event), event.name(), event.nbytes())
            for event in self._profile.profiler.kineto_results.events()
            if event.name() == _MEMORY_EVENT or event.name().startswith(_MARK)
        ]
        name, level_bytes, peak_bytes = None, 0, 0
        for _, event_name, size_bytes in sorted(events, key=lambda event: event[0]):
            if event_name == _MEMORY_EVENT:
                level_bytes += size_bytes
                peak_bytes = max(peak_bytes, level_bytes)
                continue
            if name is not None:
                self.segments[name] = Segment(peak_bytes, level_bytes)
            name, level_bytes, peak_bytes = event_name.removeprefix(_MARK), 0, 0
        if name is not None:
            self.segments[name] = Segment(peak_bytes, level_bytes)


@contextmanager
def _muted_stderr() -> Iterator[None]:
    """Builds of PyTorch with static probes tell each start and stop of the profiler on standard error, by C++."""
    sys.stderr.flush()
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


_MEMORY_EVENT = "[memory]"
"""What PyTorch's profiler calls an allocation (positive bytes) or a release (negative)."""

_MARK = "mm_autoparallel mark "
