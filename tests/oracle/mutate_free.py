"""What `mutate_certificates` needs where the order is to be found: certificates, what is true, other orders."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import compare
import free_orders
import generate_free
import semantics
from semantics import Document

from mm_autoparallel.pipeline.certify.certificate import write_certificate
from mm_autoparallel.pipeline.placement import place

MOST_PLACEMENTS = 400
CONFIRMED_TO = 1e-6


def is_free(problem: Document) -> bool:
    return bool(problem["schedule"] == "free")


def certificate(name: str, folder: Path) -> Document | None:
    """That of the problem called `name`, as `place` writes it; None where there is none."""
    try:
        problem = compare.read(generate_free.problem(name))
        result = place(problem, time_limit_s=1.0)
    except Exception:  # noqa: BLE001 - `compare_free.py` tells of it
        return None
    if result.placement is None:
        return None
    path = folder / "certificate.json"
    write_certificate(path, problem, result)
    document: Document = json.loads(path.read_text(encoding="utf-8"))
    return document


def why_false(document: Document, placement: Document) -> str:
    """As `mutate_certificates.why_false`. placement: what the certificate names, with its order. Raises TooLarge."""
    problem, bound_ms = document["problem"], document["lower_bound_ms"]
    reason = free_orders.unlawful(problem, placement)
    if reason:
        return reason
    right_ms = step_of(problem, placement)
    if not math.isclose(document["step_ms"], right_ms, rel_tol=1e-5, abs_tol=1e-9):
        return f"step_ms {document['step_ms']!r}, {right_ms!r} right"
    if document["proof"]["method"] == "none" or bound_ms is None:
        return ""
    best_ms = best(problem).step_ms
    if bound_ms > best_ms * (1 + CONFIRMED_TO) + compare.TINY_MS:
        return f"lower_bound_ms {bound_ms!r}, the optimum is {best_ms!r}"
    return ""


def step_of(problem: Document, placement: Document) -> float:
    """Raises NoOrder."""
    return free_orders.play_words(problem, placement["layers"], placement["modes"], placement["order"]).step_ms


def one_by_one(problem: Document) -> list[list[str]]:
    """The order that fits wherever any does: one micro-batch after another."""
    word = [f"{m}{letter}0" for m in range(problem["num_microbatches"]) for letter in "FB"]
    return [list(word) for _ in range(problem["num_stages"])]


def best(problem: Document) -> free_orders.Best:
    """The least step. Raises TooLarge."""
    return free_orders.best_free(problem, MOST_PLACEMENTS)


def worse(draw: random.Random, problem: Document, above_ms: float) -> list[tuple[float, Document]]:
    """Steps and placements that fit and take longer than above_ms, a few."""
    found = free_orders.placements(problem, MOST_PLACEMENTS)
    others = [placement | {"order": one_by_one(problem)} for *_, placement in draw.sample(found, min(10, len(found)))]
    steps = [(step_of(problem, other), other) for other in others]
    return [(step_ms, other) for step_ms, other in steps if step_ms > above_ms]


def change_order(draw: random.Random, order: list[list[str]]) -> str:
    """Two actions of a stage change places, or one is another, or missing."""
    word = draw.choice(order)
    one, other = draw.randrange(len(word)), draw.randrange(len(word))
    kind = draw.choice(("swapped", "swapped", "swapped", "renamed", "missing"))
    if kind == "swapped":
        word[one], word[other] = word[other], word[one]
    elif kind == "renamed":
        word[one] = word[one].replace(draw.choice("FBIW"), draw.choice("FBIW"))
    else:
        del word[one]
    return f"{kind} action"


def play(problem: Document, placement: Document) -> float | None:
    """The step of what fits, else None. Raises KeyError where there is no order."""
    if is_free(problem):
        return None if free_orders.unlawful(problem, placement) else step_of(problem, placement)
    return None if semantics.unlawful(problem, placement) else semantics.evaluate(problem, placement).step_ms
