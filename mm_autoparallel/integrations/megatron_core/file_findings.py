"""`lint` of Megatron-LM's launch files: every rule of file_rules.py, as far as numbers can be told from the file."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from mm_autoparallel.errors import PlanError, PlannerError
from mm_autoparallel.files import read_text
from mm_autoparallel.integrations.described import Given
from mm_autoparallel.integrations.findings import Finding
from mm_autoparallel.integrations.launch_script import WORLD, find_devices, find_world_size
from mm_autoparallel.integrations.megatron_core import file_rules as rules
from mm_autoparallel.integrations.megatron_core import flags
from mm_autoparallel.integrations.megatron_core.launch import read_training
from mm_autoparallel.integrations.megatron_core.layers import read_layers
from mm_autoparallel.integrations.megatron_core.linted_launch import Launch, line_of
from mm_autoparallel.integrations.megatron_core.passed import read_passed
from mm_autoparallel.integrations.shell_text import LaunchScript, Word

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


def find(path: Path, given: Given) -> Iterator[Finding]:
    """All findings in the launch file at `path`. Raises JobError where it cannot be read at all."""
    script = read_training(path)
    world_size = given.world_size or find_world_size(script)
    text = read_text(path, "launch file", "text")
    launch = Launch(path, text, read_passed(script, world_size), world_size, given.device)
    for look in _LOOKS:
        yield from look(launch)


def find_of_kind(path: Path, given: Given) -> Iterator[Finding]:
    """What holds for every framework whose scripts pass Megatron-LM's flags, in the script at `path`."""
    return (one for one in find(path, given) if one.rule in rules.OF_KIND)


# --------------------------------------------------------------------------------------------------------------- sizes


def _look_at_devices(launch: Launch) -> Iterator[Finding]:
    world, group = launch.world_size, launch.group
    nodes, per_node = find_devices(launch.script)
    if world is not None and world % group:
        names = "TP {} x PP {} x CP {}".format(*map(launch.size, (flags.TENSOR, flags.PIPELINE, flags.CONTEXT)))
        yield launch.found(
            rules.WORLD,
            f"{world} devices are no whole number of replicas of {group} ({names})",
            flags.TENSOR,
            f"--world-size {-(-world // group) * group}",
        )
    assigned = [word for word in launch.script.assignments(WORLD) if word.text.isdigit()]
    if assigned and nodes and per_node and int(assigned[-1].text) != nodes * per_node:
        yield launch.found(
            rules.WORLD_VARIABLE,
            f"{WORLD} is {assigned[-1].text}, and the launcher starts {nodes} x {per_node} = {nodes * per_node} "
            "processes",
            WORLD,
            f"{WORLD}={nodes * per_node}",
        )
    tp = launch.size(flags.TENSOR)
    if per_node and tp > per_node:
        yield launch.found(
            rules.WIDE_TENSOR,
            f"TP {tp} is wider than the {per_node} devices of a node, so every layer's sums cross nodes",
            flags.TENSOR,
            f"{flags.TENSOR} {per_node}",
            unread=True,
        )


def _look_at_batch(launch: Launch) -> Iterator[Finding]:
    mbs, batch, dp = launch.number(flags.MICRO_BATCH), launch.number(flags.GLOBAL_BATCH), launch.replicas
    if not (mbs and batch and dp):
        return
    if batch % (dp * mbs):
        yield launch.found(
            rules.BATCH,
            f"the global batch {batch} is no multiple of DP {dp} x MBS {mbs} = {dp * mbs}",
            flags.GLOBAL_BATCH,
            f"{flags.GLOBAL_BATCH} {-(-batch // (dp * mbs)) * dp * mbs}",
        )
        return
    pp, vpp = launch.size(flags.PIPELINE), _count_chunks(launch)
    number, group = batch // (dp * mbs), launch.number(flags.GROUP) or pp
    if vpp > 1 and 0 < number % group < pp:
        yield launch.found(
            rules.CHUNKS,
            f"VPP {vpp} with {number} micro-batches: the last group has {number % group}, fewer than PP {pp}",
            flags.GLOBAL_BATCH,
            f"{flags.GLOBAL_BATCH} {-(-number // pp) * pp * dp * mbs}",
        )


def _count_chunks(launch: Launch) -> int:
    """VPP, as far as it can be told."""
    layers = _layers(launch)
    return len(layers) // launch.size(flags.PIPELINE) if isinstance(layers, tuple) else launch.size(flags.CHUNKS)


