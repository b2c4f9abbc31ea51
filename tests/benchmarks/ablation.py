"""One method of placement after another left out: what each buys in step, bound and time.

    python tests/benchmarks/ablation.py [--cases NAME...] [--without METHOD...] [--limit SECONDS]

Cases: the known answers and the open ones of tests/fixtures/known_answers, the stored ones of tests/fixtures/exactness,
a hundred seeded problems of tests/oracle/generate.py, and of some of the examples' jobs, for 8 and 16 stages and each
number of chunks, the strategy of least bound. `--cases` takes those whose names begin so. A method is left out of the
table that `place` goes through; where mixtures of paths are, the linear program and the path cuts stand in for them.
Seconds are of processor time; a case ends at the limit. One line a case and method that ran on it, then the summary, a
Markdown table. Nothing is asserted. Exit code 2: no case or method is called so.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "placement"))
sys.path.insert(0, str(Path(__file__).parents[1] / "oracle"))

from compare import read
from generate import MOODS
from generate import problem as problem_called
from known_cases import fixture, large_case, multimodal_case, taylor_case

from mm_autoparallel.errors import JobError
from mm_autoparallel.model.costs.stage import build_problem
from mm_autoparallel.model.readers.job_file import read_job
from mm_autoparallel.pipeline.placement import compile_kernels, place
from mm_autoparallel.pipeline.placement.bounds.step import bound_step
from mm_autoparallel.pipeline.placement.methods import METHODS, Method
from mm_autoparallel.pipeline.placement.run import Run, Work
from mm_autoparallel.pipeline.problem import Problem
from mm_autoparallel.pipeline.simulate.graph import full_graph, short_graph
from mm_autoparallel.planner.search.space import list_entries

TESTS = Path(__file__).parents[1]
EXAMPLES = TESTS.parent / "examples"
JOBS = (
    "qwen2vl_72b/job",
    "qwen2vl_72b/job_vpp4",
    "qwen2vl_72b/job_whole_space",
    "published_gains/qwen2vl_72b",
    "published_gains/internvl2_76b",
    "deepseek_v3/job",
    "internvl2_76b/job",
    "qwen3vl_30b_a3b/job",
)
MOST_STRATEGIES, STAGES = 3_000, (8, 16)
NUM_SEEDED = 100
#: Steps and gaps that differ by less are equal: rounding, and gaps that count as none.
EQUAL_FRACTION = 1e-5

#: Without it a search of what does not fit has no end.
ALONE = "least overflow"

Load = Callable[[], Problem]


@dataclass(frozen=True)
class Outcome:
    """What `place` made of a case in cpu_s of processor time. spent_s: the same by method, of those that ran."""

    status: str
    step_ms: float
    gap_fraction: float
    cpu_s: float
    spent_s: dict[str, float]


def list_cases() -> Iterator[tuple[str, Load]]:
    """Every case by name; problems of jobs are built as they are asked for."""
    for name in fixture("taylor")["cases"]:
        yield f"taylor-{name}", lambda name=name: taylor_case(name)[0]
    for name in fixture("mindspeed_mm_milp")["cases"]:
        yield f"multimodal-{name}", lambda name=name: multimodal_case(name)[0]
    for name in fixture("large")["cases"]:
        yield f"large-{name}", lambda name=name: large_case(name)[0]
    for path in sorted((TESTS / "fixtures" / "exactness").glob("*.json")):
        yield f"exactness-{path.stem}", partial(_stored, path)
    for number in range(NUM_SEEDED):
        name = f"{MOODS[number % len(MOODS)]}-{number // len(MOODS)}"
        yield f"seeded-{name}", lambda name=name: read(problem_called(name))


def _stored(path: Path) -> Problem:
    return read(json.loads(path.read_text(encoding="utf-8"))["problem"])


def problems_of(job_name: str) -> Iterator[tuple[str, Load]]:
    """Of a job of the examples, the problem of least bound for each number of stages and chunks."""
    job = read_job(EXAMPLES / f"{job_name}.yaml")
    least: dict[tuple[int, int], tuple[float, Problem]] = {}
    strategies = [e.strategy for e in list_entries(job) if e.reason is None and e.strategy.pp in STAGES]
    for strategy in strategies[:MOST_STRATEGIES]:
        problem = build_problem(job, strategy)
        bound = bound_step(problem)
        of = (problem.num_stages, problem.num_chunks)
        if not bound.overflow_bytes and (of not in least or bound.step_ms < least[of][0]):
            least[of] = (bound.step_ms, problem)
    for (num_stages, num_chunks), (_, problem) in sorted(least.items()):
        yield f"job-{job_name}-pp{num_stages}-vpp{num_chunks}", lambda problem=problem: problem


def choose_cases(beginnings: Sequence[str]) -> Iterator[tuple[str, Load]]:
    """Those whose names begin with one of `beginnings`, all where there is none. Raises JobError where none does."""
    wanted = tuple(beginnings) or ("",)
    jobs = [job for job in JOBS if any(f"job-{job}".startswith(one) or one.startswith(f"job-{job}") for one in wanted)]
    found = False
    for name, load in chain(list_cases(), *map(problems_of, jobs)):
        if name.startswith(wanted):
            found = True
            yield name, load
    if not found:
        raise JobError(
            f"no case begins with {' or '.join(map(repr, beginnings))}; the first lines of this file say what there is"
        )


def choose_methods(names: Sequence[str]) -> list[str]:
    """These methods' names; where there is none all but the one that alone can say that nothing fits. Raises JobError
    for one that is no method's."""
    known = [method.name for method in METHODS]
    for name in names:
        if name not in known:
            raise JobError(f"{name!r} is no method of placement; these are: {', '.join(known)}")
    return list(names) or [name for name in known if name != ALONE]


