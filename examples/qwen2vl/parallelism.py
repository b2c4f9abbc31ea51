"""Parallelism: how a run is divided, as the flags or a plan have it."""

from __future__ import annotations

from dataclasses import dataclass

from mm_autoparallel.model.job.arrangement import Arrangement
from mm_autoparallel.pipeline.schedules.catalog import SCHEDULES
from mm_autoparallel.pipeline.schedules.torch_csv import Orders
from mm_autoparallel.pipeline.schedules.virtual_stages import virtual_stage
from model import Held


@dataclass(frozen=True)
class Encoder:
    """An encoder of sizes of its own: where and when it runs, and what each of its stages holds.

    orders: what each stage of the decoder runs where the encoder's passes stand among it.
    """

    arrangement: Arrangement
    pieces: tuple[tuple[Held, ...], ...]
    orders: tuple[str, ...] = ()


@dataclass(frozen=True)
class Parallelism:
    """How training is divided. pieces: what each virtual stage holds. order: in the place of the schedule's own.

    encoder: where it has sizes of its own; all others are then the decoder's.
    """

    pp: int
    dp: int
    tp: int
    micro_batch_size: int
    zero: int
    fsdp: bool
    schedule: str
    pieces: tuple[tuple[Held, ...], ...]
    order: Orders | None = None
    encoder: Encoder | None = None

    @property
    def v_shaped(self) -> bool:
        """Whether every second chunk runs back through the pipeline's ranks."""
        return self.order.v_shaped if self.order else SCHEDULES[self.schedule].v_shaped

    @property
    def parted(self) -> bool:
        """Whether weight gradients are computed apart from those of inputs."""
        return any("I" in text for text in self.order.texts) if self.order else SCHEDULES[self.schedule].splits

    def numbers_on(self, place: int) -> list[int]:
        """The virtual stages of the pipeline rank at `place`, by chunk."""
        return [virtual_stage(chunk, place, self.pp, self.v_shaped) for chunk in range(len(self.pieces) // self.pp)]
