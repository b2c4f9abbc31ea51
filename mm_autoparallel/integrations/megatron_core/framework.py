"""Megatron-LM's pretrain_gpt.py on megatron-core 0.16, as it is registered: its launch scripts, and a plan as flags."""

from __future__ import annotations

from mm_autoparallel.integrations.framework import Framework, deferred

FRAMEWORK = Framework(
    "Megatron-LM on megatron-core 0.16",
    launches=deferred("megatron_core.written:LAUNCHES"),
    exporter=deferred("megatron_core.written:EXPORTER"),
    linter=deferred("megatron_core.file_findings:LINTER"),
)
