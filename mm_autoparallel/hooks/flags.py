"""The flags of a pretrain script: how they are added to its parser, and what they say once their sense is checked."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mm_autoparallel.errors import JobError
from mm_autoparallel.hooks.launch_token import TOKEN
from mm_autoparallel.hooks.planner_process import VARIABLE, named_planner
from mm_autoparallel.model.profiles.shipped import STORE
from mm_autoparallel.profilers.launch import TASK
from mm_autoparallel.reports.terminal import say

SWITCH = "--auto-parallel-mm"

DEFAULT_MASTER_PORT = 29500
"""Where several nodes meet if no flag says otherwise: torchrun's default (torch/distributed/run.py)."""

DEFAULT_JOIN_TIMEOUT_S = 300.0
"""Assumed: nodes of a cluster that are started by one command load their Python within minutes."""


@dataclass(frozen=True)
class Flags:
    """What the flags ask for, checked.

    num_nodes, processes_per_node: the devices at hand, which profile. master_port: None where nobody asked for one.
    simulated_nodes, simulated_per_node: the cluster that is planned for. layers: modality → path of its layers.
    planner: the interpreter that searches; None for this process.
    """

    num_nodes: int
    processes_per_node: int
    node_rank: int
    master_addr: str
    master_port: int | None
    simulated_nodes: int
    simulated_per_node: int
    join_timeout_s: float
    time_limit_s: float | None
    profiles: Path
    layers: Mapping[str, str]
    planner: Path | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of automatic parallelism to a script's parser, with hyphens and with underscores."""
    group = parser.add_argument_group("automatic parallelism")

    def add(name: str, help_text: str, **options: Any) -> None:
        spellings = dict.fromkeys((f"--{name}", f"--{name.replace('-', '_')}"))
        group.add_argument(*spellings, help=help_text, **options)

    add(
        "auto-parallel-mm",
        "profile on the devices at hand, search the best plan for the simulated cluster, write "
        "auto_parallel_search_optimal_config.json and exit; start the script with plain python on every node",
        action="store_true",
    )
    add(
        "nnodes",
        f"nodes that profile (default: 1); several share a home folder, or the same ${TOKEN} in their environment",
        type=int,
        default=1,
        metavar="N",
    )
    add("nproc-per-node", "devices of each node that profile (default: all)", type=int, metavar="N")
    add("master-addr", "address of node 0 (default: localhost)", default="localhost", metavar="HOST")
    add("master-port", f"where nodes meet, the same on all (default: {DEFAULT_MASTER_PORT})", type=int, metavar="PORT")
    add("node-rank", "which node this is, from 0 (default: 0)", type=int, default=0, metavar="K")
    add("simulated-nnodes", "nodes of the cluster that is planned for (default: --nnodes)", type=int, metavar="N")
    add(
        "simulated-nproc-per-node",
        "devices of each of those (default: --nproc-per-node, else the devices of this node)",
        type=int,
        metavar="N",
    )
    add("auto-parallel-config", "train under this plan", type=Path, metavar="PLAN.json")
    add(
        "auto-parallel-join-timeout",
        f"seconds that nodes wait for each other (default: {DEFAULT_JOIN_TIMEOUT_S:g})",
        type=float,
        default=DEFAULT_JOIN_TIMEOUT_S,
        metavar="S",
    )
    add(
        "auto-parallel-profiles",
        f"folder of the profiles (default: ./{STORE})",
        type=Path,
        default=STORE,
        metavar="DIR",
    )
    add("auto-parallel-time-limit", "end the search with the best plan so far", type=float, metavar="S")
    add(
        "auto-parallel-python",
        "the Python of another environment, where the search runs: mm-autoparallel is installed there with its solver "
        f"(default: ${VARIABLE}, else this process)",
        type=Path,
        metavar="PATH",
    )
    add(
        "auto-parallel-layers",
        "where the model keeps the layers of each modality, if they are not found: vision=PATH text=PATH",
        nargs="+",
        default=[],
        metavar="MODALITY=PATH",
    )


