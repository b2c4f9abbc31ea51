"""The two confirmations of a bound against brute force: they refute what is too high, and nothing else."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from known_cases import large_case, taylor_case
from nouns import brute_force
from random_problems import random_problem

from mm_autoparallel.pipeline.certify.certificate import Unconfirmed
from mm_autoparallel.pipeline.certify.confirm_cuts import confirm_cuts
from mm_autoparallel.pipeline.certify.confirm_tree import confirm_tree
from mm_autoparallel.pipeline.certify.stage_options import list_contents, list_stage_options, undominated
from mm_autoparallel.pipeline.placement.cuts.path_cuts import stage_cuts
from mm_autoparallel.pipeline.problem import ChainBlock, Mode, Placement, Problem
from mm_autoparallel.pipeline.simulate.loads import graph_of, microbatch_classes, overfull_stages
from mm_autoparallel.pipeline.simulate.step import simulate

#: What a check may lean on in `placement`: imports and data. All else there is how `place` finds and proves.
OWN = {"cuts.path_cuts", "relaxation.duals", "relaxation.linear_solver"}


def go_on() -> bool:
    return False


def lawful_step(problem: Problem, placement: Placement) -> float:
    timeline = simulate(problem, placement)  # refuses what is no placement of the problem
    assert not overfull_stages(problem, timeline.peak_memory_bytes)
    return timeline.step_ms


@pytest.mark.parametrize(("num_chunks", "schedule"), [(1, "1f1b"), (2, "interleaved_1f1b")])
def test_one_stage_is_a_pipeline_too(num_chunks: int, schedule: str) -> None:
    layer = ChainBlock("layer", "text", 3, 1.0, 2.0, 4.0, 2.0, (Mode("recompute", 0.0, 1.0, 0.0),), tail_ms=0.5)
    hops = (1.0,) * (num_chunks - 1)
    problem = Problem(1, num_chunks, 3, schedule, (layer,), (25.0,), (0.0,), (0.25,), hops, hops)
    best_ms, _ = brute_force(problem)
    assert np.isfinite(best_ms)
    paths = [cut.path for cut in stage_cuts(problem)]
    for bound_ms in (best_ms * (1 + 1e-4), 1e9, np.inf):
        below = confirm_tree(problem, bound_ms, go_on)
        assert below is not None
        assert lawful_step(problem, below) < bound_ms
    assert confirm_tree(problem, best_ms * (1 - 1e-9), go_on) is None
    assert confirm_cuts(problem, paths, best_ms * (1 + 1e-4), go_on) is not None
    assert confirm_cuts(problem, paths, best_ms, go_on) is None


@pytest.mark.parametrize("name", ["512_4k", "512_8k", "512_8k_swap", "768_4k_gp"])
def test_published_optima_are_confirmed(name: str) -> None:
    problem, case = taylor_case(name)
    assert confirm_tree(problem, case["best_step"] * (1 - 1e-8), go_on) is None
    below = confirm_tree(problem, case["best_step"] * (1 + 1e-6), go_on)
    assert below is not None
    assert lawful_step(problem, below) == pytest.approx(case["best_step"], rel=1e-6)


def test_what_is_open_stays_unconfirmed() -> None:
    """100 layers on 16 × 2: nobody has proven its best step; the search says so in time instead of guessing."""
    problem, case = large_case("p16_v2_m128_n100")
    began = time.monotonic()
    with pytest.raises(Unconfirmed, match="stopped"):
        confirm_tree(problem, case["best_step_ms"] * 0.999, lambda: time.monotonic() > began + 0.5)
    assert confirm_tree(problem, case["best_step_ms"] * 0.95, go_on) is None


def test_the_second_solver_hears_that_it_should_stop() -> None:
    problem, _ = large_case("p64_v1_m1024_n200")
    paths = [cut.path for cut in stage_cuts(problem)]
    with pytest.raises(Unconfirmed, match="stopped"):
        confirm_cuts(problem, paths, 11100.0, lambda: True)


def test_unequal_micro_batches_are_left_to_the_cuts() -> None:
    problem = next(p for p in (random_problem(seed, "unequal") for seed in range(9)) if microbatch_classes(p)[0])
    with pytest.raises(Unconfirmed, match="equal micro-batches"):
        confirm_tree(problem, 1.0, go_on)


def test_options_of_a_stage_are_all_there_are() -> None:
    """The first of six stages: it holds where the chain begins, leaves five layers, and recompute once for each."""
    problem, _ = taylor_case("768_4k_gp")
    first = list_contents(problem, 0, 1e9)
    most = problem.chain[1].count - 5
    assert {tuple(row) for row in first.tolist()} == {(d, 0, 0) for d in (1, 2)} | {(3, m, 0) for m in range(most + 1)}
    options = list_stage_options(problem, graph_of(problem), 0, 1e9, go_on)
    for layers, counts, times in zip(options.layers[:, 0], options.modes[:, 0], options.times_ms, strict=True):
        modes = [mode for block in problem.chain for mode in block.modes]
        extra = sum(n * mode.extra_backward_ms for n, mode in zip(counts, modes, strict=True))
        plain = sum(n * b.backward_ms for n, b in zip(layers, problem.chain, strict=True))
        assert times[1] == pytest.approx(plain + extra)
    assert len({tuple(row) for row in options.used.tolist()}) == len(options)


def test_only_the_undominated_stay() -> None:
    rng = np.random.default_rng(1)
    for columns in (1, 2, 4):
        group, values = rng.integers(0, 4, 200), rng.integers(0, 6, (200, columns)).astype(float)
        kept = undominated(group, values)
        for i in range(200):
            rivals = kept[(group[kept] == group[i]) & np.all(values[kept] <= values[i], axis=1)]
            assert len(rivals) == 1 if i in kept else len(rivals) >= 1
    assert len(undominated(np.zeros(0, dtype=int), np.zeros((0, 2)))) == 0


def imports(path: Path) -> Iterator[str]:
    """Every module that the file imports anywhere, but for its types alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body.clear()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def reached_from(repository: Path, module: str) -> set[str]:
    found, pending = set(), [module]
    while pending:
        name = pending.pop()
        path = repository / f"{name.replace('.', '/')}.py"
        if name not in found and path.is_file():
            found.add(name)
            pending += [other for other in imports(path) if other.startswith("mm_autoparallel.")]
    return found


