"""The process that starts the ranks of one node through torch.distributed.run, and writes down how they failed.

What torchrun would print for a person goes into a file for the launcher: one record a failed rank. Where all ranks are
on this machine, the store at which they meet listens on loopback alone.
"""

from __future__ import annotations

import ipaddress
import json
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

from mm_autoparallel.child_process import followed
from mm_autoparallel.files import write_text_atomically

LOOPBACK = "127.0.0.1"
JOIN_S = 300.0
"""Of ranks with the store: torch's default."""


def main(report: str, *options: str) -> int:
    """Run torchrun with `options`, its program last, until all ranks have ended; 1 where one failed."""
    import torch.distributed.run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    torchrun: Any = torch.distributed.run  # it has no types
    asked = torchrun.parse_args(list(options))
    asked.training_script, *asked.training_script_args = followed([asked.training_script, *asked.training_script_args])
    store = None
    if asked.nnodes == "1":
        asked.master_addr = LOOPBACK
    if asked.node_rank == 0 and ipaddress.ip_address(asked.master_addr).is_loopback:
        store = _serve(asked.master_addr, asked.master_port)
        asked.master_port = store.port
    try:
        torchrun.run(asked)
    except ChildFailedError as error:
        failures = [
            {"rank": rank, "local_rank": failure.local_rank, "exit_code": failure.exitcode, "time_s": failure.timestamp}
            for rank, failure in error.failures.items()
        ]
        write_text_atomically(Path(report), json.dumps({"failures": failures}))
        return 1
    finally:
        del store
    return 0


def _serve(address: str, port: int) -> Any:
    """The store that ranks meet at, on `port` (0: any that is free) of `address`.

    torchrun opens its own on all interfaces, unless this process serves one for several tenants on that port already.
    """
    from mm_autoparallel.profilers.torch_releases import serve_store

    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((address, port))
    listener.listen(1024)
    return serve_store(address, listener, timedelta(seconds=JOIN_S), multi_tenant=True)
