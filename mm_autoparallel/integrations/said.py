"""Said: what a training's files say of it, quantity by quantity, whether or not the numbers go together.

The one form on which rules of files run (said_findings.py), whatever framework's the files are: scripts of flags, YAML,
JSON, TOML, Python. A framework says which key has which quantity, and what else it demands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mm_autoparallel.integrations.findings import Figures, Finding, Rule

Place = tuple[Path, int | None]
"""A file, and a line of it from 1; None: the whole file."""

Pairs = Sequence[tuple[str, str]]
Needs = Sequence[tuple[str, Sequence[str]]]


@dataclass(frozen=True)
class KeyTable:
    """What a framework's parser makes of its flags or keys. A condition is a key, which holds where it is set and not
    off, `key=value|value`, or `key!=value`.

    exclusive: two conditions that do not go together. needed: condition → those one of which it demands. idle:
    condition → those without which it does nothing. cancelled: condition → the one beside which it does nothing. old:
    key of an old release → what says it today, empty: nothing does. deprecated: the same of keys that are still taken.
    """

    exclusive: Pairs = ()
    needed: Needs = ()
    idle: Needs = ()
    cancelled: Pairs = ()
    old: Mapping[str, str] = field(default_factory=dict)
    deprecated: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Said:
    """What the file at `path` says, and what a person says beside it.

    numbers: quantity → its number, where it is known: world_size, per_node (devices), sizes by the fields of
    Strategy, micro_batches, global_batch_size, num_layers, heads, query_groups, experts, seq_length, positions,
    vocab_size, vocab_step (what the vocabulary is padded to a multiple of, a rank), recomputed (of each virtual stage),
    ranks (TP x CP x DP over which experts are dealt), group (micro-batches of a group with chunks). keys: quantity,
    or `layers`, `recompute` → the flag or key that says it, or would. place: where a flag or key stands. holds: whether
    a condition of the table holds. name: what a flag of the table is called in this file. layers: of the decoder, of
    each virtual stage, or what is wrong with them; None: not said. recompute: the layers of each that recompute, where
    files say them one by one. table: of its keys. mends: quantity → what mends it, where no number of its key does.

    What the framework demands: most_zero: ZeRO with a pipeline, at most. fills: at least as many micro-batches as
    stages. ulysses: context parallel ranks share heads. accumulates: a batch may be several times its micro-batches.
    """

    path: Path
    numbers: Mapping[str, int]
    keys: Mapping[str, str]
    place: Callable[[str], Place]
    holds: Callable[[str], bool] = lambda _: False
    name: Callable[[str], str] = lambda flag: flag
    layers: tuple[int, ...] | str | None = None
    recompute: tuple[int, ...] | None = None
    table: KeyTable = KeyTable()
    mends: Mapping[str, str] = field(default_factory=dict)
    most_zero: int = 3
    fills: bool = False
    ulysses: bool = False
    accumulates: bool = False

    def number(self, name: str) -> int | None:
        """The number of a quantity; None where the file does not say it."""
        return self.numbers.get(name)

    def size(self, name: str) -> int:
        """A parallel size, 1 where nobody says otherwise."""
        return self.numbers.get(name) or 1

    @property
    def group(self) -> int:
        """Devices of a replica."""
        return self.size("tp") * self.size("pp") * self.size("cp")

    @property
    def dp(self) -> int | None:
        """Replicas, as the file says them or as the devices make them; None where neither is known."""
        world = self.number("world_size")
        if self.number("dp") or world is None or world % self.group:
            return self.number("dp")
        return world // self.group

    @property
    def ranks(self) -> int | None:
        """TP x CP x DP of the ranks that experts are dealt to; None where DP is not known."""
        if self.number("ranks"):
            return self.number("ranks")
        return self.dp * self.size("tp") * self.size("cp") if self.dp else None

    @property
    def vpp(self) -> int:
        """Chunks of a stage, as far as they are known."""
        return len(self.layers) // self.size("pp") if isinstance(self.layers, tuple) else self.size("vpp")

    def found(
        self,
        rule: Rule,
        message: str,
        about: str = "",
        mend: str = "",
        *,
        stage: int | None = None,
        figures: Figures | None = None,
        unread: bool = False,
    ) -> Finding:
        """A finding where the flag or key `about` stands, or the one that says that quantity."""
        key = self.keys.get(about, about)
        path, line = self.place(key) if key else (self.path, None)
        return Finding(rule, message, path, line, stage, figures or {}, mend, unread)

    def spell(self, name: str, value: int) -> str:
        """What gives a quantity another number: `--flag 2` or `key: 2`."""
        key = self.keys.get(name)
        if name in self.mends or key is None:
            return self.mends.get(name, "")
        return f"{key} {value}" if key.startswith("--") else f"{key}: {value}"
