"""MindSpeed-MM 2.x, as it is registered: its model.json, its launch scripts, and a plan in both."""

from __future__ import annotations

from mm_autoparallel.integrations.framework import Framework, deferred

FRAMEWORK = Framework(
    "MindSpeed-MM 2.x",
    models=deferred("mindspeed_mm.model_reader:MODELS"),
    launches=deferred("mindspeed_mm.script_files:LAUNCHES"),
    plan_files=deferred("mindspeed_mm.plan_files:PLAN_FILES"),
    exporter=deferred("mindspeed_mm.plan_files:EXPORTER"),
    linter=deferred("mindspeed_mm.said:LINTER"),
)
