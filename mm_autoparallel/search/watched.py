"""A search that a person waits for: its kernels announced, its progress shown, its end in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from mm_autoparallel.job.job import Job
from mm_autoparallel.placement import compile_kernels
from mm_autoparallel.reports.terminal import Progress
from mm_autoparallel.search.candidate import progress_line
from mm_autoparallel.search.planner import DEFAULT_TIME_LIMIT_S, SearchResult, search


def search_watched(
    job: Job, time_limit_s: float | None, should_stop: Callable[[], bool], top_k: int = 1
) -> SearchResult:
    """`search` with a progress line on the terminal. time_limit_s: None for the default. Raises as `search` does."""
    compile_kernels()
    progress = Progress()
    try:
        return search(
            job,
            time_limit_s=time_limit_s or DEFAULT_TIME_LIMIT_S,
            should_stop=should_stop,
            on_progress=lambda state: progress.show(progress_line(state)),
            top_k=top_k,
        )
    finally:
        progress.close()


def describe_end(result: SearchResult) -> str:
    """Two lines: how many strategies ended how, and what is known of all plans."""
    ends = Counter(candidate.status for candidate in result.candidates)
    told = ", ".join(f"{number} {status}" for status, number in ends.items())
    gap = f"no plan of this space is below {result.lower_bound_ms:.2f} ms (gap {result.gap_fraction * 100:.3f} %)"
    how = "proven" if result.proven else f"not proven, {result.stopped}"
    return f"{len(result.candidates)} strategies in {result.elapsed_s:.1f} s: {told}\n{how}: {gap}"
