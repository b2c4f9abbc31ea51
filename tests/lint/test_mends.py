"""What is advised mends: the flags that a finding names, put into the script, take the finding away."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from seeded import GOOD, MISTAKES

from mm_autoparallel.api.linted import lint_files
from mm_autoparallel.integrations.findings import Finding

MENDED = (
    *("batch", "expert ranks", "sequence", "positions", "chunks", "gather alone", "too many", "padding"),
    *("memory", "imbalance", "recompute", "unsharded", "bubble"),
)


def find(text: str, path: Path) -> list[Finding]:
    """What is found in `text`."""
    path.write_text(text, encoding="utf-8")
    return [*lint_files([path], device="h100-80g").findings]


def mend(text: str, advice: str) -> str:
    """`text` that passes the flags of `advice`, and not those it says to leave out."""
    words, _, without = advice.partition("without ")
    lines = text.splitlines(keepends=True)
    flags: dict[str, list[str]] = {}
    for word in shlex.split(words):
        flags.setdefault(word, []) if word.startswith("--") else flags[next(reversed(flags))].append(word)
    gone = {*flags, *without.split()}
    kept = [line for line in lines if not line.strip() or line.split()[0] not in gone]
    added = [f"    {shlex.join([flag, *values])}\n" for flag, values in flags.items()]
    place = kept.index("    --hidden-dropout 0.0\n")
    return "".join([*kept[:place], *added, *kept[place:]])


@pytest.mark.parametrize("name", MENDED)
def test_the_mend_takes_the_finding_away(name: str, tmp_path: Path) -> None:
    text = GOOD
    for old, new in MISTAKES[name].changes.items():
        text = text.replace(old, new)
    rule = MISTAKES[name].rule
    found, *_ = (one for one in find(text, tmp_path / "before.sh") if one.rule.key == rule)
    assert found.mend
    again = find(mend(text, found.mend), tmp_path / "after.sh")
    assert rule not in {one.rule.key for one in again}, (found.mend, again)
    assert "not-read" not in {one.rule.key for one in again}, again
