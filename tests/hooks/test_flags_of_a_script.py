"""The flags: both spellings, defaults, and every contradiction refused by name."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from mm_autoparallel.errors import JobError
from mm_autoparallel.hooks.flags import DEFAULT_MASTER_PORT, Flags, add_arguments, check_together, read_flags

pytestmark = pytest.mark.usefixtures("told_on_terminal")

# What the launch script of the reference passes (its SEARCH_ARGS).
REFERENCE = (
    "--auto-parallel-mm --nnodes 1 --nproc-per-node 8 --master-addr localhost --master-port 6010 --node-rank 0 "
    "--simulated-nnodes 8 --simulated-nproc-per-node 16"
)


def parse(line: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(line.split())


def read(line: str, num_devices: int = 2, on_cpu: bool = False) -> Flags:
    return read_flags(parse(line), num_devices, on_cpu)


@pytest.mark.parametrize("line", [REFERENCE, REFERENCE.replace("-", "_").replace("__", "--")])
def test_both_spellings(line: str) -> None:
    flags = read(line, num_devices=8)
    assert (flags.num_nodes, flags.processes_per_node, flags.node_rank, flags.master_port) == (1, 8, 0, 6010)
    assert (flags.simulated_nodes, flags.simulated_per_node) == (8, 16)


def test_defaults_make_one_flag_enough() -> None:
    flags = read("--auto-parallel-mm --simulated-nnodes 8", num_devices=4)
    assert (flags.num_nodes, flags.processes_per_node, flags.simulated_per_node) == (1, 4, 4)
    assert flags.master_port is None  # any that is free
    assert flags.profiles == Path("subgraph_profiles")
    assert read("--nnodes 2").master_port == DEFAULT_MASTER_PORT
    assert read("--nnodes 2").simulated_nodes == 2


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("--nnodes 2 --node-rank 2", "--node-rank is 2 and --nnodes is 2"),
        ("--node-rank -1", "--node-rank is -1"),
        ("--nnodes 0", "--nnodes is 0"),
        ("--nproc-per-node 3", "--nproc-per-node is 3 and this node has 2 devices"),
        ("--nproc-per-node 0", "--nproc-per-node is 0"),
        ("--simulated-nnodes 0", "--simulated-nnodes is 0"),
        ("--simulated-nproc-per-node -4", "--simulated-nproc-per-node is -4"),
        ("--master-port 70000", "--master-port is 70000"),
        ("--auto-parallel-join-timeout 0", "--auto-parallel-join-timeout is 0"),
        ("--auto-parallel-time-limit -1", "--auto-parallel-time-limit is -1"),
        ("--auto-parallel-layers vision", "--auto-parallel-layers has 'vision'"),
        ("--auto-parallel-layers text=a text=b", "--auto-parallel-layers has 'text=b'"),
    ],
)
def test_contradictions_name_the_flag(line: str, named: str) -> None:
    with pytest.raises(JobError, match=named):
        read(line)


def test_cores_are_shared_up_to_what_counts_as_devices(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    flags = read("--nproc-per-node 8", on_cpu=True)
    assert (flags.processes_per_node, flags.simulated_per_node) == (2, 8)
    assert "--nproc-per-node is 8 and this machine has 2 cores" in capsys.readouterr().err
    with pytest.raises(JobError, match="--nproc-per-node is 9"):
        read("--nproc-per-node 9", on_cpu=True)


def test_layers_of_modalities() -> None:
    assert read("--auto-parallel-layers vision=model.visual.blocks text=model.layers").layers == {
        "vision": "model.visual.blocks",
        "text": "model.layers",
    }


def test_searching_and_training_exclude_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(JobError, match="--auto-parallel-mm searches a plan and --auto-parallel-config plan"):
        check_together(parse("--auto-parallel-mm --auto-parallel-config plan.json"))
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    with pytest.raises(JobError, match="started by torchrun or the like"):
        check_together(parse("--auto-parallel-mm"))
