"""torch, as it is registered: decision, schedule and code of a training on torch.distributed.pipelining."""

from __future__ import annotations

from mm_autoparallel.integrations.framework import Framework, deferred

FRAMEWORK = Framework(
    "torch.distributed.pipelining (torch 2.13)",
    launches=deferred("torch.written:LAUNCHES"),
    exporter=deferred("torch.written:EXPORTER"),
)
