"""Arrangement: an encoder and its decoder with parallel sizes of their own, on the same devices or on others.

A strategy without one is the chain: encoder and decoder in one pipeline, of one tensor, context and data parallel size.
Result files and jobs call an arrangement a layout; `layouts` of a strategy (model/job/layer_layout.py) are of layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

ModuleKind = Literal["chain", "colocated", "disaggregated"]
MODULE_KINDS: tuple[ModuleKind, ...] = get_args(ModuleKind)
EncoderRun = Literal["inline", "phases", "recomputed_phases"]
ENCODER_RUNS: tuple[EncoderRun, ...] = get_args(EncoderRun)
UNPLANNED_RUNS = ("bubbles", "prefetch", "cached")
"""Ways to run an encoder that result files may name and nothing here plans yet."""


@dataclass(frozen=True, order=True)
class ModuleLayout:
    """Sizes of the module called `name`, as Strategy's. mbs: samples that one of its replicas takes at once.

    rank_offset: its first rank; it has the `num_ranks` from there on, tensor parallel ranks side by side.
    """

    name: str
    pp: int
    tp: int
    dp: int
    mbs: int
    cp: int = 1
    rank_offset: int = 0

    @property
    def num_ranks(self) -> int:
        return self.pp * self.tp * self.cp * self.dp


@dataclass(frozen=True, order=True)
class Arrangement:
    """Where an encoder of its own sizes runs.

    colocated: on the decoder's devices; inline, before and after it in every micro-batch; in phases, all the step's
    forwards before the pipeline and all its backwards after it; in recomputed phases, where it keeps outputs alone and
    runs once more before its backwards. disaggregated: on ranks of its own, as the pipeline's first stages (inline).
    """

    kind: ModuleKind
    encoder_run: EncoderRun
    encoder: ModuleLayout

    @property
    def apart(self) -> bool:
        """Whether the encoder has ranks of its own."""
        return self.kind == "disaggregated"

    @property
    def in_phases(self) -> bool:
        """Whether the encoder runs before and after the pipeline, and none of its layers is on a stage."""
        return self.encoder_run != "inline"

    @property
    def name(self) -> str:
        """`disaggregated, vision PP 1 TP 1 DP 2`."""
        of, run = self.encoder, {"inline": "", "phases": " in phases", "recomputed_phases": " in recomputed phases"}
        each = f" MBS {of.mbs}" if self.in_phases else ""
        return f"{self.kind}{run[self.encoder_run]}, {of.name} PP {of.pp} TP {of.tp} DP {of.dp}{each}"
