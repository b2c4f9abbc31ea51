"""The errors a caller may expect, and nothing else.

    PlannerError
    ├── JobError         the job, model, cluster, problem or flags are wrong
    ├── ProfileError     a profile is missing, stale, corrupt or of another model
    ├── PlanError        an edited plan does not fit its job
    ├── TableError       a table of measurements is malformed, or of no known format
    ├── NoFeasiblePlan   expected outcome: nothing fits; names what binds and the smallest relaxation
    ├── Unfinished       the time limit came before anything was found: whether something fits is not known
    │   └── Interrupted  a person or a signal came before
    └── BackendError     a launched run failed

Each message is one paragraph for a person: what is wrong, where (file and key), and what would be right. What code asks
are fields, so that nobody takes messages apart: `where`, the file as messages call it (`job file job.yaml`), with which
the message then begins; `key`, in that file, as one would write it; `reason`, the message without its beginning. The
first two are empty where there is no such file, or no single key. `exit_code` is what the command line returns.
"""

from __future__ import annotations


class PlannerError(Exception):
    """Base of every error that is the user's to mend (exit 2) or an expected outcome (exit 3, 124, 130)."""

    exit_code = 2

    def __init__(self, reason: str, *, where: str = "", key: str = "") -> None:
        super().__init__(f"{where}: {reason}" if where else reason)
        self.reason, self.where, self.key = reason, where, key


class JobError(PlannerError):
    """The job, model, cluster, problem or flags are wrong."""


class ProfileError(PlannerError):
    """A profile is missing, stale, corrupt or of another model; says which block and how to measure it."""


class PlanError(PlannerError):
    """A plan or certificate does not fit its job or problem; says which stage or key."""


class TableError(PlannerError):
    """A table of measurements is malformed or of no known format; says which row and column."""


class NoFeasiblePlan(PlannerError):
    """Nothing satisfies the constraints; names the binding one and the smallest relaxation."""

    exit_code = 3


class Unfinished(PlannerError):
    """The time limit came before anything was found, which does not mean that there is nothing; says what was left."""

    exit_code = 124  # that of `timeout`, which means the same


class Interrupted(Unfinished):
    """The same, where the search was asked to stop."""

    exit_code = 130


class BackendError(PlannerError):
    """A launched run failed; says which rank, its last lines, and where the log is."""
