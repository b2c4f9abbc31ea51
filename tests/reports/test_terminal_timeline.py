"""The step on a terminal: what each column shows, and that files and pipes get none of it."""

from __future__ import annotations

import io
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from two_stages import PLACEMENT, PROBLEM

from mm_autoparallel.cli.main import main
from mm_autoparallel.pipeline.problem import Problem
from mm_autoparallel.pipeline.simulate.step import simulate
from mm_autoparallel.reports.tables import share_time
from mm_autoparallel.reports.terminal_timeline import TerminalTimeline, worked_in_columns
from mm_autoparallel.units import GIB

# 66 columns of a quarter of a millisecond: every task of the two stages ends with a column.
IN_LETTERS = """\
one step of 16.50 ms, 0.25 ms a column, bubble 24.2 %
 0 FFFFFFFF............RRRRBBBBBBBBFFFFRRRRBBBBBBBB....RRRRBBBBBBBB..
 1 ......FFFFBBBBBBBBFFFFBBBBBBBB........FFFFBBBBBBBBTTTTTTTTTTTTTTTT
 F forward  B backward  R recompute  T after the last backward
 . idle
peak memory of its limit
 0 ############---------------------------- 3.00 of 10.00 GiB, 30.0 %
 1 ############---------------------------- 3.00 of 10.00 GiB, 30.0 %
"""


class Terminal(io.StringIO):
    """A stream that somebody looks at."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def drawn(problem: Problem, width: int, color_system: str | None = None, encoding: str = "utf-8") -> str:
    stream = Terminal()
    stream.encoding = encoding  # type: ignore[misc]
    console = Console(
        file=stream,
        width=width,
        force_terminal=color_system is not None,
        color_system=color_system,  # type: ignore[arg-type]
        legacy_windows=False,
    )
    console.print(TerminalTimeline(problem, simulate(problem, PLACEMENT)), crop=False)
    return stream.getvalue()


@pytest.mark.parametrize("num_microbatches", [3, 500])
@pytest.mark.parametrize("num_columns", [1, 61, 200])
def test_columns_hold_what_stages_do(num_microbatches: int, num_columns: int) -> None:
    timeline = simulate(replace(PROBLEM, num_microbatches=num_microbatches), PLACEMENT)
    shares = share_time(timeline)
    for stage in range(2):
        worked = worked_in_columns(timeline, stage, num_columns)
        assert worked.min() >= -1e-9
        assert worked.sum(axis=0).max() <= 1 + 1e-9
        told_ms = worked.sum(axis=1) * timeline.step_ms / num_columns
        parts = (shares.forward_ms, shares.backward_ms, shares.recompute_ms, shares.encoders_ms, shares.tail_ms)
        assert told_ms == pytest.approx(np.array([part[stage] for part in parts]))


def test_letters_where_blocks_or_colours_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    assert drawn(PROBLEM, 69, encoding="ascii") == IN_LETTERS
    monkeypatch.setenv("NO_COLOR", "1")
    assert "FFFFFFFF....." in drawn(PROBLEM, 69, "truecolor")
    without_colours = drawn(PROBLEM, 69)
    assert without_colours.splitlines()[:4] == IN_LETTERS.splitlines()[:4]
    assert without_colours.splitlines()[6].startswith(" 0 ████████████░░░")


def test_heights_and_colours() -> None:
    told = drawn(PROBLEM, 69, "truecolor")
    assert told == drawn(PROBLEM, 69, "truecolor")
    first = told.splitlines()[1]
    forward, idle, again = "\x1b[38;2;76;120;168m████████\x1b[0m", " " * 12, "\x1b[38;2;228;87;86m████\x1b[0m"
    assert first.startswith(f" 0 {forward}{idle}{again}")
    assert "F" not in first
    half = replace(PROBLEM, num_microbatches=1000)
    assert "several of them" in drawn(half, 69, "truecolor")
    assert "▆" in drawn(half, 69, "truecolor")  # the second stage waits a quarter of its time


def test_what_does_not_fit_is_marked() -> None:
    first, second = drawn(replace(PROBLEM, memory_limit_bytes=(2.0 * GIB, 0.0)), 80, encoding="ascii").splitlines()[-2:]
    assert first.endswith("# 3.00 of 2.00 GiB, 150.0 % OVER")
    assert second.endswith("# 3.00 of 0.00 GiB, - OVER")
    assert "-" not in first


def test_a_narrow_window_is_spared() -> None:
    assert drawn(PROBLEM, 59) == ""
    assert drawn(PROBLEM, 60)


def test_simulate_draws_for_eyes_alone(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = repository / "examples" / "published_gains"
    command = ["simulate", str(examples / "qwen2vl_72b.yaml"), "--config", str(examples / "qwen2vl_72b.tuned_pp8.json")]
    monkeypatch.setenv("COLUMNS", "100")
    told = {}
    for stream in (io.StringIO(), Terminal()):
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setenv("FORCE_COLOR", "1")  # asks for colours in files, not for pictures
        assert main(command) == 0
        told[stream.isatty()] = stream.getvalue()
        monkeypatch.setattr(sys, "stdout", Terminal())
        assert main([*command, "--json"]) == 0
        assert "a column" not in sys.stdout.getvalue()  # type: ignore[attr-defined]
    assert "a column" not in told[False]
    assert "a column" in told[True]
    assert told[True].count(" GiB, ") == 8 + told[False].count(" GiB, ")


JOB = """\
model: {text: {vocab_size: 32000, layers: {num_layers: 8, hidden_size: 1024, ffn_size: 4096, num_heads: 8, norm: rms}}}
cluster: {device: a100-80g, num_nodes: 1, devices_per_node: 4}
workload: {global_batch_size: 16, seq_length: 1024}
search: {pp: [4], tp: [1], mbs: [1]}
"""


def test_plan_draws_and_tells_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    (tmp_path / "job.yaml").write_text(JOB)
    output, errors = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setattr(sys, "stderr", errors)
    assert main(["plan", str(tmp_path / "job.yaml"), "--out", str(tmp_path), "--time-limit", "30"]) == 0
    picture = output.getvalue().split("\none step of ")[1].splitlines()
    assert sum(" GiB, " in line for line in picture) == 4
    assert "\r\x1b[Klisting the strategies\r\x1b[K" in errors.getvalue()
    last = errors.getvalue().split("\r\x1b[K")[-2]  # before the line is taken away
    assert re.fullmatch(r"(\d+) of \1 strategies, best so far .* ms, bound .* ms, gap 0.0 %, \d+ s left", last)
