"""What the package prints goes through streams.py and reports/console.py, which clean it; nothing writes past them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

SINKS = {
    "streams.py": "the sink itself",
    "reports/console.py": "the sink of tables",
    "signals.py": "fixed words, written where a signal handler may",
}
WRITERS = {"print", "warnings.warn", "logging.warning", "os.write", "Console", "rich.print"}
STREAMS = ("sys.stdout.", "sys.stderr.", "sys.__stdout__.", "sys.__stderr__.")


def prints(tree: ast.Module) -> Iterator[str]:
    """Calls that write to a standard stream, and imports of what does."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            to_descriptor = called != "os.write" or ast.unparse(node.args[0]) in ("1", "2")
            if (called in WRITERS and to_descriptor) or (called.startswith(STREAMS) and "write" in called):
                yield f"{node.lineno}: {called}"
        elif isinstance(node, ast.ImportFrom) and node.module in ("rich", "logging"):
            yield from (f"{node.lineno}: {node.module}.{a.name}" for a in node.names if a.name in ("print", "Console"))


def test_nothing_prints_past_the_sinks(sources: dict[str, ast.Module]) -> None:
    found = {path: list(prints(tree)) for path, tree in sources.items() if path not in SINKS}
    assert not {path: calls for path, calls in found.items() if calls}


def test_the_finder_finds() -> None:
    bad = (
        "print(1)",
        "sys.stderr.write('a')",
        "sys.stdout.buffer.write(b)",
        "os.write(2, b)",
        "os.write(fd, b)",
        "Console()",
    )
    assert list(prints(ast.parse("\n".join(bad)))) == [
        "1: print",
        "2: sys.stderr.write",
        "3: sys.stdout.buffer.write",
        "4: os.write",
        "6: Console",
    ]
