"""What must not change an optimum, or change it one way: `place` on a problem and on the same one put otherwise."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from compare import read
from generate import MOODS, problem
from semantics import Document, modes_of, spread

from mm_autoparallel.pipeline.placement import place

PROBLEMS_OF_A_MOOD = 8
OPTIMAL = 2e-5  # two answers, each within 1e-5 of its optimum


def times(factor: float, value: Any) -> Any:
    """A number or a list of them, so many times as large."""
    return [factor * one for one in value] if isinstance(value, list) else factor * value


def scaled(document: Document) -> Document:
    """All times four times as long."""
    for of in (document, *document["chain"], *[mode for block in document["chain"] for mode in modes_of(block)]):
        for key in of:
            if "_ms" in key:
                of[key] = times(4.0, of[key])
    for block in document["chain"]:
        if block.get("recompute"):
            block["recompute"]["extra_backward_ms"] *= 4.0
    return document


def renamed(document: Document) -> Document:
    """Other names for blocks, modalities, groups and modes."""
    for i, block in enumerate(document["chain"]):
        block["name"] = f"block {len(document['chain']) - i}"
        block["modality"] = {"vision": "text", "text": "audio"}[block["modality"]]
        block["modes"] = [mode | {"name": f"way {mode['name']}"} for mode in modes_of(block)]
        block.pop("recompute", None)
        if "recompute_group" in block:
            block["recompute_group"] += " of blocks"
    return document


def divided(document: Document) -> Document:
    """Every block of several as two."""
    chain = []
    for block in document["chain"]:
        group = {"recompute_group": block.get("recompute_group", f"group of {block['name']}")}
        first = block["count"] // 2
        if first:
            chain.append(copy.deepcopy(block) | group | {"name": f"first {block['name']}", "count": first})
        chain.append(block | group | {"count": block["count"] - first})
    return document | {"chain": chain}


def roomier(document: Document) -> Document:
    """More memory everywhere."""
    for key in ("memory_limit_bytes", "host_limit_bytes"):
        if key in document:
            document[key] = [1.5 * limit + 1.0 for limit in spread(document[key], document["num_stages"])]
    return document


def faster(document: Document) -> Document:
    """Every other block, and all hops, links, stages and tails take less."""
    for i, block in enumerate(document["chain"]):
        if i % 2:
            block["forward_ms"] *= 0.5
            block["backward_ms"] *= 0.75
    for key in ("p2p_ms", "host_ms_per_byte", "stage_time_factor", "stage_tail_ms"):
        if key in document:
            document[key] = times(0.5, document[key])
    return document


@pytest.mark.parametrize("mood", MOODS)
@pytest.mark.parametrize(
    ("change", "least", "most"),
    [(scaled, 4.0, 4.0), (renamed, 1.0, 1.0), (divided, 1.0, 1.0), (roomier, 0.0, 1.0), (faster, 0.0, 1.0)],
)
def test_the_optimum_follows(change: Callable[[Document], Document], least: float, most: float, mood: str) -> None:
    for seed in range(2000, 2000 + PROBLEMS_OF_A_MOOD):
        document = problem(f"{mood}-{seed}")
        before = place(read(document), time_limit_s=120)
        after = place(read(change(copy.deepcopy(document))), time_limit_s=120)
        if before.status == "infeasible":
            assert after.status == "infeasible" or change is roomier, seed
        else:
            assert after.status == before.status == "optimal", seed
            assert before.step_ms * least * (1 - OPTIMAL) <= after.step_ms, seed
            assert after.step_ms <= before.step_ms * most * (1 + OPTIMAL), seed


@pytest.mark.parametrize("mood", MOODS)
def test_the_order_of_keys_means_nothing(mood: str) -> None:
    def shuffled(value: object) -> object:
        if isinstance(value, dict):
            return {key: shuffled(value[key]) for key in random.Random(1).sample(list(value), len(value))}
        return [shuffled(one) for one in value] if isinstance(value, list) else value

    for seed in range(50):
        document = problem(f"{mood}-{seed}")
        assert read(shuffled(document)) == read(json.loads(json.dumps(document)))  # type: ignore[arg-type]
