"""Blocks that keep to some virtual stages: `place` and its certificates against brute force."""

from __future__ import annotations

import random

import pytest
from brute_force import num_virtual_stages
from compare import compare, read
from generate import MOODS, problem
from semantics import Document

from mm_autoparallel.errors import JobError


def confined(name: str) -> Document:
    """The seeded problem of that name with some blocks that keep to stages, mostly so that there is a placement."""
    document, rng = problem(name), random.Random(f"within {name}")
    total, chain = num_virtual_stages(document), document["chain"]
    cut, border = rng.randrange(1, len(chain) + 1), rng.randrange(1, total + 1)
    for e, block in enumerate(chain):
        if rng.random() < 0.5:
            block["within"] = [0, border] if e < cut else [min(border, total - 1), total]
        elif rng.random() < 0.1:
            first = rng.randrange(total)
            block["within"] = [first, rng.randrange(first + 1, total + 1)]
    return document


@pytest.mark.parametrize("mood", MOODS)
@pytest.mark.parametrize("batch", [0, *(pytest.param(batch, marks=pytest.mark.nightly) for batch in range(1, 20))])
def test_place_equals_brute_force(batch: int, mood: str) -> None:
    wrong = {}
    for seed in range(batch * 6, (batch + 1) * 6):
        name = f"{mood}-{seed}"
        verdict = compare(name, confined(name), check_certificate=seed % 3 == 0)
        if verdict.wrong:
            wrong[name] = verdict.wrong
    assert not wrong


def test_refused_beyond_the_stages() -> None:
    document = problem(f"{MOODS[0]}-0")
    document["chain"][0]["within"] = [1, 99]
    with pytest.raises(JobError, match=r"chain\[0\].within is \[1, 99\]"):
        read(document)
