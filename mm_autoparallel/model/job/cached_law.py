"""What encoders obey whose features are read, made once before training, and not run in any step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from mm_autoparallel.model.job.arrangement import ModuleLayout
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.validation import nearest

if TYPE_CHECKING:
    from mm_autoparallel.model.job.strategy import Strategy

_SIZES = ("tp", "cp", "dp", "mbs")


def cached_reasons(model: Model, workload: Workload) -> Iterator[str]:
    """What is wrong with the encoders that the workload says have cached features."""
    known = {encoder.name: encoder for encoder in model.encoders}
    for name in workload.cached_features:
        if name not in known:
            has = f"its encoders are {', '.join(known)}" if known else "it has no encoder"
            yield f"cached_features: the model has no encoder {name}{nearest(name, list(known))}; {has}"
        elif model.layers_train(known[name]):
            what = "which trains" if not known[name].freeze else "whose positions train (train_positions)"
            yield (
                f"cached_features names {name}, {what}, so that its features are others in every step; freeze it "
                "(its projector may train), or leave it out"
            )


def break_cached(model: Model, workload: Workload, encoder: ModuleLayout, decoder: Strategy) -> Iterator[str]:
    """The rules that a module breaks whose features are read by the ranks of the decoder's first stage."""
    unsaid = [name for name in encoder.parts if name not in workload.cached_features]
    if unsaid:
        yield (
            f"workload.cached_features does not name {' and '.join(unsaid)}: features are made once and read in every "
            "step only where the encoder is frozen and each epoch shows it the same inputs, not augmented ones"
        )
    projects = [one.name for one in model.encoders if one.name in encoder.parts and model.projectors_train(one)]
    if projects and decoder.cp > 1:
        yield f"the projector of {projects[0]} trains on the stages of a decoder of CP {decoder.cp}, and needs CP 1"
    if encoder.pp > 1:
        yield f"encoder PP {encoder.pp}: cached features are read by the ranks of one stage, so its PP is 1"
    for name in _SIZES:
        mine, theirs = getattr(encoder, name), getattr(decoder, name)
        if mine != theirs:
            yield (
                f"cached features of {encoder.name} have {name.upper()} {mine} beside a decoder of {name.upper()} "
                f"{theirs}; the ranks of the decoder's first stage read them, so it has the decoder's"
            )
    if encoder.rank_offset:
        yield f"{encoder.name} begins at rank {encoder.rank_offset}; the decoder, which reads its features, begins at 0"
    if encoder.pieces != 1:
        yield f"{encoder.name} is in {encoder.pieces} pieces; passes in bubbles or as prefetch alone are cut"


def may_be_cached(workload: Workload, parts: Sequence[str]) -> bool:
    """Whether the workload says so of all these encoders."""
    return set(parts) <= set(workload.cached_features)
