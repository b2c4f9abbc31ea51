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

from mm_autoparallel.model.job.arrangement import Arrangement, EncoderRun, ModuleKind, ModuleLayout
from mm_autoparallel.model.job.arrangement_law import model_reason, stack_reason
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import Strategy, unlawful_reason

MOST_PHASE_SAMPLES = 32
"""An encoder in phases takes so many samples at once at most: more fill a device and save no time. Assumed."""


@dataclass(frozen=True, eq=False)
class Branch:
    """All strategies with arrangements of one kind, on one number of devices, beside one decoder."""

    kind: ModuleKind
    decoder: Strategy
    strategies: Callable[[], Iterator[Strategy]]


def list_branches(
    job: Job,
    num_devices: int,
    decoders: Callable[[int], Iterator[Strategy]],
    divisors: Callable[[int], tuple[int, ...]],
) -> Iterator[Branch]:
    """Those on `num_devices`, of the kinds that search.layouts names.

    decoders: the strategies within the limits on so many devices.
    """
    kinds = [kind for kind in job.search.kinds if kind != "chain" and stack_reason(job.workload, kind) is None]
    if not kinds or model_reason(job.model, job.cluster, job.workload):
        return
    alone = job.model.model_copy(update={"encoders": ()})

    def lawful(number: int) -> list[Strategy]:
        found = {replace(one, schedule="") if not job.search.schedule else one for one in decoders(number)}
        return [one for one in found if not unlawful_reason(alone, job.cluster, job.workload, one)]

    if "colocated" in kinds:
        for decoder in lawful(num_devices):
            yield Branch("colocated", decoder, partial(_colocated, job, decoder, divisors))
    if "disaggregated" in kinds:
        for number in range(1, num_devices):
            if job.cluster.uneven_reason(number) is None:
                for decoder in lawful(number):
                    of = partial(_disaggregated, job, decoder, num_devices - number, divisors)
                    yield Branch("disaggregated", decoder, of)


def _colocated(job: Job, decoder: Strategy, divisors: Callable[[int], tuple[int, ...]]) -> Iterator[Strategy]:
    number, batch, encoder = decoder.world_size, job.workload.global_batch_size, job.model.encoders[0]
    trains = not (encoder.freeze and encoder.projector.freeze)
    for tp in divisors(min(number, job.cluster.max_tensor_parallel)):
        if number % tp:
            continue
        dp, samples = number // tp, decoder.mbs * decoder.dp
        is_chain = tp == decoder.tp and dp == decoder.dp
        if decoder.pp == 1 and samples % dp == 0 and not is_chain:
            yield _arrange(decoder, "inline", ModuleLayout(encoder.name, 1, tp, dp, samples // dp))
        runs: tuple[EncoderRun, ...] = ("phases", "recomputed_phases") if trains else ("phases",)
        for run in runs if stack_reason(job.workload, "colocated", "phases") is None and batch % dp == 0 else ():
            for mbs in divisors(batch // dp):
                if mbs <= MOST_PHASE_SAMPLES:
                    yield _arrange(decoder, run, ModuleLayout(encoder.name, 1, tp, dp, mbs))
        beside: tuple[EncoderRun, ...] = ("bubbles",) if trains else ("bubbles", "prefetch")
        width, count = decoder.tp * decoder.cp, decoder.num_microbatches(batch)
        fits = decoder.pp > 1 and decoder.vpp == 1 and width % tp == 0
        for run in beside if fits and stack_reason(job.workload, "colocated", "bubbles") is None else ():
            for num_taken in divisors(count):
                if num_taken * decoder.pp > count:
                    break
                mbs, rest = divmod(num_taken * decoder.mbs * tp, width)
                if not rest and 0 < mbs <= MOST_PHASE_SAMPLES:
                    yield _arrange(decoder, run, ModuleLayout(encoder.name, 1, tp, dp, mbs))


def _arrange(decoder: Strategy, run: EncoderRun, layout: ModuleLayout) -> Strategy:
    return replace(decoder, arrangement=Arrangement("colocated", run, layout))


def _disaggregated(
    job: Job, decoder: Strategy, number: int, divisors: Callable[[int], tuple[int, ...]]
) -> Iterator[Strategy]:
    samples, encoder = decoder.mbs * decoder.dp, job.model.encoders[0]
    for dp in divisors(number):
        if samples % dp or max(dp, decoder.dp) % min(dp, decoder.dp):
            continue
        for tp in divisors(number // dp):
            pp = number // dp // tp
            if pp > encoder.layers.num_layers or job.cluster.max_tensor_parallel % tp:
                continue
            layout = ModuleLayout(encoder.name, pp, tp, dp, samples // dp, rank_offset=decoder.world_size)
            yield replace(decoder, pp=decoder.pp + pp, arrangement=Arrangement("disaggregated", "inline", layout))
