"""`python -m mm_autoparallel.profilers.follow PROGRAM …`: run a program that does not outlive who started it.

The kernel is told to kill it when its parent dies (prctl(2), PR_SET_PDEATHSIG, which survives execve), so that a killed
launcher leaves nothing behind, whatever the program does. The environment names the parent, because one that died
before the kernel was told is no longer to be seen.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PARENT = "MM_AUTOPARALLEL_PARENT"
"""Environment variable: the process id of the one that a followed program must not outlive."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def followed(command: Sequence[str]) -> list[str]:
    """`command` as one that follows its parent; PARENT must be in its environment."""
    return [sys.executable, "-m", "mm_autoparallel.profilers.follow", *command]


def follow_parent(parent: int) -> None:
    """This process dies with its parent from here on; at once where the parent is not `parent` any more."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Follow the parent that the environment names, then become the program of the command line."""
    follow_parent(int(os.environ[PARENT]))
    command = sys.argv[1:]
    os.execvpe(command[0], command, os.environ | {PARENT: str(os.getpid())})


if __name__ == "__main__":
    main()
