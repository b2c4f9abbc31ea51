"""Published YAMLs of MindFormers that ran: their authors' plans must fit, and ours never be slower than theirs.

    python tests/frameworks/mindformers_published.py GIT_DIR...

GIT_DIR: git directories of MindFormers with their history. Its model cards (docs/model_cards, research) name
YAMLs beside the tokens per second and device that were measured with them; of each YAML the last version counts. What
was measured is not looked at, but that it ran. Nightly; `make nightly MINDFORMERS="GIT_DIR..."`.
"""

from __future__ import annotations

import argparse
import posixpath
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from mm_autoparallel.errors import PlannerError
from mm_autoparallel.integrations.mindformers.layout import read_layout
from mm_autoparallel.integrations.mindformers.pipeline_problem import Ratios, build_pipeline_problem, placement_of
from mm_autoparallel.integrations.mindformers.pretrain_yaml import Pretrain, read_pretrain
from mm_autoparallel.integrations.mindformers.search.division import Scope
from mm_autoparallel.integrations.mindformers.search.layouts import Solver, find_layout
from mm_autoparallel.integrations.mindformers.search.nd_search import search_divisions
from mm_autoparallel.integrations.mindformers.search.sized_memory import size_memory
from mm_autoparallel.pipeline.placement import compile_kernels
from mm_autoparallel.pipeline.simulate.loads import overfull_stages
from mm_autoparallel.pipeline.simulate.step import simulate

LEAST_READ, LEAST_NAMES = 86, 66
"""YAMLs that are read, and their names (folders were renamed). These may grow, and never fall."""

OPEN: dict[str, str] = {}
"""Name → cause, of YAMLs whose authors' plans do not fit by our count, which is then wrong: none today."""

CARDS = ("docs/model_cards/*.md", "research/*.md", "research/*/*.md")
RATIOS = Ratios(0.33, 2.0, 1.5, 1.0)
"""The defaults of pipeline-search."""

TIME_LIMIT_S = 20.0

_ROW = re.compile(r"\]\((?P<link>[^)]*\.ya?ml)\).*?[0-9]\s*tokens/s/p")
_REPOSITORY = re.compile(r"^https?://.*?/(?:blob|tree)/[^/]*/")


def run_git(folder: Path, *arguments: str, given: str = "") -> bytes:
    """What git says of the repository at `folder`."""
    command = ["git", f"--git-dir={folder}", *arguments]
    return subprocess.run(command, input=given.encode(), capture_output=True, check=True).stdout


def list_versions(folder: Path, patterns: Sequence[str]) -> dict[str, list[tuple[int, str]]]:
    """Path → (time of its commit, blob) of every version that any branch has."""
    log = run_git(
        folder, "log", "--all", "--format=@%ct", "--raw", "--no-abbrev", "--no-renames", "--diff-filter=AM", "--",
        *patterns,
    )  # fmt: skip
    found: dict[str, list[tuple[int, str]]] = {}
    seconds = 0
    for line in log.decode().splitlines():
        if line.startswith("@"):
            seconds = int(line[1:])
        elif line.startswith(":"):
            about, path = line.split("\t")
            found.setdefault(path, []).append((seconds, about.split()[3]))
    return found


def read_blobs(folder: Path, blobs: Sequence[str]) -> dict[str, str]:
    """Blob → its text; those that are not there are left out."""
    output = run_git(folder, "cat-file", "--batch", given="".join(f"{blob}\n" for blob in blobs))
    found, position = {}, 0
    for blob in blobs:
        end = output.index(b"\n", position)
        head = output[position:end].split()
        position = end + 1
        if head[1] != b"missing":
            size = int(head[2])
            found[blob] = output[position : position + size].decode("utf-8", "replace")
            position += size + 1
    return found


