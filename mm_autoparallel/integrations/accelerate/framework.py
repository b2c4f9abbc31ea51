"""Hugging Face accelerate, as it is registered: its configuration file, of FSDP2, of Megatron-LM and of DeepSpeed."""

from __future__ import annotations

from mm_autoparallel.integrations.framework import Framework, deferred

FRAMEWORK = Framework(
    "Hugging Face accelerate 1.15",
    launches=deferred("accelerate.written:LAUNCHES"),
    exporter=deferred("accelerate.written:EXPORTER"),
    linter=deferred("accelerate.said:LINTER"),
)
