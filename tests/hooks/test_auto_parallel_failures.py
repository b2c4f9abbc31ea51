"""What goes wrong while ranks measure: each is told in words with exit code 2, and no process is left."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from mm_autoparallel.planner.plan import RESULT_FILE

pytestmark = pytest.mark.slow

TWO_RANKS = ("--nproc-per-node", 2, "--simulated-nproc-per-node", 2)


@pytest.mark.nightly
def test_a_rank_that_raises_is_named_with_its_last_lines(tmp_path: Path, launch: Callable) -> None:
    ended = launch(tmp_path, *TWO_RANKS, "--fail", "raise1").wait()
    assert ended.code == 2
    assert "rank 1 of the profile run failed with exit code 1" in ended.stderr
    assert 'KeyError: "the toy\'s own bug"' in ended.stderr
    log = Path(ended.stderr.split("log: ")[1].split(";")[0])
    assert "the toy's own bug" in (log / "stderr.log").read_text()
    assert not (tmp_path / RESULT_FILE).exists()


@pytest.mark.nightly
def test_a_rank_that_the_system_kills(tmp_path: Path, launch: Callable) -> None:
    ended = launch(tmp_path, *TWO_RANKS, "--fail", "kill1").wait()
    assert ended.code == 2
    assert "rank 1 of the profile run was killed by the system, most likely for memory (signal 9)" in ended.stderr
    assert "Traceback" not in ended.stderr.split("its last lines")[0]


@pytest.mark.nightly
def test_a_disk_that_is_full_while_ranks_measure(tmp_path: Path, launch: Callable, entries: Callable) -> None:
    """Nothing half-written is left for the command that continues."""
    ended = launch(tmp_path, *TWO_RANKS, "--fail", "full0").wait()
    assert ended.code == 2
    assert "cannot be written (File too large)" in ended.stderr.splitlines()[-1]
    assert "the same command continues after it" in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr
    assert entries(tmp_path) == set()
    for path in tmp_path.glob("subgraph_profiles/**/*.json"):
        json.loads(path.read_text())


@pytest.mark.nightly
def test_a_loss_that_is_no_number(tmp_path: Path, launch: Callable) -> None:
    ended = launch(tmp_path, *TWO_RANKS, "--fail", "nan").wait()
    assert ended.code == 2
    assert "the model's loss is no finite number" in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr


@pytest.mark.nightly
def test_interrupted_while_profiling_and_continued(
    tmp_path: Path, launch: Callable, one_rank: tuple, entries: Callable
) -> None:
    flags = (*one_rank, "--mbs", 1, 2)
    launcher = launch(tmp_path, *flags)
    launcher.wait_until(lambda: entries(tmp_path))
    kept = entries(tmp_path)
    assert launcher.listening() == {"0100007F"}  # loopback: one node needs no other
    launcher.process.send_signal(signal.SIGTERM)
    ended = launcher.wait()
    assert launcher.left_over(patience_s=0.0) == []
    assert ended.code == 130
    assert ended.stderr.splitlines()[-1].startswith("mm-autoparallel: interrupted; what was profiled is kept")
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / RESULT_FILE).exists()

    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("subgraph_profiles/*/*/*.json")}
    assert launch(tmp_path, *flags).wait().code == 0
    assert kept < entries(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in before} == before  # what was there is not measured again
