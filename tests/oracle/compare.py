"""`place` and `verify` against the oracle, problem by problem.

    python tests/oracle/compare.py --problems 2000 --seed 1 --out failures
    python tests/oracle/compare.py --files tests/fixtures/exactness/*.json

prints how many are right, wrong (by kind), not optimal within the time limit, slow (LIMIT_S); and of how many
certificates were confirmed, or why not. Failing problems are written to --out, each a file with what is right. What one
takes is counted in processor time where that is less than wall time: a busy machine makes nothing slow.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import re
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import brute_force
import generate
import nouns
import semantics
from semantics import Document

from mm_autoparallel.errors import JobError, PlannerError
from mm_autoparallel.pipeline.certify.certificate import read_certificate, write_certificate
from mm_autoparallel.pipeline.certify.verify import verify
from mm_autoparallel.pipeline.placement import PlacementResult, compile_kernels, place
from mm_autoparallel.pipeline.problem import Problem
from mm_autoparallel.pipeline.problem_file import ProblemEntry, problem_from_entry
from mm_autoparallel.validation import parse_record

LIMIT_S = 10.0
PATIENCE = 3
"""Of wall time that `place` gets, in LIMIT_S: others may have most of the machine."""
OPTIMAL = 1e-5  # what "optimal" may differ by; bounds and steps differ by rounding alone
TINY_MS = 1e-12


@dataclass
class Verdict:
    """wrong: kind → what is wrong, empty where all is right. confirmed: None where no certificate was checked."""

    name: str
    problem: Document
    optimum_ms: float
    placement: Document | None
    wrong: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    confirmed: bool | None = None


def read(document: Document) -> Problem:
    """The package's problem. Raises JobError where it refuses the document."""
    return problem_from_entry(parse_record(ProblemEntry, document, "problem", Path("PROBLEM.json")))


def compare(name: str, document: Document, check_certificate: bool = True, limit_s: float = LIMIT_S) -> Verdict:
    """What `place` and `verify` make of a problem that brute force can solve."""
    best = brute_force.brute_force(document, prune=name.startswith(generate.LARGE))
    return compare_to(name, document, best.step_ms, best.placement, check_certificate, limit_s)


def compare_to(
    name: str,
    document: Document,
    optimum_ms: float,
    placement: Document | None,
    check_certificate: bool = True,
    limit_s: float = LIMIT_S,
) -> Verdict:
    """The same for a problem whose optimum is known."""
    verdict = Verdict(name, document, optimum_ms, placement)
    begun, used = time.perf_counter(), time.process_time()
    try:
        problem = read(document)
        with _ended_after(6 * limit_s):
            result = place(problem, time_limit_s=PATIENCE * limit_s)
    except JobError as error:  # the problem contradicts itself
        if next(brute_force.cuts(document), None) is not None:
            verdict.wrong["refused"] = str(error)
        return verdict
    except Exception as error:  # noqa: BLE001 - whatever escapes is what we look for
        verdict.wrong["crash"] = _told(error)
        return verdict
    verdict.seconds = min(time.perf_counter() - begun, time.process_time() - used)
    verdict.wrong |= check_result(document, optimum_ms, result)
    if verdict.seconds > limit_s:
        verdict.wrong["slow"] = f"{verdict.seconds:.1f} s"
    if check_certificate and result.placement is not None:
        _check_certificate(verdict, problem, result, limit_s)
    return verdict


@contextmanager
def _ended_after(seconds: float) -> Iterator[None]:
    """What never ends is a failure and not an endless run."""

    def end(*_: object) -> None:
        raise TimeoutError(f"no answer after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def check_result(document: Document, optimum_ms: float, result: PlacementResult) -> dict[str, str]:
    """What is wrong with the answer, by kind."""
    if result.placement is None:
        if result.status != "infeasible":
            return {"not_optimal": f"status {result.status}, no placement"}
        if not math.isinf(optimum_ms):
            return {"false_infeasible": f"{optimum_ms!r} ms is possible"}
        return {} if result.reason else {"no_reason": "infeasible, and it does not say why"}
    placement = nouns.plain(result.placement)
    wrong = {}
    reason = semantics.unlawful(document, placement)
    if reason:
        wrong["unlawful"] = reason
        return wrong
    cost = semantics.evaluate(document, placement)
    if not _close(result.step_ms, cost.step_ms):
        wrong["step"] = f"{result.step_ms!r} said, {cost.step_ms!r} right"
    for kind, said, right in (
        ("peak", result.peak_memory_bytes, cost.peak_bytes),
        ("host_peak", result.peak_host_bytes, cost.host_bytes),
    ):
        if not all(map(_close, said, right)) or len(said) != len(right):
            wrong[kind] = f"{list(said)} said, {right} right"
    if cost.step_ms < optimum_ms * (1 - 1e-9):
        wrong["oracle"] = f"{cost.step_ms!r} is below the optimum of brute force, {optimum_ms!r}"
    if result.status != "optimal":
        wrong["not_optimal"] = f"status {result.status}, {result.step_ms!r} ms with bound {result.lower_bound_ms!r}"
    elif cost.step_ms > optimum_ms * (1 + OPTIMAL) + TINY_MS:
        wrong["false_optimal"] = f"{cost.step_ms!r} said, {optimum_ms!r} right"
    if result.lower_bound_ms > optimum_ms * (1 + 1e-9) + TINY_MS:
        wrong["false_bound"] = f"{result.lower_bound_ms!r} is above {optimum_ms!r}"
    return wrong


def _check_certificate(verdict: Verdict, problem: Problem, result: PlacementResult, limit_s: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "certificate.json"
        try:
            write_certificate(path, problem, result)
            with _ended_after(6 * limit_s):
                verification = verify(read_certificate(path), PATIENCE * limit_s)
        except PlannerError as error:
            verdict.confirmed = False
            verdict.wrong["unconfirmed"] = f"{result.proof}: {error}"
            return
        except Exception as error:  # noqa: BLE001 - whatever escapes is what we look for
            verdict.confirmed = False
            verdict.wrong["verify_crash"] = _told(error)
            return
    verdict.confirmed = True
    bound = verification.lower_bound_ms
    if bound is not None and bound > verdict.optimum_ms * (1 + 1e-9) + TINY_MS:
        verdict.wrong["false_confirmation"] = f"{result.proof}: {bound!r} is above {verdict.optimum_ms!r}"


def _told(error: Exception) -> str:
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first}\n{traceback.format_exc()}"


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-9)


