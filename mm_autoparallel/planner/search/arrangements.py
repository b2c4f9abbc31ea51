"""The arrangements of a space: beside each lawful strategy of the decoder alone, every size of the encoders.

Several encoders are tried as one module, and as a module each.

The job's limits of pp, tp, cp, dp, mbs are the decoder's; an encoder's CP is one of search.encoder_cp. An encoder on
ranks of its own has the devices that the decoder leaves, whole nodes or what is left of the first, behind the decoder's
ranks; in phases it takes any number of samples at once that divides its own, up to MOST_PHASE_SAMPLES. Where a decoder
by itself is unlawful, no encoder is tried beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import combinations, permutations, product
from typing import NamedTuple

from mm_autoparallel.model.job.arrangement import JOINED, Arrangement, EncoderRun, ModuleLayout
from mm_autoparallel.model.job.arrangement_law import (
    PLANNED_SCHEDULES,
    encoders_train,
    has_planned,
    model_reason,
    module_name,
    module_reasons,
    stack_reason,
)
from mm_autoparallel.model.job.cached_law import may_be_cached
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.job.strategy_law import Laws

MOST_PHASE_SAMPLES = 32
"""An encoder in phases takes so many samples at once at most: more fill a device and save no time. Assumed."""


Shape = tuple[int, int, int]
"""TP, CP and MBS of a decoder."""


class Sizes(NamedTuple):
    """Of a strategy on pp x tp x cp x dp devices, before anything is chosen beside them."""

    pp: int
    tp: int
    cp: int
    dp: int
    mbs: int

    @property
    def shape(self) -> Shape:
        """As much of them as the times of one block hang on."""
        return self.tp, self.cp, self.mbs


Choose = Callable[[Sizes, Callable[[str], bool]], Iterator[Strategy]]
"""The strategies of such sizes, under those of the search's schedules that are meant."""


Options = tuple[tuple[Arrangement, ...], ...]
"""Of several modules, in the order of the chain, the ways that each of them may run beside one decoder."""


def _is_any(_: Strategy) -> bool:
    return True


@dataclass(frozen=True, eq=False)
class Branch:
    """All strategies with arrangements of one kind beside one decoder.

    apart: the encoders that have ranks of their own, and num_apart, how many these are. together: strategies of all
    encoders as one module. several: of a module for each of them, options that all go with one another. is_meant:
    whether a strategy is one of the branch, of those that these name.
    """

    kind: str
    decoder: Strategy
    apart: tuple[str, ...]
    num_apart: int
    together: Callable[[], Iterator[Strategy]]
    several: Callable[[], Iterator[Options]]
    is_meant: Callable[[Strategy], bool] = _is_any

    @property
    def num_devices(self) -> int:
        """Of the decoder."""
        return self.decoder.world_size

    def strategies(self, with_several: bool = True) -> Iterator[Strategy]:
        """All of them. with_several: those too with several modules, which may be very many."""
        yield from filter(self.is_meant, self.together())
        for options in self.several() if with_several else ():
            yield from filter(self.is_meant, combine(self.decoder, options))


@dataclass(frozen=True, eq=False)
class Bough:
    """All branches of one kind whose decoders have as many devices. apart, num_apart: as of its branches.
    sizes: those of its decoders. list_branches: those of decoders of some of them."""

    kind: str
    num_devices: int
    apart: tuple[str, ...]
    num_apart: int
    sizes: tuple[Sizes, ...]
    list_branches: Callable[[Sequence[Sizes]], Iterator[Branch]]

    def branches(self) -> Iterator[Branch]:
        """All of them."""
        return self.list_branches(self.sizes)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """What its decoders may be of."""
        return tuple(dict.fromkeys(each.shape for each in self.sizes))

    def by_shape(self) -> Iterator[Bough]:
        """A bough for each shape."""
        for shape in self.shapes:
            yield replace(self, sizes=tuple(each for each in self.sizes if each.shape == shape))