def list_measured(folder: Path) -> set[str]:
    """Paths of YAMLs that some version of a model card names beside what was measured with them."""
    versions = list_versions(folder, CARDS)
    texts = read_blobs(folder, sorted({blob for of_path in versions.values() for _, blob in of_path}))
    found = set()
    for card, of_path in versions.items():
        for _, blob in of_path:
            for match in _ROW.finditer(texts.get(blob, "")):
                link = _REPOSITORY.sub("", match["link"])
                is_whole = link != match["link"]
                found.add(link if is_whole else posixpath.normpath(posixpath.join(posixpath.dirname(card), link)))
    return found


def read_measured(folders: Sequence[Path]) -> dict[str, str]:
    """Path → text of the last version of each measured YAML."""
    measured = set[str]().union(*map(list_measured, folders))
    last: dict[str, tuple[int, str]] = {}
    for folder in folders:
        versions = {path: max(found) for path, found in list_versions(folder, ["*.yaml"]).items() if path in measured}
        texts = read_blobs(folder, [blob for _, blob in versions.values()])
        for path, (seconds, blob) in versions.items():
            if path not in last or seconds > last[path][0]:
                last[path] = seconds, texts[blob]
    return {path: text for path, (_, text) in sorted(last.items())}


def own_division_fits(pretrain: Pretrain) -> bool:
    """Whether nd-search finds the YAML's own division, micro-batch and chunks to fit."""
    sizes = {name: (getattr(pretrain, name),) for name in ("dp", "tp", "pp", "cp", "ep")}
    searched = search_divisions(pretrain, pretrain.global_batch_size, Scope(pretrain.ep, sizes), {}, 1)
    fitting = [entry.division for entry in searched if entry.status == "fits"]
    return any((division.mbs, division.vp) == (pretrain.mbs, pretrain.vp) for division in fitting)


def judge(pretrain: Pretrain, scratch: Path) -> Iterator[str]:
    """What is wrong with the author's plan, or with ours."""
    if not own_division_fits(pretrain):
        yield "nd-search does not find its own division to fit"
    theirs = read_layout(pretrain)
    memory = size_memory(pretrain, bool(theirs.selected))
    problem = build_pipeline_problem(pretrain, RATIOS, memory, "default")
    timeline = simulate(problem, placement_of(problem, theirs))
    over = overfull_stages(problem, timeline.peak_memory_bytes)
    if over:
        yield f"its author's plan does not fit on stages {over}"
        return
    ours = find_layout(problem, Solver(False, scratch / "model", TIME_LIMIT_S))
    if ours.timeline.step_ms > timeline.step_ms * (1 + 1e-9):
        yield f"ours takes {ours.timeline.step_ms:.3f}, its author's {timeline.step_ms:.3f}"
    else:
        saved = 1 - ours.timeline.step_ms / timeline.step_ms
        print(f"ok     {pretrain.path.name}: ours is {saved:.1%} faster", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="*", type=Path, metavar="GIT_DIR")
    folders = parser.parse_args().folders
    if not folders:
        print("no git directory of MindFormers is given; nothing is compared")
        return 0
    compile_kernels()
    num_read, names, wrong = 0, set(), set()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        for path, text in read_measured(folders).items():
            copy = scratch / path.replace("/", "__")
            copy.write_text(text, encoding="utf-8")
            try:
                pretrain = read_pretrain(copy)
                size_memory(pretrain)
            except PlannerError as refusal:
                print(f"refused {path}: {str(refusal).replace(str(copy), '').strip()}", flush=True)
                continue
            num_read += 1
            names.add(posixpath.basename(path))
            try:
                problems = list(judge(pretrain, scratch))
            except PlannerError as error:
                problems = [str(error)]
            for problem in problems:
                print(f"WRONG  {path}: {problem}", flush=True)
            wrong |= {posixpath.basename(path)} if problems else set()
    print(f"{num_read} measured YAMLs are read, by {len(names)} names; wrong are {', '.join(sorted(wrong)) or 'none'}")
    return int(bool(wrong - OPEN.keys()) or num_read < LEAST_READ or len(names) < LEAST_NAMES)


if __name__ == "__main__":
    sys.exit(main())
