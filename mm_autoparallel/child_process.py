"""How this package starts processes: they import nothing from the folder they happen to run in, and outlive nobody.

`python -m` and `python -c` import from the current folder before anywhere else, so a stray `json.py` beside a job would
be run. A file that is named is started with its own folder in that place; this one takes that away too, and loads the
package from where the parent has it, whatever else is installed. The kernel is told to kill the process when its parent
dies (prctl(2), PR_SET_PDEATHSIG, which survives execve), so that a killed parent leaves nothing behind.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

TYPE_CHECKING = False  # as typing's; what is imported here is imported by every process
if TYPE_CHECKING:
    from pathlib import Path

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_INSTALLED = "--installed"
_handed_on: dict[str, str] = {}


def hand_on(variable: str, value: str) -> None:
    """Give processes that are started from now on this variable in their environment; this one's stays as it is."""
    _handed_on[variable] = value


def python_command(module: str, *arguments: str) -> list[str]:
    """The argument vector of a process that calls `main` of `module` of this package with `arguments`.

    To be started by this process, with which it dies. It imports from where Python is installed and from PYTHONPATH.
    """
    settings = [f"{variable}={value}" for variable, value in _handed_on.items()]
    return [sys.executable, __file__, str(os.getpid()), *settings, module, *arguments]


def installed_command(python: Path, module: str, *arguments: str) -> list[str]:
    """The same in another environment: of the package as the interpreter `python` has it installed."""
    return [str(python), __file__, str(os.getpid()), _INSTALLED, module, *arguments]


def followed(command: Sequence[str]) -> list[str]:
    """The argument vector of a process that becomes `command`, and dies with this one, which starts it."""
    return python_command("mm_autoparallel.child_process", *command)


def main(*command: str) -> None:
    """Become the program `command`."""
    os.execvp(command[0], command)


def _follow_parent(parent: int) -> None:
    """This process dies with its parent from here on; at once where the parent is not `parent` any more."""
    import ctypes
    import signal

    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the kernel was told
        os.kill(os.getpid(), signal.SIGKILL)


def _start(parent: str, *words: str) -> None:
    import importlib.util
    from pathlib import Path

    _follow_parent(int(parent))
    at = next(n for n, word in enumerate(words) if "=" not in word)  # no name of a module has one
    os.environ.update(dict(word.split("=", 1) for word in words[:at]))
    module, arguments = words[at], words[at + 1 :]
    package = Path(__file__).resolve().parent
    if sys.path and Path(sys.path[0]).resolve() == package:  # not so with PYTHONSAFEPATH
        del sys.path[0]
    if module == _INSTALLED:
        module, *rest = arguments
        sys.exit(importlib.import_module(module).main(*rest))
    spec = importlib.util.spec_from_file_location(package.name, package / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules[package.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[package.name])
    sys.exit(importlib.import_module(module).main(*arguments))


if __name__ == "__main__":
    _start(*sys.argv[1:])
