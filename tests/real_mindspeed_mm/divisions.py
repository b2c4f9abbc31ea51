"""What is run of each release: divisions of the small model, how they are started, and what must come of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from small_vlm import GLOBAL_BATCH

Rows = list[list[int]]
"""[chunk][stage]"""

Outcome = Literal["equal", "same forward", "differs", "crashes", "refused"]
"""equal: losses and gradient norms of the undivided run. same forward: only the first loss is; from the first step on
weights differ. differs: it trains, with other losses from the first on. crashes: the checkout ends with an error.
refused: exit code 2 and one paragraph before anything starts."""


@dataclass(frozen=True)
class Division:
    """A plan by its numbers; rows are [chunk][stage]."""

    vision: Rows
    text: Rows
    vision_recompute: Rows
    text_recompute: Rows
    tp: int = 1
    cp: int = 1
    dp: int = 1
    mbs: int = 1
    zero: int = 1
    sequence_parallel: bool = True

    @property
    def pp(self) -> int:
        return len(self.text[0])

    @property
    def vpp(self) -> int:
        return len(self.text)

    @property
    def num_processes(self) -> int:
        return self.pp * self.tp * self.cp * self.dp

    def plan(self) -> dict[str, object]:
        """As auto_parallel_search_optimal_config.json has it."""

        def nested(rows: Rows) -> object:
            return rows if self.vpp > 1 else rows[0]

        return {
            "parallel_config": {
                "PP": self.pp, "TP": self.tp, "DP": self.dp, "MBS": self.mbs, "CP": self.cp, "VPP": self.vpp,
                "ZERO": self.zero, **({} if self.sequence_parallel else {"SEQUENCE_PARALLEL": False}),
            },
            "layer_placement": {
                "vit_layer_placement": nested(self.vision), "llm_layer_placement": nested(self.text),
            },
            "layer_recompute": {
                "vit_layer_recompute": nested(self.vision_recompute),
                "llm_layer_recompute": nested(self.text_recompute),
            },
            "schedule": "interleaved_1f1b" if self.vpp > 1 else "1f1b",
            "global_batch_size": GLOBAL_BATCH,
        }  # fmt: skip


def division(vision: Rows, text: Rows, recompute: tuple[Rows, Rows] | None = None, **sizes: int) -> Division:
    """A division that recomputes nothing, but for `recompute` (vision, text)."""
    none = [[0] * len(row) for row in text]
    again = recompute or (none, none)
    return Division(vision, text, *again, **sizes)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Case:
    """One run. By the hook under a plan's file, or `by_hand`: lists and flags as a person writes them, no planner.

    outcomes: by release, `*` for all others. says: a pattern that the output of a refusal or crash has.
    flags: switches beside those that the division needs (by hand alone).
    """

    name: str
    division: Division
    outcomes: Mapping[str, Outcome] = field(default_factory=lambda: {"*": "equal"})
    by_hand: bool = False
    flags: tuple[str, ...] = ()
    frozen_vision: bool = False
    says: str = ""

    def outcome(self, release: str) -> Outcome:
        return self.outcomes.get(release, self.outcomes["*"])


VPP2 = division([[4, 0], [0, 0]], [[0, 2], [2, 2]], ([[0, 0], [0, 0]], [[0, 0], [1, 2]]))
TP2 = division([[4, 0]], [[2, 4]], ([[0, 0]], [[1, 3]]), tp=2)
UNEVEN = division([[3, 1]], [[0, 6]], ([[2, 0]], [[0, 4]]))
FROZEN = division([[4, 0]], [[1, 5]], ([[0, 0]], [[1, 2]]))
FROZEN_STAGE = division([[4, 0]], [[0, 6]], ([[0, 0]], [[0, 2]]))
FROZEN_RECOMPUTED = division([[4, 0]], [[1, 5]], ([[2, 0]], [[0, 0]]))
REPLICATED = division([[4, 0]], [[3, 3]], dp=2, mbs=2, zero=0)
SPLIT = division([[3, 1]], [[0, 6]])
SPLIT_TP = replace(SPLIT, tp=2)
SPLIT_CP = replace(SPLIT, cp=2)
SPLIT_VPP = division([[3, 1], [0, 0]], [[0, 0], [3, 3]])
LATE_VPP = division([[2, 1], [1, 0]], [[0, 0], [2, 4]])

LENGTHS, SEQUENCE = "--variable-seq-lengths", "--sequence-parallel"
CHUNKS_COUNTED = ("26.1.0", "master")
"""Releases that count the layers before a stage of chunk 0 rightly."""

OLDER = ("2.0.0", "2.1.0")
"""Releases whose parts know model.json alone, and whose vision tower Megatron's checkpoint cannot take."""

