"""Engine: what the planner asks of whatever solves its tasks."""

from __future__ import annotations

from typing import Protocol

from mm_autoparallel.pipeline.solve.task import Answer, Task


class Engine(Protocol):
    """`give` tasks while some are `free`, `wait` for answers, `close` at the end."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What went wrong so far, and should be known before the result is trusted."""

    @property
    def free(self) -> int:
        """How many more tasks can be given now."""

    def give(self, task: Task) -> None:
        """Take a task; only while `free`."""

    def tell_cutoff(self, cutoff_ms: float) -> None:
        """Tell running tasks that steps which are not below it are of no interest any more."""

    def wait(self) -> Answer | None:
        """The next answer, which may be a better placement on the way of a task (`is_last` False); None where nothing
        is under way, or nothing came after the word to stop.
        """

    def has_answer(self) -> bool:
        """Whether `wait` would answer at once. Costs little."""

    def close(self) -> None:
        """End all processes."""
