"""Megatron-Bridge, as it is registered: its configurations, and a plan as overrides of them."""

from __future__ import annotations

from mm_autoparallel.integrations.framework import Framework, deferred

FRAMEWORK = Framework(
    "Megatron-Bridge 0.3",
    launches=deferred("megatron_bridge.written:LAUNCHES"),
    exporter=deferred("megatron_bridge.written:EXPORTER"),
    linter=deferred("megatron_bridge.said:LINTER"),
)
