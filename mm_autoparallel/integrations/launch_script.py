"""A launch script of Megatron's kind: what it starts and passes, and numbers changed where they stand.

What frameworks that take Megatron-LM's flags share; shell_text.py reads the text itself.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path

from mm_autoparallel.errors import JobError
from mm_autoparallel.files import read_text
from mm_autoparallel.integrations.shell_text import LaunchScript

MICRO_BATCH = "--micro-batch-size"
GLOBAL_BATCH = "--global-batch-size"

WORLD = "WORLD_SIZE"
"""The variable that scripts keep the number of all devices in."""

_COUNTED_LINES = re.compile(r"(?:\$\(|`) *wc +-l +[^|<)`]+[)`]")
"""What prints a file's name behind its number of lines."""

MAX_SCRIPT_BYTES = 1_000_000
"""Assumed: a hundred times the longest known."""

SUFFIXES = (".sh", ".bash", ".slurm", ".sbatch", "")
"""Of shell scripts, those for a queue among them."""

_OF_TORCH = r"(?<![\w./-])(?:torchrun|torch\.distributed\.(?:launch|run))(?![\w.-])"
"""A launcher that starts one node where nobody says how many."""

_DEVICES = ("--nnodes", "--nproc_per_node", "--nproc-per-node", "--local_worker_num")
"""Flags of launchers that say how many devices there are."""


def read_launch_script(path: Path) -> LaunchScript:
    """The launch script at `path`. Raises JobError where it cannot be read, is no text or too large for a script."""
    text = read_text(path, "launch script", "shell script", with_marks=True, max_bytes=MAX_SCRIPT_BYTES)
    return LaunchScript(path, text)


def list_arguments(script: LaunchScript, world_size: int | None) -> list[str]:
    """The arguments of a process: every flag, numbers worked out, texts as far as variables hold them.

    world_size: devices that are meant; None where nobody knows. What has no number stays as the script has it.
    """
    known = {} if world_size is None else {WORLD: world_size}
    arguments: list[str] = []
    for flag, words in script.flags():
        arguments.append(flag)
        for word in words:
            number = script.evaluate(word, known) if "$" in word else None
            arguments.append(script.follow(word) if number is None else str(number))
    return arguments


