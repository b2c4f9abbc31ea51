"""Work: what runs beside the page, one search at a time in a thread of its own, with progress and an end to it.

It looks at the session when it begins and comes back to it when it ends: what it found becomes the plan that is worked
on where the job is still the same, and becomes an answer where it is not.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from mm_autoparallel.api import load_solver
from mm_autoparallel.errors import JobError, PlannerError
from mm_autoparallel.planner.evaluate import Estimate
from mm_autoparallel.planner.explain.why_not import WhyNot, describe_wish, explain_why_not, parse_wish
from mm_autoparallel.planner.search.candidate import Progress
from mm_autoparallel.planner.search.planner import examine, search
from mm_autoparallel.planner.search.space import SpaceEntry
from mm_autoparallel.planner.search.watched import describe_end
from mm_autoparallel.reports.estimates import describe_change
from mm_autoparallel.studio import document as words
from mm_autoparallel.studio.moments import Moment
from mm_autoparallel.studio.session import Played, Session
from mm_autoparallel.units import format_ms


@dataclass
class _Running:
    title: str
    limit_s: float
    began_s: float = field(default_factory=time.monotonic)
    progress: Progress | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None

    def see(self, progress: Progress) -> None:
        self.progress = progress


class Worker:
    """Searches of one session."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._running: _Running | None = None

    def status(self) -> words.Work | None:
        """What runs, and how far it is."""
        running = self._running
        if running is None:
            return None
        elapsed_s, progress = time.monotonic() - running.began_s, running.progress
        of_time = min(elapsed_s / running.limit_s, 1.0)
        found = progress is not None and progress.best_ms < float("inf")
        return words.Work(
            title=running.title,
            line=f"{progress.num_done} of {progress.num_candidates} strategies" if progress else "",
            done_fraction=max(of_time, progress.num_done / max(progress.num_candidates, 1)) if progress else of_time,
            best_ms=progress.best_ms if progress and found else None,
            lower_bound_ms=progress.lower_bound_ms if progress and progress.lower_bound_ms < float("inf") else None,
            elapsed_s=elapsed_s,
            limit_s=running.limit_s,
            gap_fraction=progress.gap_fraction if progress and found else None,
        )

    def cancel(self) -> None:
        """Ask what runs for the best so far; nothing where nothing runs."""
        if self._running:
            self._running.stop.set()

    def close(self, wait_s: float) -> None:
        """Cancel, and wait so long for its end."""
        running = self._running
        self.cancel()
        if running and running.thread:
            running.thread.join(wait_s)

    def optimise(self, asked: words.Optimise) -> None:
        """Look for the best of the strategy, or of the space. Raises Stale, or JobError where something runs."""
        self.session.check_revision(asked.revision)
        moment = self.session.present()
        played = self.session.play(moment.source)
        if asked.scope == "space":
            self._start("the best plan of the space", asked.limit_s, lambda run: self._search(run, moment, played))
        else:
            self._start(
                "the best placement of the strategy", asked.limit_s, lambda run: self._examine(run, moment, played)
            )

    def why_not(self, asked: words.WhyNot) -> None:
        """Ask why not a strategy. Raises Stale, or JobError where it is not understood, or something runs."""
        self.session.check_revision(asked.revision)
        wish, moment = parse_wish(asked.wish, "why not"), self.session.present()
        played, estimate = self.session.play(moment.source), self.session.estimate_of(moment)
        question = f"why not {describe_wish(wish)}"

        def ask(run: _Running) -> None:
            found = explain_why_not(played.costs, estimate, wish, run.limit_s, run.stop.is_set)
            self._answer(question, _describe(found, estimate), found.estimate.step_ms if found.estimate else None)

        self._start(question, asked.limit_s, ask)

    def _start(self, title: str, limit_s: float, work: Callable[[_Running], None]) -> None:
        if self._running is not None:
            raise JobError(f"{self._running.title} is looked for already; cancel that, or wait for it")
        running = self._running = _Running(title, limit_s)

        def run() -> None:
            try:
                load_solver()
                work(running)
            except (PlannerError, OSError) as error:
                self._answer(title, (str(error),), None)
            finally:
                self._running = None

        running.thread = threading.Thread(target=run, name="studio's search", daemon=True)
        running.thread.start()

    def _search(self, run: _Running, moment: Moment, played: Played) -> None:
        found = search(played.job, run.limit_s, run.stop.is_set, run.see)
        with self.session.lock:
            self.session.learn(moment.source, self.session.known(moment.source).with_space(found))
            command = self.session.command("plan", moment, "--time-limit", f"{run.limit_s:g}")
            told = describe_end(found).strip().splitlines()
            self._adopt(run.title, moment, found.estimates[0], command, tuple(told))

    def _examine(self, run: _Running, moment: Moment, played: Played) -> None:
        strategy = self.session.plan_of(moment).strategy
        best, candidates = examine(played.costs, (SpaceEntry(strategy, None),), run.limit_s, run.stop.is_set)
        with self.session.lock:
            self.session.learn(moment.source, self.session.known(moment.source).with_strategies(candidates))
            limits = [f"search.{name}=[{getattr(strategy, name)}]" for name in ("pp", "tp", "cp", "dp", "mbs")]
            flags = [word for limit in limits for word in ("--set", limit)]
            command = self.session.command("plan", moment, *flags, "--time-limit", f"{run.limit_s:g}")
            if best is None:
                self._answer(run.title, tuple(one.reason for one in candidates), None)
            else:
                self._adopt(run.title, moment, best, command, ())

    def _adopt(self, title: str, moment: Moment, found: Estimate, command: str, told: tuple[str, ...]) -> None:
        """What was found for `moment`: the new plan where it is better than the present one of the same job."""
        session = self.session
        present = session.present()
        line = session.describe_found(found)
        if present.source.key != moment.source.key:
            self._answer(title, (f"of the job as it was then: {line}", *told), found.step_ms)
            return
        before = session.estimate_of(present)
        if before.fits and before.step_ms <= found.step_ms * (1.0 + 1e-9):
            self._answer(title, (f"none better than the present plan was found; {line}", *told), found.step_ms)
            return
        session.add(title, command, present.source, found.plan)
        self._answer(title, (describe_change(before, found), *told), found.step_ms)

    def _answer(self, question: str, told: tuple[str, ...], step_ms: float | None) -> None:
        with self.session.lock:
            self.session.moments.answer(words.Answer(question=question, words=told, step_ms=step_ms))


def _describe(found: WhyNot, estimate: Estimate) -> tuple[str, ...]:
    """An answer in lines."""
    lines = [f"{found.status}: {found.reason}"]
    if found.outside:
        lines.append("the job's search leaves it out")
    if found.estimate is not None:
        lines.append(describe_change(estimate, found.estimate))
    lines += [
        f"{one.cause}: {format_ms(one.plan_ms)} in the plan, {format_ms(one.other_ms)} there" for one in found.causes
    ]
    return tuple(lines)
