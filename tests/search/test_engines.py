"""Tasks in other processes: the same answers, and no answer lost when a process dies or is told to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from nouns import brute_force
from random_problems import random_problem

from mm_autoparallel.child_process import python_command
from mm_autoparallel.pipeline.problem import Problem
from mm_autoparallel.pipeline.solve.engines import local_processes
from mm_autoparallel.pipeline.solve.engines.engine import Engine
from mm_autoparallel.pipeline.solve.engines.in_process import InProcess
from mm_autoparallel.pipeline.solve.engines.local_processes import LocalProcesses
from mm_autoparallel.pipeline.solve.task import Answer, Task, decode_answer, decode_task, encode, solve


def task_of(seed: int, style: str = "real") -> Task:
    problem = random_problem(seed, style)
    hint = brute_force(problem)[1]
    return Task(seed, problem, cutoff_ms=np.inf, gap_fraction=0.0, time_limit_s=30.0, hint=hint)


def last_answer(engine: Engine) -> Answer | None:
    """What `wait` gives at the end of a task, after better placements on its way."""
    while (answer := engine.wait()) is not None and not answer.is_last:
        assert answer.placement is not None
    return answer


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("style", ["real", "unequal"])
def test_a_task_survives_the_journey(seed: int, style: str) -> None:
    task = task_of(seed, style)
    assert decode_task(encode(task)) == task
    answer = Answer(seed, task.hint, 1.25, np.inf, 0.1, reason="no “room”\nhere", overflow_bytes=1e10 / 3)
    assert decode_answer(encode(answer)) == answer
    assert encode(answer).count(b"\n") == 1


@pytest.mark.slow
def test_other_processes_give_the_same_answers() -> None:
    tasks = {seed: replace(task_of(seed), hint=None) for seed in range(8)}
    engine, waiting, found = LocalProcesses(2, lambda: False), list(tasks.values()), {}
    try:
        while waiting or engine.free < 2:
            while waiting and engine.free:
                engine.give(waiting.pop())
            answer = last_answer(engine)
            assert answer is not None
            found[answer.number] = answer
        assert engine.wait() is None
    finally:
        engine.close()
    for seed, task in tasks.items():
        here = solve(task, lambda: False)
        assert replace(found[seed], solve_s=0.0) == replace(here, solve_s=0.0)


def test_in_this_process_there_is_one_task_at_a_time() -> None:
    engine = InProcess(lambda: False)
    assert engine.free == 1
    assert engine.wait() is None
    engine.give(task_of(1))
    assert engine.free == 0
    assert not engine.has_answer()
    answer = last_answer(engine)
    assert answer is not None
    assert (answer.number, engine.free) == (1, 1)


@pytest.mark.slow
def test_an_answer_that_has_arrived_is_seen_before_it_is_waited_for() -> None:
    engine = LocalProcesses(1, lambda: False)
    try:
        assert not engine.has_answer()
        engine.give(task_of(1))
        while not engine.has_answer():
            time.sleep(0.01)
        while (answer := engine.wait()) is not None and not answer.is_last:
            pass
        assert answer is not None
        assert (answer.number, engine.free, engine.has_answer()) == (1, 1, False)
    finally:
        engine.close()


def kill_when_busy(engine: LocalProcesses, times: int) -> threading.Thread:
    """Kills the engine's one process `times` times, a while after it has started."""

    def run() -> None:
        for _ in range(times):
            while not engine.process_ids:
                time.sleep(0.01)
            (number,) = engine.process_ids
            time.sleep(0.3)
            os.kill(number, signal.SIGKILL)
            while number in engine.process_ids:
                time.sleep(0.01)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.slow
