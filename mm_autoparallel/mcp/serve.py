"""The server: requests of one client on standard input, answers on standard output, nothing else there.

While it serves, descriptor 1 is standard error for all but the protocol, so that what anything prints harms nothing. It
ends when standard input ends or a signal comes: searches are asked to stop, and what has not ended after GRACE_S is
left. Processes that searches start die with this one (child_process.py).
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import anyio
import mcp_types as types
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp.shared.exceptions import MCPError

from mm_autoparallel import __version__
from mm_autoparallel.confinement import confine, release
from mm_autoparallel.errors import JobError, PlannerError
from mm_autoparallel.mcp import questions
from mm_autoparallel.mcp.answers import Answer, StatusAnswer, cleaned
from mm_autoparallel.mcp.calls import Bug, Calls
from mm_autoparallel.mcp.catalog import AT_ONCE, TOOLS
from mm_autoparallel.mcp.folder import Folder
from mm_autoparallel.private import private_folders
from mm_autoparallel.records import Noun
from mm_autoparallel.signals import forwarded_signals
from mm_autoparallel.streams import say
from mm_autoparallel.validation import validation_error

MAX_ARGUMENT_BYTES = 100_000
"""Of the arguments of one call. Assumed: a hundred times what a call needs."""
MAX_MESSAGE_BYTES = 16_000_000
"""Of one message: one that is longer ends the server, which keeps none of it. Assumed."""
MAX_WORDS = 4_000
"""Characters of an error. Assumed."""
GRACE_S = 5.0
"""How long searches and answers get to end after standard input has. Assumed; searches look several times a second."""

_LEFT = (BrokenPipeError, anyio.BrokenResourceError, anyio.ClosedResourceError)
"""What is raised where the client leaves without a word."""

INSTRUCTIONS = (
    "Plans the distributed training of large (multimodal) models: parallel strategy, layers and recompute of each "
    "pipeline stage, with a proof of how good the plan is. Begin with a job file (`init` writes one), then `plan`; "
    "`edit` and `simulate` try changes, `explain` and `why_not` give reasons, `report` writes a page for people. Paths "
    "are relative to the folder served. Times are in ms, memory in bytes. A search says how far it is by progress; "
    "`stop` ends it with the best so far, `status` tells what runs and what ended last."
)


def serve(folder: Path) -> int:
    """Serve `folder`, the working directory, until standard input ends or a signal comes; the exit code.

    Raises JobError where it cannot be served.
    """
    with tempfile.TemporaryDirectory(prefix="mm-autoparallel-mcp-") as own:
        try:
            confine(folder, own=(Path(own), *private_folders()))
        except OSError as failure:
            raise JobError(f"{folder} cannot be served: {failure.strerror or failure}") from None
        before, tempfile.tempdir = tempfile.tempdir, own  # where the package keeps what it needs for a moment
        server = _Server(Folder(folder), Path(own))
        try:
            anyio.run(server.run)
        except Exception as failure:
            if not all(isinstance(leaf, _LEFT) for leaf in _leaves(failure)):
                raise
        finally:
            server.ended.set()
            tempfile.tempdir = before
            release()
    return 0


class _Server:
    """One server and its client. own: its temporary folder. ended: set once nothing runs any more."""

    def __init__(self, folder: Folder, own: Path) -> None:
        self.calls, self.own = Calls(folder), own
        self.ended = threading.Event()
        self._is_ending = False
        self._protocol: Server[dict[str, Any]] = Server(
            "mm-autoparallel",
            version=__version__,
            instructions=INSTRUCTIONS,
            on_list_tools=self.list_tools,
            on_call_tool=self.call_tool,
        )

    async def run(self) -> None:
        """Serve until the input ends."""
        loop, lines = asyncio.get_running_loop(), _Lines(self.end)
        say(f"serving {self.calls.folder.root} over standard input and output")
        with forwarded_signals(lambda _: loop.call_soon_threadsafe(lines.close)):
            # of its input the SDK asks no more than that it yields lines
            async with stdio_server(stdin=cast("anyio.AsyncFile[str]", lines)) as (reader, writer):
                await self._protocol.run(reader, writer, self._protocol.create_initialization_options())

    def end(self) -> None:
        """Ask what runs to stop, and end the process where that takes too long."""
        if not self._is_ending:
            self._is_ending = True
            self.calls.stop()
            threading.Thread(target=self._end_late, daemon=True).start()

    def _end_late(self) -> None:
        if not self.ended.wait(GRACE_S):
            say("something did not end in time; the server ends without it")
            shutil.rmtree(self.own, ignore_errors=True)
            os._exit(0)

    async def list_tools(
        self, _context: ServerRequestContext[Any, Any], _params: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        """All tools with their schemas."""
        return types.ListToolsResult(tools=list(_list_tools()))

    async def call_tool(
        self, context: ServerRequestContext[Any, Any], params: types.CallToolRequestParams
    ) -> types.CallToolResult:
        """The answer of a tool, or its error."""
        if params.name not in (*TOOLS, *AT_ONCE):
            known = ", ".join((*TOOLS, *AT_ONCE))
            raise MCPError(types.INVALID_PARAMS, f"there is no tool {params.name[:100]!r}; there are {known}")
        try:
            answer = await self._answer(context, params.name, params.arguments or {})
        except (PlannerError, Bug) as error:
            return _refusal(str(error))
        return types.CallToolResult(
            content=[types.TextContent(type="text", text=str(cleaned(answer.text())))],
            structured_content=cleaned(answer.model_dump(mode="json")),
        )

    async def _answer(self, context: ServerRequestContext[Any, Any], name: str, arguments: dict[str, Any]) -> Answer:
        size = len(json.dumps(arguments).encode())
        if size > MAX_ARGUMENT_BYTES:
            raise JobError(f"the arguments are {size:,} bytes long; at most {MAX_ARGUMENT_BYTES:,} are taken")
        if name == "status":
            parse(questions.NoQuestion, name, arguments)
            return self.calls.status()
        if name == "stop":
            self.calls.stop(parse(questions.StopQuestion, name, arguments).number)
            return self.calls.status()
        tool = TOOLS[name]
        question = parse(tool.question, name, arguments)

        async def tell(elapsed_s: float, words: str) -> None:
            await context.session.report_progress(elapsed_s, message=str(cleaned(words)))

        return await self.calls.run(name, tool.turn, lambda call: tool.run(question, call), tell)


class _Lines:
    """The lines of standard input, read by a thread that nobody waits for at the end."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._send, self._receive = anyio.create_memory_object_stream[str](0)
        self._descriptor = os.dup(0)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)  # processes that are started read nothing that is meant for this one
        os.close(nothing)
        threading.Thread(target=self._read, daemon=True).start()

    def close(self) -> None:
        """No line comes any more."""
        self._on_end()
        self._send.close()

    def __aiter__(self) -> AsyncIterator[str]:
        return self._receive.__aiter__()

    def _read(self) -> None:
        with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError, RuntimeError):  # it has ended
            with suppress(OSError):  # a terminal that is gone
                for line in _read_lines(self._descriptor):
                    asyncio.run_coroutine_threadsafe(self._send.send(line), self._loop).result()
            self._loop.call_soon_threadsafe(self.close)


