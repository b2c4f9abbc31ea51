"""A server in a process of its own, and the SDK's client, asked without a word of `async`."""

from __future__ import annotations

import sys
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anyio.from_thread import BlockingPortal
    from mcp.client import Client

COMMAND = [sys.executable, "-m", "mm_autoparallel.cli.main", "mcp"]
LAYERS = {"num_layers": 8, "hidden_size": 1024, "ffn_size": 4096, "num_heads": 8, "norm": "rms"}
SMALL = {
    "model": {"name": "small", "text": {"vocab_size": 32000, "layers": LAYERS}},
    "cluster": {"device": "a100-80g", "num_nodes": 1, "devices_per_node": 4},
    "workload": {"global_batch_size": 16, "seq_length": 1024},
    "search": {"pp": [2], "tp": [1], "mbs": [1]},
}


@dataclass
class Session:
    """A client and the folder that its server serves. told: progress of the last call."""

    portal: BlockingPortal
    client: Client
    folder: Path
    told: list[str] = field(default_factory=list)

    async def _tell(self, progress: float, total: float | None, message: str | None) -> None:
        self.told.append(message or "")

    def start(self, tool: str, **arguments: Any) -> Future[Any]:
        """A call whose answer is waited for later, or that is cancelled."""
        self.told.clear()
        ask = partial(self.client.call_tool, tool, arguments, progress_callback=self._tell)
        return self.portal.start_task_soon(ask)

    def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """What a tool answers; its text under `text`."""
        result = self.start(tool, **arguments).result(timeout=300)
        (content,) = result.content
        assert not result.is_error, content.text
        return result.structured_content | {"text": content.text}

    def refusal(self, tool: str, **arguments: Any) -> str:
        """The sentence by which a tool refuses."""
        result = self.start(tool, **arguments).result(timeout=300)
        assert result.is_error
        assert result.structured_content is None
        (content,) = result.content
        return str(content.text)
