"""Launch: a launch file of Megatron-LM as `lint` looks at it, and the lines of what it passes."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from mm_autoparallel.files import read_text
from mm_autoparallel.integrations.described import Given
from mm_autoparallel.integrations.findings import Finding, Rule
from mm_autoparallel.integrations.launch_script import find_devices, find_world_size
from mm_autoparallel.integrations.megatron_core import flags
from mm_autoparallel.integrations.megatron_core.decided import RECOMPUTE_BESIDE, TEXT, decide
from mm_autoparallel.integrations.megatron_core.dialect import MEGATRON, Dialect
from mm_autoparallel.integrations.megatron_core.launch import MODEL_ARGS, read_training
from mm_autoparallel.integrations.megatron_core.layers import write_layers
from mm_autoparallel.integrations.megatron_core.passed import Passed, read_passed
from mm_autoparallel.integrations.megatron_core.said import say
from mm_autoparallel.integrations.said import Said
from mm_autoparallel.integrations.shell_text import LaunchScript
from mm_autoparallel.model.job.devices import DEVICES
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.planner.plan import Plan

CHOICES = {name: flag for name, flag in flags.OF_OVERLAPS.items() if flag != flags.NO_P2P_OVERLAP}
"""A workload's key → the flag that turns it on."""


_RECOMPUTE = {flags.GRANULARITY, flags.METHOD, flags.RECOMPUTED}


@dataclass(frozen=True)
class Launch:
    """A launch file with what it passes. device: by its name; None where nobody says."""

    path: Path
    text: str
    passed: Passed
    said: Said
    device: str | None = None

    @property
    def is_blackwell(self) -> bool:
        """Whether the device that is named has products of four bits, as none before Blackwell."""
        found = DEVICES.get(self.device or "")
        return found is not None and found.fp4_flops_per_s is not None

    @property
    def script(self) -> LaunchScript:
        """The script, or one that passes a YAML's arguments."""
        return self.passed.script

    def has(self, flag: str) -> bool:
        """Whether it is passed."""
        return flag in self.passed.words

    @property
    def shards_all(self) -> bool:
        """Whether FSDP shards it."""
        return any(map(self.has, (flags.MEGATRON_FSDP, flags.CUSTOM_FSDP, flags.TORCH_FSDP)))

    def found(self, rule: Rule, message: str, at: str = "", mend: str = "") -> Finding:
        """A finding where the flag or variable `at` stands."""
        return Finding(rule, message, self.path, line_of(self.text, at), mend=mend)


def read_launch(path: Path, given: Given, dialect: Dialect = MEGATRON) -> Launch:
    """The launch file at `path`, as far as it can be read. Raises JobError where it cannot be at all."""
    script = read_training(path)
    world_size = given.world_size or find_world_size(script)
    text = read_text(path, "launch file", "text")
    passed = dialect.read(read_passed(script, world_size))
    said = say(passed, path, world_size, find_devices(script)[1], lambda flag: (path, line_of(text, flag)))
    if dialect.old is not None:
        old = {flag: new for flag, new in said.table.old.items() if flag in dialect.old}
        said = replace(said, table=replace(said.table, old=old))
    return Launch(path, text, passed, said, given.device)


def line_of(text: str, at: str) -> int | None:
    """The line outside comments where the flag or variable `at` stands: of a script the last, since the last holds, of
    a YAML the first of its arguments; None where it does not."""
    if not at:
        return None
    pattern = re.compile(rf"(?<![\w-]){re.escape(at)}(?![\w-])")
    lines = text.splitlines()
    found = [
        number
        for number, line in enumerate(lines, 1)
        if line.strip()[:1] != "#" and pattern.search(line.split(" #")[0])
    ]
    head = next((number for number, line in enumerate(lines, 1) if line.startswith(f"{MODEL_ARGS}:")), None)
    if head is not None:
        return next((number for number in found if number > head), next(iter(found), None))
    return found[-1] if found else None


def locate(path: Path, about: str, _: str | None = None) -> int | None:
    """The line of a launch file that decides a field of plans, or a choice of workloads."""
    of_field = {name: flag for flag, name in flags.SIZES.items()} | {
        "mbs": flags.MICRO_BATCH,
        "global_batch_size": flags.GLOBAL_BATCH,
        "optimizer_offload": flags.OPTIMIZER_OFFLOAD,
    }
    several = {
        **dict.fromkeys(CHOICES, (flags.SHARDED_OPTIMIZER, flags.TENSOR, flags.MICRO_BATCH)),
        "recompute": (flags.RECOMPUTED, flags.GRANULARITY, flags.MICRO_BATCH),
        "layers": (flags.LAYOUT, flags.FIRST, flags.LAST, flags.CHUNKS, flags.LAYERS_PER_CHUNK, flags.PIPELINE),
        "zero": (flags.SHARDED_OPTIMIZER, flags.MEGATRON_FSDP, flags.PIPELINE),
    }
    text = read_text(path, "launch file", "text")
    candidates = several.get(about) or ((of_field[about],) if about in of_field else ())
    return next((line for flag in candidates if (line := line_of(text, flag))), None)


def spell(path: Path, before: Plan, after: Plan, job: Job) -> str:
    """The flags that the launch file at `path` is to pass so that `before` becomes `after`, and those to take out.

    Raises PlanError where Megatron-LM cannot run one of them.
    """
    passed = read_passed(read_training(path), before.strategy.world_size).words
    adapts = job.model.adapters is not None
    old, new = (
        decide(each, job, adapts=adapts, allows={each.strategy.schedule, RECOMPUTE_BESIDE}).values
        for each in (before, after)
    )
    changed = {flag for flag in new if new[flag] != old.get(flag)}
    for group in ({*write_layers(after.layers[TEXT], after.strategy.pp, 0)}, _RECOMPUTE):
        changed |= group if changed & group else set()
    if passed.get(flags.METHOD) == ("uniform",) and after.recompute == after.layers:
        changed -= _RECOMPUTE  # all layers, as they do
    wanted = {flag: new[flag] for flag in new if flag in changed and new[flag] != passed.get(flag)}
    words = [f"{flag} {' '.join(map(shlex.quote, said))}".rstrip() for flag, said in wanted.items() if said is not None]
    left_out = [flag for flag, said in wanted.items() if said is None]
    return " ".join([*words, *(["without", *left_out] if left_out else [])])
