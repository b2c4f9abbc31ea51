"""Modules: what each encoder of a strategy has of its own, as words such as `vision.TP=2` name it.

An encoder of the chain, or on the decoder's stages beside others that are elsewhere, has the decoder's sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from itertools import product

from mm_autoparallel.errors import JobError
from mm_autoparallel.model.job.arrangement import ENCODER_RUNS, MODULE_KINDS, Arrangement
from mm_autoparallel.model.job.arrangement_law import PREFETCH_LAW, encoders_train, model_reason, stack_reason
from mm_autoparallel.model.job.cached_law import may_be_cached
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.planner.search.arrangements import (
    Bough,
    Branch,
    Options,
    combine,
    is_as_decoder,
    is_lawful_beside,
)
from mm_autoparallel.planner.search.space import judge, list_all_boughs, list_entries
from mm_autoparallel.validation import nearest

Wish = Mapping[str, int | str]
"""Fields of a Strategy and their values; `layout`, and those of an encoder's module, such as `vision.tp`."""

LAYOUT = "layout"
SIZES = ("pp", "tp", "cp", "dp", "mbs", "pieces")
"""What a module has of its own, beside its layout."""
LAYOUTS = (*MODULE_KINDS, *ENCODER_RUNS)
"""What a module's layout may be called: its kind, or how it runs where it is colocated."""


@dataclass(frozen=True)
class Own:
    """Of one encoder: how it runs (of LAYOUTS the word that tells most), its sizes, and all that LAYOUTS call it."""

    layout: str
    pp: int
    tp: int
    cp: int
    dp: int
    mbs: int
    pieces: int
    layouts: tuple[str, ...]

    @classmethod
    def of(cls, strategy: Strategy, name: str) -> Own:
        """That of the encoder `name`."""
        each = strategy.arrangement.each if strategy.arrangement else ()
        return cls.beside(strategy.of_decoder(), next((one for one in each if name in one.encoder.parts), None))

    @classmethod
    def beside(cls, decoder: Strategy, one: Arrangement | None) -> Own:
        """That of an encoder of the module `one`; None: of the chain."""
        own = decoder if one is None else one.encoder
        sizes = own.pp, own.tp, own.cp, own.dp, own.mbs, one.encoder.pieces if one else 1
        if one is None:
            return cls("chain", *sizes, ("chain",))
        words = words_of(one)
        if one.apart:
            return cls(one.kind, *sizes, words)
        if one.in_chain:
            return cls("chain", *sizes, ("chain", *words))
        return cls(one.encoder_run, *sizes, (*words, "chain") if is_as_decoder(decoder, one) else words)

    def meets(self, key: str, value: int | str) -> bool:
        """Whether its size `key` is that, or its layout is called so."""
        return value in self.layouts if key == LAYOUT else bool(getattr(self, key) == value)

    def differs(self, other: Own) -> tuple[int, int]:
        """How unlike both are: first by how they run, then by sizes."""
        return int(self.layout != other.layout), sum(getattr(self, key) != getattr(other, key) for key in SIZES)


def words_of(one: Arrangement) -> tuple[str, ...]:
    """What LAYOUTS call a module: its kind and, where it is colocated, how it runs."""
    return (one.kind,) if one.apart else (one.kind, one.encoder_run)


def split_key(key: str) -> tuple[str, str]:
    """`vision.tp` → its module and what is meant of that; the module is empty where a key names none."""
    name, _, of = key.rpartition(".")
    return name, of


def format_key(key: str) -> str:
    """As people write it: `vision.TP`."""
    name, of = split_key(key)
    return f"{name}.{of.upper()}" if name else of.upper()


def parts_of(wish: Wish) -> dict[str, dict[str, int | str]]:
    """What a wish says of each encoder that it names."""
    found: dict[str, dict[str, int | str]] = {}
    for key, value in wish.items():
        name, of = split_key(key)
        if name:
            found.setdefault(name, {})[of] = value
    return found


def check_modules(job: Job, wish: Wish, told: str) -> None:
    """Raises JobError where a wish names an encoder that the model has not. told: what messages call the wish."""
    names = [encoder.name for encoder in job.model.encoders]
    for name in parts_of(wish):
        if name not in names:
            has = f"its encoders are {', '.join(names)}" if names else "it has no encoder"
            raise JobError(f"{told}: the model has no encoder {name}{nearest(name, names)}; {has}")


def kinds_of(wish: Wish) -> set[str]:
    """Kinds of layouts within which encoders may be as a wish says; none where it says nothing of them."""
    kinds = set[str]()
    for of in parts_of(wish).values():
        word = of.get(LAYOUT)
        kinds |= {str(word)} if word in MODULE_KINDS else {"colocated"} if word else set(MODULE_KINDS)
        kinds |= {"colocated"} if word == "chain" else set()
    return kinds


def absence_reason(job: Job, wish: Wish) -> str | None:
    """Why no strategy of the job has such layouts, where a law of model or framework says it."""
    if reason := model_reason(job.model, job.cluster, job.workload):
        return reason
    asked = {"": str(wish.get(LAYOUT, "chain"))}
    asked |= {name: str(of.get(LAYOUT, "chain")) for name, of in parts_of(wish).items()}
    for name, word in asked.items():
        kind, run = ("colocated", word) if word in ENCODER_RUNS else (word, "")
        if reason := stack_reason(job.workload, kind, run):
            return reason
        trains = encoders_train(job.model, (name,) if name else ())
        if word == "prefetch" and trains:
            return f"{PREFETCH_LAW}; freeze both, or run it in bubbles"
        cached = [one for one in job.model.encoders if not name or one.name == name]
        if word == "cached" and not may_be_cached(job.workload, [one.name for one in cached]):
            return (
                f"features of {name or 'the encoder'} may be made once and read where workload.cached_features names "
                "it, and that does not"
            )
        if word == "recomputed_phases" and not trains:
            return f"nothing of {name or 'the encoder'} trains, so nothing of it is run again; ask for phases"
    return None


