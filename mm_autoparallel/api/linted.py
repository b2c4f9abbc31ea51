"""lint: what the launch files of a training break or waste, with the line and the flag that mends it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mm_autoparallel.api.imported import NOTHING, ImportResult, find_kind, import_launch
from mm_autoparallel.errors import JobError, PlannerError
from mm_autoparallel.files import read_text
from mm_autoparallel.integrations.catalog import frameworks
from mm_autoparallel.integrations.described import Given
from mm_autoparallel.integrations.findings import Finding, Linter, Rule, Severity, find_line
from mm_autoparallel.integrations.framework import LaunchKind
from mm_autoparallel.integrations.key_lines import read_key_lines
from mm_autoparallel.integrations.launch_script import SUFFIXES
from mm_autoparallel.lint import plan_rules
from mm_autoparallel.lint.study import Advice, Study
from mm_autoparallel.validation import nearest

SCHEMA = "mm-autoparallel/lint/1"
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")

UNREAD = Rule(
    "not-read",
    "error",
    "a file from which no plan is read: a contradiction, a choice that no plan says, or something that it leaves out",
    "what the message names",
)
UNSIMULATED = Rule(
    "not-simulated",
    "note",
    "a file of which memory and time are not looked at, for want of a device",
    "--device NAME, or --cluster FILE",
)
_ENTRIES = (UNREAD, UNSIMULATED)


@dataclass(frozen=True)
class LintResult:
    """findings: in order of file, line and rule. files: what was looked at, with its framework. rules: looked for."""

    findings: tuple[Finding, ...]
    files: Mapping[Path, str]
    rules: tuple[Rule, ...]

    def count(self, severity: Severity) -> int:
        """Findings of `severity`."""
        return sum(one.rule.severity == severity for one in self.findings)

    def fails(self, least: Severity = "error") -> bool:
        """Whether something is found that is at least so severe."""
        return any(map(self.count, SEVERITIES[: SEVERITIES.index(least) + 1]))

    def document(self) -> dict[str, Any]:
        """As `lint --format json` prints it."""
        return {
            "schema": SCHEMA,
            "files": [{"file": str(path), "framework": name} for path, name in self.files.items()],
            "counts": {severity: self.count(severity) for severity in SEVERITIES},
            "findings": [
                {
                    "rule": one.rule.key,
                    "severity": one.rule.severity,
                    "file": str(one.path),
                    "line": one.line,
                    "stage": one.stage,
                    "message": one.message,
                    "figures": dict(one.figures),
                    "mend": one.mend,
                }
                for one in self.findings
            ],
        }


def list_rules() -> dict[str, tuple[Rule, ...]]:
    """Who looks → rules: those of every framework under an empty name, then each framework's own."""
    own = {name: linter.rules for name in frameworks() if (linter := _linter(name))}
    return {"": (*_ENTRIES, *plan_rules.RULES), **own}


def lint_files(
    paths: Sequence[Path],
    *,
    framework: str | None = None,
    device: str | None = None,
    cluster: Mapping[str, Any] | None = None,
    given: Given = NOTHING,
    ignored: Iterable[str] = (),
) -> LintResult:
    """All that is found in the launch files at `paths`, each by itself.

    framework, device, cluster, given: as import_launch; without device and cluster nothing is simulated, and a note
    says so. A file that is no launch itself belongs to the one before it. ignored: keys of rules that are not told.
    Raises JobError where a file is missing or nobody knows it, or a name or key is unknown.
    """
    rules = tuple(dict.fromkeys(rule for of_one in list_rules().values() for rule in of_one))
    left_out = {*ignored}
    for key in left_out - {rule.key for rule in rules}:
        known = sorted({rule.key for rule in rules})
        raise JobError(f"--ignore {key}: no rule{nearest(key, known)}; known are {', '.join(known)}")
    named = cluster["device"] if cluster and isinstance(cluster.get("device"), str) else None
    found: list[Finding] = []
    files: dict[Path, str] = {}
    for path, beside in _group(paths, framework):
        name, kind = find_kind(path, framework)
        files[path] = name
        said = replace(given, beside=(*given.beside, *beside), device=device or named)
        found += _lint(path, name, kind, device, cluster, said)
    order = {rule.key: place for place, rule in enumerate(rules)}
    places = {path: place for place, path in enumerate(files)}
    findings = sorted(
        (one for one in found if one.rule.key not in left_out),
        key=lambda one: (places.get(one.path, 0), one.line or 0, order[one.rule.key], one.stage or 0, one.message),
    )
    return LintResult(tuple(findings), files, rules)


