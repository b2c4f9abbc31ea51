"""The flags of Auto Tuning and Auto Settings in a script's parser, and what they say once their sense is checked."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mm_autoparallel.errors import JobError
from mm_autoparallel.hooks.flags import SWITCH, Flags
from mm_autoparallel.integrations.auto_tuning.flags import (
    AUTO_SETTINGS,
    FAMILIES,
    KINDS,
    LOG_LEVELS,
    PROFILE_FILE,
    SWITCHES_OF_CHILDREN,
    TARGET_NODES,
    Family,
    Kind,
    LogLevel,
)
from mm_autoparallel.model.profiles.shipped import STORE
from mm_autoparallel.validation import nearest


@dataclass(frozen=True)
class Tuning:
    """What the flags of one family ask for, checked. num_ranks: devices of the cluster that is planned for."""

    family: Family
    work_dir: Path
    num_ranks: int
    log_level: LogLevel
    kind: Kind

    def path(self, name: str) -> Path:
        """A file of the work folder: `auto_tuning_top1.json`."""
        return self.work_dir / f"{self.family.prefix}_{name}"


def add_tuning_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of Auto Tuning and Auto Settings to a script's parser, with hyphens and with underscores.

    `add_arguments` adds those that they share with --auto-parallel-mm, and comes first.
    """
    for family in FAMILIES:
        group = parser.add_argument_group(family.title)

        def add(name: str, help_text: str, group: Any = group, **options: Any) -> None:
            spellings = dict.fromkeys((f"--{name}", f"--{name.replace('-', '_')}"))
            group.add_argument(*spellings, help=help_text, **options)

        add(
            family.name,
            f"profile on the devices at hand, recommend three configurations for the cluster of "
            f"{family.switch}-ranks, and exit",
            action="store_true",
        )
        add(
            f"{family.name}-work-dir",
            f"folder of profiles and results (default: ./{family.work_dir if family.work_dir.name else ''})",
            type=Path,
            default=family.work_dir,
            metavar="DIR",
        )
        add(
            f"{family.name}-ranks",
            f"devices of the cluster that is planned for (default: {family.num_ranks})",
            type=int,
            metavar="N",
        )
        add(
            f"{family.name}-log-level",
            f"one of {', '.join(LOG_LEVELS)} (default: info)",
            default="info",
            metavar="WORD",
        )
        if family is AUTO_SETTINGS:
            _add_settings(add, family)


def _add_settings(add: Any, family: Family) -> None:
    add(
        f"{family.name}-type",
        "white plans; black trains every configuration that can be, cut to the devices at hand; mixed trains the best "
        f"plans so (default: {family.kinds[0]})",
        default=family.kinds[0],
        metavar="WORD",
    )
    add(
        TARGET_NODES[2:],
        f"nodes of the cluster that is planned for, in place of {family.switch}-ranks",
        type=int,
        metavar="N",
    )
    add(PROFILE_FILE[2:], "refused: where upstream's own children write what they measure", metavar="FILE")


def asked_switches(arguments: argparse.Namespace) -> list[str]:
    """The flags that search, of those that are given. A script may have added any of them to its parser, or none."""
    switches = {SWITCH: "auto_parallel_mm"} | {family.switch: family.prefix for family in FAMILIES}
    return [switch for switch, name in switches.items() if getattr(arguments, name, False)]


def read_tuning(arguments: argparse.Namespace, words: Sequence[str]) -> Tuning | None:
    """What the family asks for that is given; None where neither is. words: of the command line.

    Raises JobError naming the flag that is wrong, or those that do not go together.
    """
    asked = asked_switches(arguments)
    if len(asked) > 1:
        raise JobError(f"{' and '.join(asked)} each search a plan; give one of them")
    family = next((one for one in FAMILIES if one.switch in asked), None)
    if family is None:
        return None
    _check_surroundings(family, words)
    level: str = getattr(arguments, f"{family.prefix}_log_level")
    kind: str = getattr(arguments, f"{family.prefix}_type", family.kinds[0])
    _check_word(f"{family.switch}-log-level", level, LOG_LEVELS)
    _check_word(f"{family.switch}-type", kind, KINDS)
    if getattr(arguments, "simulated_nnodes", None) is not None:
        raise JobError(
            f"{family.switch} plans for the devices of {family.switch}-ranks, and --simulated-nnodes is "
            f"{arguments.simulated_nnodes}; leave that out"
        )
    return Tuning(
        family=family,
        work_dir=getattr(arguments, f"{family.prefix}_work_dir"),
        num_ranks=_count_ranks(arguments, family),
        log_level=level,  # type: ignore[arg-type]  # it is one of them
        kind=kind,  # type: ignore[arg-type]
    )


