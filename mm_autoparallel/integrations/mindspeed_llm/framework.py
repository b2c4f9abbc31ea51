"""MindSpeed-LLM, as it is registered: launch scripts of pretrain_gpt.py and posttrain_gpt.py, and a plan in them."""

from __future__ import annotations

from mm_autoparallel.integrations.framework import Framework, deferred

FRAMEWORK = Framework(
    "MindSpeed-LLM 26.1",
    launches=deferred("mindspeed_llm.written:LAUNCHES"),
    exporter=deferred("mindspeed_llm.written:EXPORTER"),
    linter=deferred("mindspeed_llm.written:LINTER"),
)
