"""Prices: the checker's own sums confirm what a tree over parts of layers leaves behind, and nothing that is false."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nouns import brute_force
from random_modes import random_modes_problem
from random_problems import random_problem

from mm_autoparallel.errors import PlanError
from mm_autoparallel.files import write_text_atomically
from mm_autoparallel.model.costs.stage import build_problem
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.readers.job_file import read_job
from mm_autoparallel.pipeline.certify.certificate import Unconfirmed, read_certificate, write_certificate
from mm_autoparallel.pipeline.certify.confirm_prices import confirm_prices
from mm_autoparallel.pipeline.certify.verify import verify
from mm_autoparallel.pipeline.placement import PlacementResult, place
from mm_autoparallel.pipeline.placement.methods import METHODS
from mm_autoparallel.pipeline.placement.relaxation.duals import PriceProof, Prices
from mm_autoparallel.pipeline.placement.relaxation.tree import FractionalTree
from mm_autoparallel.pipeline.problem import ChainBlock, Mode, Problem
from mm_autoparallel.pipeline.simulate.step import simulate


def go_on() -> bool:
    return False


def confirm(problem: Problem, proof: PriceProof, bound_ms: float) -> None:
    paths = [cut.path for cut in proof.cuts]
    confirm_prices(problem, proof.main, paths, proof.prices, proof.parts, bound_ms, go_on)


def long_problem() -> Problem:
    """Too many patterns for a tree of plays: 16 stages of 80 layers, each in one of four ways."""
    modes = (Mode("selective", 0.0, 0.3, 7.0), Mode("recompute", 0.0, 1.0, 1.0), Mode("activation", 0.0, 0.1, 9.0))
    chain = (
        ChainBlock("embedding", "text", 1, 0.3, 0.4, 20.0, layer=False, pinned="first"),
        ChainBlock("layer", "text", 80, 1.0, 2.0, 6.0, 10.0, modes, transient_bytes=2.0),
        ChainBlock("head", "text", 1, 1.7, 3.4, 20.0, layer=False, pinned="last"),
    )
    hops = (0.05,) * 31
    nothing = (0.0,) * 16
    return Problem(16, 2, 64, "interleaved_1f1b", chain, (800.0,) * 16, nothing, nothing, hops, (0.0,) * 31)


def random_prices(prices: Prices, rng: np.random.Generator) -> Prices:
    def moved(named: dict[int, float]) -> dict[int, float]:
        return {at: value * float(rng.uniform(0.0, 2.0)) for at, value in named.items()}

    return Prices(
        {path: weight * float(rng.uniform(0.5, 2.0)) for path, weight in prices.path_fraction.items()},
        moved(prices.moved_count),
        moved(prices.memory_ms),
        moved(prices.layers_ms),
        moved(prices.stages_ms),
        moved(prices.virtual_stages_ms),
    )


def test_what_the_tree_shows_is_confirmed_and_nothing_above_the_optimum() -> None:
    """Modes, host links and limits, unequal stages and micro-batches, pins. Whatever prices say, no bound above the
    optimum is confirmed by them."""
    problems = [random_modes_problem(seed) for seed in range(9100, 9125)]
    problems += [random_problem(seed, style) for seed in range(9100, 9108) for style in ("round", "real", "unequal")]  # type: ignore[arg-type]
    rng = np.random.default_rng(7)
    divided = 0
    for problem in problems:
        best_ms, best = brute_force(problem)
        tree = FractionalTree(problem, 1.2 * best_ms)
        if best is None:
            continue
        for target_ms in (0.9 * best_ms, 1.1 * best_ms):
            tree.advance(target_ms, 1.2 * best_ms, 2_000, go_on)
            proof = tree.proof()
            confirm(problem, proof, tree.lower_bound_ms)
            divided += len(proof.parts) > 1
            above_ms = best_ms * (1 + 1e-5)
            for prices in (proof.prices, *([random_prices(p, rng) for p in proof.prices] for _ in range(3))):
                with pytest.raises(PlanError, match=r"shows only that"):
                    confirm(problem, replace(proof, prices=tuple(prices)), above_ms)
    assert divided > len(problems) / 4


def test_a_part_that_is_left_out_is_missed() -> None:
    problem = long_problem()
    tree = FractionalTree(problem, 3000.0)
    tree.advance(3000.0, 3000.0, 20_000, go_on)
    proof = tree.proof()
    confirm(problem, proof, tree.lower_bound_ms)
    leaf = max(i for i, part in enumerate(proof.parts) if isinstance(part, int))
    without = (*proof.parts[:leaf], None, *proof.parts[leaf + 1 :])
    with pytest.raises(PlanError, match=rf"proof.parts\[{leaf}\] shows only that no placement of it is below 0.0 ms"):
        confirm(problem, replace(proof, parts=without), tree.lower_bound_ms)
    paths = [cut.path for cut in proof.cuts]
    with pytest.raises(Unconfirmed, match="stopped"):
        confirm_prices(problem, proof.main, paths, proof.prices, proof.parts, 1.0, lambda: True)


@pytest.fixture(scope="module")
def placed(repository: Path) -> tuple[Problem, PlacementResult]:
    """A plan of 72B in four chunks with every mode: more than a search can list, for `place` and for its checker."""
    job = read_job(repository / "examples" / "qwen2vl_72b" / "job_whole_space.yaml")
    problem = build_problem(job, Strategy(pp=8, tp=2, dp=8, mbs=1, vpp=4))
    methods = [method for method in METHODS if method.name != "thinned mixtures"]
    return problem, place(problem, gap_fraction=0.05, methods=methods)


def test_a_bound_by_prices_is_written_and_confirmed(placed: tuple[Problem, PlacementResult], tmp_path: Path) -> None:
    problem, result = placed
    assert (result.proof, result.status) == ("prices", "feasible")
    assert 0 < result.gap_fraction <= 0.08 * (1 + 1e-9)
    write_certificate(tmp_path / "c.json", problem, result)
    certificate = read_certificate(tmp_path / "c.json")
    assert result.prices is not None
    assert (certificate.parts, certificate.main) == (result.prices.parts, result.prices.main)
    verification = verify(certificate)
    assert (verification.method, verification.lower_bound_ms) == ("prices", result.lower_bound_ms)
    assert result.placement is not None
    assert verification.step_ms == simulate(problem, result.placement).step_ms
    too_high = replace(certificate, lower_bound_ms=result.step_ms * (1 - 1e-6), gap_fraction=1e-6)
    with pytest.raises(PlanError, match=r"proof\.parts\[\d+\] shows only that no placement of it is below"):
        verify(too_high)


def divide(document: dict[str, Any], **part: int) -> None:
    document["proof"]["parts"] = [part, {"prices": 0}, {"prices": 0}]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d["proof"].update(block="layers"), ["proof.block is layers", "chain"]),
        (lambda d: d["proof"].update(parts=[]), ["proof.parts is empty"]),
        (lambda d: d["proof"].update(parts=[{"prices": 10**6}]), ["proof.parts[0].prices is 1000000"]),
        (lambda d: d["proof"].update(parts=[{"prices": 0}] * 2), ["proof.parts[1] is part of none"]),
        (lambda d: divide(d, stage=0, least=1, fewer=1), ["proof.parts[0] must be divided"]),
        (lambda d: divide(d, stage=16, least=1, fewer=1, more=2), ["divides at 16"]),
        (lambda d: divide(d, stage=0, least=1, fewer=0, more=2), ["proof.parts[0] names part 0"]),
        (lambda d: divide(d, stage=0, least=1, fewer=1, more=1), ["proof.parts[0] names part 1"]),
        (lambda d: divide(d, virtual_stage=0, least=1, fewer=1, more=3), ["proof.parts[0] names part 3"]),
        (lambda d: d["proof"]["prices"][0].update(path_fraction=[]), ["proof.prices[0].path_fraction"]),
        (lambda d: d["proof"]["prices"][0].update(path_fraction=[[10**6, 1.0]]), ["path_fraction names 1000000"]),
        (lambda d: d["proof"]["prices"][0].update(memory_ms=[[0, -1.0]]), ["proof.prices[0].memory_ms"]),
        (lambda d: d["proof"].update(method="cuts", cuts=[]), ["proof.method is cuts", "0 cuts"]),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(
    placed: tuple[Problem, PlacementResult],
    change: Callable[[dict[str, Any]], Any],
    words: list[str],
    tmp_path: Path,
) -> None:
    path = tmp_path / "c.json"
    write_certificate(path, *placed)
    document = json.loads(path.read_text(encoding="utf-8"))
    change(document)
    write_text_atomically(path, json.dumps(document))
    with pytest.raises(PlanError) as failure:
        read_certificate(path)
    for word in words:
        assert word in str(failure.value)
