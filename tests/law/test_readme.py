"""README and the pages of reference say what is there: the command line's commands, the package's rooms, a job."""

from __future__ import annotations

import argparse
import ast
import re
from pathlib import Path

import pytest
import yaml

from mm_autoparallel.cli.parser import build_parser
from mm_autoparallel.model.readers.job_file import read_job


@pytest.fixture(scope="module")
def readme(repository: Path) -> str:
    return (repository / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def docs(repository: Path) -> dict[str, str]:
    """Every page: its path below docs/ → its text."""
    folder = repository / "docs"
    return {str(path.relative_to(folder)): path.read_text(encoding="utf-8") for path in folder.rglob("*.md")}


def blocks(readme: str, language: str) -> list[str]:
    """The fenced blocks of `language`, without their fences."""
    found, inside = [], None
    for line in readme.splitlines(keepends=True):
        if not line.startswith("```"):
            if found and inside == language:
                found[-1] += line
        elif inside is not None:
            inside = None
        else:
            inside = line.strip().removeprefix("```")
            found += [""] if inside == language else []
    return found


def test_there_are_two_command_blocks(readme: str) -> None:
    """.ci/run executes them by number: install, profile and plan, then the tests."""
    install, tests = blocks(readme, "bash")
    assert "python examples/qwen2vl/pretrain_vlm.py --auto-parallel-mm --simulated-nnodes 8" in install
    assert tests.rstrip().endswith("make check")


def test_the_listing_is_the_command_line(docs: dict[str, str]) -> None:
    (listing,) = [
        block for block in blocks(docs["reference/cli.md"], "text") if block.startswith("mm-autoparallel plan")
    ]
    (verbs,) = [action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction)]
    listed = {}
    for line in listing.splitlines():
        _, verb, *words = re.split(r"[\s\[\]|]+", line)
        listed[verb] = {word for word in words if word.startswith("--")}
    offered = {
        name: {
            next(option for option in action.option_strings if option.startswith("--"))
            for action in verb._actions
            if action.option_strings
        }
        - {"--help"}
        for name, verb in verbs.choices.items()
    }
    assert listed == offered


def test_every_room_stands_on_a_floor_of_the_architecture(docs: dict[str, str], sources: dict[str, ast.Module]) -> None:
    rooms = {f"{path.split('/')[0]}/" if "/" in path else path for path in sources} - {"__init__.py"}
    section = docs["explanation/architecture.md"].split("## Floors")[1].split("## ")[0]
    assert {room for room in rooms if f"`{room}`" not in section} == set()


@pytest.mark.parametrize("page", ["reference/job-file.md", "start/no-model.md", "zh/no-model.md"])
def test_the_job_on_a_page_is_a_job(page: str, docs: dict[str, str], repository: Path, tmp_path: Path) -> None:
    (text,) = blocks(docs[page], "yaml")
    model = repository / "examples" / "qwen2vl_72b" / yaml.safe_load(text)["model"]
    (tmp_path / model.name).write_bytes(model.read_bytes())
    (tmp_path / "job.yaml").write_text(text)
    job = read_job(tmp_path / "job.yaml")
    assert job.cluster.num_devices == 128
    assert job.search.max_vpp == 2


def test_paths_that_are_named_exist(readme: str, docs: dict[str, str], repository: Path) -> None:
    rooms = "examples|tests|pipeline|model|planner|integrations|measurements|reports|api|hooks|profilers|cli"
    own = {name: text for name, text in docs.items() if name.startswith(("contributing", "explanation", "start/p"))}
    text = "\n".join((readme, *own.values()))
    named = set(re.findall(rf"(?<![\w/])(?:{rooms})/[\w/]+\.(?:py|json|yaml)\b", text))
    assert named
    missing = [
        path for path in named if not ((repository / path).exists() or (repository / "mm_autoparallel" / path).exists())
    ]
    assert missing == []