def combine(decoder: Strategy, options: Options) -> Iterator[Strategy]:
    """Every choice of one option of each module, but for all of them on the decoder's stages, which is the chain."""
    for first, *others in product(*options):
        if not all(one.in_chain or is_as_decoder(decoder, one) for one in (first, *others)):
            arrangement = replace(first, others=tuple(others))
            yield replace(decoder, pp=decoder.pp + arrangement.num_stages_apart, arrangement=arrangement)


def is_lawful_beside(job: Job, decoder: Strategy, one: Arrangement) -> bool:
    """Whether a module beside others obeys the laws that it has by itself."""
    lone = decoder.with_only(one)
    return next(module_reasons(job.model, job.cluster, job.workload, lone, True), None) is None


def is_as_decoder(decoder: Strategy, one: Arrangement) -> bool:
    """Whether an encoder inline on one stage has the decoder's sizes."""
    inline, own = one.kind == "colocated" and not one.away, one.encoder
    return inline and (own.tp, own.cp, own.dp) == (decoder.tp, decoder.cp, decoder.dp)


def list_boughs(
    job: Job,
    num_devices: int,
    sizes: Callable[[int, Callable[[Sizes], bool]], Iterator[Sizes]],
    choose: Choose,
    divisors: Callable[[int], tuple[int, ...]],
) -> Iterator[Bough]:
    """Those on `num_devices`, of the kinds that search.layouts names; where it names both, of both in one too.

    sizes: those within the limits on so many devices, without those that break a law at any MBS. choose: the strategies
    of such sizes, under schedules that are meant.
    """
    kinds = [kind for kind in job.search.kinds if kind != "chain" and stack_reason(job.workload, kind) is None]
    if not kinds or model_reason(job.model, job.cluster, job.workload):
        return
    if "chain" in job.search.kinds and not has_planned(job.schedules):
        return  # where the chain is not asked for, they are listed so that the law is told
    alone = job.model.model_copy(update={"encoders": ()})
    breaks, names = _outlaw(job, alone), tuple(encoder.name for encoder in job.model.encoders)

    def list_branches(kind: str, apart: tuple[str, ...], num_apart: int, found: Sequence[Sizes]) -> Iterator[Branch]:
        for decoder in _lawful(job, alone, found, choose):
            together: Callable[[], Iterator[Strategy]] = partial(_colocated, job, decoder, divisors)
            if apart:
                together = partial(_disaggregated, job, decoder, num_apart, divisors)
            several = partial(_list_options, job, decoder, apart, num_apart, divisors)
            is_one = len(apart) in (0, len(names))
            yield Branch(kind, decoder, apart, num_apart, together if is_one else _none, several)

    apart_of: list[tuple[str, tuple[str, ...]]] = [("disaggregated", names)] if "disaggregated" in kinds else []
    if len(kinds) == 2:
        some = (each for number in range(1, len(names)) for each in combinations(names, number))
        apart_of += [("colocated and disaggregated", apart) for apart in some]
    together: list[tuple[str, tuple[str, ...]]] = [("colocated", ())]
    asked = [(num_devices, together)] if "colocated" in kinds else []
    asked += [(number, apart_of) for number in range(1, num_devices) if apart_of]
    for number, kinds_there in asked:
        if number < num_devices and job.cluster.uneven_reason(number):
            continue
        found = [each for each in sizes(number, breaks) if not breaks(each)]
        if len(names) == 1 and number < num_devices:
            found = [each for each in found if _fits_apart(job, each, num_devices - number, divisors)]
        for kind, apart in kinds_there if found else ():
            num_apart = num_devices - number
            yield Bough(kind, number, apart, num_apart, tuple(found), partial(list_branches, kind, apart, num_apart))


def _fits_apart(job: Job, decoder: Sizes, number: int, divisors: Callable[[int], tuple[int, ...]]) -> bool:
    """Whether the one encoder has sizes on `number` ranks of its own beside such a decoder."""
    (encoder,) = job.model.encoders
    limits = encoder.layers.num_layers, job.cluster.max_tensor_parallel, tuple(job.search.encoder_cp)
    return bool(_list_sizes_apart(number, decoder.mbs * decoder.dp, decoder.dp, limits, divisors))


def _none() -> Iterator[Strategy]:
    yield from ()


