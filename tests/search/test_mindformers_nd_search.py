"""The ND search: its space, the least memory of a division, what is chosen for profiling and how it is made smaller."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mm_autoparallel.errors import JobError, NoFeasiblePlan
from mm_autoparallel.integrations.mindformers.layout import Layout
from mm_autoparallel.integrations.mindformers.model_job import build_job, strategy_of
from mm_autoparallel.integrations.mindformers.pipeline_problem import Ratios, build_pipeline_problem, placement_of
from mm_autoparallel.integrations.mindformers.pretrain_yaml import Pretrain, read_pretrain, recompute_config
from mm_autoparallel.integrations.mindformers.search.design import _features, choose_to_profile
from mm_autoparallel.integrations.mindformers.search.division import Scope, divide, list_divisions
from mm_autoparallel.integrations.mindformers.search.lowest_memory import find_lowest_memory
from mm_autoparallel.integrations.mindformers.search.nd_search import (
    DRY_RUN,
    Searched,
    choose_trials,
    list_candidates,
    search_divisions,
)
from mm_autoparallel.integrations.mindformers.search.sized_memory import figures_of, size_memory
from mm_autoparallel.integrations.mindformers.search.trial import Trial, shrink
from mm_autoparallel.model.costs.stage import build_problem
from mm_autoparallel.pipeline.problem import ChainBlock, Mode, Problem
from mm_autoparallel.pipeline.simulate.step import simulate
from mm_autoparallel.units import GIB, MIB

EXAMPLES = Path(__file__).parents[2] / "examples" / "mindformers"
FIXTURES = Path(__file__).parents[1] / "fixtures"
BATCH = 128


@pytest.fixture(scope="module")
def pretrain() -> Pretrain:
    """30 layers of DeepSeek-V3 on 128 devices."""
    return read_pretrain(EXAMPLES / "pretrain_deepseek3.yaml")


@pytest.fixture(scope="module")
def searched(pretrain: Pretrain) -> list[Searched]:
    return search_divisions(pretrain, BATCH, Scope(32), {}, 1)


def test_every_division_is_there_once_with_one_fate(pretrain: Pretrain, searched: list[Searched]) -> None:
    divisions = [entry.division for entry in searched]
    assert len(set(divisions)) == len(divisions)
    assert {(d.dp, d.tp, d.pp, d.cp) for d in divisions} == {
        sizes for sizes in product((1, 2, 4, 8, 16, 32, 64, 128), repeat=4) if np.prod(sizes) == 128
    }
    for entry in searched:
        assert (entry.status == "fits") == (entry.reason == "")
        assert (entry.peak_bytes is None) == (entry.status == "unlawful")
        if entry.peak_bytes is not None:
            assert entry.limit_bytes == 58 * GIB
            assert (entry.peak_bytes <= entry.limit_bytes) == (entry.status == "fits")


def test_reasons_are_the_rules(searched: list[Searched]) -> None:
    def reason_of(**sizes: int | None) -> str:
        (entry,) = (e for e in searched if all(getattr(e.division, name) == size for name, size in sizes.items()))
        return entry.reason

    assert "TP 16 is wider than the 8 devices" in reason_of(dp=8, tp=16, pp=1, cp=1)
    assert "CP 2 leaves 2048 tokens" in reason_of(dp=64, tp=1, pp=1, cp=2)
    assert "need a layer each, and the model has 29" in reason_of(dp=4, tp=1, pp=32, cp=1)
    assert "EP 64 is above max_expert_parallel 32" in reason_of(dp=16, tp=4, pp=2, ep=64)
    assert "EP 32 x ETP 1" in reason_of(dp=1, tp=8, pp=16, ep=32)
    assert "1 micro-batches are fewer than PP 2" in reason_of(dp=32, tp=2, pp=2, ep=1, op=1, vp=1, mbs=4)
    assert "VPP 3 needs" not in reason_of(dp=16, tp=1, pp=8, ep=1, op=1, vp=3, mbs=1)
    assert "x VPP 4 = 32 chunks need a layer each" in reason_of(dp=16, tp=1, pp=8, ep=1, op=1, vp=4, mbs=1)
    assert "memory: with every layer recomputed stage" in reason_of(dp=128, tp=1, pp=1, ep=1, op=128, vp=1, mbs=1)


def test_the_least_memory_is_that_of_the_whole_step(pretrain: Pretrain) -> None:
    """Fewer micro-batches are looked at than there are, and the simulator's peaks of all of them are the same."""
    job = build_job(pretrain, 1024)
    divisions = [d for d, reason in list_divisions(pretrain, job, Scope(32)) if reason is None and d.pp in (4, 8)]
    for division in divisions[:: len(divisions) // 12]:
        divided = divide(pretrain, division, 1024)
        lowest = find_lowest_memory(divided, job)
        memory = figures_of(divided, build_problem(job, strategy_of(divided)), job.workload)
        problem = build_pipeline_problem(divided, Ratios(0.5, 2.0, 1.0, 0.3), memory, "default")
        timeline = simulate(problem, placement_of(problem, lowest.layout))
        assert timeline.peak_memory_bytes == pytest.approx(lowest.stage_peak_bytes)
        counts = np.array(lowest.layout.layers).sum(axis=0)
        assert counts.sum() == 30
        assert min(map(min, lowest.layout.layers)) >= 1


CASES: dict[str, Any] = json.loads((FIXTURES / "known_answers" / "taylor.json").read_text(encoding="utf-8"))["cases"]


@pytest.mark.parametrize("name", CASES)
def test_sizes_meet_dry_runs(name: str) -> None:
    """Figures of published dry runs: kept activations within 2.4 %, recomputed ones exact (one run has a mask more),
    static within 12 % (that of one run's dense layer, 130 MB, is less than its gradients alone).
    """
    pretrain = read_pretrain(FIXTURES / "mindformers" / f"{name}.yaml")
    plain = {**recompute_config(pretrain), "select_recompute": False}
    memory = size_memory(replace(pretrain, document={**pretrain.document, "recompute_config": plain}))
    assert memory.dense
    layers = (memory.dense, memory.expert)
    assert [layer.activation_bytes / MIB for layer in layers] == pytest.approx(CASES[name]["activation_mb"], rel=0.024)
    more_mb = 16 if name == "768_4k_gp" else 0
    recomputed_mb = [layer.recomputed_bytes / MIB + more_mb for layer in layers]
    assert recomputed_mb == pytest.approx(CASES[name]["recomputed_mb"], rel=0.001)
    known = CASES[name]["static_mb"]
    assert memory.expert.static_bytes / MIB == pytest.approx(known[1], rel=0.12)
    if name != "512_8k":
        assert memory.dense.static_bytes / MIB == pytest.approx(known[0], rel=0.12)


@pytest.mark.slow
def test_a_dry_run_counts_for_the_yaml_s_own_setting(pretrain: Pretrain) -> None:
    fewer = replace(pretrain, dp=1, tp=4)
    dry_runs = {(1, 4, 8, 4): 59.0 * GIB, (2, 2, 8, 2): 57.0 * GIB}
    searched = search_divisions(fewer, 16, Scope(4), dry_runs, 1)
    from_runs = [entry for entry in searched if entry.source == DRY_RUN]
    assert {entry.division.candidate: entry.status for entry in from_runs} == {
        (1, 4, 8, 4): "out of memory",
        (2, 2, 8, 2): "fits",
    }
    for entry in from_runs:
        assert (entry.division.op, entry.division.vp, entry.division.mbs) == (entry.division.dp, 1, 1)
    assert "its dry run needs 59.0 GiB of 58.0 GiB" in from_runs[0].reason + from_runs[1].reason
    with pytest.raises(JobError, match="DP3_TP4_PP8_EP16"):
        search_divisions(fewer, 16, Scope(4), {(3, 4, 8, 16): 1.0}, 1)


def test_a_candidate_stands_for_the_yaml_s_own_setting(pretrain: Pretrain, searched: list[Searched]) -> None:
    candidates = list_candidates(searched, pretrain)
    fitting = {entry.division.candidate for entry in searched if entry.status == "fits"}
    assert [entry.division.candidate for entry in candidates] == sorted(fitting)
    own = [entry for entry in candidates if (entry.division.vp, entry.division.mbs) == (1, 1)]
    assert len(own) == len(candidates)
    assert all((entry.division.op or 1) == entry.division.dp for entry in own)
    none = [replace(entry, status="out of memory") if entry.status == "fits" else entry for entry in searched]
    with pytest.raises(NoFeasiblePlan, match="comes closest"):
        list_candidates(none, pretrain)


def test_trials_run_on_the_devices_at_hand(pretrain: Pretrain, searched: list[Searched]) -> None:
    candidates = list_candidates(searched, pretrain)
    chosen = choose_trials(candidates, pretrain, BATCH, 32)
    trials = [entry for entry in chosen if entry.trial]
    assert len(trials) == min(
        20, sum(isinstance(shrink(divide(pretrain, c.division, BATCH), 32), Trial) for c in candidates)
    )
    for entry in trials:
        assert entry.trial
        small, whole = entry.trial.divided, entry.searched.division
        assert small.dp * small.tp * small.pp * small.cp <= 32
        assert (small.tp, small.cp, small.ep) == (whole.tp, whole.cp, whole.ep)
        assert small.pp in (1, 2) or small.dp == whole.dp
        (layers,), (again,) = entry.trial.layout.layers, entry.trial.layout.recompute
        assert sum(layers) == small.num_layers < pretrain.num_layers + 1
        # two layers with experts that are recomputed, and two that are not
        dense = [3] + [0] * (small.pp - 1)
        assert max(r - d for r, d in zip(again, dense, strict=True)) >= 2
        assert layers[-1] - again[-1] >= 2
        memory = size_memory(small)
        problem = build_pipeline_problem(small, Ratios(1.0, 1.0, 1.0, 1.0), memory, "default")
        peaks = simulate(problem, placement_of(problem, entry.trial.layout)).peak_memory_bytes
        assert max(peaks) <= 58 * GIB


def test_too_few_devices_are_told(pretrain: Pretrain, searched: list[Searched]) -> None:
    wide = [entry for entry in list_candidates(searched, pretrain) if entry.division.tp == 8]
    with pytest.raises(NoFeasiblePlan, match="4 devices are too few: TP 8 x CP 1 alone are 8 devices"):
        choose_trials(wide, pretrain, BATCH, 4)


def test_trials_of_many_layers_are_found_in_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """8,080 layers once took a problem for each number of them that does not fit."""
    from mm_autoparallel.integrations.mindformers.search import trial

    pretrain = read_pretrain(EXAMPLES / "pretrain_llama3_70b.yaml")
    many = replace(pretrain, num_layers=8080, vp=1, pp=1, dp=8, tp=8, cp=2, num_microbatches=2)
    calls: list[str] = []

    def counted(name: str) -> Any:
        made = getattr(trial, name)
        return lambda *given: calls.append(name) or made(*given)

    for name in ("build_problem", "peaks_of"):
        monkeypatch.setattr(trial, name, counted(name))
    found = shrink(replace(many, max_memory_bytes=98 * GIB), 16)
    assert isinstance(found, Trial)
    (layers,), (again,) = found.layout.layers, found.layout.recompute
    assert (layers[0], again[0]) == (93, 87)
    assert calls.count("build_problem") <= 4
    assert calls.count("peaks_of") <= 20
    monkeypatch.undo()
    for num_layers, fits in ((94, True), (95, False)):  # of 94 recomputed layers, two that are not have no room
        more = replace(found.divided, num_layers=num_layers)
        assert (find_lowest_memory(more, build_job(more)).reason is None) == fits


def test_many_layers_that_must_move_are_found_in_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers that are not recomputed take the room of 2,000 others: 500 must leave the last stage for the first."""
    from mm_autoparallel.integrations.mindformers.search import trial

    recompute = Mode("recompute", extra_backward_ms=1.0, activation_bytes=0.0)
    block = ChainBlock("moe", "text", 2000, 1.0, 2.0, 1.0, 1000.0, (recompute,), recompute_group="layers")
    numbers = {"memory_limit_bytes": (2500.0,) * 2, "stage_static_bytes": (0.0,) * 2, "stage_tail_ms": (0.0,) * 2}
    problem = Problem(2, 1, 4, "1f1b", (block,), **numbers, p2p_ms=(0.0,), p2p_ms_per_byte=(0.0,))
    calls: list[Layout] = []
    peaks_of = trial.peaks_of
    monkeypatch.setattr(trial, "peaks_of", lambda of, layout: calls.append(layout) or peaks_of(of, layout))
    found = trial._find_layout(problem, Layout(((1000, 1000),), ((1000, 1000),)), 0)
    assert found == Layout(((1500, 500),), ((1500, 498),))
    assert len(calls) <= 25


SIZES = [
    (dp, tp, pp, ep, cp)
    for dp, tp, pp, cp in product((1, 2, 4, 8, 16, 32, 64), repeat=4)
    if dp * tp * pp * cp == 256 and tp <= 8 and cp <= 4 and 2 <= pp <= 16
    for ep in (1, 4, 16, 64)
]


def log_determinant(chosen: list[int]) -> float:
    rows = _features(SIZES)[chosen]
    return float(np.linalg.slogdet(rows.T @ rows + 1e-6 * np.eye(rows.shape[1]))[1])


def test_the_design_covers_and_tells_most() -> None:
    chosen = choose_to_profile(SIZES, 20)
    assert len(set(chosen)) == 20
    for dimension in range(5):
        assert {SIZES[index][dimension] for index in chosen} == {sizes[dimension] for sizes in SIZES}
    generator = np.random.default_rng(7)
    rivals = [sorted(generator.choice(len(SIZES), 20, replace=False).tolist()) for _ in range(300)]
    assert log_determinant(chosen) > max(map(log_determinant, rivals))
    assert choose_to_profile(SIZES, 20) == chosen


def test_what_was_profiled_is_not_chosen_again() -> None:
    first = choose_to_profile(SIZES, 20)
    known = [SIZES[index] for index in first]
    more = choose_to_profile(SIZES, 5, known)
    assert len(more) == 5
    assert not set(more) & set(first)
    assert choose_to_profile(SIZES[:6], 20) == list(range(6))
    assert choose_to_profile(SIZES[:6], 20, SIZES[:2]) == [2, 3, 4, 5]


def test_reasons_of_what_is_not_profiled(pretrain: Pretrain, searched: list[Searched]) -> None:
    candidates = list_candidates(searched, pretrain)
    able = [entry.searched for entry in choose_trials(candidates, pretrain, BATCH, 32) if entry.trial]
    known = [able[0].division.candidate]
    chosen = {
        entry.searched.division.candidate: entry for entry in choose_trials(candidates, pretrain, BATCH, 32, known)
    }
    assert chosen[known[0]].reason == "profiled already"
    assert sum(entry.trial is not None for entry in chosen.values()) == len(able) - 1


def test_users_narrow_the_space(pretrain: Pretrain) -> None:
    scope = Scope(32, {"tp": (4,), "pp": (4, 8), "ep": (16, 32)})
    searched = search_divisions(pretrain, BATCH, scope, {}, 1)
    looked_at = [entry.division for entry in searched if entry.peak_bytes is not None]
    assert {(d.tp, d.pp, d.ep) for d in looked_at} == {(4, 8, 16), (4, 4, 16), (4, 4, 32)}
    reasons = {entry.reason for entry in searched if entry.division.tp == 8}
    assert reasons == {"TP 8 is not among --tp 4"}
    assert any(entry.reason == "EP 8 is not among --ep 16 32" for entry in searched)


def test_context_parallel_ranks_share_the_optimizer_too(tmp_path: Path, pretrain: Pretrain) -> None:
    text, count = re.subn(r"(\n +seq_length: (?:&\w+ )?)4096", r"\g<1>8192", pretrain.text)
    assert count == 1
    (tmp_path / "longer.yaml").write_text(text)
    longer = read_pretrain(tmp_path / "longer.yaml")
    scope = Scope(16, {"dp": (1,), "tp": (8,), "pp": (8,), "cp": (2,), "ep": (2,)})
    searched = [e for e in search_divisions(longer, 16, scope, {}, 1) if e.peak_bytes is not None]
    assert {entry.division.op for entry in searched} == {1, 2}
    peaks = {e.division.op: e.peak_bytes for e in searched if (e.division.vp, e.division.mbs) == (1, 1)}
    assert peaks[2] is not None
    assert peaks[1] is not None
    assert peaks[2] < 0.8 * peaks[1]


def test_the_yaml_s_own_micro_batch_is_tried(pretrain: Pretrain) -> None:
    scope = Scope(16, {"dp": (4,), "tp": (4,), "pp": (8,), "ep": (16,)})
    wide = replace(pretrain, mbs=8)
    for given, expected in ((pretrain, {1, 2, 4}), (wide, {1, 2, 4, 8})):
        searched = search_divisions(given, 512, scope, {}, 1)
        assert {entry.division.mbs for entry in searched if entry.peak_bytes is not None} == expected


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("rank_num", [64, 128])
def test_modules_of_prediction_are_no_layers_of_a_trial(pretrain: Pretrain, rank_num: int) -> None:
    """With as many devices as nd-search takes by default, stages would have been left without a layer."""
    scope = Scope(64, {"tp": (4, 8), "pp": (2, 8)})
    candidates = list_candidates(search_divisions(pretrain, BATCH, scope, {}, 1), pretrain)
    for entry in choose_trials(candidates, pretrain, BATCH, rank_num):
        assert entry.trial is not None or entry.reason
        if entry.trial:
            assert entry.trial.divided.num_layers - pretrain.mtp_depth >= entry.trial.divided.pp


def test_the_mistake_of_one_candidate_ends_no_search(pretrain: Pretrain, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever goes wrong with one division is its reason; the others are found all the same."""
    from mm_autoparallel.integrations.mindformers.search import measuring, trial

    def measure(divided: Pretrain, *more: Any) -> Any:
        if divided.vp == 2:
            raise JobError("this one is broken")
        return find_lowest_memory(divided, *more)

    def spoil(whole: Pretrain, *more: Any) -> Any:
        if whole.pp == 8:
            raise JobError("this trial is broken")
        return with_fewer_layers(whole, *more)

    with_fewer_layers = trial._with_fewer_layers
    monkeypatch.setattr(measuring, "find_lowest_memory", measure)
    monkeypatch.setattr(trial, "_with_fewer_layers", spoil)
    scope = Scope(64, {"tp": (4,), "pp": (4, 8)})
    searched = search_divisions(pretrain, BATCH, scope, {}, 1)
    broken = [entry for entry in searched if entry.reason == "this one is broken"]
    assert broken
    assert all((entry.status, entry.division.vp) == ("unlawful", 2) for entry in broken)
    chosen = choose_trials(list_candidates(searched, pretrain), pretrain, BATCH, 64)
    assert {entry.searched.division.pp for entry in chosen if entry.trial} == {4}
    assert all("this trial is broken" in entry.reason for entry in chosen if entry.searched.division.pp == 8)
