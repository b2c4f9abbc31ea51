"""What the balancer is given, checked: a PlanError names what is wrong and what would be right."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import index
from typing import Any

import numpy as np

from mm_autoparallel.errors import PlanError
from mm_autoparallel.files import describe_value
from mm_autoparallel.samples.sample import Sample, SampleCost
from mm_autoparallel.samples.table import SampleTable, tabulate

_NUMBERS = (int, float, np.integer, np.floating)


def whole_number(name: str, value: Any, least: int = 0) -> int:
    """`value`, of numpy's numbers too. Raises PlanError where it is no whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise PlanError(f"{name} is {describe_value(value)}; a whole number of at least {least} is expected")
    return int(value)


def check_cost(cost: Any) -> None:
    """Raise PlanError where `cost` is no SampleCost, or one of its figures is malformed."""
    if not isinstance(cost, SampleCost):
        raise PlanError(
            f"cost is {describe_value(cost)}; SampleCost(image_ms=(a2, a1, a0), token_ms=(b2, b1)) is expected"
        )
    for name, names in (("image_ms", "a2, a1, a0"), ("token_ms", "b2, b1")):
        given = getattr(cost, name)
        figures = tuple(given) if isinstance(given, Iterable) else ()
        if len(figures) != names.count(",") + 1 or not all(
            isinstance(figure, _NUMBERS) and 0.0 <= figure < math.inf for figure in figures
        ):
            raise PlanError(f"cost.{name} is {given}; ({names}), finite and at least 0, is expected")
    whole_number("cost.merge_tokens", cost.merge_tokens, least=1)


def read_samples(samples: Sequence[Sample]) -> SampleTable:
    """The samples as columns. Raises PlanError, naming the sample, where one is malformed."""
    try:
        return tabulate(samples)
    except (AttributeError, OverflowError, TypeError, ValueError) as error:
        raise PlanError(_find_fault(samples) or str(error)) from None


def _find_fault(samples: Any) -> str:
    if not hasattr(samples, "__len__") or not hasattr(samples, "__getitem__"):
        return f"the samples are of type {type(samples).__name__}; a list of Sample is expected"
    for i, one in enumerate(samples):
        if not isinstance(one, Sample):
            return f"sample {i} is {describe_value(one)}; Sample(patches=(4096, 1024), text_tokens=700) is expected"
        for name in ("patches", "audio_s"):
            if not hasattr(getattr(one, name), "__len__"):
                return f"sample {i} is {one}; {name} is a tuple, with a number for each"
        if not all(isinstance(seconds, _NUMBERS) for seconds in one.audio_s):
            return f"sample {i} is {one}; audio_s are seconds of each recording"
    return ""


def read_dealing(ranks: Any, num_samples: int) -> list[list[list[int]]]:
    """A dealing of `num_samples` samples, as lists. Raises PlanError where a number is no sample's or stands there
    twice, or a replica has no micro-batch."""
    try:
        dealing = [[list(map(index, micro_batch)) for micro_batch in replica] for replica in ranks]
    except TypeError as error:
        raise PlanError(
            f"the dealing is malformed ({error}); numbers of samples, of each replica, of each micro-batch, are "
            "expected: [[[0, 3], [1]], [[2], [4]]]"
        ) from None
    if not dealing:
        raise PlanError("the dealing has no replica; give one list of micro-batches for each")
    seen: set[int] = set()
    for r, replica in enumerate(dealing):
        if not replica:
            raise PlanError(f"replica {r} has no micro-batch; each needs one or more")
        for i in chain.from_iterable(replica):
            if not 0 <= i < num_samples or i in seen:
                why = "is dealt twice" if i in seen else f"is none of the {num_samples} samples"
                raise PlanError(f"replica {r} holds sample {i}, which {why}")
            seen.add(i)
    return dealing