def _outlaw(job: Job, alone: Model) -> Callable[[Sizes], bool]:
    """Whether sizes of a decoder break one of the laws that most break: asked first, of millions of them."""
    workload, num_layers, widest = job.workload, alone.num_layers, job.cluster.max_tensor_parallel

    def breaks(sizes: Sizes) -> bool:
        pp, tp, cp, dp, mbs = sizes
        is_wide = tp > widest or min(pp * tp * cp * dp, widest) % tp != 0
        return bool(pp > num_layers or is_wide or workload.global_batch_size % (dp * mbs) or workload.seq_length % cp)

    return breaks


def _lawful(job: Job, alone: Model, found: Sequence[Sizes], choose: Choose) -> Iterator[Strategy]:
    """The lawful strategies of the decoder by itself, each once, with schedules that go with an arrangement; where the
    search names none of these, with those that it names, so that the law is told."""
    seen, laws = set(), Laws(alone, job.cluster, job.workload)
    asks_planned = has_planned(job.schedules)

    def is_meant(schedule: str) -> bool:
        return not asks_planned or schedule in ("", *PLANNED_SCHEDULES)

    for sizes in found:
        for one in choose(sizes, is_meant):
            decoder = one if job.search.schedule else replace(one, schedule="")
            if decoder not in seen:
                seen.add(decoder)
                if not laws.unlawful_reason(decoder):
                    yield decoder


def _colocated(job: Job, decoder: Strategy, divisors: Callable[[int], tuple[int, ...]]) -> Iterator[Strategy]:
    for one in _list_colocated(job, decoder, module_name(job.model), divisors):
        if not is_as_decoder(decoder, one) and not one.in_chain:
            yield replace(decoder, arrangement=one)


