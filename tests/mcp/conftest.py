"""One server in a process of its own for all tests of a file."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mcp_session import COMMAND, SMALL, Session


@pytest.fixture(scope="module")
def start_session() -> Iterator[Callable[[Path], Any]]:
    """Starts servers for folders."""
    from anyio.from_thread import start_blocking_portal
    from mcp.client import Client
    from mcp.client.stdio import StdioServerParameters, stdio_client

    with start_blocking_portal() as portal:

        def start(folder: Path, mode: str = "auto") -> Any:
            server = StdioServerParameters(
                command=COMMAND[0],
                args=COMMAND[1:],
                cwd=folder,
                env={**os.environ, "PYTHONWARNINGS": "error::UserWarning"},
            )
            return portal, portal.wrap_async_context_manager(Client(stdio_client(server), mode=mode))

        yield start


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Path:
    """A folder with jobs and a problem, and what lies beside it."""
    folder = tmp_path_factory.mktemp("outside") / "served"
    folder.mkdir()
    for name in ("job.yaml", "job_vpp4.yaml", "model_72b.json"):
        shutil.copy(repository / "examples" / "qwen2vl_72b" / name, folder)
    shutil.copy(repository / "examples" / "place" / "problem.json", folder)
    shutil.copy(repository / "examples" / "megatron_core" / "train_8b.sh", folder / "train.sh")
    (folder / "small.json").write_text(json.dumps(SMALL))
    return folder


@pytest.fixture(scope="module")
def session(served: Path, start_session: Callable[[Path], Any]) -> Iterator[Session]:
    portal, client = start_session(served)
    with client as entered:
        yield Session(portal, entered, served)
