"""The FSDP trainers of MindSpeed-MM and MindSpeed-LLM, as they are registered: launch script or YAML, a plan in it."""

from __future__ import annotations

from mm_autoparallel.integrations.framework import Framework, deferred

FRAMEWORK = Framework(
    "the FSDP trainers of MindSpeed-MM and MindSpeed-LLM",
    launches=deferred("mindspeed_mm_fsdp.launch_files:LAUNCHES"),
    linter=deferred("mindspeed_mm_fsdp.said:LINTER"),
)
