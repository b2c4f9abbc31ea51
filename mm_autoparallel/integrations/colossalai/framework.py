"""Colossal-AI, as it is registered: the keywords of HybridParallelPlugin, in JSON or in the Python that calls it."""

from __future__ import annotations

from mm_autoparallel.integrations.framework import Framework, deferred

FRAMEWORK = Framework(
    "Colossal-AI 0.5",
    launches=deferred("colossalai.written:LAUNCHES"),
    exporter=deferred("colossalai.written:EXPORTER"),
    linter=deferred("colossalai.said:LINTER"),
)
