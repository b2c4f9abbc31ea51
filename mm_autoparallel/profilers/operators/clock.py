"""OperatorClock: how long each operator takes inside a running model, by its form.

On CPU alone, where an operator is done when its call returns. An accelerator's time line says of single operators what
the host took to launch them one by one; there micro-benchmarks of many launches tell (benchmark.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from mm_autoparallel.model.profiles.operators.base import MAX_SAMPLES, Sampled
from mm_autoparallel.model.profiles.operators.form import OperatorForm
from mm_autoparallel.profilers.dispatch import is_of_wrappers, tensors_in
from mm_autoparallel.profilers.operators.forms import form_of
from mm_autoparallel.profilers.shard import COLLECTIVES
from mm_autoparallel.profilers.trace.tally import does_nothing, weigh_call


class OperatorClock(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Use as a context around what is to be timed; views and collectives are left out. now: as of Stopwatch."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._now = now
        self._forms: dict[bytes, OperatorForm] = {}
        self._samples_us: dict[bytes, list[float]] = {}

    @property
    def found(self) -> list[Sampled]:
        """What ran, each form with its latest times."""
        return [Sampled(form, self._samples_us[digest][-MAX_SAMPLES:]) for digest, form in self._forms.items()]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Lets tensor subclasses go first, as Recorder does."""
        if is_of_wrappers(tuple(types)):
            return NotImplemented
        named = dict(kwargs or {})
        start_s = self._now()
        result = func(*args, **named)
        took_us = (self._now() - start_s) * 1e6
        self._note(func, args, named, result, took_us)
        return result

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, took_us: float) -> None:
        inputs, outputs = tensors_in(args, kwargs), tensors_in(result)
        if func._schema.name in COLLECTIVES or does_nothing(func, inputs, outputs):
            return
        _, flops, moved_bytes = weigh_call(func, args, kwargs, result, inputs, outputs)
        form = form_of(func, args, kwargs, outputs, flops, moved_bytes)
        self._forms.setdefault(form.digest, form)
        self._samples_us.setdefault(form.digest, []).append(took_us)
