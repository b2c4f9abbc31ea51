"""How Galvatron lays out one layer, or the embedding with the head: degrees, ZeRO stage, checkpointing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DpType = Literal["ddp", "zero2", "zero3"]


@dataclass(frozen=True)
class EndsStrategy:
    """Of embedding and head: pipeline stages, tensor or Ulysses parallel degree (one of them is 1), data parallel."""

    pp: int
    tp: int
    sp: int
    dp: int
    dp_type: DpType

    @property
    def degree(self) -> int:
        """Devices that share one sample."""
        return max(self.tp, self.sp)

    @property
    def sharded(self) -> int:
        """Devices that hold the same weights without ZeRO: what ZeRO shards over."""
        return self.dp * self.sp

    @property
    def uses_ulysses(self) -> bool:
        """What files say of it."""
        return self.sp > 1

    def __str__(self) -> str:
        """As Galvatron's logs write it: `1-4*-2f-sp` is PP 1, degree 4, DP 2 with ZeRO 3, Ulysses. The star stands at
        the degree whose devices are neighbours."""
        star, fully = "*" if self.degree > 1 else "", "f" if self.dp_type == "zero3" else ""
        before, after = ("", star) if self._is_strided() else (star, "")
        return f"{self.pp}-{self.degree}{before}-{self.dp}{fully}{after}{self._tail()}{'-sp' if self.sp > 1 else ''}"

    def _is_strided(self) -> bool:
        return False

    def _tail(self) -> str:
        return ""


@dataclass(frozen=True)
class LayerStrategy(EndsStrategy):
    """Of one layer: the same, and whether its activations are computed again in the backward. strided: the devices of
    data parallelism are neighbours, not those of tensor parallelism; of 2.4.0 alone."""

    checkpoint: bool = False
    strided: bool = False

    def _is_strided(self) -> bool:
        return self.strided

    def _tail(self) -> str:
        return "-c" if self.checkpoint else ""

    @property
    def of_ends(self) -> EndsStrategy:
        """The same for embedding and head."""
        return EndsStrategy(self.pp, self.tp, self.sp, self.dp, self.dp_type)


@dataclass(frozen=True)
class FlaggedEnds(EndsStrategy):
    """is_ulysses: of the vocabulary, also at a degree of 1, where slips of a cost model tell."""

    is_ulysses: bool = False

    @property
    def uses_ulysses(self) -> bool:
        """What files say of it."""
        return self.is_ulysses


def dp_type_of(dp: int, is_fully: bool, default: DpType) -> DpType:
    """ZeRO 3 or the default; without data parallelism Galvatron shards nothing, not over Ulysses' devices either."""
    return "ddp" if dp == 1 else "zero3" if is_fully else default


def powers(most: int) -> list[int]:
    """1, 2, 4 … up to `most`."""
    return [1 << shift for shift in range(most.bit_length())] if most > 0 else []
