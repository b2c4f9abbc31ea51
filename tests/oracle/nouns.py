"""The package's nouns as the oracle's documents and back, for tests that have a Problem in hand."""

from __future__ import annotations

from itertools import pairwise

import brute_force as oracle
import semantics
from semantics import Document

from mm_autoparallel.pipeline.problem import Placement, Problem
from mm_autoparallel.pipeline.problem_file import problem_document


def plain(placement: Placement) -> Document:
    """A placement as the oracle reads it."""
    return {
        "layers": [list(map(int, row)) for row in placement.layers],
        "modes": [[list(map(int, counts)) for counts in row] for row in placement.modes],
    }


def placement_of(document: Document) -> Placement:
    """The oracle's placement as the package reads it."""
    return Placement(
        tuple(tuple(row) for row in document["layers"]),
        tuple(tuple(tuple(counts) for counts in row) for row in document["modes"]),
    )


def cost_of(problem: Problem, placement: Placement) -> semantics.Cost:
    """Step and peaks by the oracle."""
    return semantics.evaluate(problem_document(problem), plain(placement))


def some_placement(problem: Problem) -> Placement | None:
    """One placement that the chain allows, whether it fits or not, with as much in first modes as there can be."""
    document = problem_document(problem)
    cut = next(oracle.cuts(document), None)
    if cut is None:
        return None
    layers = [oracle.held_between(document, *ends) for ends in pairwise(cut)]
    return placement_of({"layers": layers, "modes": [oracle.mode_counts(document, held)[0] for held in layers]})


def brute_force(problem: Problem) -> tuple[float, Placement | None]:
    """The least step in ms of all placements that fit, and one that has it; (inf, None) where none fits."""
    best = oracle.brute_force(problem_document(problem))
    return best.step_ms, placement_of(best.placement) if best.placement is not None else None
