"""MindFormers, as it is registered: its pretrain YAML, and verbs of its own that search divisions of one."""

from __future__ import annotations

from mm_autoparallel.integrations.framework import Framework, deferred

FRAMEWORK = Framework(
    "MindFormers",
    launches=deferred("mindformers.launch:LAUNCHES"),
    exporter=deferred("mindformers.launch:EXPORTER"),
    linter=deferred("mindformers.said:LINTER"),
    verbs=("nd-search", "pipeline-search", "rank"),
)
