"""A studio in a process of its own, and what it answers."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMMAND = [sys.executable, "-m", "mm_autoparallel.cli.main"]


@dataclass
class Answer:
    """What a server answered."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def document(self) -> Any:
        """The JSON of the body, packed or not."""
        if self.headers.get("content-type") == "application/octet-stream":
            return json.loads(self.body[4 : 4 + int.from_bytes(self.body[:4], "little")])
        return json.loads(self.body)


class _Stays(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


@dataclass
class Running:
    """A studio in a process of its own."""

    process: subprocess.Popen[str]
    base: str
    token: str
    folder: Path

    def ask(self, path: str, body: Any = None, headers: dict[str, str] | None = None, method: str = "") -> Answer:
        """Ask with the token, unless headers say otherwise; a body is posted as JSON."""
        sent = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"} | (headers or {})
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.base + path, data, {k: v for k, v in sent.items() if v}, method=method or None
        )
        try:
            with urllib.request.build_opener(_Stays).open(request, timeout=60) as found:
                return Answer(found.status, {k.lower(): v for k, v in found.headers.items()}, found.read())
        except urllib.error.HTTPError as found:
            return Answer(found.code, {k.lower(): v for k, v in found.headers.items()}, found.read())

    def do(self, revision: int, **action: Any) -> Answer:
        """An action."""
        return self.ask("/do", {"revision": revision, "action": action})

    def wait(self, seconds: float = 120.0) -> Any:
        """The status once nothing runs any more."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            status = self.ask("/status").document
            if status["work"] is None:
                return status
            time.sleep(0.1)
        raise AssertionError("the search did not end")

    def end(self) -> int:
        """Ctrl-C."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(30)


def start_studio(folder: Path, *arguments: str) -> Running:
    """A studio that serves `folder`, on a free port unless `arguments` name one."""
    process = subprocess.Popen(
        [*COMMAND, "studio", "--port", "0", *arguments], cwd=folder, stderr=subprocess.PIPE, text=True
    )
    told = []
    assert process.stderr is not None
    for line in process.stderr:
        told.append(line)
        found = re.search(r"(http://127\.0\.0\.1:\d+)/\?token=(\S+)", line)
        if found:
            return Running(process, found[1], found[2], folder)
    raise AssertionError("".join(told))
