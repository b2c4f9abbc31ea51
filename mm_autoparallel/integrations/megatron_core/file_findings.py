"""`lint` of Megatron-LM's launch files: every rule of file_rules.py, as far as numbers are known from the file."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from mm_autoparallel.errors import PlannerError
from mm_autoparallel.integrations import file_rules as shared
from mm_autoparallel.integrations.described import Given
from mm_autoparallel.integrations.findings import Finding, Linter
from mm_autoparallel.integrations.key_lines import read_key_lines
from mm_autoparallel.integrations.launch_script import SUFFIXES, WORLD, find_devices
from mm_autoparallel.integrations.megatron_core import file_rules as rules
from mm_autoparallel.integrations.megatron_core import flags
from mm_autoparallel.integrations.megatron_core.dialect import MEGATRON, Dialect
from mm_autoparallel.integrations.megatron_core.known_flags import is_known
from mm_autoparallel.integrations.megatron_core.linted_launch import CHOICES, Launch, locate, read_launch, spell
from mm_autoparallel.integrations.said import Said
from mm_autoparallel.integrations.said_findings import find_pairs, find_sizes
from mm_autoparallel.integrations.shell_text import LaunchScript
from mm_autoparallel.integrations.shell_words import Word

_SIZED = (
    *(*flags.SIZES, flags.MICRO_BATCH, flags.GLOBAL_BATCH, flags.EXPERT_TENSOR, flags.NUM_LAYERS, flags.RECOMPUTED),
    *(rules.SEQUENCE, flags.CHUNKS, flags.LAYERS_PER_CHUNK),
)
"""Flags whose values a plan stands on."""

_KNOWN = sorted(
    {value for value in vars(flags).values() if isinstance(value, str) and value.startswith("--")}
    | flags.SWITCHES
    | {*flags.LOW_PRECISION, *flags.GRAPHS, *_SIZED, "--fp4-param-gather"}
    | {rules.HEADS, rules.QUERY_GROUPS, rules.EXPERTS, rules.POSITIONS, rules.VOCABULARY, "--hidden-size"}
)
_NEAR_FRACTION = 0.92
"""How alike a flag is to a known one to be that one misspelt; no other flag of core_r0.16.0 is so near to these."""


def find(path: Path, given: Given, dialect: Dialect = MEGATRON) -> Iterator[Finding]:
    """All findings in the launch file at `path`. Raises JobError where it cannot be read at all, PlanError where it has
    a flag that `dialect` does not read."""
    launch = read_launch(path, given, dialect)
    yield from find_sizes(launch.said)
    yield from find_choices(launch.said)
    for look in _LOOKS:
        yield from look(launch)


def find_of_kind(path: Path, given: Given, dialect: Dialect = MEGATRON) -> Iterator[Finding]:
    """What holds for every framework whose scripts pass Megatron-LM's flags, in the script at `path`."""
    kept = rules.OF_KIND if dialect.old is None else (*rules.OF_KIND, shared.OLD)
    return (one for one in find(path, given, dialect) if one.rule in kept)


def find_choices(said: Said) -> Iterator[Finding]:
    """Flags, by whatever name, that do not go together, need others, or do nothing."""
    yield from find_pairs(said)
    old = said.holds(flags.OLD_SELECTIVE)
    is_selective = old or said.holds(f"{flags.GRANULARITY}=selective")
    granularity = said.name(flags.GRANULARITY)
    for flag in filter(said.holds, (flags.METHOD, flags.RECOMPUTED) if is_selective else ()):
        by = flags.OLD_SELECTIVE if old else f"{granularity} selective"
        message, at = f"{by} takes no {said.name(flag)}", said.name(flag)
        yield said.found(shared.CONTRADICTED, message, at, f"{granularity} full", unread=True)
    if said.holds(flags.SEQUENCE_PARALLEL) and (said.number("tp") == 1 or not said.holds(flags.TENSOR)):
        at = said.name(flags.SEQUENCE_PARALLEL)
        yield said.found(shared.IDLE, f"{at} is turned off with TP 1", at)
    if said.size("ep") > 1 and said.number("num_layers") and not said.holds(rules.EXPERTS):
        at = said.name(flags.EXPERT)
        yield said.found(shared.CONTRADICTED, f"{at} needs {said.name(rules.EXPERTS)} beside it", at)
    elif said.size("etp") > 1 and said.number("num_layers") and not said.holds(rules.EXPERTS):
        at = said.name(flags.EXPERT_TENSOR)
        yield said.found(shared.IDLE, f"{at} divides experts, and the model has none", at)