def case_of(verdict: Verdict) -> Document:
    """What a failing problem is kept as; formats as in tests/fixtures/exactness."""
    return {
        "expected": {
            "name": verdict.name,
            "optimum_ms": verdict.optimum_ms if math.isfinite(verdict.optimum_ms) else None,
            "placement": verdict.placement,
            "was_wrong": verdict.wrong,
        },
        "problem": verdict.problem,
    }


def _verdict_of(name: str, schedule: str | None = None) -> Verdict:
    path = Path(name)
    stored = path.suffix == ".json"
    document = json.loads(path.read_text(encoding="utf-8"))["problem"] if stored else generate.problem(name)
    if schedule and document.get("num_chunks", 1) == 1:
        document["schedule"] = schedule
    try:
        return compare(path.stem, document)
    except brute_force.TooLarge:
        return Verdict(path.stem, document, math.nan, None)


def report(verdicts: Iterable[Verdict], out: Path | None) -> Counter[str]:
    """Print the counts; keep what failed."""
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    slowest, slowest_name = 0.0, ""
    for verdict in verdicts:
        counts["problems"] += 1
        counts["infeasible"] += math.isinf(verdict.optimum_ms)
        counts["too large for brute force"] += math.isnan(verdict.optimum_ms)
        counts["right"] += not verdict.wrong and not math.isnan(verdict.optimum_ms)
        counts["confirmed"] += verdict.confirmed is True
        if verdict.seconds > slowest:
            slowest, slowest_name = verdict.seconds, verdict.name
        for kind, what in verdict.wrong.items():
            counts[f"WRONG {kind}"] += 1
            first = what.splitlines()[0]
            reasons[f"{kind}: {re.sub(r'[0-9][0-9.e+-]*', 'N', first)[:150]}"] += 1
            print(f"{verdict.name}: {kind}: {first[:200]}", flush=True)
        if verdict.wrong and out is not None:
            out.mkdir(parents=True, exist_ok=True)
            path = out / f"{min(verdict.wrong)}_{verdict.name}.json"
            path.write_text(json.dumps(case_of(verdict), indent=1), encoding="utf-8")
    for key, count in sorted(counts.items()):
        if count:
            print(f"{count:8d} {key}")
    for reason, count in reasons.most_common(20):
        print(f"{count:8d} × {reason}")
    print(f"slowest place: {slowest:.2f} s{f' ({slowest_name})' if slowest_name else ''}")
    return counts


def main() -> int:
    """0 where all is right, 1 where anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="the first seed; problems are MOOD-SEED")
    parser.add_argument(
        "--moods", nargs="+", choices=(*generate.MOODS, generate.LARGE, generate.LAYOUTS), default=generate.MOODS
    )
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--schedule", help="of every problem with one chunk a stage, in place of its own")
    parser.add_argument("--files", nargs="+", help="cases, or names of problems, in place of seeds")
    arguments = parser.parse_args()
    names: list[str] = arguments.files or [
        f"{arguments.moods[i % len(arguments.moods)]}-{arguments.seed + i // len(arguments.moods)}"
        for i in range(arguments.problems)
    ]
    verdict_of = functools.partial(_verdict_of, schedule=arguments.schedule)
    compile_kernels()
    begun = time.perf_counter()
    if arguments.jobs == 1:
        counts = report(map(verdict_of, names), arguments.out)
    else:
        with ProcessPoolExecutor(arguments.jobs) as pool:
            counts = report(pool.map(verdict_of, names, chunksize=8), arguments.out)
    print(f"{time.perf_counter() - begun:.1f} s")
    return 1 if any(key.startswith("WRONG") for key in counts) else 0


if __name__ == "__main__":
    raise SystemExit(main())
