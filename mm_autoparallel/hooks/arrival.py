"""Whether a script came by the planner: one that trains without, or ends without, is stopped with a paragraph.

A training shows by its first process group or optimizer. Both are watched from the hook's first line until the script
calls the function that the planner replaces.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from typing import Any

from mm_autoparallel.reports.terminal import say

EXIT_CODE = 2


class Arrival:
    """Watches one process. script: what messages call it. where: the function it must call. supported: what does."""

    def __init__(self, script: str, where: str, supported: str) -> None:
        self._script, self._where, self._supported = script, where, supported
        self._restore: list[Callable[[], None]] = []
        self._open = True

    def watch(self) -> None:
        """Stop the process where it starts a training, or ends, before `arrive`."""
        import torch.distributed as dist
        from torch.optim import Optimizer

        self._guard(dist, "init_process_group", "it makes a process group")
        self._guard(Optimizer, "__init__", "it makes an optimizer")
        atexit.register(self._end)

    def arrive(self) -> None:
        """The script has called the planner: watch no longer."""
        self._open = False
        atexit.unregister(self._end)
        while self._restore:
            self._restore.pop()()

    def describe(self, how: str) -> str:
        """`how` it went on without the planner, and what would do."""
        return (
            f"{self._script}: {how} and has not called {self._where}, where --auto-parallel-mm takes over, so nothing "
            f"was planned; {self._supported}; take --auto-parallel-mm out to train"
        )

    def _guard(self, holder: Any, name: str, what: str) -> None:
        plain = getattr(holder, name)

        def guarded(*args: Any, **options: Any) -> Any:
            if self._open:
                self.arrive()
                say(self.describe(f"{what} to train"))
                sys.exit(EXIT_CODE)
            return plain(*args, **options)

        setattr(holder, name, guarded)
        self._restore.append(lambda: setattr(holder, name, plain))

    def _end(self) -> None:
        """At the interpreter's exit, where no error of the script's own is being told."""
        if self._open and getattr(sys, "last_value", None) is None:
            say(self.describe("it ended"))
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(EXIT_CODE)  # a code cannot be given otherwise here
