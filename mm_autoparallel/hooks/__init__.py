"""Hooks: three lines in a pretrain script.

    hooks.add_arguments(parser)                      # --auto-parallel-mm and its like
    pretraining = hooks.Pretraining(model=…, workload=…, subject=…)
    hooks.auto_parallel(arguments, pretraining)      # profiles, searches and exits where the flags say so

or, in a script that takes Megatron-LM's flags,

    hooks.add_arguments(parser)
    hooks.add_tuning_arguments(parser)               # --auto-tuning, --auto-settings and their like
    hooks.auto_tuning(arguments, subject)

and, to train under what was found, `plan = hooks.applied_plan(arguments, pretraining)`. `hooks.RankExchange` is how
replicas meet for `BatchBalancer.wrap`.
"""

from mm_autoparallel.hooks.applied import AppliedPlan, Held, applied_plan
from mm_autoparallel.hooks.auto_parallel import auto_parallel, auto_tuning
from mm_autoparallel.hooks.balanced_batches import RankExchange
from mm_autoparallel.hooks.flags import add_arguments
from mm_autoparallel.hooks.pretraining import Pretraining
from mm_autoparallel.hooks.tuning_flags import add_tuning_arguments

__all__ = [
    "AppliedPlan",
    "Held",
    "Pretraining",
    "RankExchange",
    "add_arguments",
    "add_tuning_arguments",
    "applied_plan",
    "auto_parallel",
    "auto_tuning",
]