def meets(strategy: Strategy, wish: Wish) -> bool:
    """Whether each encoder is as a wish says."""
    return all(
        Own.of(strategy, name).meets(key, value) for name, of in parts_of(wish).items() for key, value in of.items()
    )


def narrow_options(branch: Branch, wish: Wish) -> Iterator[Options]:
    """Of a branch's options for several modules those that are as a wish says, module by module."""
    parts = parts_of(wish)

    def is_meant(one: Arrangement) -> bool:
        own = Own.beside(branch.decoder, one)
        wishes = (item for name in one.encoder.parts for item in parts.get(name, {}).items())
        return all(own.meets(key, value) for key, value in wishes)

    for options in branch.several():
        yield tuple(tuple(filter(is_meant, each)) for each in options)


def list_owns(job: Job, branches: Iterable[Branch], look: Callable[[], None] = lambda: None) -> dict[str, set[Own]]:
    """All that each encoder may be in lawful strategies of the branches. look: called for each that is new, to raise
    what should end it."""
    found: dict[str, set[Own]] = {encoder.name: set() for encoder in job.model.encoders}

    def is_known(decoder: Strategy, one: Arrangement) -> bool:
        own = Own.beside(decoder, one)
        return all(own in found[name] for name in one.encoder.parts)

    def learn(decoder: Strategy, one: Arrangement, ways: Iterable[Strategy]) -> None:
        look()
        if any(judge(job, way).reason is None for way in ways):
            for name in one.encoder.parts:
                found[name].add(Own.beside(decoder, one))

    for branch in branches:
        decoder = branch.decoder
        for strategy in branch.together():
            assert strategy.arrangement is not None
            if not is_known(decoder, strategy.arrangement):
                learn(decoder, strategy.arrangement, (strategy,))
        is_lawful = cache(partial(is_lawful_beside, job, decoder))
        for options in branch.several():
            for at, each in enumerate(options):
                for one in each:
                    if not is_known(decoder, one) and is_lawful(one):
                        others = [tuple(filter(is_lawful, other)) for other in options]
                        learn(decoder, one, combine(decoder, (*others[:at], (one,), *others[at + 1 :])))
    return found


def list_new(
    job: Job, is_new: Callable[[Strategy], bool], look: Callable[[], None] = lambda: None, with_several: bool = True
) -> Iterator[Strategy]:
    """Lawful strategies that have between them every figure of the lawful ones: those of the chain, and of layouts
    those that are new. is_new: whether a strategy has a figure that none before it had. look: called for each bough
    and strategy of the chain, to raise what should end it. with_several: as in `list_entries`."""
    yield from (entry.strategy for entry in list_entries(job, look, ()) if entry.reason is None)
    branches = tuple(list_branches(list_all_boughs(job, look)))
    for branch in branches:
        yield from (one for one in branch.together() if is_new(one) and judge(job, one).reason is None)
    if with_several:
        yield from _list_several(job, branches, is_new)


def _list_several(job: Job, branches: Iterable[Branch], is_new: Callable[[Strategy], bool]) -> Iterator[Strategy]:
    """Lawful strategies of several modules, of each branch one of each number of stages, context parallel size and
    number of pieces, as far as they are new. is_new: asked before whether a strategy is lawful, and again before the
    next one."""
    for branch in branches:
        decoder, known = branch.decoder, set[tuple[int, int, int]]()
        is_lawful = cache(partial(is_lawful_beside, job, decoder))
        for options in branch.several():
            alike = [_group(decoder, each) for each in options]
            for keys in product(*alike):
                shape = sum(key[0] for key in keys), max(key[1] for key in keys), max(key[2] for key in keys)
                groups = tuple(group[key] for group, key in zip(alike, keys, strict=True))
                first = None if shape in known else next(combine(decoder, tuple((group[0],) for group in groups)), None)
                if first is None:
                    continue
                if not is_new(first):
                    known.add(shape)
                    continue
                lawful = combine(decoder, tuple(tuple(filter(is_lawful, group))[:1] for group in groups))
                found = next((one for one in lawful if judge(job, one).reason is None), None)
                if found:
                    known.add(shape)
                    yield found


def _group(decoder: Strategy, options: Iterable[Arrangement]) -> dict[tuple[int, ...], list[Arrangement]]:
    """Options of a module by what a strategy's figures, and whether it is lawful together with others, hang on: stages
    of its own, context parallel size, pieces, and whether it lies as in the chain."""
    groups: dict[tuple[int, ...], list[Arrangement]] = {}
    for one in options:
        own = one.encoder
        key = one.num_stages_apart, own.cp, own.pieces, one.in_chain, is_as_decoder(decoder, one)
        groups.setdefault(key, []).append(one)
    return groups


def list_branches(boughs: Iterable[Bough]) -> Iterator[Branch]:
    """All of them."""
    return (branch for bough in boughs for branch in bough.branches())


def list_beside(job: Job, decoder: Strategy) -> dict[str, set[Own]]:
    """All that each encoder may be beside one decoder in lawful strategies of the job's space with layouts."""
    boughs = (bough for bough in list_all_boughs(job) if bough.num_devices == decoder.world_size)
    return list_owns(job, (branch for branch in list_branches(boughs) if branch.decoder == decoder))