def _read_lines(descriptor: int) -> Iterator[str]:
    """Lines of the file, waited for, until it ends or one is too long."""
    rest = b""
    while chunk := os.read(descriptor, 1 << 16):
        *lines, rest = (rest + chunk).split(b"\n")
        yield from (line.decode("utf-8", "replace") for line in lines if line.strip())
        if len(rest) > MAX_MESSAGE_BYTES:
            say(f"a message of more than {MAX_MESSAGE_BYTES:,} bytes came in; the server ends")
            return


def _list_tools() -> Iterator[types.Tool]:
    for name, tool in TOOLS.items():
        yield _describe(name, tool.description, tool.question, tool.answer, is_reader=not tool.writes)
    for name, (description, question) in AT_ONCE.items():
        yield _describe(name, description, question, StatusAnswer, is_reader=True)


def _describe(name: str, description: str, question: type[Noun], answer: type[Answer], is_reader: bool) -> types.Tool:
    return types.Tool(
        name=name,
        description=description,
        input_schema=_untitled(question.model_json_schema()),
        output_schema=_untitled(answer.model_json_schema(mode="serialization")),
        annotations=types.ToolAnnotations(
            read_only_hint=is_reader, destructive_hint=not is_reader, open_world_hint=False
        ),
    )


def _untitled(schema: Any) -> Any:
    """`schema` without the titles that pydantic makes of names: assistants read all of it."""
    if isinstance(schema, list):
        return [_untitled(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _untitled(value) for key, value in schema.items() if key != "title" or not isinstance(value, str)}


def parse(record: type[Any], tool: str, arguments: dict[str, Any]) -> Any:
    """The question. Raises JobError with one paragraph naming the argument and what would be right."""
    from pydantic import ValidationError

    try:
        return record.model_validate(arguments)
    except ValidationError as failure:
        raise validation_error(failure, f"arguments of {tool}", record, arguments) from None


def _refusal(words: str) -> types.CallToolResult:
    told = str(cleaned(words))
    if len(told) > MAX_WORDS:
        told = f"{told[:MAX_WORDS]} … ({len(told) - MAX_WORDS} characters left out)"
    return types.CallToolResult(content=[types.TextContent(type="text", text=told)], is_error=True)


def _leaves(failure: BaseException) -> Iterator[BaseException]:
    """What a group of exceptions holds."""
    inner = getattr(failure, "exceptions", None)
    if inner is None:
        yield failure
        return
    for one in inner:
        yield from _leaves(one)