PLANS = (
    Case("VPP 2, uneven recompute", VPP2),
    Case("TP 2, uneven recompute, no sequence parallel", replace(TP2, sequence_parallel=False)),
    Case(
        "TP 2, uneven recompute, sequence parallel", TP2,
        {"*": "same forward", **dict.fromkeys(OLDER, "refused")}, says="TP 2 with sequence parallel",
    ),
    Case(
        "uneven recompute, vision on both stages", UNEVEN,
        {"*": "equal", **dict.fromkeys(OLDER, "refused")}, says="it recomputes 2 vision layers",
    ),
    Case("vision on both stages, TP 2, no sequence parallel", replace(SPLIT_TP, sequence_parallel=False)),
    Case("frozen vision", FROZEN, frozen_vision=True),
    Case("frozen vision, a stage without anything to train", FROZEN_STAGE, frozen_vision=True),
    Case("no distributed optimizer, MBS 2", REPLICATED),
)  # fmt: skip
"""Edited plans under the hook."""

LAWS = (
    Case(
        "TP 2, --sequence-parallel", TP2, {"*": "same forward", **dict.fromkeys(OLDER, "crashes")}, by_hand=True,
        flags=(LENGTHS, SEQUENCE), says="must match the size",
    ),
    Case("vision on both stages, no --variable-seq-lengths", SPLIT, {"*": "crashes"}, by_hand=True, says="size|shape"),
    Case(
        "vision on both stages, TP 2, --sequence-parallel", SPLIT_TP, {"*": "crashes"}, by_hand=True,
        flags=(LENGTHS, SEQUENCE), says="NoneType|must match the size",
    ),
    Case("vision on both stages, TP 2", SPLIT_TP, by_hand=True, flags=(LENGTHS,)),
    Case(
        "VPP 2, windows, vision of chunk 0 on both stages", SPLIT_VPP,
        {"*": "crashes", **dict.fromkeys(CHUNKS_COUNTED, "equal")}, by_hand=True, flags=(LENGTHS,), says="'list'",
    ),
    Case(
        "VPP 2, windows, vision in chunk 1", LATE_VPP,
        {"*": "crashes", **dict.fromkeys(CHUNKS_COUNTED, "differs")}, by_hand=True, flags=(LENGTHS,), says="'list'",
    ),
)  # fmt: skip
"""What each release's own forward makes of what the laws of plans forbid, and of the alternatives that they name."""

REFUSED = (
    Case(
        "planned: vision on both stages, TP 2, sequence parallel", SPLIT_TP, {"*": "refused"}, says="sequence parallel",
    ),
    Case("planned: vision on both stages, CP 2", SPLIT_CP, {"*": "refused"}, says="CP 2"),
    Case(
        "planned: VPP 2, windows, vision of chunk 0 on both stages", SPLIT_VPP,
        {"*": "refused", **dict.fromkeys(CHUNKS_COUNTED, "equal")}, says="VPP 2",
    ),
    Case("planned: VPP 2, windows, vision in chunk 1", LATE_VPP, {"*": "refused"}, says="VPP 2"),
    Case(
        "planned: recompute of frozen vision", FROZEN_RECOMPUTED, {"*": "refused"}, frozen_vision=True, says="frozen",
    ),
)  # fmt: skip
"""The same under the hook, before anything starts."""
