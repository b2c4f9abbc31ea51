"""Calls of tools: in threads, in turns, stopped, and none that ends the server."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

pytest.importorskip("mcp", reason="comes with the extra `mcp`")

import anyio

from mm_autoparallel.errors import JobError
from mm_autoparallel.mcp.answers import Answer, InitAnswer
from mm_autoparallel.mcp.calls import Bug, Call, Calls
from mm_autoparallel.mcp.folder import Folder
from mm_autoparallel.streams import say, telling

DONE = InitAnswer(model="a", parts={}, num_devices=1)


async def untold(_elapsed_s: float, _words: str) -> None:
    """Nobody listens."""


def calls() -> Calls:
    return Calls(Folder(Path.cwd()))


def test_a_bug_is_named_as_one_and_others_go_on() -> None:
    ours = calls()

    def fail(_call: Call) -> Answer:
        raise ZeroDivisionError("of a kind")

    bug = r"init failed by a bug of mm-autoparallel \(ZeroDivisionError: of a kind\)"
    with telling(), pytest.raises(Bug, match=bug):  # as the command line tells
        anyio.run(ours.run, "init", "quick", fail, untold)
    assert anyio.run(ours.run, "init", "quick", lambda _call: DONE, untold) == DONE
    assert [(call.state, call.words) for call in ours.status().calls] == [
        ("answered", "a: ; 1 devices"),
        ("refused", "a bug: ZeroDivisionError"),
    ]


def test_what_is_wrong_with_the_input_is_raised_as_it_is() -> None:
    def refuse(_call: Call) -> Answer:
        raise JobError("mend it")

    with pytest.raises(JobError, match="mend it"):
        anyio.run(calls().run, "init", "quick", refuse, untold)


def test_a_quick_tool_is_answered_while_a_search_runs_and_searches_take_turns() -> None:
    ours, order = calls(), []

    def search(call: Call) -> Answer:
        order.append(f"search {call.number}")
        assert call.stop.wait(30)
        order.append(f"end {call.number}")
        return DONE

    def quick(_call: Call) -> Answer:
        order.append("quick")
        return DONE

    async def ask() -> None:
        async with anyio.create_task_group() as group:
            for _ in range(2):
                group.start_soon(ours.run, "plan", "search", search, untold)
                await anyio.wait_all_tasks_blocked()
            await ours.run("simulate", "quick", quick, untold)
            assert [call.state for call in ours.status().calls] == ["runs", "waits", "answered"]
            ours.stop(1)
            while len(ours.running) > 1:
                await anyio.sleep(0.01)
            ours.stop()

    anyio.run(ask)
    assert order == ["search 1", "quick", "end 1", "search 2", "end 2"]


def test_a_cancelled_call_is_asked_to_stop_and_waited_for() -> None:
    ours, ended = calls(), threading.Event()

    def search(call: Call) -> Answer:
        assert call.stop.wait(30)
        ended.set()
        return DONE

    async def ask() -> None:
        with anyio.move_on_after(0.1):
            await ours.run("plan", "search", search, untold)
        assert ended.is_set()

    anyio.run(ask)
    assert [call.state for call in ours.status().calls] == ["cancelled"]


@pytest.mark.usefixtures("told_on_terminal")
def test_what_is_said_in_its_thread_is_remembered_of_a_call() -> None:
    ours, heard = calls(), list[str]()

    def talk(call: Call) -> Answer:
        say("one of its own")
        other = threading.Thread(target=say, args=("of another thread",))
        other.start()
        other.join()
        heard.extend(call.remarks)
        return DONE

    anyio.run(ours.run, "init", "quick", talk, untold)
    assert heard == ["one of its own"]
