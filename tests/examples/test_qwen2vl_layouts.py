"""The training script under plans with layouts: encoders of sizes of their own, and the gradients of one process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from forked_ranks import ForkedRanks
from gradients import check, start

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("skimage")
pytest.importorskip("safetensors")

VISION, TEXT = 4, 5
"""Layers of the small model."""

Sizes = tuple[int, int, int, int]
"""PP, TP, DP and MBS."""


def plan(
    kind: str,
    run: str,
    encoder: Sizes,
    decoder: Sizes,
    text: Sequence[Any] = (TEXT,),
    vision: Sequence[int] = (VISION,),
    again: Sequence[int] = (0,),
    encoder_first: bool = False,
    **more: Any,
) -> dict[str, Any]:
    """A plan's file. text, vision: layers by stages of either module (text of chunks: a list each). again: of the
    decoder's, those that recompute."""
    apart = kind == "disaggregated"
    counts = [each[0] * each[1] * each[2] for each in (encoder, decoder)]
    offsets = ((0, counts[0]) if encoder_first else (counts[1], 0)) if apart else (0, 0)
    names = ("PP", "TP", "DP", "MBS")
    modules = {
        name: dict(zip(names, sizes, strict=True)) | {"rank_offset": offset}
        for name, sizes, offset in zip(("vision", "llm"), (encoder, decoder), offsets, strict=True)
    }
    zeros = [0] * (encoder[0] if apart else 0)
    none = [[0] * len(chunk) if isinstance(chunk, list) else 0 for chunk in [*zeros, *text]]
    placed = [*vision, *none[len(vision) :]] if run == "inline" else none
    return {
        "parallel_config": dict(zip(names, decoder, strict=True)) | {"PP": len(zeros) + decoder[0], "ZERO": 0} | more,
        "layer_placement": {"vit_layer_placement": placed, "llm_layer_placement": [*zeros, *text]},
        "layer_recompute": {
            "vit_layer_recompute": none,
            "llm_layer_recompute": [*zeros, *again] if any(again) else none,
        },
        "layout": {"kind": kind, "encoder_run": run, "modules": modules},
        "e2e_time": 123.4,
    }


TWO = {
    "phases": plan("colocated", "phases", (1, 1, 2, 2), (2, 1, 1, 1), (2, 3), again=(1, 0)),
    "recomputed-phases-frozen": plan("colocated", "recomputed_phases", (1, 2, 1, 1), (1, 1, 2, 1)),
    "inline": plan("colocated", "inline", (1, 1, 2, 1), (1, 2, 1, 2)),
}
THREE = {
    "apart-stages": plan("disaggregated", "inline", (1, 1, 1, 1), (2, 1, 1, 1), (2, 3)),
    "apart-replicas-frozen": plan("disaggregated", "inline", (1, 1, 1, 2), (1, 1, 2, 1), encoder_first=True, ZERO=1),
}


FOUR = {
    "apart-many-to-one-divided": plan("disaggregated", "inline", (1, 1, 2, 1), (1, 2, 1, 2)),
    "apart-encoder-stages-frozen": plan("disaggregated", "inline", (2, 1, 1, 1), (2, 1, 1, 1), (2, 3), (3, 1)),
    "apart-encoder-stages": plan("disaggregated", "inline", (2, 1, 1, 2), (1, 1, 2, 1), vision=(1, 3)),
    "apart-divided": plan(
        "disaggregated", "inline", (1, 2, 1, 1), (2, 1, 1, 1), (1, 4), again=(0, 2), encoder_first=True
    ),
    "phases-interleaved": plan("colocated", "phases", (1, 1, 4, 1), (2, 1, 2, 1), ([1, 1], [1, 2]), VPP=2, ZERO=1),
    "phases-divided": plan("colocated", "recomputed_phases", (1, 2, 2, 2), (2, 2, 1, 1), (3, 2)),
    "inline-many": plan("colocated", "inline", (1, 1, 4, 1), (1, 2, 2, 2)),
    "inline-few-frozen": plan("colocated", "inline", (1, 2, 2, 2), (1, 1, 4, 1), ZERO=1),
}
FIVE = {"apart-one-to-many": plan("disaggregated", "inline", (1, 1, 1, 4), (1, 1, 4, 1))}


Plans = dict[str, dict[str, Any]]


def write(ranks: ForkedRanks, folder: Path, flags: str, groups: dict[int, Plans]) -> None:
    """Write the gradients of one process, and under each plan; a name with `frozen` freezes the tower."""
    named = {name: document for plans in groups.values() for name, document in plans.items()}
    lines = {
        number: {
            name: f"{flags} --auto-parallel-config {name}.json{' --freeze-ViT' if 'frozen' in name else ''}"
            for name in plans
        }
        for number, plans in groups.items()
    }
    alone = {"whole": flags, "whole-frozen": f"{flags} --freeze-ViT"}
    files = {f"{name}.json": json.dumps(document) for name, document in named.items()}
    start(ranks, folder, {1: alone} | lines, files)


@pytest.fixture(scope="module")
def flags(small_flags: str) -> str:
    return f"{small_flags} --init-method-std 0.05"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, flags: str, forked_ranks: ForkedRanks) -> Path:
    folder = tmp_path_factory.mktemp("layouts")
    write(forked_ranks, folder, flags, {2: TWO, 3: THREE})
    return folder


def check_all(folder: Path, plans: Plans) -> None:
    """Where matrices are divided among ranks, or samples among four, sums add up in another order."""
    for name, document in plans.items():
        divided = any(sizes["TP"] > 1 or sizes["DP"] > 2 for sizes in document["layout"]["modules"].values())
        check(folder, name, "whole-frozen" if "frozen" in name else "whole", 2e-6 if divided else 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*TWO, *THREE])
def test_gradients_equal_those_of_one_process(name: str, runs: Path) -> None:
    check_all(runs, {name: (TWO | THREE)[name]})


@pytest.mark.nightly
def test_gradients_of_other_layouts_equal_those_of_one_process(
    tmp_path: Path, flags: str, forked_ranks: ForkedRanks
) -> None:
    write(forked_ranks, tmp_path, flags, {4: FOUR, 5: FIVE})
    check_all(tmp_path, FOUR | FIVE)
