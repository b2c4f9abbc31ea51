"""The flags of Auto Tuning and Auto Settings: both spellings, defaults, and every contradiction refused by name."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

import pytest

from mm_autoparallel.errors import JobError
from mm_autoparallel.hooks.flags import add_arguments, check_together, read_flags
from mm_autoparallel.hooks.tuning_flags import (
    Tuning,
    add_tuning_arguments,
    is_follower,
    read_tuning,
    store_of,
    with_tuning,
)
from mm_autoparallel.integrations.auto_tuning.flags import AUTO_SETTINGS, AUTO_TUNING

# What the feature's own page tells to add to a launch script, and that of its successor.
TEXT = (
    "--auto-tuning --auto-tuning-work-dir ./auto_tuning_dir --auto-tuning-ranks 16 --auto-tuning-log-level debug "
    "--nnodes 2 --nproc-per-node 8 --master-addr localhost --master-port 6005 --node-rank 0"
)
SUCCESSOR = (
    "--auto-settings --auto-settings-type mixed --auto-settings-work-dir ./auto_settings_dir --auto-settings-ranks 16 "
    "--auto-settings-log-level warning --nproc-per-node 8 --master-addr localhost --master-port 6005 --node-rank 0"
)


def parse(line: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(parser)
    add_tuning_arguments(parser)
    return parser.parse_known_args(shlex.split(line))[0]


def read(line: str) -> Tuning:
    tuning = read_tuning(parse(line), shlex.split(line))
    assert tuning is not None
    return tuning


def underscored(line: str) -> str:
    return " ".join(f"--{word[2:].replace('-', '_')}" if word.startswith("--") else word for word in line.split())


@pytest.mark.parametrize("spell", [str, underscored])
def test_the_lines_of_the_page_are_understood(spell: type[str]) -> None:
    assert read(spell(TEXT)) == Tuning(AUTO_TUNING, Path("auto_tuning_dir"), 16, "debug", "white")
    assert read(spell(SUCCESSOR)) == Tuning(AUTO_SETTINGS, Path("auto_settings_dir"), 16, "warning", "mixed")


def test_defaults_are_upstreams() -> None:
    assert read("--auto-tuning") == Tuning(AUTO_TUNING, Path("auto_tuning_dir"), 16, "info", "white")
    assert read("--auto-settings") == Tuning(AUTO_SETTINGS, Path(), 8, "info", "mixed")
    assert read_tuning(parse("--seq-length 8"), ["--seq-length", "8"]) is None


def test_fewer_ranks_than_upstream_asks_for_are_planned_for() -> None:
    assert read("--auto-tuning --auto-tuning-ranks 8").num_ranks == 8
    assert read("--auto-settings --target-nnodes 125 --nproc-per-node 8").num_ranks == 1000


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("--auto-tuning --auto-settings", "--auto-tuning and --auto-settings each search a plan"),
        ("--auto-parallel-mm --auto-tuning", "--auto-parallel-mm and --auto-tuning each search a plan"),
        ("--auto-tuning --auto-tuning-log-level debgu", "--auto-tuning-log-level is 'debgu'.*debug"),
        ("--auto-settings --auto-settings-log-level loud", "one of debug, info, warning is expected"),
        ("--auto-settings --auto-settings-type grey", "--auto-settings-type is 'grey'"),
        ("--auto-tuning --auto-tuning-ranks 0", "--auto-tuning-ranks is 0"),
        ("--auto-settings --target-nnodes 0 --nproc-per-node 8", "--target-nnodes is 0"),
        ("--auto-settings --target-nnodes 4", "--target-nnodes is 4, and how many devices a node has"),
        (
            "--auto-settings --auto-settings-ranks 16 --target-nnodes 4 --nproc-per-node 8",
            "--auto-settings-ranks is 16, and --target-nnodes 4 of 8 devices are 32",
        ),
        ("--auto-settings --load ckpt", "--load is given"),
        ("--auto-settings --save=ckpt", "--save is given"),
        ("--auto-settings --prof-file x", "--prof-file says where"),
        ("--auto-tuning --simulated-nnodes 4", "--simulated-nnodes is 4"),
    ],
)
def test_contradictions_name_the_flag(line: str, named: str) -> None:
    with pytest.raises(JobError, match=named):
        read(line)


def test_a_plan_is_not_trained_under_and_searched_at_once() -> None:
    with pytest.raises(JobError, match=r"--auto-tuning searches a plan and --auto-parallel-config plan\.json"):
        check_together(parse("--auto-tuning --auto-parallel-config plan.json"), "--auto-tuning")


def test_upstreams_own_switches_are_no_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OOTB_OPTIMIZER_PROFILING", "TRUE")
    with pytest.raises(JobError, match="OOTB_OPTIMIZER_PROFILING is in the environment"):
        read("--auto-tuning")


def test_ranks_are_nodes_of_the_devices_at_hand() -> None:
    def cluster(line: str) -> tuple[int, int]:
        flags = with_tuning(read_flags(parse(line), 8, on_cpu=False), read(line))
        return flags.simulated_nodes, flags.simulated_per_node

    assert cluster("--auto-tuning --auto-tuning-ranks 1024 --nproc-per-node 8") == (128, 8)
    assert cluster("--auto-tuning --auto-tuning-ranks 4 --nproc-per-node 8") == (1, 4)
    assert cluster("--auto-tuning --auto-tuning-ranks 64 --nproc-per-node 2 --simulated-nproc-per-node 16") == (4, 16)
    with pytest.raises(JobError, match="12 devices are planned for, and nodes have 8 each"):
        cluster("--auto-tuning --auto-tuning-ranks 12 --nproc-per-node 8")


def test_profiles_lie_in_the_work_folder_unless_it_is_said() -> None:
    assert store_of(parse(TEXT)) == Path("auto_tuning_dir/subgraph_profiles")
    assert store_of(parse(f"{TEXT} --auto-parallel-profiles shared")) == Path("shared")
    assert store_of(parse("--auto-parallel-mm")) == Path("subgraph_profiles")


def test_of_torchruns_ranks_the_first_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_follower(parse(TEXT))
    monkeypatch.setenv("GROUP_RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert not is_follower(parse(TEXT))
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert is_follower(parse(TEXT))
    monkeypatch.setenv("GROUP_RANK", "1")
    with pytest.raises(JobError, match="--node-rank is 0, and torchrun calls this node 1"):
        is_follower(parse(TEXT))
