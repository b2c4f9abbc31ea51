"""Galvatron, as it is registered: strategies of one kind for all layers as plans, its search by verbs of its own."""

from __future__ import annotations

from mm_autoparallel.integrations.framework import Framework, deferred

FRAMEWORK = Framework(
    "Galvatron (Hetu-Galvatron 2.4)",
    launches=deferred("galvatron.plans:LAUNCHES"),
    exporter=deferred("galvatron.plans:EXPORTER"),
    verbs=("galvatron-search", "galvatron-score", "galvatron-profiles"),
)