def test_verify_leans_on_no_solver_of_place(repository: Path) -> None:
    room = "mm_autoparallel.pipeline.placement."
    of_place = reached_from(repository, f"{room}place")
    assert {f"{room}{name}" for name in ("incumbents.anneal", "cuts.solve", "patterns.tree", "segments")} <= of_place
    certify = "mm_autoparallel.pipeline.certify."
    reached = reached_from(repository, f"{certify}verify")
    assert {"mm_autoparallel.pipeline.simulate.step", f"{certify}confirm_tree", f"{certify}confirm_cuts"} <= reached
    assert {name.removeprefix(room) for name in reached if name.startswith(room)} <= OWN


def test_verify_runs_where_they_are_missing(repository: Path) -> None:
    """In a fresh process whose package `placement` neither runs its own file nor finds any solver."""
    probe = f"""
import sys, types
package = types.ModuleType("mm_autoparallel.pipeline.placement")
package.__path__ = ["mm_autoparallel/pipeline/placement"]
sys.modules[package.__name__] = package
class Absent:
    def find_spec(self, name, path=None, target=None):
        module = name.removeprefix(package.__name__ + ".")
        own = any(one.startswith(module) for one in {OWN!r})
        if (module != name and not own) or name.startswith("ortools.sat"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
from mm_autoparallel.pipeline.certify.verify import verify
from mm_autoparallel.pipeline.certify.confirm_tree import confirm_tree
from mm_autoparallel.pipeline.certify.confirm_cuts import confirm_cuts
from mm_autoparallel.pipeline.placement.cuts.path_cuts import stage_cuts
from mm_autoparallel.pipeline.problem import ChainBlock, Problem
chain = (ChainBlock("layer", "text", 4, 1.0, 2.0),)
problem = Problem(2, 1, 4, "1f1b", chain, (1.0,) * 2, (0.0,) * 2, (0.0,) * 2, (0.0,), (0.0,))
paths = [cut.path for cut in stage_cuts(problem)]
print(confirm_tree(problem, 29.9, lambda: False), confirm_cuts(problem, paths, 29.9, lambda: False))
print(confirm_tree(problem, 30.1, lambda: False).layers)
"""
    result = subprocess.run([sys.executable, "-c", probe], cwd=repository, capture_output=True, text=True, timeout=100)
    assert result.stdout == "None None\n((2,), (2,))\n", result.stderr
