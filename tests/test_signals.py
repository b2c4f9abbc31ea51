"""Ctrl-C and SIGTERM: one wish however often it is said at once, heard everywhere, and no trace of them at the end."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from mm_autoparallel import signals
from mm_autoparallel.signals import (
    interrupted_at_safe_points,
    interrupted_by_signals,
    raise_interrupt,
    stop_on_signal,
)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wishes of one test are none of the next."""
    monkeypatch.setattr(signals, "_heard_s", [-1.0])
    monkeypatch.setattr(signals, "SAME_WISH_S", 0.05)


def say_it(number: int = signal.SIGINT, times: int = 3) -> None:
    for _ in range(times):
        os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_search_is_asked_first_and_ended_then(number: int) -> None:
    before = signal.getsignal(number)
    with stop_on_signal() as stop:
        say_it(number)
        assert stop.is_set()
        time.sleep(0.06)
        with pytest.raises(KeyboardInterrupt):
            say_it(number)
    assert signal.getsignal(number) is before


def test_what_runs_inside_a_search_and_has_no_flag_is_ended(capfd: pytest.CaptureFixture[str]) -> None:
    with stop_on_signal() as stop:
        with pytest.raises(KeyboardInterrupt), interrupted_by_signals():
            say_it()
        assert not stop.is_set()
        time.sleep(0.06)
        say_it()
        assert stop.is_set()
    assert "stopping with the best so far" in capfd.readouterr().err


def test_a_replaced_standard_error_is_no_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with stop_on_signal() as stop:
        say_it()
    assert stop.is_set()


def test_an_interrupt_that_a_library_drops_is_raised_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "HANDLED_WITHIN_S", 0.02)
    before = signal.getsignal(signal.SIGALRM)

    def drop_it_twice() -> None:
        for _ in range(2):
            with suppress(KeyboardInterrupt):  # as machine code drops it
                say_it(times=1)
                time.sleep(5.0)
        time.sleep(5.0)

    with pytest.raises(KeyboardInterrupt), interrupted_by_signals():
        drop_it_twice()
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_one_dropped_at_the_very_end_is_raised_there() -> None:
    with pytest.raises(KeyboardInterrupt), interrupted_by_signals(), suppress(KeyboardInterrupt):
        say_it(times=1)


def test_what_breaks_because_of_a_dropped_one_is_no_crash() -> None:
    """As numba does, whose compiler calls back through ctypes and then misses what the callback was to leave."""

    def break_down() -> None:
        with suppress(KeyboardInterrupt):
            say_it(times=1)
        raise RuntimeError("no compiled object yet")

    with pytest.raises(KeyboardInterrupt), interrupted_by_signals():
        break_down()
    with pytest.raises(RuntimeError, match="as it is"), interrupted_by_signals():
        raise RuntimeError("as it is")


def test_an_interrupt_waits_for_a_safe_point() -> None:
    reached = []

    def work() -> None:
        raise_interrupt()
        say_it(times=1)
        reached.append("after the signal")
        with suppress(KeyboardInterrupt):  # as machine code drops it
            raise_interrupt()
        try:
            raise_interrupt()
        finally:
            raise_interrupt()  # not in what ends because of it
            reached.append("the end")
        reached.append("too much")

    with pytest.raises(KeyboardInterrupt), interrupted_by_signals(), interrupted_at_safe_points():
        work()
    assert reached == ["after the signal", "the end"]
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    raise_interrupt()


def test_the_end_is_a_safe_point() -> None:
    reached = []

    def work() -> None:
        with interrupted_at_safe_points():
            say_it(times=1)
            reached.append("the end")
        reached.append("too much")

    with pytest.raises(KeyboardInterrupt), interrupted_by_signals():
        work()
    assert reached == ["the end"]


def test_the_next_one_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "SAFE_WITHIN_S", 0.02)
    reached = []

    def work() -> None:
        say_it()
        time.sleep(0.06)
        reached.append("no safe point")
        say_it()
        reached.append("too much")

    with pytest.raises(KeyboardInterrupt), interrupted_by_signals(), interrupted_at_safe_points():
        work()
    assert reached == ["no safe point"]


OWN_PROCESS = """
import os, signal, time
from mm_autoparallel.signals import interrupt_on_signal, interrupted_at_safe_points
interrupt_on_signal()
try:
    with interrupted_at_safe_points():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)
except BaseException:
    print("nothing may come through there")
"""


def test_a_process_of_our_own_ends_rather_than_break(repository: Path) -> None:
    begun = time.monotonic()
    command = [sys.executable, "-c", OWN_PROCESS]
    result = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (130, "")
    assert result.stderr == "mm-autoparallel: interrupted before there was a result\n"
    assert time.monotonic() - begun < 20.0


def test_what_ends_in_order_is_not_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "HANDLED_WITHIN_S", 0.01)
    ended = []

    @contextmanager
    def ends_slowly() -> Iterator[None]:
        try:
            yield
        finally:
            with suppress(ValueError):
                raise ValueError  # of an ending that has troubles of its own
            time.sleep(0.1)
            ended.append(True)

    with pytest.raises(KeyboardInterrupt), interrupted_by_signals(), ends_slowly():
        say_it(times=1)
    assert ended


def test_what_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with stop_on_signal() as stop:
            say_it(signal.SIGTERM)
        assert not stop.is_set()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_other_threads_may_search() -> None:
    entered = []

    def search() -> None:
        with stop_on_signal() as stop, interrupted_by_signals():
            entered.append(stop.is_set())

    thread = threading.Thread(target=search)
    thread.start()
    thread.join()
    assert entered == [False]


