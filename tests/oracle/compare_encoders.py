"""Hold `place` of decoders with encoders against `encoder_orders`, problem by problem.

`python tests/oracle/compare_encoders.py --problems 200 --seed 0 [--chunks 2 | --first-stage 1 | --pieces]` prints what
is wrong, and how many were proven.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import encoder_orders
from encoder_orders import Document

from mm_autoparallel.errors import PlanError
from mm_autoparallel.pipeline.certify.beside import EncodedCertificate, read_any_certificate, write_beside
from mm_autoparallel.pipeline.certify.confirm_beside import verify_beside
from mm_autoparallel.pipeline.encoders import EncodedProblem
from mm_autoparallel.pipeline.encoders_file import EncodedProblemEntry, problem_from_any
from mm_autoparallel.pipeline.placement.bubbles.lanes import bound_lanes
from mm_autoparallel.pipeline.placement.bubbles.run import EncodedResult, place_encoded
from mm_autoparallel.pipeline.simulate.encoders.orders import write_orders
from mm_autoparallel.pipeline.simulate.encoders.play import Player


class Outcome(NamedTuple):
    """wrong: what contradicts the oracle; nothing where all agrees. best_ms: of the oracle, infinite: nothing fits."""

    wrong: str
    result: EncodedResult
    best_ms: float


def read(document: Document) -> EncodedProblem:
    problem = problem_from_any(EncodedProblemEntry.model_validate(document))
    assert isinstance(problem, EncodedProblem)
    return problem


def compare(document: Document) -> Outcome:
    """The package's answer against every placement and order."""
    result = place_encoded(read(document))
    best_ms = math.inf
    for layers in encoder_orders.layouts(document):
        best_ms = encoder_orders.best_step(encoder_orders.work_of(document, layers), best_ms)
    wrong = _check_order(document, result)
    if not wrong and result.lower_bound_ms > best_ms * (1 + 1e-9):
        wrong = f"bound {result.lower_bound_ms} is above {best_ms}"
    if not wrong and result.step_ms < best_ms * (1 - 1e-9):
        wrong = f"step {result.step_ms} is below {best_ms}"
    if not wrong and result.status == "optimal" and result.step_ms > best_ms * (1 + 2e-5):
        wrong = f"step {result.step_ms} is called optimal, and {best_ms} is there"
    if not wrong and result.status == "infeasible" and math.isfinite(best_ms):
        wrong = f"called infeasible, and {best_ms} is there"
    return Outcome(wrong, result, best_ms)


def _check_order(document: Document, result: EncodedResult) -> str:
    if result.tasks is None or result.words is None or result.placement is None:
        return ""
    layers = [row[0] for row in result.placement.layers]
    work = encoder_orders.work_of(document, layers)
    orders = [order.split() for order in write_orders(result.tasks, result.words)]
    step_ms, _ = encoder_orders.play(work, orders)
    if not math.isclose(step_ms, result.step_ms, rel_tol=1e-12):
        return f"step {result.step_ms}, played {step_ms}"
    held = encoder_orders.peaks(work, orders)
    if not all(math.isclose(a, b) for a, b in zip(held, result.peak_bytes, strict=True)):
        return f"peaks {result.peak_bytes}, counted {held}"
    if any(each > limit for each, limit in zip(held, work.limit, strict=True)):
        return f"peaks {held} are above {work.limit}"
    least = encoder_orders.best_step(work, result.step_ms)
    if result.placed_bound_ms > least * (1 + 1e-9):
        return f"bound of the placement {result.placed_bound_ms} is above {least}"
    lanes_ms = bound_lanes(Player(result.tasks), 0.0, math.inf, lambda: False)
    if lanes_ms > least * (1 + 1e-9):
        return f"bound by lanes {lanes_ms} is above {least}"
    return _check_certificate(result)


def _check_certificate(result: EncodedResult) -> str:
    """What `verify` says against the certificate, which claims no more than the search."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "certificate.json"
        write_beside(path, result)
        certificate = read_any_certificate(path)
    assert isinstance(certificate, EncodedCertificate)
    if certificate.lower_bound_ms > result.lower_bound_ms:
        return f"the certificate claims {certificate.lower_bound_ms}, the search {result.lower_bound_ms}"
    try:
        verify_beside(certificate)
    except PlanError as error:
        return f"its certificate is refused: {error}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--chunks", type=int, default=1, help="of each of the decoder's stages")
    parser.add_argument("--first-stage", type=int, default=0, help="that encoders meet")
    parser.add_argument("--pieces", action="store_true", help="passes are cut into two")
    arguments = parser.parse_args()
    counts: dict[str, int] = {}
    for seed in range(arguments.seed, arguments.seed + arguments.problems):
        document = encoder_orders.problem(seed, arguments.chunks, arguments.first_stage)
        found = compare(encoder_orders.in_pieces(seed) if arguments.pieces else document)
        best = "=" if math.isclose(found.result.step_ms, found.best_ms, rel_tol=1e-9) else ">"
        key = f"{found.result.status} {best}" if not found.wrong else "wrong"
        counts[key] = counts.get(key, 0) + 1
        if found.wrong:
            print(f"seed {seed}: {found.wrong}", flush=True)
    print(counts)
    return int("wrong" in counts)


if __name__ == "__main__":
    raise SystemExit(main())