def check_together(arguments: argparse.Namespace, switch: str = SWITCH) -> None:
    """Refuse what cannot be asked for beside `switch`, the flag that searches. Raises JobError naming the flags."""
    if arguments.auto_parallel_config is not None:
        raise JobError(
            f"{switch} searches a plan and --auto-parallel-config {arguments.auto_parallel_config} trains "
            "under one; give one of the two"
        )
    if switch == SWITCH:
        _check_started()


def _check_started() -> None:
    started_by = "TORCHELASTIC_RUN_ID" if "TORCHELASTIC_RUN_ID" in os.environ else "RANK"
    if TASK not in os.environ and started_by in os.environ and "WORLD_SIZE" in os.environ:
        raise JobError(
            "--auto-parallel-mm starts its own processes, and this one was started by torchrun or the like "
            f"({started_by} is in its environment); start the script with plain `python` on every node"
        )


def read_flags(arguments: argparse.Namespace, num_devices: int, on_cpu: bool) -> Flags:
    """The flags of a launcher on a node with `num_devices` devices. Raises JobError naming the flag that is wrong.

    On CPU a device is a core, which is an assumption of this project and no fact about the machine: asked for more, up
    to the most that it ever takes for devices, it profiles with what is there and says so.
    """
    at_least_one = ("nnodes", "nproc_per_node", "simulated_nnodes", "simulated_nproc_per_node")
    for name in at_least_one:
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise JobError(f"{_spell(name)} is {value}; it must be at least 1")
    nodes, rank = arguments.nnodes, arguments.node_rank
    if not 0 <= rank < nodes:
        raise JobError(f"--node-rank is {rank} and --nnodes is {nodes}; ranks of nodes are 0 to {nodes - 1}")
    port = arguments.master_port
    if port is not None and not 1 <= port <= 65535:
        raise JobError(f"--master-port is {port}; a port is a number from 1 to 65535")
    for name in ("auto_parallel_join_timeout", "auto_parallel_time_limit"):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < float("inf"):
            raise JobError(f"{_spell(name)} is {value:g}; a number of seconds above 0 is expected")
    asked = arguments.nproc_per_node or num_devices
    return Flags(
        num_nodes=nodes,
        processes_per_node=_devices_to_use(asked, num_devices, on_cpu),
        node_rank=rank,
        master_addr=arguments.master_addr,
        master_port=port if port is not None or nodes == 1 else DEFAULT_MASTER_PORT,
        simulated_nodes=arguments.simulated_nnodes or nodes,
        simulated_per_node=arguments.simulated_nproc_per_node or asked,
        join_timeout_s=arguments.auto_parallel_join_timeout,
        time_limit_s=arguments.auto_parallel_time_limit,
        profiles=arguments.auto_parallel_profiles,
        layers=read_layers(arguments.auto_parallel_layers),
        planner=named_planner(arguments.auto_parallel_python) if rank == 0 else None,
    )


def read_layers(pairs: list[str]) -> dict[str, str]:
    """`["vision=model.visual.blocks", …]` as a mapping. Raises JobError where one is no MODALITY=PATH."""
    layers: dict[str, str] = {}
    for pair in pairs:
        modality, _, path = pair.partition("=")
        if not modality or not path or modality in layers:
            raise JobError(
                f"--auto-parallel-layers has {pair!r}; pairs MODALITY=PATH are expected, one for each modality, such "
                "as vision=model.visual.blocks"
            )
        layers[modality] = path
    return layers


def _devices_to_use(asked: int, num_devices: int, on_cpu: bool) -> int:
    if asked <= num_devices:
        return asked
    if on_cpu:
        from mm_autoparallel.profilers.device import MAX_CPU_DEVICES

        if asked <= MAX_CPU_DEVICES:
            say(
                f"warning: --nproc-per-node is {asked} and this machine has {num_devices} cores, each of which counts "
                f"as a device; {num_devices} processes profile, because more would measure how cores are shared"
            )
            return num_devices
    what = "cores, each of which counts as a device" if on_cpu else "devices"
    raise JobError(f"--nproc-per-node is {asked} and this node has {num_devices} {what}; give at most {num_devices}")


def _spell(name: str) -> str:
    return f"--{name.replace('_', '-')}"
