"""Auto Tuning, as it is registered: its flags are added to a training script by mm_autoparallel.hooks."""

from __future__ import annotations

from mm_autoparallel.integrations.framework import Framework

FRAMEWORK = Framework("Auto Tuning and Auto Settings (MindSpeed)", switches=("--auto-tuning", "--auto-settings"))
