"""Ranks on a page: each has the stage and the places in groups that its module gives it."""

from __future__ import annotations

import numpy as np
from two_modules import APART, PHASES, apart, make_job

from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.reports.page.timelines import Block, pack_devices


def places(strategy: Strategy) -> dict[str, list[int]]:
    block = Block()
    packed = pack_devices(make_job().cluster, strategy, block)
    content = block.bytes()
    numbers = {"stage": packed.stage, "tp": packed.tp, "dp": packed.dp}
    return {
        name: np.frombuffer(content, f"<u{one.width}", one.count, one.offset).tolist() for name, one in numbers.items()
    }


def test_encoder_ranks_behind_the_decoders() -> None:
    assert places(APART.strategy) == {
        "stage": [1, 1, 2, 2, 0, 0, 0, 0],
        "tp": [0, 1, 0, 1, 0, 0, 0, 0],
        "dp": [0, 0, 0, 0, 0, 1, 2, 3],
    }


def test_encoder_ranks_before_the_decoders() -> None:
    first = Strategy(3, 2, 1, 1, arrangement=apart(1, 4, 1, 1, offset=0))
    assert places(first)["stage"] == [0, 0, 0, 0, 1, 1, 2, 2]


def test_shared_ranks_are_the_decoders() -> None:
    assert places(PHASES.strategy)["stage"] == [0, 0, 0, 0, 1, 1, 1, 1]