def solve(problem: Problem, limit_s: float, without: str = "") -> Outcome:
    """Place a problem, within so much processor time, by all methods but one."""
    spent_s: dict[str, float] = {}

    def timed(method: Method) -> Method:
        def advance(run: Run, work: Work) -> None:
            began = time.process_time()
            try:
                method.advance(run, work)
            finally:
                spent_s[method.name] = spent_s.get(method.name, 0.0) + time.process_time() - began

        return method._replace(advance=advance)

    began = time.process_time()
    result = place(
        problem,
        should_stop=lambda: time.process_time() - began > limit_s,
        methods=[timed(method) for method in METHODS if method.name != without],
    )
    cpu_s = time.process_time() - began
    return Outcome(result.status, result.step_ms, result.gap_fraction, cpu_s, spent_s)


@dataclass(frozen=True)
class Effect:
    """What leaving a method out does to the cases that it ran on.

    num_slower, most_slower_fraction: cases whose step got longer, and by how much at most; num_wider, mean_wider_...,
    most_wider_fraction: the same of the gap, the mean over all cases. num_lost: were proven and are not; num_won: are,
    and were not. with_s,
    without_s: processor time of all cases.
    """

    name: str
    num_cases: int
    num_slower: int
    most_slower_fraction: float
    num_wider: int
    mean_wider_fraction: float
    most_wider_fraction: float
    num_lost: int
    num_won: int
    with_s: float
    without_s: float


def judge(name: str, pairs: Sequence[tuple[Outcome, Outcome]]) -> Effect:
    """pairs: outcomes with all methods and without this one, of the cases that it ran on."""
    slower = [
        without.step_ms / whole.step_ms - 1 if without.step_ms != whole.step_ms else 0.0 for whole, without in pairs
    ]
    wider = [without.gap_fraction - whole.gap_fraction for whole, without in pairs]
    settled = [(_settled(whole), _settled(without)) for whole, without in pairs]
    return Effect(
        name,
        num_cases=len(pairs),
        num_slower=sum(one > EQUAL_FRACTION for one in slower),
        most_slower_fraction=max(slower, default=0.0),
        num_wider=sum(one > EQUAL_FRACTION for one in wider),
        mean_wider_fraction=sum(wider) / max(len(wider), 1),
        most_wider_fraction=max(wider, default=0.0),
        num_lost=sum(before and not after for before, after in settled),
        num_won=sum(after and not before for before, after in settled),
        with_s=sum(whole.cpu_s for whole, _ in pairs),
        without_s=sum(without.cpu_s for _, without in pairs),
    )


def _settled(outcome: Outcome) -> bool:
    return outcome.status in ("optimal", "infeasible")


def describe(effects: Iterable[Effect]) -> list[str]:
    """The lines of a Markdown table."""
    lines = [
        "| without | cases | longer step (most) | wider gap (mean, most) | proofs lost, won | s with → without |",
        "|---|---|---|---|---|---|",
    ]
    for one in effects:
        most = f"{one.most_slower_fraction:.2%}" if math.isfinite(one.most_slower_fraction) else "nothing found"
        slower = f"{one.num_slower} ({most})" if one.num_slower else "0"
        wider = (
            f"{one.num_wider} ({one.mean_wider_fraction:.2%}, {one.most_wider_fraction:.2%})" if one.num_wider else "0"
        )
        lines.append(
            f"| {one.name} | {one.num_cases} | {slower} | {wider} | {one.num_lost}, {one.num_won} | "
            f"{one.with_s:.1f} → {one.without_s:.1f} |"
        )
    return lines


def main() -> int:
    """0; 2 where no case or method is called so."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=[], metavar="NAME", help="names, or what they begin with")
    parser.add_argument("--without", nargs="+", default=[], metavar="METHOD", help="these in turn, in place of each")
    parser.add_argument("--limit", type=float, default=8.0, metavar="SECONDS", help="processor time a case")
    arguments = parser.parse_args()
    try:
        names = choose_methods(arguments.without)
        cases = choose_cases(arguments.cases)
        compile_kernels()
        pairs: dict[str, list[tuple[Outcome, Outcome]]] = {name: [] for name in names}
        num_cases = 0
        print(f"{'case':44} {'without':16} {'step':>14} {'bound':>14} {'gap':>9} {'status':10} {'s':>6}")
        for name, load in cases:
            problem = load()
            of = (problem.schedule, problem.num_stages, problem.num_chunks, problem.num_microbatches)
            short_graph(*of), full_graph(*of)  # kept, so that the first run pays for no more than the others
            whole = solve(problem, arguments.limit)
            num_cases += 1
            _print(name, "", whole)
            for method in names:
                if method in whole.spent_s:
                    pairs[method].append((whole, solve(problem, arguments.limit, method)))
                    _print(name, method, pairs[method][-1][1])
    except JobError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"\n{num_cases} cases, {arguments.limit:g} s each\n")
    print("\n".join(describe(judge(name, pairs[name]) for name in names)))
    return 0


def _print(name: str, without: str, outcome: Outcome) -> None:
    bound_ms = outcome.step_ms * (1.0 - outcome.gap_fraction)
    print(
        f"{name:44} {without:16} {outcome.step_ms:14.4f} {bound_ms:14.4f} {outcome.gap_fraction:9.2e} "
        f"{outcome.status:10} {outcome.cpu_s:6.2f}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
