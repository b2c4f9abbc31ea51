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

    def __str__(self) -> str:
        """As Galvatron's logs write it: `1-4*-2f-sp` is PP 1, degree 4, DP 2 with ZeRO 3, Ulysses."""
        star, fully = "*" if self.degree > 1 else "", "f" if self.dp_type == "zero3" else ""
        return f"{self.pp}-{self.degree}{star}-{self.dp}{fully}{self._tail()}{'-sp' if self.sp > 1 else ''}"

    def _tail(self) -> str:
        return ""


@dataclass(frozen=True)
class LayerStrategy(EndsStrategy):
    """Of one layer: the same, and whether its activations are computed again in the backward."""

    checkpoint: bool = False

    def _tail(self) -> str:
        return "-c" if self.checkpoint else ""

    @property
    def of_ends(self) -> EndsStrategy:
        """The same for embedding and head."""
        return EndsStrategy(self.pp, self.tp, self.sp, self.dp, self.dp_type)


def dp_type_of(dp: int, is_fully: bool, default: DpType) -> DpType:
    """ZeRO 3 or the default; without data parallelism Galvatron shards nothing, not over Ulysses' devices either."""
    return "ddp" if dp == 1 else "zero3" if is_fully else default


def powers(most: int) -> list[int]:
    """1, 2, 4 … up to `most`."""
    return [1 << shift for shift in range(most.bit_length())] if most > 0 else []
