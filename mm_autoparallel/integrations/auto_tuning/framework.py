"""Auto Tuning, as it is registered: its flags are added to a training script by mm_autoparallel.hooks."""

from __future__ import annotations

from mm_autoparallel.integrations.auto_tuning.flags import FAMILIES
from mm_autoparallel.integrations.framework import Framework

FRAMEWORK = Framework("Auto Tuning and Auto Settings (MindSpeed)", switches=tuple(one.switch for one in FAMILIES))
