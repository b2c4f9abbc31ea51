"""torchtitan, as it is registered: TOMLs of 0.2, registries of 0.3 and of the newest code."""

from __future__ import annotations

from mm_autoparallel.integrations.framework import Framework, deferred

FRAMEWORK = Framework(
    "torchtitan 0.2, 0.3 and main",
    launches=deferred("torchtitan.written:LAUNCHES"),
    exporter=deferred("torchtitan.written:EXPORTER"),
    linter=deferred("torchtitan.said:LINTER"),
)
