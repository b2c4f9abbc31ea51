"""Galvatron, as it is registered: its files are read and written by verbs of its own."""

from __future__ import annotations

from mm_autoparallel.integrations.framework import Framework

FRAMEWORK = Framework("Galvatron (Hetu-Galvatron 2.4)", verbs=("galvatron-search", "galvatron-score"))
