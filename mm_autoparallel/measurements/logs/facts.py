"""Facts: what a log must tell, or a person tells in its place, and never both differently."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mm_autoparallel.errors import JobError
from mm_autoparallel.files import describe_value
from mm_autoparallel.measurements.logs.log import Log
from mm_autoparallel.records import LARGEST_COUNT
from mm_autoparallel.validation import nearest

KNOWN = {
    "devices_per_node": "devices of one node",
    "vocab_size": "tokens of the vocabulary, as the tokenizer has them",
    "model": "a model that tables know by name, or the path of a model file",
    "seq_length": "tokens of a sample",
    "global_batch_size": "samples of a step",
    "tokens_per_sample": "tokens of a sample as it ran, on average, where samples are of unequal lengths",
    "image_tokens_per_sample": "tokens of a sample that are images",
    "images_per_sample": "images of a sample",
    "network_bytes_per_s": "what the network of a node brings each device, one way",
}
"""Name → what it is; all that --fact takes."""


@dataclass(frozen=True)
class Facts:
    """What a person says of all logs of one call. asked: the names that some log was asked about."""

    given: dict[str, str] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)

    def text(self, log: Log, name: str, logged: str | None = None, expected: str = "") -> str:
        """What the log tells of `name`, or else the person. Raises TableError where neither does, or both differ."""
        found = self.optional(log, name, logged)
        if found is None:
            raise log.error(
                f"it does not tell {name} ({KNOWN[name]}), which decides its time; give --fact {name}={expected or '…'}"
            )
        return found

    def optional(self, log: Log, name: str, logged: str | None = None) -> str | None:
        """As `text`; None where neither tells."""
        self.asked.add(name)
        given = self.given.get(name)
        if given is not None and logged is not None and given != logged:
            raise log.error(f"it tells {name} {logged}, and --fact {name}={given} contradicts; leave that out")
        return given if logged is None else logged

    def count(self, log: Log, name: str, logged: int | None = None) -> int:
        """A whole number of at least 1, as `text`."""
        found = self.optional_count(log, name, logged)
        if found is None:
            self.text(log, name, expected="N")
        assert found is not None
        return found

    def optional_count(self, log: Log, name: str, logged: int | None = None) -> int | None:
        """As `count`; None where neither tells."""
        text = self.optional(log, name, None if logged is None else str(logged))
        if text is None:
            return None
        if not (text.isascii() and text.isdigit() and 1 <= int(text[:20]) <= LARGEST_COUNT):
            raise JobError(f"--fact {name}={text}: a whole number from 1 to {LARGEST_COUNT:,} is expected")
        return int(text)

    def check_all_asked(self) -> None:
        """Raises JobError naming what was given and no log was asked about."""
        idle = [name for name in self.given if name not in self.asked]
        if idle:
            raise JobError(
                f"--fact {', '.join(idle)}: none of these logs leaves that open, so it changes nothing; leave it out"
            )


def parse_facts(texts: Sequence[str]) -> Facts:
    """`name=value`, each once. Raises JobError for an unknown name, one that is given twice, or no value."""
    given: dict[str, str] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if name not in KNOWN:
            raise JobError(
                f"--fact {describe_value(text)}: {describe_value(name)} is no fact of a run"
                f"{nearest(name, list(KNOWN))}; known are {', '.join(KNOWN)}"
            )
        if not equals or not value:
            raise JobError(f"--fact {describe_value(text)}: {name}=VALUE is expected: {KNOWN[name]}")
        if given.get(name, value) != value:
            raise JobError(f"--fact {name} is given as {given[name]} and as {value}; keep one of the two")
        given[name] = value
    return Facts(given)