def _list_colocated(
    job: Job, decoder: Strategy, name: str, divisors: Callable[[int], tuple[int, ...]]
) -> Iterator[Arrangement]:
    """The ways of one module on the decoder's devices, its chain's own included."""
    number, batch, parts = decoder.world_size, job.workload.global_batch_size, tuple(name.split(JOINED))
    trains = encoders_train(job.model, parts)
    num_layers = sum(part.layers.num_layers for part in job.model.encoders if part.name in parts)
    if may_be_cached(job.workload, parts) and stack_reason(job.workload, "colocated", "cached") is None:
        yield _on_shared("cached", ModuleLayout(name, 1, decoder.tp, decoder.dp, decoder.mbs, decoder.cp))
    if decoder.pp > 1 and decoder.cp == 1:
        yield _on_shared("inline", ModuleLayout(name, decoder.pp, decoder.tp, decoder.dp, decoder.mbs))
    for tp, cp in product(divisors(min(number, job.cluster.max_tensor_parallel)), job.search.encoder_cp):
        if number % (tp * cp):
            continue
        dp, samples = number // (tp * cp), decoder.mbs * decoder.dp
        if decoder.pp == 1 and samples % dp == 0:
            yield _on_shared("inline", ModuleLayout(name, 1, tp, dp, samples // dp, cp))
        runs: tuple[EncoderRun, ...] = ("phases", "recomputed_phases") if trains else ("phases",)
        for run in runs if stack_reason(job.workload, "colocated", "phases") is None and batch % dp == 0 else ():
            for mbs in divisors(batch // dp):
                if mbs <= MOST_PHASE_SAMPLES:
                    yield _on_shared(run, ModuleLayout(name, 1, tp, dp, mbs, cp))
        beside: tuple[EncoderRun, ...] = ("bubbles",) if trains else ("bubbles", "prefetch")
        width, count = decoder.tp * decoder.cp, decoder.num_microbatches(batch)
        fits = decoder.pp > 1 and width % (tp * cp) == 0
        for run in beside if fits and stack_reason(job.workload, "colocated", "bubbles") is None else ():
            for num_taken, pieces in product(divisors(count), job.search.encoder_pieces):
                if num_taken * decoder.pp > count:
                    break
                mbs, rest = divmod(num_taken * decoder.mbs * tp * cp, width)
                if not rest and 0 < mbs <= MOST_PHASE_SAMPLES and pieces <= num_layers:
                    yield _on_shared(run, ModuleLayout(name, 1, tp, dp, mbs, cp, pieces=pieces))


def _on_shared(run: EncoderRun, layout: ModuleLayout) -> Arrangement:
    return Arrangement("colocated", run, layout)


def _disaggregated(
    job: Job, decoder: Strategy, number: int, divisors: Callable[[int], tuple[int, ...]]
) -> Iterator[Strategy]:
    for one in _list_apart(job, decoder, module_name(job.model), decoder.world_size, number, divisors):
        yield replace(decoder, pp=decoder.pp + one.encoder.pp, arrangement=one)


def _list_apart(
    job: Job, decoder: Strategy, name: str, begin: int, number: int, divisors: Callable[[int], tuple[int, ...]]
) -> Iterator[Arrangement]:
    """The ways of one module on `number` ranks of its own from `begin` on."""
    parts = name.split(JOINED)
    num_layers = sum(part.layers.num_layers for part in job.model.encoders if part.name in parts)
    limits = num_layers, job.cluster.max_tensor_parallel, tuple(job.search.encoder_cp)
    for pp, tp, cp, dp, mbs in _list_sizes_apart(number, decoder.mbs * decoder.dp, decoder.dp, limits, divisors):
        yield Arrangement("disaggregated", "inline", ModuleLayout(name, pp, tp, dp, mbs, cp, begin))


@lru_cache(maxsize=100_000)
def _list_sizes_apart(
    number: int,
    samples: int,
    decoder_dp: int,
    limits: tuple[int, int, tuple[int, ...]],
    divisors: Callable[[int], tuple[int, ...]],
) -> tuple[Sizes, ...]:
    """Of a module on `number` ranks of its own. samples: of a decoder's micro-batch, all replicas together. limits: its
    layers, the widest tensor parallel group, and its context parallel sizes."""
    num_layers, widest, shared = limits
    found = []
    for dp in divisors(number):
        if samples % dp or max(dp, decoder_dp) % min(dp, decoder_dp):
            continue
        for tp, cp in product(divisors(number // dp), shared):
            pp, rest = divmod(number // dp // tp, cp)
            if not rest and pp <= num_layers and widest % tp == 0:
                found.append(Sizes(pp, tp, cp, dp, samples // dp))
    return tuple(found)


def _list_options(
    job: Job, decoder: Strategy, apart: tuple[str, ...], num_apart: int, divisors: Callable[[int], tuple[int, ...]]
) -> Iterator[Options]:
    """Of a module for each encoder: on the decoder's devices; apart, for each way to part the ranks, behind the decoder
    in the order of the chain, or in one in which none straddles nodes."""
    names = [encoder.name for encoder in job.model.encoders]
    if len(names) == 1 or job.workload.samples:  # modules of their own are planned for equal micro-batches
        return
    shared = {name: tuple(_list_colocated(job, decoder, name, divisors)) for name in names if name not in apart}
    for numbers in _part_ranks(num_apart, len(apart)):
        options = dict(shared)
        for order in permutations(range(len(apart))):
            begins, end = [0] * len(apart), decoder.world_size
            for at in order:
                begins[at], end = end, end + numbers[at]
            if all(_is_on_nodes(job, *each) for each in zip(begins, numbers, strict=True)):
                for name, begin, number in zip(apart, begins, numbers, strict=True):
                    options[name] = tuple(_list_apart(job, decoder, name, begin, number, divisors))
                yield tuple(options[name] for name in names)
                break


def _is_on_nodes(job: Job, begin: int, number: int) -> bool:
    span = job.cluster.node_span
    return begin % span == 0 or begin % span + number <= span


def _part_ranks(number: int, num_modules: int) -> Iterator[tuple[int, ...]]:
    """Every way to give `number` ranks to so many modules, each one at least; the empty one to none."""
    if num_modules == 0:
        yield ()
    elif num_modules == 1:
        yield (number,)
    else:
        for first in range(1, number - num_modules + 2):
            for others in _part_ranks(number - first, num_modules - 1):
                yield (first, *others)
