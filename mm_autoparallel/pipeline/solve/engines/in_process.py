"""One task at a time, in this process."""

from __future__ import annotations

from collections.abc import Callable

from mm_autoparallel.pipeline.solve.known_paths import KnownPaths
from mm_autoparallel.pipeline.solve.task import Answer, Task, solve


class InProcess:
    """Solves a task when it is waited for. on_better: told of placements on the way; they do not come from `wait`."""

    def __init__(self, should_stop: Callable[[], bool], on_better: Callable[[Answer], None] = lambda _: None) -> None:
        self._should_stop, self._on_better = should_stop, on_better
        self._task: Task | None = None
        self._known_paths = KnownPaths()

    @property
    def warnings(self) -> tuple[str, ...]:
        return ()

    @property
    def free(self) -> int:
        return 0 if self._task else 1

    def give(self, task: Task) -> None:
        """Keep the task until `wait`."""
        self._task = task

    def tell_cutoff(self, cutoff_ms: float) -> None:
        """Nothing runs that could be told."""

    def wait(self) -> Answer | None:
        """Solve it."""
        task, self._task = self._task, None
        if task is None:
            return None
        return solve(task, self._should_stop, self._on_better, known_paths=self._known_paths)

    def has_answer(self) -> bool:
        """Nothing is solved before it is waited for."""
        return False

    def close(self) -> None:
        """Nothing to end."""