def test_a_task_whose_process_dies_is_tried_again(hard_problem: Problem) -> None:
    engine = LocalProcesses(1, lambda: False)
    try:
        engine.give(Task(3, hard_problem, np.inf, 0.0, time_limit_s=6.0))
        killer = kill_when_busy(engine, times=1)
        answer = last_answer(engine)
        killer.join()
        assert answer is not None
        assert (answer.number, answer.reason) == (3, "")
        assert answer.placement is not None
    finally:
        engine.close()


def test_a_task_whose_process_dies_twice_is_given_up(hard_problem: Problem) -> None:
    engine = LocalProcesses(1, lambda: False)
    try:
        engine.give(Task(3, hard_problem, np.inf, 0.0, time_limit_s=60.0))
        killer = kill_when_busy(engine, times=2)
        answer = last_answer(engine)
        killer.join()
        assert answer is not None
        assert answer.placement is None
        assert not answer.infeasible
        assert "killed by signal 9" in answer.reason
    finally:
        engine.close()


@pytest.mark.slow
def test_the_word_to_stop_brings_the_best_so_far(hard_problem: Problem) -> None:
    stop = threading.Event()
    engine = LocalProcesses(1, stop.is_set)
    try:
        engine.give(Task(3, hard_problem, np.inf, 0.0, time_limit_s=60.0))
        assert engine.wait() is not None  # a placement on the way: it runs
        stop.set()
        answer = last_answer(engine)
        assert answer is not None
        assert answer.placement is not None
        assert answer.lower_bound_ms < answer.step_ms
        assert engine.wait() is None
    finally:
        engine.close()


@pytest.mark.slow
def test_a_lower_cutoff_reaches_a_running_task(hard_problem: Problem) -> None:
    """Nothing is below it, so the task ends at once instead of in a minute; so does the next one, told beforehand."""
    engine = LocalProcesses(1, lambda: False)
    try:
        engine.give(Task(3, hard_problem, np.inf, 0.0, time_limit_s=60.0))
        assert engine.wait() is not None  # a placement on the way: it runs
        engine.tell_cutoff(1000.0)
        answer = last_answer(engine)
        assert answer is not None
        assert answer.step_ms > 1000.0
        assert answer.lower_bound_ms == pytest.approx(1000.0, rel=1e-4)
        engine.give(Task(4, hard_problem, np.inf, 0.0, time_limit_s=60.0))
        answer = last_answer(engine)
        assert answer is not None
        assert answer.placement is None
        assert answer.lower_bound_ms == pytest.approx(1000.0, rel=1e-4)
    finally:
        engine.close()


def test_processes_that_all_die_are_told_with_their_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import sys; sys.exit('before the end\\nwhat it died of')"
    monkeypatch.setattr(local_processes, "python_command", lambda _: [sys.executable, "-c", program])
    engine = LocalProcesses(2, lambda: False)
    try:
        assert engine.warnings == ()
        engine.give(task_of(1))
        answer = last_answer(engine)
        assert answer is not None
        assert "ended with exit code 1, and the one before ended likewise" in answer.reason
        assert engine.warnings == (
            "all 2 processes that place problems died; the last one ended with exit code 1, and its last words were: "
            "what it died of",
        )
    finally:
        engine.close()


def test_no_process_outlives_its_engine(hard_problem: Problem) -> None:
    engine = LocalProcesses(1, lambda: False)
    engine.give(Task(3, hard_problem, np.inf, 0.0, time_limit_s=60.0))
    (number,) = engine.process_ids
    engine.close()
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)


@pytest.mark.slow
def test_a_process_ends_with_its_parent(hard_problem: Problem) -> None:
    """The end of its input is all that a parent's death leaves of it."""
    command = python_command("mm_autoparallel.pipeline.solve.engines.worker")
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(encode(Task(3, hard_problem, np.inf, 0.0, time_limit_s=60.0)))
    process.stdin.flush()
    time.sleep(3.0)
    written, _ = process.communicate(timeout=5.0)  # closes its input
    assert process.returncode == 0
    assert decode_answer(written.splitlines()[-1]).is_last
