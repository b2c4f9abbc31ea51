"""Tinker's folders, figures, options and files."""

from __future__ import annotations

import contextlib
import csv
import json
import random
import shutil
import subprocess
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tinker_folders import read_results, write_folder

from mm_autoparallel.cli.main import main
from mm_autoparallel.cli.tinker_options import read_settings
from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.integrations.tinker.cost import Chain, Choice, Cluster
from mm_autoparallel.integrations.tinker.ours import place_chain, plan_folder, simulate_layers
from mm_autoparallel.integrations.tinker.profiles import DATA, INTER, INTRA, Config, Folder, read_folder
from mm_autoparallel.integrations.tinker.results import format_results
from mm_autoparallel.integrations.tinker.search import list_choices, search

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "tinker"
"""A folder with made-up figures in Tinker's form, and what TinkerOptimizer 1.3.0 finds in it for 2 nodes of 8, a batch
of 64 and 57,000 MB (Ascend/mstt at 99c2e0f, run on a CPU)."""
PROFILED = FIXTURES / "profiled"
CLUSTER = Cluster(2, 8)
SIMULATED = Choice(Config(tp=4, sp=1), 4, dist_opt=True, recompute=False, global_batch_size=64)


@pytest.fixture
def folder() -> Folder:
    return read_folder(PROFILED)


def test_one_strategy_has_tinkers_figures(folder: Folder) -> None:
    score = Chain(folder, CLUSTER, SIMULATED).score((8, 8, 8, 8))
    assert score.step_us / 1000.0 == pytest.approx(2602.68055555555, rel=1e-12)
    assert score.stage_mib == pytest.approx((12114.624, 10456.0, 9360.0, 9430.144), rel=1e-12)
    assert sum(score.stage_us) / 1000.0 == pytest.approx(152.680555555555, rel=1e-12)
    assert f"{score.tokens_per_device_s:.1f}" == "6295.0"


def test_the_search_finds_tinkers_rows(folder: Folder, tmp_path: Path) -> None:
    """All 442, to the last printed digit."""
    (tmp_path / "results.csv").write_text(format_results(search(folder, CLUSTER, 64, 57000)))
    theirs = read_results(FIXTURES / "results.csv")
    assert len(theirs) == 442
    assert Counter(read_results(tmp_path / "results.csv")) == Counter(theirs)


def test_rows_are_read_by_every_reader(folder: Folder) -> None:
    rows = list(csv.reader(format_results(search(folder, CLUSTER, 64, 20000)).splitlines()))
    assert {len(row) for row in rows} == {14}


def test_our_step_is_never_below_its_work(folder: Folder) -> None:
    """1F1B ends no sooner than the slowest stage has run all its micro-batches, and Tinker's sum bounds nothing."""
    chain = Chain(folder, CLUSTER, SIMULATED)
    ours_ms, slowest_us = simulate_layers(chain, (8, 8, 8, 8)), 4800.0
    assert ours_ms > chain.num_microbatches * slowest_us / 1000.0
    again = Chain(folder, CLUSTER, Choice(SIMULATED.config, 4, True, True, 64))
    assert simulate_layers(again, (8, 8, 8, 8)) > ours_ms


@pytest.mark.parametrize(
    ("memory_mib", "layers", "recompute"),
    [
        (12500, (8, 8, 8, 8), (0, 0, 0, 0)),
        (11500, (8, 8, 8, 8), (2, 0, 0, 0)),
        (9500, (8, 8, 8, 8), (6, 3, 0, 0)),
        (9000, (8, 8, 8, 8), (7, 5, 2, 4)),
    ],
)
def test_our_plan_recomputes_by_stage(
    memory_mib: float, layers: tuple[int, ...], recompute: tuple[int, ...], folder: Folder
) -> None:
    """The less memory, the more layers recompute, the first stages first; Tinker's all or none is never faster."""
    chain = Chain(folder, CLUSTER, SIMULATED)
    planned = place_chain(chain, 32, memory_mib)
    assert planned is not None
    assert (planned.layers, planned.recompute, planned.result.status) == (layers, recompute, "optimal")
    all_again = Chain(folder, CLUSTER, Choice(SIMULATED.config, 4, True, True, 64))
    assert planned.step_ms < simulate_layers(all_again, layers)


def test_nothing_is_planned_where_nothing_fits(folder: Folder) -> None:
    assert place_chain(Chain(folder, CLUSTER, SIMULATED), 32, 6000) is None