def _check_word(flag: str, word: str, known: Sequence[str]) -> None:
    if word not in known:
        raise JobError(f"{flag} is {word!r}{nearest(word, known)}; one of {', '.join(known)} is expected")


def _check_surroundings(family: Family, words: Sequence[str]) -> None:
    """What may stand neither beside the switch nor in the environment."""
    named = {word.partition("=")[0].replace("_", "-") for word in words if word.startswith("--")}
    for flag in family.forbidden:
        if flag in named:
            raise JobError(
                f"{family.switch} trains nothing that lasts, and {flag} is given, as upstream refuses too; leave it out"
            )
    if PROFILE_FILE in named:
        raise JobError(
            f"{PROFILE_FILE} says where upstream's own children write what they measure, and nothing else reads it; "
            "leave it out"
        )
    for variable in SWITCHES_OF_CHILDREN:
        if variable in os.environ:
            raise JobError(
                f"{variable} is in the environment, which upstream sets in its own children alone; a training that has "
                "it measures something else: unset it"
            )


def _count_ranks(arguments: argparse.Namespace, family: Family) -> int:
    """Devices of the cluster that is planned for: those of the flag, of --target-nnodes, or the default."""
    flag = f"{family.switch}-ranks"
    ranks: int | None = getattr(arguments, f"{family.prefix}_ranks")
    nodes: int | None = getattr(arguments, "target_nnodes", None) if family is AUTO_SETTINGS else None
    for name, value in ((flag, ranks), (TARGET_NODES, nodes)):
        if value is not None and value < 1:
            raise JobError(f"{name} is {value}; it must be at least 1")
    if nodes is None:
        return ranks or family.num_ranks
    per_node: int | None = arguments.simulated_nproc_per_node or arguments.nproc_per_node
    if per_node is None:
        raise JobError(f"{TARGET_NODES} is {nodes}, and how many devices a node has is not said: give --nproc-per-node")
    if ranks not in (None, nodes * per_node):
        raise JobError(
            f"{flag} is {ranks}, and {TARGET_NODES} {nodes} of {per_node} devices are {nodes * per_node}; give one of "
            "the two"
        )
    return nodes * per_node


def store_of(arguments: argparse.Namespace) -> Path:
    """The folder of the profiles: in the work folder where a family searches, unless --auto-parallel-profiles says."""
    said: Path = arguments.auto_parallel_profiles
    family = next((one for one in FAMILIES if getattr(arguments, one.prefix, False)), None)
    if family is None or said != STORE:
        return said
    work_dir: Path = getattr(arguments, f"{family.prefix}_work_dir")
    return work_dir / STORE


def with_tuning(flags: Flags, tuning: Tuning) -> Flags:
    """`flags` for the cluster that `tuning` plans for. Raises JobError where its nodes are no whole number."""
    per_node = flags.simulated_per_node
    if tuning.num_ranks < per_node:
        return replace(flags, simulated_nodes=1, simulated_per_node=tuning.num_ranks)
    if tuning.num_ranks % per_node:
        raise JobError(
            f"{tuning.num_ranks} devices are planned for, and nodes have {per_node} each (--nproc-per-node, or "
            "--simulated-nproc-per-node where the cluster's nodes have others); give a multiple"
        )
    return replace(flags, simulated_nodes=tuning.num_ranks // per_node)


def is_follower(arguments: argparse.Namespace) -> bool:
    """Whether torchrun started this process beside another of its node, which searches for all of them.

    Raises JobError where torchrun and --node-rank say different things of the node.
    """
    if "LOCAL_RANK" not in os.environ:
        return False
    node = os.environ.get("GROUP_RANK")
    if node is not None and int(node) != arguments.node_rank:
        raise JobError(f"--node-rank is {arguments.node_rank}, and torchrun calls this node {node}; give both the same")
    return os.environ["LOCAL_RANK"] != "0"
