"""Arrangement: encoders and their decoder with parallel sizes of their own, on the same devices or on others.

Several encoders, such as vision and audio, are one module, with the same sizes, of which one runs after the other; or
modules of their own, each with a kind, a run and sizes that others need not have.

A strategy without one is the chain: encoder and decoder in one pipeline, of one tensor, context and data parallel size.
Result files and jobs call an arrangement a layout; `layouts` of a strategy (model/job/layer_layout.py) are of layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

ModuleKind = Literal["chain", "colocated", "disaggregated"]
MODULE_KINDS: tuple[ModuleKind, ...] = get_args(ModuleKind)
EncoderRun = Literal["inline", "phases", "recomputed_phases", "bubbles", "prefetch", "cached"]
ENCODER_RUNS: tuple[EncoderRun, ...] = get_args(EncoderRun)
JOINED = "+"
"""Between the names of encoders that are one module."""


@dataclass(frozen=True, order=True)
class ModuleLayout:
    """Sizes of the module called `name`, as Strategy's. mbs: samples that one of its replicas takes at once.

    name: of encoders that share it, all of their names, in the order of the chain (`vision+audio`).

    rank_offset: its first rank; it has the `num_ranks` from there on, tensor parallel ranks side by side. pieces: into
    which each pass is cut, of whole layers, where it runs in bubbles or as prefetch.
    """

    name: str
    pp: int
    tp: int
    dp: int
    mbs: int
    cp: int = 1
    rank_offset: int = 0
    pieces: int = 1

    @property
    def num_ranks(self) -> int:
        return self.pp * self.tp * self.cp * self.dp

    @property
    def parts(self) -> tuple[str, ...]:
        """The modalities that are in it."""
        return tuple(self.name.split(JOINED))


@dataclass(frozen=True, order=True)
class Arrangement:
    """Where an encoder of its own sizes runs.

    colocated: on the decoder's devices; inline, before and after it in every micro-batch; in phases, all the step's
    forwards before the pipeline and all its backwards after it; in recomputed phases, where it keeps outputs alone and
    runs once more before its backwards; in bubbles, in the time that the decoder's pipeline leaves; as prefetch, there
    too and for the next step, where it is frozen; cached, in no step: it is frozen, features of each sample that were
    made once are read, and a projector that trains lies on the decoder's stages. disaggregated: on ranks of its own, as
    the pipeline's first stages (inline).

    others: those of further modules, each by itself; modules stand in the order of the chain. What is said below is of
    the first alone, but for `each` and what follows it.
    """

    kind: ModuleKind
    encoder_run: EncoderRun
    encoder: ModuleLayout
    others: tuple[Arrangement, ...] = ()

    @property
    def apart(self) -> bool:
        """Whether the encoder has ranks of its own."""
        return self.kind == "disaggregated"

    @property
    def away(self) -> bool:
        """Whether none of the encoder's layers is on a stage: it runs before, after or beside the pipeline, or not."""
        return self.encoder_run != "inline"

    @property
    def in_chain(self) -> bool:
        """Whether it lies on the decoder's stages, several, under the decoder's sizes, as in the chain."""
        return self.kind == "colocated" and not self.away and self.encoder.pp > 1

    @property
    def is_cached(self) -> bool:
        """Whether its features are read, and it does not run."""
        return self.encoder_run == "cached"

    @property
    def decoder_sized(self) -> bool:
        """Whether what of it lies on stages has the decoder's sizes, on whichever of them."""
        return self.in_chain or self.is_cached

    @property
    def in_phases(self) -> bool:
        """Whether it runs before and after the pipeline."""
        return self.encoder_run in ("phases", "recomputed_phases")

    @property
    def in_bubbles(self) -> bool:
        """Whether its passes run between those of the pipeline, in an order that plans have."""
        return self.encoder_run in ("bubbles", "prefetch")

    def num_beside(self, tp: int, cp: int) -> int:
        """Of a decoder of so many ranks a stage: encoder replicas that lie on the ranks of one of its stages."""
        return tp * cp // (self.encoder.tp * self.encoder.cp)

    @property
    def each(self) -> tuple[Arrangement, ...]:
        """Every module's by itself."""
        return (replace(self, others=()), *self.others) if self.others else (self,)

    @property
    def has_orders(self) -> bool:
        """Whether any module's passes run in an order that plans have."""
        return any(one.in_bubbles for one in self.each)

    @property
    def is_hard(self) -> bool:
        """Whether orders are to be found in which a step waits for passes of its own: these take long to prove."""
        return any(one.encoder_run == "bubbles" for one in self.each)

    @property
    def num_stages_apart(self) -> int:
        """Stages of the pipeline on ranks of encoders' own."""
        return sum(one.encoder.pp for one in self.each if one.apart)

    @property
    def decoder_offset(self) -> int:
        """The decoder's first rank: behind an encoder that alone has ranks of its own and begins at 0, else 0."""
        apart = [one.encoder for one in self.each if one.apart]
        return apart[0].num_ranks if len(apart) == 1 and apart[0].rank_offset == 0 else 0

    @property
    def name(self) -> str:
        """`disaggregated, vision PP 1 TP 1 DP 2`, of several modules with `; ` between."""
        return "; ".join(one._name for one in self.each)

    @property
    def words(self) -> str:
        """`colocated in phases`, of the first module."""
        run = self.encoder_run.replace("_", " ")
        return self.kind + {"inline": "", "prefetch": " as prefetch", "cached": " with cached features"}.get(
            run, f" in {run}"
        )

    @property
    def _name(self) -> str:
        of = self.encoder
        each = f" MBS {of.mbs}" if self.away else ""
        each += f" in {of.pieces} pieces" if of.pieces > 1 else ""
        shared = f" CP {of.cp}" if of.cp > 1 else ""
        return f"{self.words}, {of.name} PP {of.pp} TP {of.tp}{shared} DP {of.dp}{each}"
