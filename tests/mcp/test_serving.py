"""The server as a process: what is on its standard output, how it ends, and what it says where it cannot serve."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp", reason="comes with the extra `mcp`")

from mcp_session import COMMAND

from mm_autoparallel.cli.main import main
from mm_autoparallel.mcp import serve

pytestmark = pytest.mark.slow

HELLO = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}},
}


def ask(process: subprocess.Popen[str], *messages: object) -> None:
    assert process.stdin
    for message in messages:
        process.stdin.write((message if isinstance(message, str) else json.dumps(message)) + "\n")
    process.stdin.flush()


def call(number: int, tool: str, **arguments: Any) -> dict[str, Any]:
    params = {"name": tool, "arguments": arguments, "_meta": {"progressToken": number}}
    return {"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": params}


@pytest.fixture
def server(served: Path) -> Iterator[subprocess.Popen[str]]:
    """A server that has been greeted, in a session of its own, so that what it starts can be found."""
    process = subprocess.Popen(
        COMMAND,
        cwd=served,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    ask(process, HELLO, {"jsonrpc": "2.0", "method": "notifications/initialized"})
    yield process
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        assert stream
        with suppress(BrokenPipeError):
            stream.close()


def processes_of(session: int) -> list[str]:
    """The command lines of the processes that belong to a session."""

    def command_line(folder: Path) -> str:
        with suppress(OSError):  # it has ended
            state, *_, session_of = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            return (folder / "cmdline").read_text() if int(session_of) == session and state != "Z" else ""
        return ""

    return [line for line in map(command_line, Path("/proc").glob("[0-9]*")) if line]


def search_and_end(server: subprocess.Popen[str], end: signal.Signals | None) -> list[str]:
    """End the server by a signal, or by closing its input, while it searches; what it has printed since it was asked.

    It ends at once, without a mistake, and what it started ends too.
    """
    assert server.stdin
    assert server.stdout
    assert server.stderr
    ask(server, call(9, "plan", job="job_vpp4.yaml", out=f"ended_{end}.json", time_limit_s=300))
    printed = []
    for line in server.stdout:
        printed.append(line)
        if "best so far" in line:
            break
    began_s = time.monotonic()
    if end is None:
        server.stdin.close()
    else:
        server.send_signal(end)
    assert server.wait(timeout=60) == 0
    assert time.monotonic() - began_s < 30
    while processes_of(server.pid):
        assert time.monotonic() - began_s < 60, processes_of(server.pid)
        time.sleep(0.05)
    assert "Traceback" not in server.stderr.read()
    return [*printed, *server.stdout]


def test_standard_output_holds_the_protocol_alone_and_sigterm_ends_it(
    server: subprocess.Popen[str], served: Path
) -> None:
    (served / "talks.json").write_text((served / "small.json").read_text().replace('"seq_length"', '"seq_lenght"'))
    ask(
        server,
        "no JSON",
        '{"jsonrpc": "2.0", "id": 7, "method": "tools/list", "params": {"cursor": 5}}',
        call(2, "init", model="qwen3-30b-a3b", device="h100-80g", global_batch_size=8, seq_length=64, out="talk.yaml"),
        call(3, "plan", job="talks.json"),
        call(4, "plan", job="small.json", out="small_plan.json"),
        call(5, "status"),
    )
    assert server.stdout
    answered: dict[int, Any] = {}
    while not {1, 2, 3, 4, 5, 7} <= answered.keys():
        line = json.loads(server.stdout.readline())
        assert line["jsonrpc"] == "2.0"
        answered |= {line["id"]: line} if "id" in line else {}
    assert answered[2]["result"]["isError"] is False
    assert "search.ep is not said" in answered[2]["result"]["content"][0]["text"]
    assert answered[3]["result"]["isError"] is True
    assert answered[4]["result"]["structuredContent"]["proven"] is True
    assert "error" in answered[7]
    assert {json.loads(line)["jsonrpc"] for line in search_and_end(server, signal.SIGTERM)} == {"2.0"}


@pytest.mark.nightly
@pytest.mark.parametrize("end", [signal.SIGINT, None])
def test_ctrl_c_and_the_end_of_its_input_end_it(server: subprocess.Popen[str], end: signal.Signals | None) -> None:
    assert {json.loads(line)["jsonrpc"] for line in search_and_end(server, end)} == {"2.0"}


@pytest.mark.nightly
def test_a_client_that_leaves_without_a_word_is_no_crash(served: Path) -> None:
    reader, writer = os.pipe()
    process = subprocess.Popen(
        COMMAND, cwd=served, stdin=subprocess.PIPE, stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    os.close(reader)
    _, said = process.communicate(json.dumps(HELLO) + "\n", timeout=60)
    assert process.returncode == 0
    assert "Traceback" not in said


def test_without_the_extra_it_names_the_pip_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in sys.modules if name.startswith("mm_autoparallel.mcp")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mcp_types", None)
    assert main(["mcp"]) == 2
    assert capsys.readouterr().err == (
        "mm-autoparallel: mcp needs the package `mcp` 2, which is not installed; pip install 'mm-autoparallel[mcp]'\n"
    )


def test_a_home_folder_is_served_only_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert main(["mcp"]) == 2
    assert "all below it would be served; name a project's by --folder DIR" in capsys.readouterr().err
    assert main(["mcp", "--folder", "none"]) == 2
    assert "--folder none: No such file or directory" in capsys.readouterr().err


@pytest.mark.nightly
def test_what_does_not_stop_is_left_behind(served: Path, tmp_path: Path) -> None:
    """A tool that looks at nothing keeps no server alive, and its temporary folder goes too."""
    script = tmp_path / "stubborn.py"
    script.write_text(
        "import sys, time\n"
        "from dataclasses import replace\n"
        "from mm_autoparallel.cli.main import main\n"
        "from mm_autoparallel.mcp import catalog, serve\n"
        "def wait(question, call):\n"
        "    call.words = 'best so far: it waits'\n"
        "    time.sleep(300)\n"
        "catalog.TOOLS['doctor'] = replace(catalog.TOOLS['doctor'], run=wait)\n"
        "serve.GRACE_S = 1.0\n"
        "sys.exit(main(['mcp']))\n"
    )
    process = subprocess.Popen(
        [sys.executable, script],
        cwd=served,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        ask(process, HELLO, {"jsonrpc": "2.0", "method": "notifications/initialized"}, call(2, "doctor"))
        assert process.stdout
        assert process.stderr
        assert any("best so far" in line for line in process.stdout)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
        assert "something did not end in time" in process.stderr.read()
    assert [path.name for path in tmp_path.iterdir()] == ["stubborn.py"]


def test_lines_are_put_together_and_one_that_is_too_long_ends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "MAX_MESSAGE_BYTES", 1000)
    reader, writer = os.pipe()
    lines = serve._read_lines(reader)
    os.write(writer, b"first\n\nsec")
    assert next(lines) == "first"
    os.write(writer, b"ond\n\xff\n" + b"x" * 1001)
    assert [*lines] == ["second", "\ufffd"]
    os.close(writer)
    os.close(reader)
