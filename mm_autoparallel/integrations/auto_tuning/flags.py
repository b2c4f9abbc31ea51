"""The flags of both families, as data: names, defaults and words.

Auto Tuning is of MindSpeed up to 2.1.0_core_r0.8.0, Auto Settings of its master branch. The five flags that both hand
to torchrun (--nnodes, --nproc-per-node, --master-addr, --master-port, --node-rank) are those of --auto-parallel-mm too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

LogLevel = Literal["debug", "info", "warning"]
LOG_LEVELS: tuple[LogLevel, ...] = get_args(LogLevel)

Kind = Literal["white", "black", "mixed"]
"""How is searched: planned; all that can be run here measured; the best of the plans measured."""
KINDS: tuple[Kind, ...] = get_args(Kind)

NUM_BEST = 3
"""Configurations that are recommended."""

NUM_MEASURED = 5
"""Of the plans, how many `mixed` measures, the best first."""

SWITCHES_OF_CHILDREN = (
    "OOTB_OPTIMIZER_MODIFIED_ARGV_PATH",
    "OOTB_OPTIMIZER_PARSE_ARGS",
    "OOTB_OPTIMIZER_PARSE_MODEL",
    "OOTB_OPTIMIZER_PROFILING",
)
"""Environment variables that upstream sets in its own children alone."""


@dataclass(frozen=True)
class Family:
    """The flags that begin with one name.

    name: of the switch, and what the others begin with. work_dir, num_ranks: defaults. kinds: how it may search, the
    first by default. forbidden: flags of the training that it refuses.
    """

    name: str
    title: str
    work_dir: Path
    num_ranks: int
    kinds: tuple[Kind, ...]
    forbidden: tuple[str, ...] = ()

    @property
    def switch(self) -> str:
        """`--auto-tuning`."""
        return f"--{self.name}"

    @property
    def prefix(self) -> str:
        """What files of its work folder begin with: `auto_tuning`; of its values among parsed arguments too."""
        return self.name.replace("-", "_")


AUTO_TUNING = Family("auto-tuning", "Auto Tuning", Path("auto_tuning_dir"), 16, ("white",))
AUTO_SETTINGS = Family(
    "auto-settings", "Auto Settings", Path(), 8, ("mixed", "white", "black"), forbidden=("--load", "--save")
)
FAMILIES = (AUTO_TUNING, AUTO_SETTINGS)

TARGET_NODES, PROFILE_FILE = "--target-nnodes", "--prof-file"
"""Of Auto Settings: nodes of the cluster that is planned for; where its own children write what they measure."""

_VALUED = ("work-dir", "ranks", "log-level", "type")


def without_flags(words: tuple[str, ...]) -> tuple[str, ...]:
    """A script's arguments without those of both families, in either spelling; what is left trains."""
    valued = {f"{one.switch}-{name}" for one in FAMILIES for name in _VALUED} | {TARGET_NODES, PROFILE_FILE}
    switches = {one.switch for one in FAMILIES}
    left: list[str] = []
    skip = False
    for word in words:
        if skip:
            skip = False
            continue
        name, equals, _ = word.partition("=")
        name = "--" + name[2:].replace("_", "-") if name.startswith("--") else name
        skip = name in valued and not equals
        if name not in valued | switches:
            left.append(word)
    return tuple(left)
