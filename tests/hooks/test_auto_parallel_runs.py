"""The toy script with --auto-parallel-mm: what a run leaves, and that a second one has nothing to measure."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from mm_autoparallel.planner.plan import RESULT_FILE

pytestmark = pytest.mark.slow


def test_a_second_run_measures_nothing(profiled: Path, copied: Path, launch: Callable, one_rank: tuple) -> None:
    first = json.loads((profiled / RESULT_FILE).read_text())
    assert {"parallel_config", "layer_placement", "layer_recompute", "e2e_time", "throughput"} <= first.keys()
    assert first["provenance"]["blocks"]["text_layer"]["time"] == "measured"
    logs = profiled / "subgraph_profiles" / "logs"
    assert logs.is_dir()
    assert list(logs.iterdir()) == []  # of runs that ended well none are kept

    second = launch(copied, *one_rank, "--fail", "raise0").wait()  # a child would fail
    assert second.code == 0, second.stderr
    assert "measured before" in second.stderr
    assert "where the step goes" in second.stdout
    assert json.loads((copied / RESULT_FILE).read_text()) == first  # the same job_sha256 among others


@pytest.mark.nightly
def test_two_ranks_and_two_sizes_are_measured_once(tmp_path: Path, launch: Callable) -> None:
    flags = ("--nproc-per-node", 2, "--simulated-nnodes", 2, "--tp", 1, 2)
    first = launch(tmp_path, *flags).wait()
    assert first.code == 0, first.stderr
    result = json.loads((tmp_path / RESULT_FILE).read_text())
    assert {"parallel_config", "layer_placement", "layer_recompute", "e2e_time", "throughput"} <= result.keys()
    assert result["world_size"] == 4
    assert result["provenance"]["blocks"]["text_layer"]["time"] == "measured"
    assert "where the step goes" in first.stdout
    assert "measured now" in first.stderr
    assert (tmp_path / "subgraph_profiles" / "logs").is_dir()
    assert list((tmp_path / "subgraph_profiles" / "logs").iterdir()) == []  # of runs that ended well none are kept
    names = {path.name for path in tmp_path.glob("subgraph_profiles/*/*/*.json")}
    assert {name[:3] for name in names} == {"tp1", "tp2"}

    second = launch(tmp_path, *flags, "--fail", "raise0").wait()  # a child would fail
    assert second.code == 0, second.stderr
    assert "measured before" in second.stderr
    again = json.loads((tmp_path / RESULT_FILE).read_text())
    assert again == result  # the same job_sha256 among others


@pytest.mark.nightly
def test_tensor_parallel_groups_that_are_not_there_are_measured_as_shards(
    tmp_path: Path, launch: Callable, one_rank: tuple
) -> None:
    ended = launch(tmp_path, *one_rank, "--tp", 2).wait()
    assert ended.code == 0, ended.stderr
    (profile,) = tmp_path.glob("subgraph_profiles/*/*/tp2*.json")
    assert {entry["arrangement"] for entry in json.loads(profile.read_text())["entries"]} == {"shard"}
    assert json.loads((tmp_path / RESULT_FILE).read_text())["parallel_config"]["TP"] == 2


@pytest.mark.nightly
def test_the_result_is_whole_or_not_there(copied: Path, launch: Callable, one_rank: tuple) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, before[1]))  # a disk with room for 300 bytes more
    try:
        launcher = launch(copied, *one_rank)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    ended = launcher.wait()
    assert ended.code == 2
    assert f"{RESULT_FILE} cannot be written" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert [path.name for path in copied.iterdir()] == ["subgraph_profiles"]


def test_a_folder_that_cannot_be_written_is_told_before_anything_is_measured(launch: Callable, one_rank: tuple) -> None:
    ended = launch(Path("/proc"), *one_rank).wait()  # not writable for root either
    assert ended.code == 2
    assert f"{RESULT_FILE} cannot be written" in ended.stderr
    assert ended.stderr.count("\n") == 1


@pytest.mark.nightly
def test_nothing_feasible_exits_3(copied: Path, launch: Callable, one_rank: tuple) -> None:
    (device,) = copied.glob("subgraph_profiles/*/device.json")
    document = json.loads(device.read_text())
    document["context_bytes"] = document["memory_bytes"]  # the runtime leaves nothing for the model
    device.write_text(json.dumps(document))
    ended = launch(copied, *one_rank).wait()
    assert ended.code == 3, ended.stderr
    assert not (copied / RESULT_FILE).exists()
