"""Tinker, as it is registered: its files are read and written by a verb of its own."""

from __future__ import annotations

from mm_autoparallel.integrations.framework import Framework

FRAMEWORK = Framework("Tinker 1.3 (Ascend/mstt)", verbs=("tinker",))
