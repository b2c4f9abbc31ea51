"""What is run of each release: divisions of the small model, how they are started, and what must come of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from small_vlm import GLOBAL_BATCH

Rows = list[list[int]]
"""[chunk][stage]"""

Outcome = Literal["equal", "refused", "crashes", "differs"]
"""equal: the losses of the undivided run. refused: exit code 2 and one paragraph before anything starts. crashes: the
checkout ends with an error in its own forward or before. differs: it trains, with other losses."""


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
    schedule: str = ""

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
                "ZERO": self.zero,
            },
            "layer_placement": {
                "vit_layer_placement": nested(self.vision), "llm_layer_placement": nested(self.text),
            },
            "layer_recompute": {
                "vit_layer_recompute": nested(self.vision_recompute),
                "llm_layer_recompute": nested(self.text_recompute),
            },
            "schedule": self.schedule or ("interleaved_1f1b" if self.vpp > 1 else "1f1b"),
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


VPP2 = division([[4, 0], [0, 0]], [[0, 2], [2, 2]], ([[0, 0], [0, 0]], [[0, 0], [1, 2]]), dp=2)
TP2 = division([[4, 0]], [[2, 4]], ([[0, 0]], [[1, 3]]), tp=2)
TP2_PLAIN = division([[4, 0]], [[2, 4]], tp=2)
UNEVEN = division([[3, 1]], [[0, 6]], ([[2, 0]], [[0, 4]]), dp=2)
FROZEN = division([[4, 0]], [[1, 5]], ([[0, 0]], [[1, 2]]), dp=2)
FROZEN_STAGE = division([[4, 0]], [[0, 6]], ([[0, 0]], [[0, 2]]), dp=2)
SPLIT_TP = division([[3, 1]], [[0, 6]], tp=2)
SPLIT_CP = division([[3, 1]], [[0, 6]], cp=2)
CP2 = division([[4, 0]], [[2, 4]], cp=2)
SPLIT_VPP = division([[3, 1], [0, 0]], [[0, 0], [3, 3]], dp=2)
LATE_VPP = division([[2, 1], [1, 0]], [[0, 0], [2, 4]], dp=2)
REPLICATED = division([[4, 0]], [[3, 3]], dp=2, mbs=2, zero=0)

VARIABLE = ("--variable-seq-lengths",)
SEQUENCE = ("--sequence-parallel",)

CASES = (
    Case("VPP 2", VPP2),
    Case("TP 2", TP2),
    Case("uneven recompute, vision on both stages", UNEVEN),
    Case("frozen vision", FROZEN, frozen_vision=True),
    Case("a stage without anything to train", FROZEN_STAGE, frozen_vision=True),
    Case("no distributed optimizer, MBS 2", REPLICATED),
    Case("CP 2", CP2),
)
"""Edited plans under the hook."""

LAWS = (
    Case("TP 2 by hand, --sequence-parallel", TP2_PLAIN, {"*": "differs"}, by_hand=True, flags=SEQUENCE),
    Case("TP 2 by hand, no --sequence-parallel", TP2_PLAIN, by_hand=True),
    Case(
        "vision on both stages without --variable-seq-lengths",
        division([[3, 1]], [[0, 6]]),
        {"*": "crashes"},
        by_hand=True,
    ),
    Case("vision on both stages, TP 2", SPLIT_TP, {"*": "crashes"}, by_hand=True, flags=(*VARIABLE, *SEQUENCE)),
    Case("the same, no --sequence-parallel", SPLIT_TP, by_hand=True, flags=VARIABLE),
    Case("vision on both stages, CP 2", SPLIT_CP, {"*": "crashes"}, by_hand=True, flags=VARIABLE),
    Case(
        "VPP 2, windows, chunk 0's vision on both stages",
        SPLIT_VPP,
        {"*": "crashes", "master": "equal"},
        by_hand=True,
        flags=VARIABLE,
    ),
    Case("VPP 2, windows, vision in chunk 1", LATE_VPP, {"*": "crashes", "master": "differs"}, by_hand=True, flags=VARIABLE),
)
"""The rows of the table of laws: what each release's own forward makes of a plan."""

REFUSED = (
    Case("refused: vision on both stages, CP 2", SPLIT_CP, {"*": "refused"}, says=r"CP"),
    Case("refused: VPP 2, vision in chunk 1", LATE_VPP, {"*": "refused"}, says=r"chunk"),
    Case(
        "refused: recompute of frozen vision",
        division([[4, 0]], [[1, 5]], ([[2, 0]], [[0, 0]]), dp=2),
        {"*": "refused"},
        frozen_vision=True,
        says=r"vision",
    ),
)
"""Plans that the hook must refuse before the start."""
