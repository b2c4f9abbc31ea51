"""Hooks: three lines in a pretrain script.

    hooks.add_arguments(parser)                      # --auto-parallel-mm and its like
    pretraining = hooks.Pretraining(model=…, workload=…, subject=…)
    hooks.auto_parallel(arguments, pretraining)      # profiles, searches and exits where the flags say so

and, to train under what was found, `plan = hooks.applied_plan(arguments, pretraining)`.
"""

from mm_autoparallel.hooks.applied import AppliedPlan, Held, applied_plan
from mm_autoparallel.hooks.auto_parallel import auto_parallel
from mm_autoparallel.hooks.flags import add_arguments
from mm_autoparallel.hooks.pretraining import Pretraining

__all__ = ["add_arguments", "Pretraining", "auto_parallel", "applied_plan", "AppliedPlan", "Held"]