def _layers(launch: Launch) -> tuple[int, ...] | str | None:
    """Layers of each virtual stage; what is wrong with them; None where the file does not say."""
    number = launch.number(flags.NUM_LAYERS)
    if not number or any(launch.has(one) and launch.has(other) for one, other in rules.EXCLUSIVE):
        return None
    try:
        return read_layers(launch.passed, number, launch.size(flags.PIPELINE))
    except PlanError as failure:
        return failure.reason


def _look_at_layers(launch: Launch) -> Iterator[Finding]:
    layers, pp = _layers(launch), launch.size(flags.PIPELINE)
    at = next(filter(launch.has, (flags.LAYOUT, flags.FIRST, flags.LAST, flags.PIPELINE)), flags.NUM_LAYERS)
    if isinstance(layers, str):
        yield launch.found(rules.LAYERS, layers, at)
    if not isinstance(layers, tuple):
        return
    for index, held in enumerate(layers):
        if held == 0:
            chunk = f", chunk {index // pp}" if len(layers) > pp else ""
            yield Finding(
                rules.EMPTY,
                f"stage {index % pp}{chunk} holds no decoder layer",
                launch.path,
                line_of(launch.text, at),
                index % pp,
                unread=True,
            )
    number = launch.number(flags.RECOMPUTED)
    if launch.word(flags.METHOD) == "block" and number and number > max(layers):
        yield launch.found(
            rules.TOO_MANY,
            f"{number} layers of each chunk are to recompute, and the largest holds {max(layers)}: all do",
            flags.RECOMPUTED,
            f"{flags.RECOMPUTED} {max(layers)}",
        )