def _linter(name: str) -> Linter | None:
    one = frameworks().get(name)
    return one.linter() if one is not None and one.linter is not None else None


def _group(paths: Sequence[Path], framework: str | None) -> list[tuple[Path, tuple[Path, ...]]]:
    """Each launch with the files that belong to it. Raises JobError for the first file that cannot be read."""
    groups: list[tuple[Path, list[Path]]] = []
    for path in paths:
        read_text(path, "launch file", "text")
        if groups and not _is_launch(path, framework):
            groups[-1][1].append(path)
        else:
            groups.append((path, []))
    return [(path, tuple(beside)) for path, beside in groups]


def _is_launch(path: Path, framework: str | None) -> bool:
    if framework is not None and path.suffix and path.suffix in SUFFIXES:
        return True  # a script of another entry, which the framework was named for
    try:
        return find_kind(path, framework)[1].is_one(path)
    except JobError:
        return False


def _lint(
    path: Path, name: str, kind: LaunchKind, device: str | None, cluster: Mapping[str, Any] | None, given: Given
) -> Iterator[Finding]:
    linter, of_files = _linter(name), list[Finding]()
    refusal: PlannerError | None = None
    try:
        for one in linter.find(path, given) if linter else ():
            of_files.append(one)  # one by one: what was found before an error stays
        if device is None and cluster is None:
            kind.read_plan(path, given)
            of_files.append(Finding(UNSIMULATED, "memory and time are not looked at without a device", path,
                                    mend="--device NAME"))  # fmt: skip
        else:
            read = import_launch(path, framework=name, device=device, cluster=cluster, given=given)
            advice = plan_rules.advise(Study(read.job, read.estimate, read.keeps_less))
            of_files += [_place(one, path, linter, read, given.entry) for one in advice]
    except PlannerError as failure:
        refusal = failure
    yield from of_files
    if refusal and not any(one.unread or one.rule.severity == "error" for one in of_files):
        message = re.sub(rf"^(?:[a-z ]+ )?{re.escape(str(path))}: ", "", str(refusal))
        yield Finding(UNREAD, message, path, find_line(message, read_key_lines(path).find))


def _place(advice: Advice, path: Path, linter: Linter | None, read: ImportResult, entry: str | None) -> Finding:
    """What was found in a plan, in the file that says it and in that file's words."""
    line = linter.locate(path, advice.about, entry) if linter and linter.locate else None
    mend = (linter.choices if linter else {}).get(advice.about, advice.words)
    if advice.better is not None and linter and linter.spell:
        try:
            mend = linter.spell(path, read.estimate.plan, advice.better, read.job) or mend
        except PlannerError:
            return Finding(advice.rule, advice.message, path, line, advice.stage, advice.figures, mend)
    return Finding(advice.rule, advice.message, path, line, advice.stage, advice.figures, mend)


def list_lines(result: LintResult) -> Iterator[str]:
    """For people: a line for each finding, and one that counts them."""
    for one in result.findings:
        where = f"{one.path}:{one.line}" if one.line is not None else str(one.path)
        mend = f"\n    mend: {one.mend}" if one.mend else ""
        yield f"{where}: {one.rule.severity}: {one.message} [{one.rule.key}]{mend}"
    counted = Counter(one.rule.severity for one in result.findings)
    told = ", ".join(f"{counted[severity]} {severity}{'s' * (counted[severity] != 1)}" for severity in SEVERITIES)
    yield f"{len(result.files)} file{'s' * (len(result.files) != 1)}: {told}"
