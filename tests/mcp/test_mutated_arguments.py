"""Arguments that are nearly right: every one is answered or refused in a sentence, and nothing outside is touched."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp", reason="comes with the extra `mcp`")

from mcp_session import SMALL
from mutate import mutate

from mm_autoparallel.confinement import confine, release
from mm_autoparallel.errors import PlannerError
from mm_autoparallel.files import write_text_atomically
from mm_autoparallel.mcp.calls import Call
from mm_autoparallel.mcp.catalog import TOOLS
from mm_autoparallel.mcp.folder import Folder
from mm_autoparallel.mcp.serve import parse

RIGHT: dict[str, dict[str, Any]] = {
    "plan": {"job": "small.json", "out": "plan.json", "overwrite": True, "time_limit_s": 1, "top_k": 2},
    "simulate": {"job": "small.json", "plan": "plan.json", "out": "figures.json", "overwrite": True},
    "edit": {
        "job": "small.json",
        "plan": "plan.json",
        "out": "edited.json",
        "overwrite": True,
        "changes": {"workload.global_batch_size": 32},
        "sizes": "PP=2",
        "moves": [{"part": "text", "layers": 1, "from_stage": 0, "to_stage": 1}],
        "modes": [{"part": "text", "stage": 1, "mode": "activation", "layers": 1}],
        "layers": {"text": [4, 4]},
        "recompute": {"text": [1, 0]},
    },
    "explain": {"job": "small.json", "plan": "plan.json", "against": ["plan.json"], "top_k": 1, "time_limit_s": 0.2},
    "why_not": {"job": "small.json", "plan": "plan.json", "wish": "PP=1,TP=1", "time_limit_s": 0.2},
    "report": {"job": "small.json", "plans": ["plan.json"], "search": False, "out": "page.html", "overwrite": True},
    "init": {
        "model": "llama3-8b",
        "device": "h100-80g",
        "num_nodes": 1,
        "devices_per_node": 8,
        "global_batch_size": 8,
        "seq_length": 64,
        "more": {"search": {"tp": [1, 2]}, "workload": {"stack": "megatron-te"}, "calibration": "h100-80g.llm-foundry"},
        "out": "job.yaml",
        "overwrite": True,
    },
    "import_launch": {"file": "train.sh", "device": "h100-80g", "framework": "megatron-core", "out": "imported"},
    "lint": {
        "files": ["train.sh"],
        "device": "h100-80g",
        "ignore": ["stage-imbalance"],
        "out": "found.json",
        "sarif": True,
        "overwrite": True,
    },
    "export_plan": {
        "plan": "imported/plan.json",
        "framework": "megatron-core",
        "job": "imported/job.yaml",
        "out": "exported",
        "overwrite": True,
    },
    "place": {"problem": "problem.json", "time_limit_s": 1, "out": "certificate.json", "overwrite": True},
    "verify": {"certificate": "certificate.json", "time_limit_s": 1},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repository: Path) -> Iterator[Path]:
    served = tmp_path / "served"
    served.mkdir()
    shutil.copy(repository / "examples" / "place" / "problem.json", served)
    shutil.copy(repository / "examples" / "megatron_core" / "train_8b.sh", served / "train.sh")
    (served / "small.json").write_text(json.dumps(SMALL))
    monkeypatch.chdir(served)
    confine(served)
    yield served
    release()


def ask(tool: str, arguments: Any, folder: Path) -> tuple[bool, str]:
    """Whether a tool answers, as the server asks it, and its text or its refusal."""
    try:
        question = parse(TOOLS[tool].question, tool, arguments)
        limits = {"time_limit_s": min(1.0, question.time_limit_s)} if hasattr(question, "time_limit_s") else {}
        answer = TOOLS[tool].run(question.model_copy(update=limits), Call(1, tool, Folder(folder)))
    except PlannerError as error:
        return False, str(error)
    return True, answer.text()


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(4))
def test_what_is_nearly_right_is_answered_or_refused(folder: Path, seed: int) -> None:
    for tool, arguments in RIGHT.items():
        answered, words = ask(tool, arguments, folder)
        assert answered, words
    rng = random.Random(seed)
    kept = {name: (folder / name).read_text() for name in ("small.json", "problem.json")}
    num_answered = num_refused = 0
    while num_answered + num_refused < 400:
        tool = rng.choice([*RIGHT])
        try:
            arguments = json.loads(mutate("arguments.json", json.dumps(RIGHT[tool]), rng, []))
        except (ValueError, RecursionError):  # the protocol's own to refuse
            continue
        if not isinstance(arguments, dict):  # likewise
            continue
        answered, words = ask(tool, arguments, folder)
        num_answered, num_refused = num_answered + answered, num_refused + (not answered)
        assert words, arguments
        assert answered or "\n" not in words, arguments
        for name, text in kept.items():
            write_text_atomically(Path(name), text)  # an overwrite that was asked for
    assert min(num_answered, num_refused) > 10
    assert [path.name for path in folder.parent.iterdir()] == ["served"]