# Sends itself three Ctrl-Cs, or what the first argument says, at the moment that the second and third name.
AT_A_MOMENT = """
import os, runpy, sys
number, event, name = int(sys.argv[1]), sys.argv[2], sys.argv[3]
sent = []
def look(what, details):
    if what == event and not sent and str(details[0]).endswith(name):
        sent.append(True)
        for _ in range(3):
            os.kill(os.getpid(), number)
sys.addaudithook(look)
sys.argv[1:] = sys.argv[4:]
runpy.run_module("mm_autoparallel.cli.main", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    ("number", "event", "name"),
    [
        (signal.SIGINT, "import", "argparse"),
        (signal.SIGTERM, "import", "numpy"),
        (signal.SIGINT, "open", "problem.json"),
        (signal.SIGTERM, "open", "problem.json"),
        (signal.SIGINT, "import", "mm_autoparallel.pipeline.placement.place"),
    ],
)
def test_no_moment_before_the_search_is_too_early(repository: Path, number: int, event: str, name: str) -> None:
    problem = repository / "examples" / "place" / "problem.json"
    command = [sys.executable, "-c", AT_A_MOMENT, str(int(number)), event, name, "place", str(problem)]
    result = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (130, "")
    assert result.stderr == "mm-autoparallel: interrupted before there was a result\n"


def test_no_library_swallows_it(repository: Path) -> None:
    """torch imports numpy from its machine code, and drops whatever is raised meanwhile."""
    pytest.importorskip("torch")
    command = [sys.executable, "-c", AT_A_MOMENT, "2", "import", "numpy.linalg", "profile", "no.json"]
    result = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=60)
    assert result.returncode in (130, -signal.SIGINT)
    assert result.stderr == "mm-autoparallel: interrupted before there was a result\n"


# Ctrl-C while torch is imported, a part of which its machine code does: says where it is raised.
WHILE_TORCH_IS_IMPORTED = """
import os, signal, sys
class Sender:
    sent = False
    def find_spec(self, name, path, target=None):
        if name == "torch.functional" and not Sender.sent:
            Sender.sent = True
            try:
                os.kill(os.getpid(), signal.SIGINT)
                sum(range(1000))
            except KeyboardInterrupt:
                print("raised inside")
                raise
sys.meta_path.insert(0, Sender())
from mm_autoparallel.signals import interrupt_on_signal, interrupted_by_signals
interrupt_on_signal()
try:
    with interrupted_by_signals():
        from mm_autoparallel.profilers import load_torch
        load_torch()
except KeyboardInterrupt:
    assert Sender.sent
    sys.exit(130)
"""


def test_none_comes_while_torch_is_imported(repository: Path) -> None:
    pytest.importorskip("torch")
    command = [sys.executable, "-c", WHILE_TORCH_IS_IMPORTED]
    result = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (130, "")


# SIGTERM where torch calls Python and carries no exception out; the process would be aborted.
INSIDE_OF_TORCH = """
import os, signal, sys
from torch import nn, randint
from torch._library import simple_registry
from mm_autoparallel.profilers.meter import KeptActivations
from mm_autoparallel.profilers.trace.fakes import build_fake, on_fakes
from mm_autoparallel.profilers.trace.recorder import Recorder
from mm_autoparallel.signals import interrupted_by_signals
find, to_send = simple_registry.find_torch_dispatch_rule, []
def find_and_send(*arguments):
    if to_send:
        os.kill(os.getpid(), to_send.pop())
    return find(*arguments)
simple_registry.find_torch_dispatch_rule = find_and_send  # which torch looks up once
model = build_fake(lambda: nn.Embedding(4, 4))
try:
    with interrupted_by_signals(), on_fakes(model), KeptActivations(model), Recorder():
        tokens = randint(4, (3,))
        to_send.append(signal.SIGTERM)
        for _ in range(100):
            model(tokens).sum().backward()
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_none_comes_where_torch_would_die_of_it(repository: Path) -> None:
    pytest.importorskip("torch.distributed._tools.fake_collectives")
    command = [sys.executable, "-c", INSIDE_OF_TORCH]
    result = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=240)
    assert (result.returncode, result.stderr) == (130, "")


def test_many_signals_do_not_break_the_last_words(repository: Path) -> None:
    """Ctrl-C by a hand that does not let go, until the process has ended."""
    command = [sys.executable, "-c", AT_A_MOMENT, "2", "import", "argparse", "plan", "no.yaml"]
    process = subprocess.Popen(command, cwd=repository, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    told = process.stderr.read(len("mm-autoparallel"))
    while process.poll() is None:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
    told += process.stderr.read()
    process.stderr.close()
    assert process.returncode == 130
    assert told == "mm-autoparallel: interrupted before there was a result\n"


INSIDE_EXEC = """
from mm_autoparallel import streams
from mm_autoparallel.cli import main

def run(argv):
    exec("raise KeyboardInterrupt")

main._run = run
main.start()
"""


def test_one_that_comes_within_source_that_is_run_ends_with_the_code_too(tmp_path: Path) -> None:
    """As where dataclasses are made: `python -m` would go on to end by the signal."""
    (tmp_path / "inside_exec.py").write_text(INSIDE_EXEC)
    command = [sys.executable, "-m", "inside_exec"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (130, "")
    assert result.stderr == "mm-autoparallel: interrupted before there was a result\n"
