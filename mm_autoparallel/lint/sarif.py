"""Findings as SARIF 2.1.0 (OASIS), which code hosts show beside the lines of a change."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mm_autoparallel import __version__
from mm_autoparallel.integrations.findings import Finding, Rule

VERSION = "2.1.0"
SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def sarif_document(findings: Sequence[Finding], rules: Sequence[Rule], folder: Path) -> dict[str, Any]:
    """One run with `findings`, each at its file relative to `folder` where it lies below, in the order given.

    rules: all that were looked for, which the results point to by place.
    """
    places = {rule.key: place for place, rule in enumerate(rules)}
    driver = {
        "name": "mm-autoparallel",
        "version": __version__,
        "rules": [_describe_rule(rule) for rule in rules],
    }
    results = [_result(finding, places[finding.rule.key], folder) for finding in findings]
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}
    return {"$schema": SCHEMA, "version": VERSION, "runs": [run]}


def _describe_rule(rule: Rule) -> dict[str, Any]:
    return {
        "id": rule.key,
        "shortDescription": {"text": rule.finds},
        "help": {"text": f"What mends it: {rule.mends}."},
        "defaultConfiguration": {"level": rule.severity},
    }


def _result(finding: Finding, place: int, folder: Path) -> dict[str, Any]:
    message = f"{finding.message}. Mend: {finding.mend}" if finding.mend else finding.message
    location: dict[str, Any] = {"artifactLocation": {"uri": relative_uri(finding.path, folder)}}
    if finding.line is not None:
        location["region"] = {"startLine": finding.line}
    properties = {"stage": finding.stage, **finding.figures, "mend": finding.mend}
    return {
        "ruleId": finding.rule.key,
        "ruleIndex": place,
        "level": finding.rule.severity,
        "message": {"text": message},
        "locations": [{"physicalLocation": location}],
        "properties": {key: value for key, value in properties.items() if value not in (None, "")},
    }


def relative_uri(path: Path, folder: Path) -> str:
    """The file as SARIF names it: below `folder` relative to it, else by its absolute place."""
    whole = (folder / path).resolve()
    below = folder.resolve()
    return quote(whole.relative_to(below).as_posix()) if whole.is_relative_to(below) else whole.as_uri()