def _look_at_variable(launch: Launch) -> Iterator[Finding]:
    nodes, per_node = find_devices(launch.script)
    assigned = [word for word in launch.script.assignments(WORLD) if word.text.isdigit()]
    if assigned and nodes and per_node and int(assigned[-1].text) != nodes * per_node:
        yield launch.found(
            rules.WORLD_VARIABLE,
            f"{WORLD} is {assigned[-1].text}, and the launcher starts {nodes} x {per_node} = {nodes * per_node} "
            "processes",
            WORLD,
            f"{WORLD}={nodes * per_node}",
        )


def _look_at_connections(launch: Launch) -> Iterator[Finding]:
    tp, cp = launch.said.size("tp"), launch.said.size("cp")
    found = re.findall(rf"^[^#\n]*\b{flags.CONNECTIONS}\s*[=:]\s*[\"']?(\d+)", launch.text, re.MULTILINE)
    if launch.shards_all and found and found[-1] == "1":
        yield launch.found(
            rules.CONNECTIONS, f"{flags.CONNECTIONS} is 1, and FSDP takes any other number", flags.CONNECTIONS,
            f"{flags.CONNECTIONS}=8",
        )  # fmt: skip
    if tp * cp == 1 or launch.shards_all or launch.is_blackwell or launch.has(flags.BATCH_OVERLAP):
        return
    if found and found[-1] != "1":
        yield launch.found(
            rules.CONNECTIONS,
            f"{flags.CONNECTIONS} is {found[-1]}; with TP {tp} and CP {cp} Megatron-LM asks for 1 before Blackwell",
            flags.CONNECTIONS,
            f"export {flags.CONNECTIONS}=1",
        )
    if flags.CONNECTIONS not in launch.text:
        yield launch.found(
            rules.NO_CONNECTIONS,
            f"{flags.CONNECTIONS} is not set here; with TP {tp} and CP {cp} Megatron-LM ends without it before "
            "Blackwell",
            mend=f"export {flags.CONNECTIONS}=1",
        )


def _look_at_names(launch: Launch) -> Iterator[Finding]:
    told = {*rules.TABLE.old, *rules.TABLE.deprecated, *_KNOWN}
    for flag in launch.passed.words:
        if flag not in told:
            yield from _look_at_spelling(launch, flag)


def _look_at_spelling(launch: Launch, flag: str) -> Iterator[Finding]:
    whole = [known for known in _KNOWN if known.startswith(flag)] if flag.count("-") > 3 else []
    near = difflib.get_close_matches(flag.replace("_", "-"), _KNOWN, n=1, cutoff=_NEAR_FRACTION)
    if len(whole) == 1:
        yield launch.found(rules.ABBREVIATED, f"{flag} is short for {whole[0]}, and no flag", flag, whole[0])
    elif near:
        yield launch.found(shared.MISSPELT, f"{flag} is no flag; {near[0]} is one", flag, near[0])
    elif not is_known(flag):
        yield launch.found(rules.UNKNOWN, f"{flag} is no flag of a release that is known here", flag, "--model FILE")


def _look_at_assignments(launch: Launch) -> Iterator[Finding]:
    script, text = launch.script, launch.script.text
    if launch.path.suffix not in SUFFIXES:
        for key, line in read_key_lines(launch.path).twice:
            flag = key.rpartition(".")[2]
            yield Finding(shared.PASSED_TWICE, f"{flag} stands twice; the last holds", launch.path, line)
        return
    names = {name for flag in _SIZED for word in _values(script, flag) for name in script.names_in(word.text)}
    for name in sorted(names):
        plain = [word for word in script.assignments(name) if word.text.isdigit() and _is_alone(text, name, word)]
        if len({word.text for word in plain}) > 1:
            lines = " and ".join(str(script.line(word.start)) for word in plain)
            yield Finding(
                rules.ASSIGNED,
                f"{name} is assigned in lines {lines}, other numbers each, of which the last holds",
                launch.path,
                script.line(plain[-1].start),
            )
    for flag in _SIZED:
        words = _values(script, flag)
        numbers = {script.evaluate(word.text, {}) for word in words}
        if len(numbers) > 1 and None not in numbers and script.text.count("pretrain_gpt.py") <= 1:
            told = " and ".join(word.text for word in words)
            yield launch.found(shared.PASSED_TWICE, f"{flag} is passed with {told}; the last holds", flag)


def _values(script: LaunchScript, flag: str) -> list[Word]:
    try:
        return script.values(flag)
    except PlannerError:
        return []


def _is_alone(text: str, name: str, word: Word) -> bool:
    """Whether the assignment begins its line: what is indented may stand in a branch."""
    start = text.rfind("\n", 0, word.start) + 1
    return re.match(rf"(?:export[ \t]+)?{name}=", text[start:]) is not None


_LOOKS: tuple[Callable[[Launch], Iterator[Finding]], ...] = (
    _look_at_variable,
    _look_at_connections,
    _look_at_names,
    _look_at_assignments,
)


LINTER = Linter(rules.RULES, find, locate, spell, CHOICES)
