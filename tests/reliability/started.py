"""A command as a person starts it, and every process that comes of it: each carries the command's mark."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent.parent
MARK = "STARTED_BY_A_TEST"
TIMEOUT_S = 240


@dataclass(frozen=True)
class Ended:
    code: int
    stdout: str
    stderr: str


class Started:
    """A command that runs in `folder`, in a session of its own, without what pytest left in the environment."""

    def __init__(self, command: Sequence[object], folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self.mark = uuid.uuid4().hex
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("MM_AUTO", "PYTEST"))}
        self.process = subprocess.Popen(
            [*map(str, command)],
            cwd=folder,
            env={**inherited, "PYTHONPATH": str(REPOSITORY), **(environment or {}), MARK: self.mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait(self, timeout_s: float = TIMEOUT_S) -> Ended:
        try:
            stdout, stderr = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        return Ended(self.process.returncode, stdout, stderr)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def processes(self) -> list[int]:
        """Of this command, itself included, that run now."""
        return [pid for path in Path("/proc").glob("[0-9]*") if self._is_own(pid := int(path.name))]

    def left_over(self, patience_s: float = 10.0) -> list[str]:
        """What still runs after the command has ended and the kernel has had time to end the rest."""
        ends_s = time.monotonic() + patience_s
        while (pids := self.processes()) and time.monotonic() < ends_s:
            time.sleep(0.05)
        return [Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in pids]

    def listening(self) -> set[str]:
        """Addresses, as /proc/net/tcp and tcp6 write them, at which processes of this command wait for others."""
        links = set()
        for pid in self.processes():
            with contextlib.suppress(OSError):  # it has just ended
                links |= {link.readlink() for link in Path(f"/proc/{pid}/fd").iterdir()}
        rows = [
            line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
        ]
        return {row[1].split(":")[0] for row in rows if row[3] == "0A" and Path(f"socket:[{row[9]}]") in links}

    def wait_until(self, what: Callable[[], object], timeout_s: float = 120.0) -> None:
        ends_s = time.monotonic() + timeout_s
        while not what():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < ends_s
            time.sleep(0.02)

    def _is_own(self, pid: int) -> bool:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
            return state not in "ZX" and f"{MARK}={self.mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return False
