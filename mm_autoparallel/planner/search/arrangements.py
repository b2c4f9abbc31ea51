"""The arrangements of a space: beside each lawful strategy of the decoder alone, every size of the encoder.

The job's limits of pp, tp, cp, dp, mbs are the decoder's. An encoder on ranks of its own has the devices that the
decoder leaves, whole nodes or what is left of the first, behind the decoder's ranks; in phases it takes any number of
samples at once that divides its own, up to MOST_PHASE_SAMPLES. Where a decoder by itself is unlawful, no encoder is
tried beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from mm_autoparallel.model.job.arrangement import Arrangement, EncoderRun, ModuleKind, ModuleLayout
from mm_autoparallel.model.job.arrangement_law import encoders_train, model_reason, module_name, stack_reason
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.model.job.strategy import Strategy, unlawful_reason

MOST_PHASE_SAMPLES = 32
"""An encoder in phases takes so many samples at once at most: more fill a device and save no time. Assumed."""


class Sizes(NamedTuple):
    """Of a strategy on pp x tp x cp x dp devices, before anything is chosen beside them."""

    pp: int
    tp: int
    cp: int
    dp: int
    mbs: int


Shape = tuple[int, int, int]
"""TP, CP and MBS of a decoder: as much of its sizes as the times of one block hang on."""


@dataclass(frozen=True, eq=False)
class Branch:
    """All strategies with arrangements of one kind beside one decoder. num_apart: devices that the encoder has to
    itself, 0 where it shares the decoder's."""

    kind: ModuleKind
    decoder: Strategy
    num_apart: int
    strategies: Callable[[], Iterator[Strategy]]

    @property
    def num_devices(self) -> int:
        """Of the decoder."""
        return self.decoder.world_size


@dataclass(frozen=True, eq=False)
class Bough:
    """All branches of one kind whose decoders have as many devices. num_apart: as of its branches.
    shapes: what its decoders may be of."""

    kind: ModuleKind
    num_devices: int
    num_apart: int
    shapes: tuple[Shape, ...]
    branches: Callable[[], Iterator[Branch]]


def list_boughs(
    job: Job,
    num_devices: int,
    sizes: Callable[[int], Iterator[Sizes]],
    choose: Callable[[Sizes], Iterator[Strategy]],
    divisors: Callable[[int], tuple[int, ...]],
) -> Iterator[Bough]:
    """Those on `num_devices`, of the kinds that search.layouts names.

    sizes: those within the limits on so many devices. choose: the strategies of such sizes.
    """
    kinds = [kind for kind in job.search.kinds if kind != "chain" and stack_reason(job.workload, kind) is None]
    if not kinds or model_reason(job.model, job.cluster, job.workload):
        return
    alone = job.model.model_copy(update={"encoders": ()})
    breaks = _outlaw(job, alone)

    def list_branches(kind: ModuleKind, found: list[Sizes], num_apart: int) -> Iterator[Branch]:
        for decoder in _lawful(job, alone, found, choose):
            if kind == "colocated":
                yield Branch(kind, decoder, 0, partial(_colocated, job, decoder, divisors))
            else:
                yield Branch(kind, decoder, num_apart, partial(_disaggregated, job, decoder, num_apart, divisors))

    for kind in kinds:
        for number in (num_devices,) if kind == "colocated" else range(1, num_devices):
            if kind == "colocated" or job.cluster.uneven_reason(number) is None:
                found = [each for each in sizes(number) if not breaks(each)]
                shapes = tuple(dict.fromkeys((each.tp, each.cp, each.mbs) for each in found))
                if shapes:
                    num_apart = num_devices - number
                    yield Bough(kind, number, num_apart, shapes, partial(list_branches, kind, found, num_apart))


def _outlaw(job: Job, alone: Model) -> Callable[[Sizes], bool]:
    """Whether sizes of a decoder break one of the laws that most break: asked first, of millions of them."""
    workload, num_layers, widest = job.workload, alone.num_layers, job.cluster.max_tensor_parallel

    def breaks(sizes: Sizes) -> bool:
        pp, tp, cp, dp, mbs = sizes
        is_wide = tp > widest or min(pp * tp * cp * dp, widest) % tp != 0
        return bool(pp > num_layers or is_wide or workload.global_batch_size % (dp * mbs) or workload.seq_length % cp)

    return breaks


def _lawful(
    job: Job, alone: Model, found: list[Sizes], choose: Callable[[Sizes], Iterator[Strategy]]
) -> Iterator[Strategy]:
    """The lawful strategies of the decoder by itself, each once."""
    seen = set()
    for sizes in found:
        for one in choose(sizes):
            decoder = one if job.search.schedule else replace(one, schedule="")
            if decoder not in seen:
                seen.add(decoder)
                if not unlawful_reason(alone, job.cluster, job.workload, decoder):
                    yield decoder


def _colocated(job: Job, decoder: Strategy, divisors: Callable[[int], tuple[int, ...]]) -> Iterator[Strategy]:
    number, batch, name = decoder.world_size, job.workload.global_batch_size, module_name(job.model)
    trains = encoders_train(job.model)
    for tp in divisors(min(number, job.cluster.max_tensor_parallel)):
        if number % tp:
            continue
        dp, samples = number // tp, decoder.mbs * decoder.dp
        is_chain = tp == decoder.tp and dp == decoder.dp
        if decoder.pp == 1 and samples % dp == 0 and not is_chain:
            yield _arrange(decoder, "inline", ModuleLayout(name, 1, tp, dp, samples // dp))
        runs: tuple[EncoderRun, ...] = ("phases", "recomputed_phases") if trains else ("phases",)
        for run in runs if stack_reason(job.workload, "colocated", "phases") is None and batch % dp == 0 else ():
            for mbs in divisors(batch // dp):
                if mbs <= MOST_PHASE_SAMPLES:
                    yield _arrange(decoder, run, ModuleLayout(name, 1, tp, dp, mbs))
        beside: tuple[EncoderRun, ...] = ("bubbles",) if trains else ("bubbles", "prefetch")
        width, count = decoder.tp * decoder.cp, decoder.num_microbatches(batch)
        fits = decoder.pp > 1 and width % tp == 0
        for run in beside if fits and stack_reason(job.workload, "colocated", "bubbles") is None else ():
            for num_taken in divisors(count):
                if num_taken * decoder.pp > count:
                    break
                mbs, rest = divmod(num_taken * decoder.mbs * tp, width)
                if not rest and 0 < mbs <= MOST_PHASE_SAMPLES:
                    yield _arrange(decoder, run, ModuleLayout(name, 1, tp, dp, mbs))


def _arrange(decoder: Strategy, run: EncoderRun, layout: ModuleLayout) -> Strategy:
    return replace(decoder, arrangement=Arrangement("colocated", run, layout))


def _disaggregated(
    job: Job, decoder: Strategy, number: int, divisors: Callable[[int], tuple[int, ...]]
) -> Iterator[Strategy]:
    samples, num_layers = decoder.mbs * decoder.dp, sum(part.layers.num_layers for part in job.model.encoders)
    for dp in divisors(number):
        if samples % dp or max(dp, decoder.dp) % min(dp, decoder.dp):
            continue
        for tp in divisors(number // dp):
            pp = number // dp // tp
            if pp > num_layers or job.cluster.max_tensor_parallel % tp:
                continue
            layout = ModuleLayout(module_name(job.model), pp, tp, dp, samples // dp, rank_offset=decoder.world_size)
            yield replace(decoder, pp=decoder.pp + pp, arrangement=Arrangement("disaggregated", "inline", layout))
