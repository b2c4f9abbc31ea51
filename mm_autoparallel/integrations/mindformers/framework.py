"""MindFormers, as it is registered: its pretrain YAML is read and written by verbs of its own."""

from __future__ import annotations

from mm_autoparallel.integrations.framework import Framework

FRAMEWORK = Framework("MindFormers", verbs=("nd-search", "pipeline-search", "rank"))
