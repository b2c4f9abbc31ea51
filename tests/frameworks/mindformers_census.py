"""Reads every training YAML of MindFormers' history, as it was last, and counts what is read and what is refused why.

    python tests/frameworks/mindformers_census.py GIT_DIRECTORY…

Git directories are those of MindFormers' public repositories (mindspore-ai/mindformers, mindspore-lab/mindformers) with
all branches. A YAML is of training where its name says pretrain, finetune, train.yaml, run_llama, run_mixtral or
pynative. Read means that its pipeline is a problem that a solver takes: layers, memory, times. Counts stand below and
may only grow; exit code 1 where one fell, or where less than nine tenths are read or wrong by themselves.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.integrations.mindformers.layout import stale_offset_notes
from mm_autoparallel.integrations.mindformers.pipeline_problem import Ratios, build_pipeline_problem
from mm_autoparallel.integrations.mindformers.pretrain_yaml import read_pretrain
from mm_autoparallel.integrations.mindformers.search.sized_memory import size_memory

TRAINING = re.compile(r"pretrain|finetune|train\.yaml|run_llama|run_mixtral|pynative")

AT_LEAST_READ = 221
"""Of 275 that both repositories' branches have had until July 2026."""

AT_LEAST_SHARE = 0.9
"""Of those read or refused for a reason that is theirs."""

THEIRS = {
    "it is empty": "empty files",
    "stands twice in one mapping": "a key twice",
    "section `model` is missing": "no training of a model (data set tests)",
    "where there is no config.json": "the model's config.json is not in the repository",
    "there is no pretrained_model_dir": "no model: a test's code has it",
    "max_device_memory is missing": "no limit of memory",
    "which is in no release": "of an experiment that is in no release",
    "divides the model by itself, and parallel_config gives neither": "MindSpore divides it, over devices not named",
}
"""What a refusal says → the reason that is the file's own."""


def last_versions(git_directories: list[Path]) -> dict[str, tuple[Path, str]]:
    """Path in the repository → git directory and blob of its last version on any branch."""
    found: dict[str, tuple[str, Path, str]] = {}
    for directory in git_directories:
        log = _git(directory, "log", "--all", "-m", "--no-renames", "--raw", "--no-abbrev", "--format=C %cI", "--")
        date = ""
        for line in log.decode("utf-8", "replace").splitlines():
            if line.startswith("C "):
                date = line[2:]
            elif line.startswith(":"):
                fields, path = line.split("\t", 1)
                *_, blob, status = fields.split()
                is_one = path.endswith((".yaml", ".yml")) and TRAINING.search(path.rsplit("/", 1)[-1])
                if is_one and status != "D" and (path not in found or found[path][0] < date):
                    found[path] = (date, directory, blob)
    return {path: (directory, blob) for path, (_, directory, blob) in found.items()}


def _git(directory: Path, *arguments: str) -> bytes:
    command = ["git", f"--git-dir={directory}", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout


def verdict(path: Path) -> tuple[str, str]:
    """`read`, `theirs` or `refused`, and why; another error is a bug, and raised."""
    try:
        pretrain = read_pretrain(path)
        stale_offset_notes(pretrain)
        build_pipeline_problem(pretrain, Ratios(0.33, 2.0, 1.5, 1.0), size_memory(pretrain), "default")
    except (JobError, PlanError) as error:
        told = str(error).replace(str(path), "FILE")
        reason = next((why for words, why in THEIRS.items() if words in told), None)
        return ("theirs", reason) if reason else ("refused", told)
    return "read", pretrain.model.family


def main() -> int:
    """Read them all; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("git_directories", nargs="*", type=Path, metavar="GIT_DIRECTORY")
    directories = parser.parse_args().git_directories
    if not directories:
        print("no git directory of MindFormers is given: its YAMLs are not read")
        return 0
    verdicts: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (directory, blob) in enumerate(last_versions(directories).values()):
            path = Path(folder) / f"{number}.yaml"
            path.write_bytes(_git(directory, "cat-file", "blob", blob))
            kind, why = verdict(path)
            verdicts.setdefault(kind, Counter())[why] += 1
    numbers = {kind: sum(reasons.values()) for kind, reasons in verdicts.items()}
    total = sum(numbers.values())
    for kind, reasons in verdicts.items():
        print(f"{kind}: {numbers[kind]} of {total}")
        for why, count in reasons.most_common():
            print(f"  {count:3d} {why}")
    share = (numbers.get("read", 0) + numbers.get("theirs", 0)) / total
    print(f"read or wrong by themselves: {share:.1%}")
    return int(numbers.get("read", 0) < AT_LEAST_READ or share < AT_LEAST_SHARE)


if __name__ == "__main__":
    sys.exit(main())
