"""What the tools answer: short records, from which their schemas are made, and the same as lines of text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import Field

from mm_autoparallel.records import Noun
from mm_autoparallel.streams import visible
from mm_autoparallel.units import format_bytes, format_ms, format_percent

MAX_STAGES_SHOWN = 16
MAX_FINDINGS = 50
"""Of one answer; a file that `out` names has all. Assumed."""
MAX_SENTENCES, MAX_SENTENCE = 18, 250
"""Sentences of a text that may be long, and characters of each: some hundred words. Assumed."""


class Answer(Noun, ABC):
    """What every answer has."""

    file: str | None = Field(None, description="what was written, relative to the folder served")
    warnings: tuple[str, ...] = Field((), description="what to know before trusting the figures")
    remarks: tuple[str, ...] = Field((), description="what was told on the way")

    @abstractmethod
    def lines(self) -> Iterator[str]:
        """The answer as text, without what every answer has."""

    def text(self) -> str:
        """The whole answer as text."""
        last = [*(f"warning: {one}" for one in self.warnings), *self.remarks]
        return "\n".join([*self.lines(), *last, *([f"wrote {self.file}"] if self.file else [])])


class Stage(Noun):
    """A pipeline stage. Counts by part of the model, one a chunk."""

    layers: dict[str, tuple[int, ...]]
    recompute: dict[str, tuple[int, ...]] = Field(description="of them, how many recompute")
    modes: dict[str, dict[str, tuple[int, ...]]] = Field(description="how many run in other modes, by part and mode")
    peak_memory_bytes: int
    memory_limit_bytes: int


class Figures(Noun):
    """A plan, simulated."""

    strategy: str
    step_ms: float
    low_step_ms: float | None = Field(description="between this and high_step_ms a measured step is expected")
    high_step_ms: float | None
    throughput_tokens_per_s: float = Field(description="text tokens a second and device")
    bubble_fraction: float = Field(description="of the stages' time, what is idle")
    fits: bool = Field(description="whether every stage keeps its memory limit")
    oom_probability: float = Field(description="chance that the fullest device runs out of memory")
    chance: str
    expected: str = Field(description="the interval and what it rests on; empty where everything was measured")
    stages: tuple[Stage, ...]

    def lines(self) -> Iterator[str]:
        """As `simulate` says it."""
        fits = "fits" if self.fits else "DOES NOT FIT"
        yield self.strategy
        yield (
            f"step {format_ms(self.step_ms)}, {self.throughput_tokens_per_s:.1f} tokens/s per device, bubble "
            f"{format_percent(self.bubble_fraction)}, {fits}"
        )
        yield self.chance
        if self.expected:
            yield self.expected
        yield from _stage_lines(self.stages)


class PlanAnswer(Answer):
    """Answer of `plan`."""

    best: Figures
    lower_bound_ms: float = Field(
        description="the bound in steps of the best plan: no plan ranks before one with this step and as likely to fit"
    )
    gap_fraction: float = Field(description="1 - lower_bound_ms / step_ms")
    proven: bool = Field(description="whether the gap is at most 0.1 %")
    stopped: str = Field(description="why the search ended: finished, time limit, interrupted, processes died")
    elapsed_s: float
    verdict: tuple[str, ...]
    runners_up: tuple[str, ...] = Field(description="the next best plans, where top_k asks for some")

    def lines(self) -> Iterator[str]:
        """The best plan, and what is known of all others."""
        yield from self.best.lines()
        yield from self.verdict
        yield from self.runners_up


class SimulateAnswer(Answer):
    """Answer of `simulate`."""

    plan: Figures
    longest_path: str

    def lines(self) -> Iterator[str]:
        """The plan and its longest path."""
        yield from self.plan.lines()
        yield self.longest_path


class EditAnswer(SimulateAnswer):
    """Answer of `edit`."""

    before_step_ms: float = Field(description="step of the plan that was edited")
    before_fits: bool
    change: str = Field(description="step and highest peak, signed against the plan that was edited")

    def lines(self) -> Iterator[str]:
        """What the change did, then the plan that came out."""
        yield self.change
        yield from super().lines()


class Source(Noun):
    """What a step owes to one source of costs."""

    name: str
    time_source: str = Field(description="measured, interpolated, traced or analytic")
    error_fraction: float
    share_fraction: float = Field(description="per cent of the step that one per cent of the source makes")
    low_step_ms: float = Field(description="step if the source takes less, by change_fraction")
    high_step_ms: float


class Memory(Noun):
    """What more memory would bring, by stage."""

    extra_bytes: float = Field(description="how much more is asked about")
    left_bytes: tuple[float, ...]
    gain_ms: tuple[float | None, ...] = Field(description="what it saves on that stage alone; null: not known in time")
    all_gain_ms: float | None = Field(description="what it saves on all stages")


class Cause(Noun):
    """A part of the difference of two steps."""

    cause: str
    plan_ms: float
    other_ms: float


class ExplainAnswer(Answer):
    """Answer of `explain`."""

    step_ms: float
    plans: tuple[str, ...] = Field(description="the plan, then those that it is held against, as `plan 2` and so on")
    sentences: tuple[str, ...] = Field(description="what `explain` says, in order")
    change_fraction: float = Field(description="by which sources are made faster and slower")
    sources: tuple[Source, ...] = Field(description="what the step owes most to")
    memory: Memory

    def lines(self) -> Iterator[str]:
        """The plans, the sentences, then the sources."""
        yield from self.plans
        yield from self.sentences
        for one in self.sources:
            yield (
                f"{one.name} ({one.time_source}, ±{format_percent(one.error_fraction)}): "
                f"{format_percent(one.share_fraction)} of the step"
            )


class WhyNotAnswer(Answer):
    """Answer of `why_not`."""

    asked: dict[str, int | str]
    step_ms: float = Field(description="of the plan")
    other_step_ms: float | None = Field(description="of the best plan with the sizes asked for; null: there is none")
    other_fits: bool | None
    other_strategy: str
    status: str = Field(description="what became of it: solved, dominated, infeasible, unlawful or unfinished")
    reason: str
    outside_search: bool = Field(description="whether the job's limits of the search leave it out")
    causes: tuple[Cause, ...] = Field(description="where the difference comes from, means over stages")
    sentences: tuple[str, ...]

    def lines(self) -> Iterator[str]:
        """The sentences, then the causes."""
        yield from self.sentences
        for one in self.causes:
            yield f"{one.cause}: {one.plan_ms:.2f} ms in the plan, {one.other_ms:.2f} ms in the other"


class ReportAnswer(Answer):
    """Answer of `report`."""

    plans: tuple[str, ...] = Field(description="what the page shows: name, strategy, step, whether it fits")

    def lines(self) -> Iterator[str]:
        """A line for each plan."""
        return iter(self.plans)


class InitAnswer(Answer):
    """Answer of `init`."""

    model: str
    parts: dict[str, int] = Field(description="layers by part of the model")
    num_devices: int

    def lines(self) -> Iterator[str]:
        """What the job is about."""
        parts = ", ".join(f"{count} {part} layers" for part, count in self.parts.items())
        yield f"{self.model}: {parts}; {self.num_devices} devices"


class PlaceAnswer(Answer):
    """Answer of `place`."""

    status: str = Field(description="optimal, feasible, infeasible or unknown")
    step_ms: float | None
    lower_bound_ms: float | None
    gap_fraction: float | None
    layers: dict[str, Any] | None = Field(description="by block, [stage] or [chunk][stage]")
    recompute: dict[str, Any] | None
    peak_memory_bytes: tuple[int, ...] | None
    sentence: str

    def lines(self) -> Iterator[str]:
        """The verdict, then the lists."""
        yield self.sentence
        lists = (("layers", self.layers or {}), ("recompute", self.recompute or {}))
        yield from cut([f"{name} of {block}: {counts}" for name, of in lists for block, counts in of.items()])
        if self.peak_memory_bytes is not None:
            yield f"peaks: {', '.join(format_bytes(peak) for peak in self.peak_memory_bytes[:MAX_STAGES_SHOWN])}"


class ExportAnswer(Answer):
    """Answer of `export_plan`."""

    files: tuple[str, ...] = Field(description="what was written, relative to the folder served")
    framework: str
    target_version: str
    predicted: tuple[str, ...] = Field(description="step and highest peak of what the files run by themselves")
    approximations: tuple[str, ...] = Field(description="what was rounded, always to what keeps less memory")
    notes: tuple[str, ...] = Field(description="what was not checked, and what must be set beside the files")

    def lines(self) -> Iterator[str]:
        """The figures, what was rounded, and the files."""
        yield from (*self.predicted, *self.approximations, *self.notes)
        yield f"{', '.join(self.files)} for {self.framework} {self.target_version}"


class ImportAnswer(Answer):
    """Answer of `import_launch`."""

    files: tuple[str, ...] = Field(description="job file and plan file that were written")
    framework: str
    plan: Figures

    def lines(self) -> Iterator[str]:
        """The plan that the launch runs under."""
        yield from self.plan.lines()
        yield f"{' and '.join(self.files)}, of {self.framework}"


class Finding(Noun):
    """Something that a launch file breaks or wastes."""

    rule: str
    severity: str = Field(description="error, warning or note")
    place: str = Field(description="file, or file:line")
    stage: int | None
    message: str
    mend: str = Field(description="the flag with its value that mends it; empty where several could")


class LintAnswer(Answer):
    """Answer of `lint`."""

    errors: int
    warning_count: int
    notes: int
    findings: tuple[Finding, ...] = Field(description=f"the first {MAX_FINDINGS}, in order of file and line")

    def lines(self) -> Iterator[str]:
        """The count, then a line for each."""
        yield f"{self.errors} errors, {self.warning_count} warnings, {self.notes} notes"
        for one in self.findings[:MAX_SENTENCES]:
            mend = f"; mend: {one.mend}" if one.mend else ""
            yield f"{one.place}: {one.severity}: {one.message} [{one.rule}]{mend}"


class VerifyAnswer(Answer):
    """Answer of `verify`."""

    step_ms: float
    lower_bound_ms: float | None = Field(description="null: no bound is claimed")
    gap_fraction: float | None
    sentences: tuple[str, ...]

    def lines(self) -> Iterator[str]:
        """What was confirmed, and how."""
        return iter(self.sentences)


class Check(Noun):
    """Something that was tried on this machine."""

    name: str
    status: str = Field(description="works, absent or broken")
    found: str


class DoctorAnswer(Answer):
    """Answer of `doctor`."""

    works: bool
    checks: tuple[Check, ...]

    def lines(self) -> Iterator[str]:
        """A line for each check."""
        return (f"{one.name}: {one.status}: {one.found}" for one in self.checks)


class CallAnswer(Noun):
    """A call of a tool that runs or has ended."""

    number: int
    tool: str
    elapsed_s: float
    state: str = Field(description="waits, runs, answered, refused or cancelled")
    words: str = Field(description="how far it is, or how it ended")


class StatusAnswer(Answer):
    """Answer of `status` and `stop`."""

    folder: str
    calls: tuple[CallAnswer, ...] = Field(description="those that run, then the last that have ended")

    def lines(self) -> Iterator[str]:
        """A line for each call."""
        yield f"serving {self.folder}"
        for one in self.calls:
            yield f"call {one.number}, {one.tool}: {one.state} ({one.elapsed_s:.1f} s) {one.words}"


def cut(sentences: Sequence[str]) -> tuple[str, ...]:
    """The first of them, none longer than a paragraph, and how many are left out."""
    kept = [one if len(one) <= MAX_SENTENCE else f"{one[:MAX_SENTENCE]} …" for one in sentences[:MAX_SENTENCES]]
    rest = len(sentences) - len(kept)
    return (*kept, *([f"and {rest} more"] if rest else []))


def cleaned(value: Any) -> Any:
    """JSON values, with characters that a terminal obeys or nobody sees written out in every text."""
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, Mapping):
        return {visible(str(key)): cleaned(item) for key, item in value.items()}
    return [cleaned(item) for item in value] if isinstance(value, (list, tuple)) else value


def _stage_lines(stages: Sequence[Stage]) -> Iterator[str]:
    for number, stage in enumerate(stages[:MAX_STAGES_SHOWN]):
        parts = [_describe_part(part, stage) for part, counts in stage.layers.items() if any(counts)]
        peak, limit = format_bytes(stage.peak_memory_bytes), format_bytes(stage.memory_limit_bytes)
        yield f"stage {number}: {', '.join(parts)}; peak {peak} of {limit}"
    if len(stages) > MAX_STAGES_SHOWN:
        yield f"and {len(stages) - MAX_STAGES_SHOWN} more stages"


def _describe_part(part: str, stage: Stage) -> str:
    """`text 38 (2 recompute)`, with chunks `text 10 + 9`."""

    def counted(counts: Sequence[int]) -> str:
        return " + ".join(map(str, counts))

    modes = {"recompute": stage.recompute.get(part, ()), **stage.modes.get(part, {})}
    told = ", ".join(f"{counted(counts)} {mode}" for mode, counts in modes.items() if any(counts))
    return f"{part} {counted(stage.layers[part])}" + (f" ({told})" if told else "")
