"""Waiting for another process by what it has done, not by the clock: machines are busy."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any


def wait_until_used(process: subprocess.Popen[Any], used_s: float) -> None:
    """Until the process itself, its threads but not its children, has used so much of a processor."""
    while True:
        assert process.poll() is None, process.communicate()
        fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        if (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") >= used_s:
            return
        time.sleep(0.05)
