"""The exported program says what the simulator says: other solvers find the same optimum in it, and the same limits."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from known_cases import taylor_case
from ortools.linear_solver.python import model_builder

from mm_autoparallel.errors import JobError
from mm_autoparallel.integrations.mindformers.highs import read_solution
from mm_autoparallel.integrations.mindformers.program import (
    build_program,
    columns_from_placement,
    count_columns,
    format_mps,
    placement_from_columns,
)
from mm_autoparallel.pipeline.placement.place import place
from mm_autoparallel.pipeline.problem import ChainBlock, Mode, Problem
from mm_autoparallel.pipeline.simulate.lawful import check_placement
from mm_autoparallel.pipeline.simulate.loads import overfull_stages
from mm_autoparallel.pipeline.simulate.step import simulate


def small_problem(seed: int) -> Problem:
    """Two kinds of layers and a head on few stages; recompute, of which every other problem has two more kinds, is
    needed more often than not.
    """
    rng = random.Random(seed)
    num_stages, num_chunks = rng.choice([(2, 1), (3, 1), (2, 2)])
    counts = rng.randint(1, 3), rng.randint(4, 6)
    group = rng.choice(["layers", None])
    kinds = [
        ChainBlock(
            name,
            "text",
            count,
            forward := rng.choice([0.5, 1.0, 1.5]),
            forward * 2.0,
            rng.uniform(1, 3) * 1e9,
            rng.uniform(1, 2) * 1e9,
            (
                Mode("recompute", 0.0, rng.choice([0.25, 1.0]) * forward, rng.uniform(0, 0.5) * 1e9),
                *(
                    Mode(kind, rng.choice([0.0, 0.1]), rng.uniform(0, 0.5), rng.uniform(0.5, 1.5) * 1e9, restored)
                    for kind, restored in (("both", 0.0), ("select", 1e8))
                    if seed % 2
                ),
            ),
            recompute_group=group,
        )
        for name, count in zip(("dense", "moe"), counts, strict=True)
    ]
    head = ChainBlock("head", "text", 1, 0.7, 1.4, 1e9, 0.5e9, layer=False, pinned="last", transient_bytes=1e8)
    hops = (0.0,) * (num_stages * num_chunks - 1)
    limits = tuple(rng.uniform(5, 18) * 1e9 for _ in range(num_stages))
    nothing = (0.0,) * num_stages
    schedule = "1f1b" if num_chunks == 1 else rng.choice(["interleaved_1f1b", "interleaved_1f1b_low_memory"])
    return Problem(
        num_stages, num_chunks, 2 * num_stages, schedule, (*kinds, head), limits, nothing, nothing, hops, hops
    )


def solve_with_scip(problem: Problem, tmp_path: Path) -> tuple[float, dict[str, float]] | None:
    path = tmp_path / "model.mps"
    path.write_text(format_mps(build_program(problem), "model"))
    model = model_builder.Model()
    assert model.import_from_mps_file(str(path))
    solver = model_builder.Solver("scip")
    status = solver.solve(model)
    if status == model_builder.SolveStatus.INFEASIBLE:
        return None
    assert status == model_builder.SolveStatus.OPTIMAL
    return solver.objective_value, {variable.name: solver.value(variable) for variable in model.get_variables()}


@pytest.mark.parametrize("seed", range(24))
def test_another_solver_finds_the_same_optimum(tmp_path: Path, seed: int) -> None:
    problem = small_problem(seed)
    ours, theirs = place(problem), solve_with_scip(problem, tmp_path)
    assert (ours.status == "infeasible") == (theirs is None)
    if theirs is None:
        return
    objective, values = theirs
    assert objective == pytest.approx(ours.step_ms, rel=1e-6)
    placement = placement_from_columns(problem, values)
    check_placement(problem, placement)
    timeline = simulate(problem, placement)
    assert timeline.step_ms == pytest.approx(objective, rel=1e-6)
    assert not overfull_stages(problem, timeline.peak_memory_bytes - 4096.0)


def test_the_problems_are_of_both_kinds() -> None:
    statuses = [place(small_problem(seed)).status for seed in range(24)]
    assert statuses.count("infeasible") >= 2
    assert statuses.count("optimal") >= 10


def test_a_compressed_run_has_the_published_optimum(tmp_path: Path) -> None:
    problem, case = taylor_case("768_4k_gp")
    solved = solve_with_scip(problem, tmp_path)
    assert solved is not None
    assert solved[0] == pytest.approx(case["best_step"], rel=1e-6)


def test_columns_and_placements_are_the_same_thing() -> None:
    problem = small_problem(0)
    found = place(problem).placement
    assert found is not None
    values = columns_from_placement(problem, found)
    assert placement_from_columns(problem, values) == found
    assert set(values) == set(count_columns(problem).values())
    assert "x_type1_0_0" in values
    one_kind = replace(problem, chain=problem.chain[1:])
    assert {name.split("_")[1] for name in count_columns(one_kind).values()} == {"type2"}


@pytest.mark.parametrize(
    ("change", "word"),
    [({"p2p_ms": (1.0,)}, "transfers"), ({"p2p_ms_per_byte": (1.0,)}, "transfers")],
)
def test_what_no_row_expresses_is_refused(change: dict[str, tuple[float, ...]], word: str) -> None:
    with pytest.raises(JobError, match=word):
        build_program(replace(small_problem(0), **change))


def test_a_solution_file_is_read_with_or_without_its_frame(tmp_path: Path) -> None:
    path = tmp_path / "a.sol"
    path.write_text(
        "Model status\nOptimal\n\n# Primal solution values\nFeasible\n# Columns 2\na 1\nb 2.5\n# Rows 1\nr 9\n"
    )
    assert read_solution(path) == {"a": 1.0, "b": 2.5}
    path.write_text("a 1\nb 2.5\n")
    assert read_solution(path) == {"a": 1.0, "b": 2.5}
    path.write_text("a 1\na 2\n")
    with pytest.raises(JobError, match="twice"):
        read_solution(path)