def _look_at_model(launch: Launch) -> Iterator[Finding]:
    tp, cp, ep = map(launch.size, (flags.TENSOR, flags.CONTEXT, flags.EXPERT))
    etp = launch.number(flags.EXPERT_TENSOR) or tp
    heads, groups, experts = map(launch.number, (rules.HEADS, rules.QUERY_GROUPS, rules.EXPERTS))
    if launch.ranks and ep > 1 and launch.ranks % (ep * etp):
        yield launch.found(
            rules.EXPERT_RANKS,
            f"EP {ep} x ETP {etp} does not divide the {launch.ranks} ranks of a stage (TP x CP x DP)",
            flags.EXPERT,
            f"{flags.EXPERT_TENSOR} 1" if etp > 1 and launch.ranks % ep == 0 else "",
        )
    if experts and experts % ep:
        yield launch.found(rules.EXPERTS_DEALT, f"EP {ep} does not divide {experts} experts", flags.EXPERT)
    grouped = groups if launch.has("--group-query-attention") else None
    for count, name, flag in ((heads, "attention heads", rules.HEADS), (grouped, "query groups", rules.QUERY_GROUPS)):
        if count and count % tp and tp % count:
            yield launch.found(rules.HEADS_DEALT, f"TP {tp} does not divide {count} {name}", flag)
    length, positions = launch.number(rules.SEQUENCE), launch.number(rules.POSITIONS)
    parts = math.lcm(2 * cp if cp > 1 else 1, cp * tp if launch.has(flags.SEQUENCE_PARALLEL) else 1)
    if length and length % parts:
        yield launch.found(
            rules.SEQUENCE_DEALT,
            f"{length} tokens of a sample are no multiple of {parts}, as CP {cp} and TP {tp} ask",
            rules.SEQUENCE,
            f"{rules.SEQUENCE} {-(-length // parts) * parts}",
        )
    if length and positions and positions < length:
        yield launch.found(
            rules.SEQUENCE_LONG,
            f"a sample has {length} tokens, and {rules.POSITIONS} is {positions}",
            rules.POSITIONS,
            f"{rules.POSITIONS} {length}",
        )
    tokens, step = launch.number(rules.VOCABULARY), (launch.number(rules.VOCABULARY_STEP) or 128) * tp
    padded = -(-tokens // step) * step if tokens else 0
    if tokens and padded > tokens * 1.01:
        yield Finding(
            rules.PADDING,
            f"{tokens} tokens are padded to {padded}, a multiple of {step}",
            launch.path,
            line_of(launch.text, rules.VOCABULARY),
            figures={"padding_tokens": float(padded - tokens)},
            mend=f"{rules.VOCABULARY_STEP} 1",
        )


# --------------------------------------------------------------------------------------------------------------- flags


def _look_at_sharding(launch: Launch) -> Iterator[Finding]:
    pp, tp, cp = map(launch.size, (flags.PIPELINE, flags.TENSOR, flags.CONTEXT))
    kind = launch.word(flags.SHARDING) if launch.has(flags.MEGATRON_FSDP) else None
    if pp > 1 and (launch.has(flags.TORCH_FSDP) or kind in flags.SHARDINGS[2:]):
        yield launch.found(
            rules.ZERO,
            f"FSDP shards {'gradients' if kind == flags.SHARDINGS[2] else 'weights'}, which is known to run with PP 1 "
            f"alone, and PP is {pp}",
            flags.PIPELINE,
            flags.SHARDED_OPTIMIZER,
        )
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


def _look_at_pairs(launch: Launch) -> Iterator[Finding]:
    for one, other in rules.EXCLUSIVE:
        if launch.has(one) and launch.has(other):
            yield launch.found(rules.CONTRADICTED, f"{one} and {other} go with one another in no run", other)
    for flag, others in rules.NEEDED:
        if launch.has(flag) and not any(map(launch.has, others)):
            yield launch.found(
                rules.CONTRADICTED, f"{flag} needs {' or '.join(others)} beside it", flag, f"{others[0]}"
            )
    for flag, others in rules.USELESS:
        if launch.has(flag) and not any(map(launch.has, others)):
            yield launch.found(rules.IDLE, f"{flag} does nothing without {' or '.join(others)}", flag, others[0])
    kind = launch.word(flags.GRANULARITY)
    is_selective = kind == "selective" or launch.has(flags.OLD_SELECTIVE)
    for flag in filter(launch.has, (flags.METHOD, flags.RECOMPUTED) if is_selective else ()):
        by = flags.OLD_SELECTIVE if launch.has(flags.OLD_SELECTIVE) else f"{flags.GRANULARITY} selective"
        yield launch.found(rules.CONTRADICTED, f"{by} takes no {flag}", flag, f"{flags.GRANULARITY} full", unread=True)
    if launch.has(flags.SEQUENCE_PARALLEL) and launch.number(flags.TENSOR) in (None, 1):
        if not (launch.word(flags.TENSOR) or "1").isdigit():
            return
        yield launch.found(rules.IDLE, f"{flags.SEQUENCE_PARALLEL} is turned off with TP 1", flags.SEQUENCE_PARALLEL)
    if launch.size(flags.EXPERT) > 1 and not launch.has(rules.EXPERTS):
        yield launch.found(rules.CONTRADICTED, f"{flags.EXPERT} needs {rules.EXPERTS} beside it", flags.EXPERT)


def _look_at_names(launch: Launch) -> Iterator[Finding]:
    for flag in launch.passed.words:
        if flag in rules.OLD_FLAGS:
            new = rules.OLD_FLAGS[flag]
            what = f"what it did is said by {new}" if new else "nothing took its place; take it out"
            yield launch.found(rules.OLD, f"{flag} is of an old release; {what}", flag, new, unread=True)
        elif flag in rules.DEPRECATED_FLAGS:
            new = rules.DEPRECATED_FLAGS[flag]
            yield launch.found(rules.DEPRECATED, f"{flag} is called {new} today", flag, new)
        elif flag not in _KNOWN:
            yield from _look_at_spelling(launch, flag)


def _look_at_spelling(launch: Launch, flag: str) -> Iterator[Finding]:
    whole = [known for known in _KNOWN if known.startswith(flag)] if flag.count("-") > 3 else []
    near = difflib.get_close_matches(flag.replace("_", "-"), _KNOWN, n=1, cutoff=_NEAR_FRACTION)
    if len(whole) == 1:
        yield launch.found(rules.ABBREVIATED, f"{flag} is short for {whole[0]}, and no flag", flag, whole[0])
    elif near:
        yield launch.found(rules.MISSPELT, f"{flag} is no flag; {near[0]} is one", flag, near[0])


def _look_at_assignments(launch: Launch) -> Iterator[Finding]:
    script, text = launch.script, launch.script.text
    if launch.path.suffix not in (".sh", ".bash", ""):
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
            yield launch.found(rules.PASSED_TWICE, f"{flag} is passed with {told}; the last holds", flag)


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
    _look_at_devices,
    _look_at_batch,
    _look_at_layers,
    _look_at_model,
    _look_at_sharding,
    _look_at_pairs,
    _look_at_names,
    _look_at_assignments,
)