def test_the_best_of_a_folder_are_all_of_it(folder: Folder) -> None:
    """What `plan_folder` leaves out by its bound is no better than what it gives."""
    limit = 20000.0
    found = plan_folder(folder, Cluster(1, 4), 16, limit, best=2)
    chains = [
        Chain(folder, Cluster(1, 4), each) for each in list_choices(folder, Cluster(1, 4), 16) if not each.recompute
    ]
    steps = sorted(planned.step_ms for chain in chains if (planned := place_chain(chain, 32, limit)))
    assert [each.step_ms for each in found] == steps[:2]


@pytest.mark.parametrize("experts", [False, True])
def test_drawn_folders_are_searched(experts: bool, tmp_path: Path) -> None:
    write_folder(tmp_path / "drawn", random.Random(3), 7, experts=experts)
    scores = search(read_folder(tmp_path / "drawn"), Cluster(1, 4), 16, 1e9)
    assert scores
    assert all(sum(score.layers) == 7 and min(score.layers) > 0 for score in scores)
    assert {score.choice.config.ep for score in scores} == ({1, 2} if experts else {1})


# --------------------------------------------------------------------------------------------------------- bad folders


def break_line(text: str, old: str, new: str) -> str:
    assert old in text
    return text.replace(old, new, 1)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("config,block_name", "config,block", "line 1 is .* is expected"),
        ("4800.000", "many", "line 3, forward-compute: .many. is no number"),
        ("4800.000", "-1", "line 3, forward-compute: -1 is none of 0 to"),
        ("4800.000", "nan", "line 3, forward-compute: nan is none of 0 to"),
        (
            "example-7b_tp1_sp0_ep1_mbs1_algo0,post1",
            "example-7b_tp1_sp0_ep1_mbs1_algo0,block",
            "has the blocks .* expected",
        ),
        (",20.000,30.000", ",20.000", "line 2 has 9 cells; 10 are expected"),
    ],
)
def test_a_broken_table_is_named(old: str, new: str, told: str, tmp_path: Path) -> None:
    shutil.copytree(PROFILED, tmp_path / "broken")
    path = tmp_path / "broken" / DATA
    path.write_text(break_line(path.read_text(), old, new))
    with pytest.raises(JobError, match=told):
        read_folder(tmp_path / "broken")


def test_what_did_not_fit_is_left_out(tmp_path: Path) -> None:
    shutil.copytree(PROFILED, tmp_path / "some")
    path = tmp_path / "some" / DATA
    path.write_text(path.read_text().replace("9600.000,19200.000", "1000000000.000,1000000000.000"))
    found = read_folder(tmp_path / "some")
    assert Config(mbs=2) not in found.blocks
    assert any("did not fit" in note for note in found.notes)


def test_bandwidths_stand_for_each_other_and_one_is_needed(tmp_path: Path) -> None:
    shutil.copytree(PROFILED, tmp_path / "one")
    (tmp_path / "one" / INTRA).unlink()
    found = read_folder(tmp_path / "one")
    assert found.intra_gb_per_s == found.inter_gb_per_s
    (tmp_path / "one" / INTER).unlink()
    with pytest.raises(JobError, match="has neither"):
        read_folder(tmp_path / "one")


@pytest.mark.parametrize(
    ("choice", "told"),
    [
        (Choice(Config(tp=16), 1, False, False, 64), "was not measured"),
        (Choice(Config(tp=8), 3, False, False, 64), "does not divide 16 devices"),
        (Choice(Config(), 1, False, False, 60), "no multiple of dp 16 x mbs 1"),
    ],
)
def test_a_strategy_that_cannot_be_is_named(choice: Choice, told: str, folder: Folder) -> None:
    with pytest.raises(PlanError, match=told):
        Chain(folder, CLUSTER, choice)


# ------------------------------------------------------------------------------------------------------------- options


def test_options_are_found_where_tinker_finds_them(tmp_path: Path) -> None:
    """The command line first, then the mode's section, then the default; `zero` is --dist_opt."""
    path = tmp_path / "parameter_config.json"
    path.write_text(json.dumps({"search": {"num_nodes": 3, "memory_limit": None}, "simulate": {"zero": 1}}))
    found = read_settings("search", {"global_batch_size": 8}, path)
    assert (found["num_nodes"], found["memory_limit"], found["global_batch_size"]) == (3, 57000, 8)
    assert read_settings("search", {"num_nodes": 5}, path)["num_nodes"] == 5
    assert read_settings("simulate", {}, path)["dist_opt"] == 1


@pytest.mark.parametrize(
    ("document", "told"),
    [
        ({"serach": {}}, 'serach is no section .*"search"'),
        ({"search": {"memory_limt": 1}}, 'search.memory_limt is not known .*"memory_limit"'),
        ({"search": {"num_nodes": "4"}}, 'search.num_nodes is "4"; a whole number'),
        ({"simulate": {"recompute": 2}}, "simulate.recompute is 2; one of 0, 1"),
    ],
)
def test_a_broken_parameter_file_is_named(document: dict[str, Any], told: str, tmp_path: Path) -> None:
    path = tmp_path / "parameters.json"
    path.write_text(json.dumps(document))
    with pytest.raises(JobError, match=told):
        read_settings("search", {}, path)