def find_devices(script: LaunchScript) -> tuple[int | None, int | None]:
    """Nodes that the script starts, and processes a node; None where only the machine knows.

    torchrun is told both; msrun all processes (--worker_num) and those of a node (--local_worker_num).
    """
    processes = _last_number(script, "--nproc_per_node", "--nproc-per-node", "--local_worker_num")
    workers = _last_number(script, "--worker_num")
    if workers is None or not processes:
        is_one = processes and not script.has_flag("--nnodes") and any(script.find(_OF_TORCH))
        return 1 if is_one else _last_number(script, "--nnodes"), processes
    return (None if workers % processes else workers // processes), processes


def find_world_size(script: LaunchScript) -> int | None:
    """Devices that the script starts: nodes times processes a node; None where only the machine knows."""
    nodes, processes = find_devices(script)
    return nodes * processes if nodes is not None and processes is not None else None


def find_broken_arithmetic(script: LaunchScript) -> str | None:
    """Why the script's arithmetic cannot come to WORLD_SIZE, whatever nodes a person sets; None where it can."""
    for word in script.assignments(WORLD):
        if not word.text.startswith("$(("):
            continue
        for name in re.findall(r"[A-Za-z_]\w*", word.text):
            where = f"line {script.line(word.start)} works {WORLD} out from {name}"
            assigned = script.assignments(name)
            if not assigned and not _is_set_outside(script, name):
                return f"{where}, which is assigned nowhere"
            for source in assigned:
                if _COUNTED_LINES.fullmatch(source.text):
                    return (
                        f"{where}, and line {script.line(source.start)} gives {name} a number with the name of the "
                        "file behind it; `wc -l < FILE` gives the number alone"
                    )
    return None


def known_world(script: LaunchScript, world_size: int) -> dict[str, int]:
    """WORLD_SIZE as it will be when a person has set nodes and processes; nothing where it cannot be that.

    What depends on it then has no value, so that a number is written in its place.
    """
    if find_broken_arithmetic(script):
        return {}
    assigned = script.assignments(WORLD)
    if assigned and all(re.fullmatch(r"\d+", word.text) for word in assigned):
        return {}  # a number that stands there, and nobody's nodes change it
    return {WORLD: world_size}


def read_number(script: LaunchScript, flag: str, known: Mapping[str, int], default: int | None = None) -> int:
    """The whole number that `flag` passes, of several the last; `default` where it is not passed.

    Raises JobError where it is missing without a default, no whole number of at least 1, or known only when it runs.
    """
    words = script.values(flag)
    if not words:
        if default is None:
            raise JobError(f"launch script {script.path}: it does not pass {flag}; a whole number is expected")
        return default
    value = script.evaluate(words[-1].text, known)
    if value is None or value < 1:
        raise JobError(
            f"launch script {script.path}: line {script.line(words[-1].start)} gives {flag} the value "
            f"{words[-1].text}, whose number cannot be told from the script; a whole number of at least 1 is expected"
        )
    return value


def check_shared_variables(script: LaunchScript, wanted: Mapping[str, int]) -> None:
    """One variable behind two flags cannot hold two numbers."""
    holders: dict[str, tuple[str, int]] = {}
    for flag, value in wanted.items():
        for word in script.values(flag):
            name = word.text.strip("${}").split(":")[0] if word.text.startswith("$") and "(" not in word.text else ""
            other, held = holders.setdefault(name, (flag, value))
            if name and held != value:
                raise JobError(
                    f"launch script {script.path}: {other} and {flag} both take their value from {name}, and the plan "
                    f"needs {held} for the one and {value} for the other; give {flag} a variable of its own"
                )


def set_global_batch(
    script: LaunchScript, batch: int, num_microbatches: int, known: Mapping[str, int], sizes: Collection[str]
) -> LaunchScript:
    """Where the batch is worked out from the number of micro-batches, that number is set; else the batch itself.

    sizes: flags of the parallel sizes, whose variables count no micro-batches. Raises JobError as set_flag.
    """
    for word in script.values(GLOBAL_BATCH):
        found = script.evaluate(word.text, known)
        if found == batch:
            continue
        for name in sorted(script.names_in(word.text)) if found is not None else ():
            (assigned, *more) = script.assignments(name)
            if more or name in known or not assigned.text.isdigit():
                continue
            counted = dict(known) | {name: num_microbatches}
            if _holds_micro_batches(script, name, sizes) and script.evaluate(word.text, counted) == batch:
                return script.set_variable(name, num_microbatches, known, GLOBAL_BATCH)
    return script.set_flag(GLOBAL_BATCH, batch, known)


def _last_number(script: LaunchScript, *flags: str) -> int | None:
    words = [word for flag in flags for word in script.values(flag)]
    return script.evaluate(words[-1].text) if words else None


def _is_set_outside(script: LaunchScript, name: str) -> bool:
    """Whether the launcher's own nodes or processes are `name` too, so that the caller's environment has it."""
    return any(
        name in re.findall(r"[A-Za-z_]\w*", word.text)
        for flag in ("--nnodes", "--nproc_per_node", "--nproc-per-node", "--worker_num", "--local_worker_num")
        for word in script.values(flag)
        if "$" in word.text
    )


def _holds_micro_batches(script: LaunchScript, name: str, sizes: Collection[str]) -> bool:
    """Whether `name` serves no flag but the global batch, so that it may count micro-batches."""
    others = [*sizes, MICRO_BATCH, *_DEVICES]
    return not any(
        name in script.names_in(word.text)
        for flag in others
        for word in script.values(flag)
        if word.text.startswith("$")
    )


def check_numbers(script: LaunchScript, wanted: Mapping[str, int], known: Mapping[str, int]) -> None:
    """What was written is read back, because a person will train with it for weeks.

    wanted: flag → what it must pass wherever it stands. Raises JobError where one comes to something else.
    """
    for flag, value in wanted.items():
        for word in script.values(flag):
            if script.evaluate(word.text, known) != value:
                raise JobError(
                    f"launch script {script.path}: {flag} would have to be {value}, and its value {word.text} depends "
                    f"on other variables so that it cannot be; put a number or a variable of its own behind {flag}"
                )
