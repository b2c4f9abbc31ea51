"""Each method by itself against brute force: small problems rarely get past the first of those that `place` goes
through, and each of them may prove what the others did not.

    python tests/oracle/methods.py --problems 400 --seed 1

A check returns what is wrong, or "".
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import numpy as np
import semantics
from brute_force import brute_force
from compare import read
from generate import MOODS
from generate import problem as problem_called
from nouns import plain
from semantics import Document

from mm_autoparallel.errors import JobError, PlannerError
from mm_autoparallel.pipeline.certify.certificate import Unconfirmed
from mm_autoparallel.pipeline.certify.confirm_cuts import confirm_cuts
from mm_autoparallel.pipeline.certify.confirm_mixtures import confirm_mixtures
from mm_autoparallel.pipeline.certify.confirm_prices import confirm_prices
from mm_autoparallel.pipeline.certify.confirm_tree import confirm_tree
from mm_autoparallel.pipeline.placement.bounds.step import bound_step, work_bound_ms
from mm_autoparallel.pipeline.placement.cuts.path_cuts import stage_cuts
from mm_autoparallel.pipeline.placement.cuts.solve import solve_with_cuts
from mm_autoparallel.pipeline.placement.paths.branch_and_bound import BranchAndBound
from mm_autoparallel.pipeline.placement.patterns.stage_patterns import list_patterns, load_limits
from mm_autoparallel.pipeline.placement.patterns.state_graph import build_layers
from mm_autoparallel.pipeline.placement.patterns.thinned import thin
from mm_autoparallel.pipeline.placement.relaxation.tree import FractionalTree
from mm_autoparallel.pipeline.placement.segments import cut_into_segments
from mm_autoparallel.pipeline.problem import Placement, Problem
from mm_autoparallel.pipeline.simulate.graph import full_graph
from mm_autoparallel.pipeline.simulate.step import simulate

Check = Callable[[Document, Problem, float], str]
ABOVE = 1 + 1e-9


def go_on() -> bool:
    return False


def lawful_below(document: Document, placement: Placement, best_ms: float, below_ms: float) -> str:
    """What is wrong with a placement that is said to take less than below_ms."""
    reason = semantics.unlawful(document, plain(placement))
    step_ms = semantics.evaluate(document, plain(placement)).step_ms
    return reason or ("" if best_ms / ABOVE <= step_ms < below_ms * ABOVE else f"{step_ms!r} ms, {best_ms!r} is right")


def search_bounds(document: Document, problem: Problem, best_ms: float) -> str:
    """Of strategies, before any is placed; and by how many bytes one is said to miss its memory at least."""
    bounds = [work_bound_ms(problem), *(bound_step(problem, sharpen).step_ms for sharpen in (False, True))]
    if max(bounds) > best_ms * ABOVE:
        return f"{bounds} above {best_ms!r}"
    overflow_bytes = bound_step(problem).overflow_bytes
    if overflow_bytes:
        less = overflow_bytes * 0.999999 - 2.0  # a byte or two: what bounds allow for rounding
        limits = [limit + less for limit in semantics.spread(document["memory_limit_bytes"], problem.num_stages)]
        if brute_force(document | {"memory_limit_bytes": limits}).placement is not None:
            return f"{overflow_bytes!r} bytes said to be missing, and fewer are enough"
    return ""


def parts_of_layers(document: Document, problem: Problem, best_ms: float) -> str:
    """The linear program over parts of layers and its tree, and the prices that are left of them."""
    if not 0 < best_ms < np.inf:
        return ""
    tree = FractionalTree(problem, 1.2 * best_ms)
    for target_ms in (0.7 * best_ms, 1.1 * best_ms):
        tree.advance(target_ms, 1.2 * best_ms, 1_000, go_on)
        if tree.lower_bound_ms > best_ms * ABOVE:
            return f"{tree.lower_bound_ms!r} above {best_ms!r}"
    proof = tree.proof()
    paths = [cut.path for cut in proof.cuts]
    confirm_prices(problem, proof.main, paths, proof.prices, proof.parts, tree.lower_bound_ms, go_on)
    return ""


def thinned_mixtures(document: Document, problem: Problem, best_ms: float) -> str:
    """Mixtures without the blocks in front of the main kind, however heavy: refuting what is below the optimum, and not
    what is above."""
    light = thin(problem, np.inf) if not _unequal(document) and problem.num_chunks > 1 else None
    if light is None or not 0 < best_ms < np.inf:
        return ""
    segments, spread = light
    graph = full_graph(problem.schedule, problem.num_stages, problem.num_chunks, problem.num_microbatches)
    for target_ms in (0.8 * best_ms, best_ms * (1 - 1e-6), 1.1 * best_ms):
        limits = [load_limits(problem, segments, s, target_ms) for s in range(problem.num_stages)]
        linked = build_layers(segments, [list_patterns(segments, graph, s, *each) for s, each in enumerate(limits)])
        if linked is None:
            bound_ms = target_ms
        else:
            splits = BranchAndBound(segments.problem, *linked, graph, target_ms, spread=spread)
            splits.advance(20_000_000, go_on)
            bound_ms = splits.lower_bound_ms
        if bound_ms > best_ms * ABOVE:
            return f"{bound_ms!r} above {best_ms!r}"
    return ""


def path_cuts(document: Document, problem: Problem, best_ms: float) -> str:
    """The loop of CP-SAT and the simulator."""
    if not 0 < best_ms < np.inf:
        return ""
    found: list[Placement] = []
    result = solve_with_cuts(
        cut_into_segments(problem), 1.5 * best_ms, stage_cuts(problem), np.inf, 0.0, go_on, lambda: np.inf, found.append
    )
    if not result.exhausted or not found:
        return "not exhausted"
    if result.lower_bound_ms > best_ms * ABOVE:
        return f"{result.lower_bound_ms!r} above {best_ms!r}"
    wrong = [what for what in (lawful_below(document, one, best_ms, np.inf) for one in found) if what]
    least_ms = min(semantics.evaluate(document, plain(one)).step_ms for one in found)
    return wrong[0] if wrong else "" if least_ms <= best_ms * (1 + 1e-5) else f"{least_ms!r}, {best_ms!r} is right"


def confirming_tree(document: Document, problem: Problem, best_ms: float) -> str:
    if _unequal(document):
        return ""  # said to be left open
    return _confirms(lambda below_ms: confirm_tree(problem, below_ms, go_on), document, best_ms, 1e-9)


def confirming_mixtures(document: Document, problem: Problem, best_ms: float) -> str:
    if _unequal(document):
        return ""
    return _confirms(lambda below_ms: confirm_mixtures(problem, below_ms, go_on), document, best_ms, 1e-6)


def confirming_cuts(document: Document, problem: Problem, best_ms: float) -> str:
    """Cuts are added until no placement keeps them all below the optimum: this ends only if the model is right."""
    paths = [cut.path for cut in stage_cuts(problem)]
    if np.isfinite(best_ms):
        while (below := confirm_cuts(problem, paths, best_ms * (1 - 2e-6), go_on)) is not None:
            wrong = lawful_below(document, below, best_ms, np.inf)
            if wrong:
                return wrong
            paths.append(simulate(problem, below).critical_path)
        for above_ms in [best_ms * (1 + more) for more in (1e-5, 1e-4, 9e-4, 1e-2) if best_ms > 0]:
            if confirm_cuts(problem, paths, above_ms, go_on) is None:
                return f"found nothing below {above_ms!r}, {best_ms!r} is right"
        return ""
    return "found what does not fit" if confirm_cuts(problem, paths, 1e12, go_on) is not None else ""


def _unequal(document: Document) -> bool:
    return any(block.get("microbatch_scale") for block in document["chain"])


def _confirms(below: Callable[[float], Placement | None], document: Document, best_ms: float, to: float) -> str:
    """A search below the optimum must find nothing, one a little above it must find something."""
    if not np.isfinite(best_ms):
        return "found what does not fit" if below(1e12) is not None else ""
    if best_ms == 0:
        return ""
    if below(best_ms * (1 - to)) is not None:
        return f"found something below {best_ms!r}"
    found = below(best_ms * (1 + 1e-4))
    if found is None:
        return f"found nothing below {best_ms * (1 + 1e-4)!r}"
    return lawful_below(document, found, best_ms, best_ms * (1 + 1e-4))


METHODS: dict[str, Check] = {
    check.__name__: check
    for check in (
        search_bounds,
        parts_of_layers,
        thinned_mixtures,
        path_cuts,
        confirming_tree,
        confirming_mixtures,
        confirming_cuts,
    )
}


def check_methods(name: str) -> dict[str, str]:
    """What is wrong with each method on the problem of that name, by method."""
    document = problem_called(name)
    best_ms = brute_force(document).step_ms
    wrong = {}
    for method, check in METHODS.items():
        try:
            what = check(document, read(document), best_ms)
        except Unconfirmed:  # said to be left open
            continue
        except JobError as error:  # the problem contradicts itself
            what = str(error) if math.isfinite(best_ms) else ""
        except PlannerError as error:  # a proof that its own checker does not take
            what = str(error)
        if what:
            wrong[method] = what
    return wrong


def main() -> int:
    """0 where all is right, 1 where anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0, help="the first seed; problems are MOOD-SEED")
    arguments = parser.parse_args()
    bad = 0
    for i in range(arguments.problems):
        name = f"{MOODS[i % len(MOODS)]}-{arguments.seed + i // len(MOODS)}"
        for method, what in check_methods(name).items():
            bad += 1
            print(f"{name}: {method}: {what}", flush=True)
    print(f"{arguments.problems} problems by {len(METHODS)} methods, {bad} times wrong")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
