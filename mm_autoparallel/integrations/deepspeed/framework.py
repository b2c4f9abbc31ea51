"""DeepSpeed, as it is registered: ds_config.json, and the layers beside it."""

from __future__ import annotations

from mm_autoparallel.integrations.framework import Framework, deferred

FRAMEWORK = Framework(
    "DeepSpeed 0.19",
    launches=deferred("deepspeed.written:LAUNCHES"),
    exporter=deferred("deepspeed.written:EXPORTER"),
    linter=deferred("deepspeed.said:LINTER"),
)
