"""What the rules of files find in Said: sizes that do not go together, flags or keys that cancel each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from mm_autoparallel.integrations import file_rules as rules
from mm_autoparallel.integrations.findings import Finding
from mm_autoparallel.integrations.said import Said


def find_sizes(said: Said) -> Iterator[Finding]:
    """All that rules of sizes find, as far as numbers are known; goes on after the first."""
    for look in _LOOKS:
        yield from look(said)


def _look_at_devices(said: Said) -> Iterator[Finding]:
    world, group, dp = said.number("world_size"), said.group, said.number("dp")
    names = f"TP {said.size('tp')} x PP {said.size('pp')} x CP {said.size('cp')}"
    if world is not None and dp is None and world % group:
        yield said.found(
            rules.WORLD,
            f"{world} devices are no whole number of replicas of {group} ({names})",
            next((name for name in ("tp", "pp", "cp") if said.size(name) > 1), "tp"),
            f"--world-size {-(-world // group) * group}",
        )
    elif world is not None and dp is not None and world != dp * group:
        yield said.found(
            rules.WORLD,
            f"its sizes are those of {dp * group} devices (DP {dp} x {names}), and {world} are meant",
            "dp",
            said.spell("dp", world // group) if world % group == 0 else "",
        )
    tp, per_node = said.size("tp"), said.number("per_node")
    if per_node and tp > per_node:
        yield said.found(
            rules.WIDE_TENSOR,
            f"TP {tp} is wider than the {per_node} devices of a node, so every layer's sums cross nodes",
            "tp",
            said.spell("tp", per_node),
            unread=True,
        )


def _look_at_batch(said: Said) -> Iterator[Finding]:
    mbs, batch, dp, number = (said.number("mbs"), said.number("global_batch_size"), said.dp,
                              said.number("micro_batches"))  # fmt: skip
    if batch and dp and (mbs or number):
        unit = dp * (mbs or 1) * (number or 1)
        is_whole = batch % unit == 0 if said.accumulates or not (mbs and number) else batch == unit
        factors = [f"DP {dp}", *([f"MBS {mbs}"] if mbs else []), *([f"{number} micro-batches"] if number else [])]
        if not is_whole:
            exact = "" if said.accumulates or not (mbs and number) else "is not"
            yield said.found(
                rules.BATCH,
                f"the global batch {batch} {exact or 'is no multiple of'} {' x '.join(factors)} = {unit}",
                "global_batch_size",
                said.spell("global_batch_size", unit if exact else -(-batch // unit) * unit),
            )
            return
    number = number or (batch // (dp * mbs) if batch and dp and mbs else None)
    if number:
        yield from _look_at_micro_batches(said, number)


def _look_at_micro_batches(said: Said, number: int) -> Iterator[Finding]:
    """number: micro-batches of a step."""
    pp, vpp = said.size("pp"), said.vpp
    group = said.number("group") or pp
    samples = (said.dp or 1) * said.size("mbs")
    is_batch = said.number("micro_batches") is None
    about, each = ("global_batch_size", samples) if is_batch else ("micro_batches", 1)
    if said.fills and number < pp:
        yield said.found(
            rules.UNFILLED,
            f"{number} micro-batches on {pp} stages: at least {pp} are asked for",
            about,
            said.spell(about, pp * each),
        )
    elif vpp > 1 and 0 < number % group < pp:
        yield said.found(
            rules.CHUNKS,
            f"VPP {vpp} with {number} micro-batches: the last group has {number % group}, fewer than PP {pp}",
            about,
            said.spell(about, -(-number // pp) * pp * each),
        )


def _look_at_layers(said: Said) -> Iterator[Finding]:
    layers, pp = said.layers, said.size("pp")
    if isinstance(layers, str):
        yield said.found(rules.LAYERS, layers, "layers", said.mends.get("layers", ""))
    if not isinstance(layers, tuple):
        return
    for index, held in enumerate(layers):
        if held == 0:
            chunk = f", chunk {index // pp}" if len(layers) > pp else ""
            message = f"stage {index % pp}{chunk} holds no decoder layer"
            yield said.found(rules.EMPTY, message, "layers", stage=index % pp, unread=True)
    number = said.number("recomputed")
    if number and number > max(layers):
        yield said.found(
            rules.TOO_MANY,
            f"{number} layers of each chunk are to recompute, and the largest holds {max(layers)}: all do",
            "recompute",
            said.spell("recompute", max(layers)),
        )
    for index, (again, held) in enumerate(zip(said.recompute or (), layers, strict=False)):
        if again > held:
            message = f"stage {index % pp} recomputes {again} layers and holds {held}"
            yield said.found(rules.TOO_MANY, message, "recompute", stage=index % pp, unread=True)


def _look_at_experts(said: Said) -> Iterator[Finding]:
    tp, ep, experts = said.size("tp"), said.size("ep"), said.number("experts")
    etp = said.number("etp") or tp
    if said.ranks and ep > 1 and said.ranks % (ep * etp):
        yield said.found(
            rules.EXPERT_RANKS,
            f"EP {ep} x ETP {etp} does not divide the {said.ranks} ranks of a stage (TP x CP x DP)",
            "ep",
            said.spell("etp", 1) if etp > 1 and said.ranks % ep == 0 else "",
        )
    if experts and experts % ep:
        yield said.found(rules.EXPERTS_DEALT, f"EP {ep} does not divide {experts} experts", "ep")


def _look_at_model(said: Said) -> Iterator[Finding]:
    tp, cp = said.size("tp"), said.size("cp")
    share, words = (tp * cp, f"TP {tp} x CP {cp}") if said.ulysses and cp > 1 else (tp, f"TP {tp}")
    for name, what in (("heads", "attention heads"), ("query_groups", "query groups")):
        count = said.number(name)
        may_copy = name == "query_groups"  # ranks beyond the groups hold copies of them
        if count and count % share and not (may_copy and share % count == 0):
            at = name if name in said.keys else "tp" if tp > 1 else "cp"
            yield said.found(rules.HEADS_DEALT, f"{words} does not divide {count} {what}", at)
    length, positions = said.number("seq_length"), said.number("positions")
    parts = math.lcm((cp if said.ulysses else 2 * cp) if cp > 1 else 1, cp * tp if said.number("divides") else 1)
    if length and length % parts:
        yield said.found(
            rules.SEQUENCE_DEALT,
            f"{length} tokens of a sample are no multiple of {parts}, as CP {cp} and TP {tp} ask",
            "seq_length",
            said.spell("seq_length", -(-length // parts) * parts),
        )
    if length and positions and positions < length:
        name = said.keys.get("positions", "the model's number of positions")
        yield said.found(
            rules.SEQUENCE_LONG,
            f"a sample has {length} tokens, and {name} is {positions}",
            "positions" if "positions" in said.keys else "seq_length",
            said.spell("positions", length),
        )
    tokens, step = said.number("vocab_size"), (said.number("vocab_step") or 1) * tp
    padded = -(-tokens // step) * step if tokens else 0
    if tokens and padded > tokens * 1.01:
        yield said.found(
            rules.PADDING,
            f"{tokens} tokens are padded to {padded}, a multiple of {step}",
            "vocab_size",
            said.spell("vocab_step", 1),
            figures={"padding_tokens": float(padded - tokens)},
        )


def _look_at_zero(said: Said) -> Iterator[Finding]:
    pp, zero = said.size("pp"), said.number("zero") or 0
    if pp > 1 and zero > said.most_zero:
        yield said.found(
            rules.ZERO,
            f"ZeRO {zero} shards {'gradients' if zero == 2 else 'weights'}, which is known to run with PP 1 alone, and "
            f"PP is {pp}",
            "pp" if "pp" in said.keys else "zero",
            said.spell("zero", said.most_zero),
        )


_LOOKS: tuple[Callable[[Said], Iterator[Finding]], ...] = (
    _look_at_devices,
    _look_at_batch,
    _look_at_layers,
    _look_at_experts,
    _look_at_model,
    _look_at_zero,
)


def find_pairs(said: Said) -> Iterator[Finding]:
    """Flags or keys that do not go together, that need others, or that do nothing, by the framework's table."""
    table = said.table
    for one, other in table.exclusive:
        if said.holds(one) and said.holds(other):
            names = " and ".join(_words(said, each) for each in (one, other))
            yield said.found(rules.CONTRADICTED, f"{names} go with one another in no run", _key(said, other))
    for flag, others in table.needed:
        if said.holds(flag) and not any(map(said.holds, others)):
            needs = " or ".join(_words(said, each) for each in others)
            message = f"{_words(said, flag)} needs {needs} beside it"
            yield said.found(rules.CONTRADICTED, message, _key(said, flag), _words(said, others[0]))
    for flag, others in table.idle:
        if said.holds(flag) and not any(map(said.holds, others)):
            needs = " or ".join(_words(said, each) for each in others)
            message = f"{_words(said, flag)} does nothing without {needs}"
            yield said.found(rules.IDLE, message, _key(said, flag), _words(said, others[0]))
    for flag, other in table.cancelled:
        if said.holds(flag) and said.holds(other):
            message = f"{_words(said, flag)} does nothing beside {_words(said, other)}"
            yield said.found(rules.IDLE, message, _key(said, flag), f"without {_key(said, flag)}")
    for flag, new in table.old.items():
        if said.holds(flag):
            what = f"what it did is said by {new}" if new else "nothing took its place; take it out"
            yield said.found(rules.OLD, f"{flag} is of an old release; {what}", flag, new, unread=True)
    for flag, new in table.deprecated.items():
        if said.holds(flag):
            yield said.found(rules.DEPRECATED, f"{flag} is called {new} today", flag, new)


def _key(said: Said, condition: str) -> str:
    return said.name(condition.partition("=")[0].rstrip("!"))


def _words(said: Said, condition: str) -> str:
    """`key`, `key a or b`, or `key other than a`."""
    key, _, values = condition.partition("=")
    other = " other than" * key.endswith("!")
    name = said.name(key.rstrip("!"))
    return f"{name}{other} {' or '.join(values.split('|'))}" if values else name