# ------------------------------------------------------------------------------------------------------------ the verb


COMMON = ("-profiled", str(PROFILED), "-gbs", "64", "-nodes", "2", "-n", "8")
SCRIPT = """#!/bin/bash
# a launch script
GPT_ARGS="
    --num-layers 32 --hidden-size 4096 \\
    --tensor-model-parallel-size 8 --micro-batch-size 4 \\
    --global-batch-size 256 \\
    --recompute-granularity full --recompute-method block --recompute-num-layers 2 \\
    --context-parallel-size 1 \\
    --sequence-parallel \\
    --lr 1e-4
"
torchrun --nproc_per_node 8 pretrain_gpt.py $GPT_ARGS
"""


def test_one_strategy_is_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    more = (
        "--simu_tp",
        "4",
        "--simu_pp",
        "4",
        "--simu_sp",
        "1",
        "--zero",
        "1",
        "-mbs",
        "1",
        "--num_layer_list",
        "8,8,8,8",
    )
    assert main(["tinker", "-m", "simulate", *COMMON, *more, "--model", "tinker", "-d"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "1,4,4,1,1,1,1,1,8_8_8_8,0,6295.0,2602.681,12114.62"
    assert lines[3] == "0,8,37.189,12114.62"
    assert main(["tinker", "-m", "simulate", *COMMON, *more, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["tinker"]["time_cost_ms"] == pytest.approx(2602.68055555555)
    assert document["tinker_error"] == pytest.approx(2602.68055555555 / document["step_ms"] - 1.0)


def test_a_search_leaves_results_and_scripts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.sh").write_text(SCRIPT)
    assert main(["tinker", "-m", "search", *COMMON, "-mem", "57000", "--model", "tinker", "-shs", "train.sh"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[5] == "5,1,2,8,0,1,1,1,16_16,0,7682.3,2132.700,41833.56"
    (folder,) = (tmp_path / "results").iterdir()
    assert len(read_results(folder / "results.csv")) == 442
    scripts = sorted((folder / "configs").iterdir())
    assert len(scripts) == 10
    (fifth,) = [path for path in scripts if "rank5_" in path.name]
    assert (
        fifth.name == "example-7b-rank5_seq4096_tp1_pp2_sp0_distopt1_mbs1_gbs64_L16_16_rc0_time2132.700_mem41833.56.sh"
    )
    text = fifth.read_text()
    assert text.startswith("#!/bin/bash\n# a launch script\n")
    for word in ("--lr 1e-4", "--hidden-size 4096", "--num-layer-list 16,16", "--use-distributed-optimizer"):
        assert word in text
    for gone in ("recompute", "--sequence-parallel", "--context-parallel-size"):
        assert gone not in text
    for script in scripts:
        subprocess.run(["bash", "-n", str(script)], check=True)


def test_our_plan_is_told_beside_tinkers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["tinker", "-m", "search", "-profiled", str(PROFILED), "-gbs", "16", "-nodes", "1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    steps = [row["step_ms"] for row in document["best"]]
    assert steps == sorted(steps)
    assert all(row["tinker"]["time_cost_ms"] > 0 and row["status"] == "optimal" for row in document["best"])


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("-m", "search", "-profiled", "nowhere", "-gbs", "8"), 2, "no folder of that name"),
        (("-m", "search", "-gbs", "8"), 2, "needs --profiled_data_path"),
        (("-m", "search", *COMMON, "-mem", "10"), 3, "fits 10 MB"),
        (("-m", "simulate", *COMMON, "--simu_pp", "3"), 2, "does not divide 16 devices"),
        (("-m", "simulate", *COMMON, "--simu_pp", "2", "--num_layer_list", "16,15"), 2, "the model has 32 layers"),
        (("-m", "all", "-sh", "train.sh"), 2, "needs --global_batch_size"),
    ],
)
def test_what_cannot_be_done_is_said(
    words: tuple[str, ...],
    code: int,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["tinker", *words, "--model", "tinker"]) == code
    assert told in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_search_ends_when_it_is_asked_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With 130, and nothing is written."""
    stop = threading.Event()
    stop.set()
    monkeypatch.setattr("mm_autoparallel.cli.tinker.stop_on_signal", lambda: contextlib.nullcontext(stop))
    monkeypatch.chdir(tmp_path)
    assert main(["tinker", "-m", "search", *COMMON, "-mem", "16000"]) == 130
    assert "stopped; nothing was written" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
