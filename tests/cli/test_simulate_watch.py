"""`simulate --watch`: each saved version is played and held against those before, until Ctrl-C."""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest

from mm_autoparallel.cli.main import main
from mm_autoparallel.cli.simulate import describe_version
from mm_autoparallel.cli.watching import look_at, wait_for_save

WAITING = "waiting until"


class Watch:
    """A running `simulate --watch`, and what it printed."""

    def __init__(self, repository: Path, folder: Path, *more: str) -> None:
        command = [sys.executable, "-m", "mm_autoparallel.cli.main", "simulate", "job.yaml", "--config", "plan.json"]
        environment = os.environ | {"PYTHONPATH": str(repository), "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            [*command, "--watch", *more],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True).start()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            self._lines.put(line)
        self._lines.put(None)

    def until(self, word: str) -> str:
        """What is printed up to the line with `word`."""
        told = []
        while word not in "".join(told[-1:]):
            line = self._lines.get(timeout=300)
            assert line is not None, f"it ended before {word!r}: {''.join(told)}"
            told.append(line)
        return "".join(told)


@pytest.fixture
def folder(repository: Path, tmp_path: Path) -> Path:
    """job.yaml and plan.json, 72B on eight stages."""
    examples = repository / "examples"
    job = (examples / "published_gains" / "qwen2vl_72b.yaml").read_text()
    (tmp_path / "job.yaml").write_text(job.replace("../", f"{examples}/"))
    shutil.copy(examples / "published_gains" / "qwen2vl_72b.tuned_pp8.json", tmp_path / "plan.json")
    return tmp_path


@pytest.fixture
def start(repository: Path, folder: Path) -> Iterator[Callable[..., Watch]]:
    started: list[Watch] = []

    def run(*more: str) -> Watch:
        started.append(Watch(repository, folder, *more))
        return started[-1]

    yield run
    for watch in started:
        watch.process.kill()
        watch.process.communicate()


@pytest.mark.slow
def test_versions_are_held_against_each_other(start: Callable[..., Watch], folder: Path) -> None:
    plan = folder / "plan.json"
    document = json.loads(plan.read_text())
    watch = start("--svg", "step.svg")
    told = watch.until(WAITING)
    assert "where the step goes" in told
    assert "against" not in told
    picture = (folder / "step.svg").read_text()

    layers = document["layer_placement"]["llm_layer_placement"]
    document["layer_recompute"]["llm_layer_recompute"] = layers
    replacing = folder / "plan.json.new"  # as editors do that write beside a file and rename
    replacing.write_text(json.dumps(document))
    replacing.rename(plan)
    told = watch.until(WAITING)
    assert "version 2: step +" in told
    assert "against the version before\n" in told
    assert (folder / "step.svg").read_text() != picture

    plan.write_text(json.dumps(document)[:100])
    told = watch.until(WAITING)
    assert told.count("mm-autoparallel: plan plan.json") == 1
    assert "where the step goes" not in told
    assert "Traceback" not in told

    document["layer_recompute"]["llm_layer_recompute"] = [0] * len(layers)
    plan.write_text(json.dumps(document))
    told = watch.until(WAITING)
    assert "version 3: step -" in told
    assert "against the version before, -" in told
    assert "against the first\n" in told

    (folder / "job.yaml").write_text((folder / "job.yaml").read_text() + "\n# saved again\n")
    assert "version 4: step +0.00 ms (+0.0 %) against the version before" in watch.until(WAITING)

    watch.process.send_signal(signal.SIGINT)
    assert watch.process.wait(timeout=120) == 0


@pytest.mark.slow
def test_without_a_result_an_interrupt_is_130(start: Callable[..., Watch], folder: Path) -> None:
    (folder / "plan.json").write_text("{")
    watch = start()
    assert "mm-autoparallel: plan plan.json" in watch.until(WAITING)
    watch.process.send_signal(signal.SIGTERM)
    assert watch.process.wait(timeout=120) == 130


def test_a_mistyped_name_is_2(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(folder / "job.yaml"), "--config", str(folder / "plans.json"), "--watch"]) == 2
    assert "plans.json" in capsys.readouterr().err


def test_one_document_is_not_printed_again_and_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["simulate", str(folder / "job.yaml"), "--config", str(folder / "plan.json"), "--watch", "--json"]
    assert main(arguments) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert "--watch prints again and again" in told.err


def test_a_file_that_is_away_for_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read while a file changes, and one that comes back as it was is not saved."""
    path, away = tmp_path / "plan.json", tmp_path / "away"
    path.write_text("1")
    seen = look_at([path])
    edits: list[Callable[[], object]] = [
        lambda: path.rename(away),
        lambda: away.rename(path),
        lambda: path.write_text("12"),
        lambda: path.write_text("123"),
        lambda: None,
        lambda: path.write_text("1234"),
    ]
    monkeypatch.setattr("mm_autoparallel.cli.watching.time.sleep", lambda _: edits.pop(0)())  # one between two looks
    now = wait_for_save([path], seen)
    assert now == look_at([path]) != seen
    assert path.read_text() == "123"
    edits[:] = [path.unlink, lambda: None]
    assert wait_for_save([path], now) == (None,)


def test_changes_in_words() -> None:
    assert describe_version(90.0, [100.0]) == "version 2: step -10.00 ms (-10.0 %) against the version before"
    assert describe_version(99.9999, [80.0, 100.0]) == (
        "version 3: step +0.00 ms (+0.0 %) against the version before, +20.00 ms (+25.0 %) against the first"
    )
