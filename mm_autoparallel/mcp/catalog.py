"""The tools as clients see them: by name, with what each is asked and answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mm_autoparallel.mcp import answers, launches, questions, reasons, tools
from mm_autoparallel.mcp.answers import Answer
from mm_autoparallel.mcp.calls import Call
from mm_autoparallel.records import Noun


@dataclass(frozen=True)
class Tool:
    """A tool as clients see it. turn: with which it takes turns (calls.py). writes: whether it may write a file."""

    description: str
    question: type[Noun]
    answer: type[Answer]
    run: Callable[[Any, Call], Answer]
    turn: Literal["search", "quick"] = "search"
    writes: bool = True


TOOLS: Mapping[str, Tool] = {
    "plan": Tool(
        "Search all parallel strategies that a job allows (PP, TP, DP, CP, EP, ZeRO, micro-batch, layers and recompute "
        "of each pipeline stage) for the fastest plan that fits, write it, and say how much faster any could be.",
        questions.PlanQuestion,
        answers.PlanAnswer,
        tools.plan,
    ),
    "simulate": Tool(
        "Simulate one training step of a job under a plan file: step time, and per stage layers, recompute and peak "
        "memory against its limit.",
        questions.SimulateQuestion,
        answers.SimulateAnswer,
        tools.simulate,
        "quick",
    ),
    "edit": Tool(
        "Edit a plan file: take other sizes (PP, TP, …), move layers between pipeline stages, set how many layers of a "
        "stage recompute or run in another mode, or give whole lists. Writes the edited plan, simulates it and says "
        "what the change did.",
        questions.EditQuestion,
        answers.EditAnswer,
        tools.edit,
        "quick",
    ),
    "explain": Tool(
        "Explain a plan: its longest path, what each cost source is worth and how sure it is, what more memory on a "
        "stage would save, whether other plans are within its error, and which measurement would settle that.",
        questions.ExplainQuestion,
        answers.ExplainAnswer,
        reasons.explain,
    ),
    "why_not": Tool(
        "Say why a plan is not one with other sizes, such as PP=8: the best plan with those sizes and where its step "
        "differs, or why there is none.",
        questions.WhyNotQuestion,
        answers.WhyNotAnswer,
        reasons.why_not,
    ),
    "report": Tool(
        "Write one HTML page about plans of a job for people: timelines, memory, stages, every strategy and why it was "
        "left out. Without plans it searches and shows the best one.",
        questions.ReportQuestion,
        answers.ReportAnswer,
        tools.report,
    ),
    "init": Tool(
        "Write a job file for a model (a Hugging Face config.json in the folder, or a published model by its name) on "
        "a cluster, with comments on what else may stand there.",
        questions.InitQuestion,
        answers.InitAnswer,
        tools.init,
    ),
    "export_plan": Tool(
        "Write a plan as files of the framework that trains under it, or into a person's own launch script with "
        "nothing else changed. Says what was rounded, or refuses by name what the framework cannot run.",
        questions.ExportQuestion,
        answers.ExportAnswer,
        launches.export_plan,
        "quick",
    ),
    "import_launch": Tool(
        "Read what a launch script or configuration trains, without running it, and write it as a job file and as the "
        "plan that it runs under today, simulated.",
        questions.ImportQuestion,
        answers.ImportAnswer,
        launches.import_launch,
        "quick",
    ),
    "lint": Tool(
        "Find what launch scripts or configurations break (memory, batches, layers, flags that contradict) and waste "
        "(balance, recompute, micro-batches), with line, stage and the flag that mends it.",
        questions.LintQuestion,
        answers.LintAnswer,
        launches.lint,
        "quick",
    ),
    "place": Tool(
        "Place the layers of a pipeline whose costs are given in a problem file, with a bound on all other placements "
        "and, if asked for, a certificate.",
        questions.PlaceQuestion,
        answers.PlaceAnswer,
        tools.place,
    ),
    "verify": Tool(
        "Check the certificate of a placement without the solver that found it.",
        questions.VerifyQuestion,
        answers.VerifyAnswer,
        tools.verify,
        writes=False,
    ),
    "doctor": Tool(
        "Try what planning needs on this machine: packages, folders, kernels, solver and checkers.",
        questions.NoQuestion,
        answers.DoctorAnswer,
        tools.doctor,
        writes=False,
    ),
}
"""Those that run in a thread, by name."""

AT_ONCE: Mapping[str, tuple[str, type[Noun]]] = {
    "status": (
        "Tell which calls run and how far they are, and how the last ones ended, those that were cancelled among them.",
        questions.NoQuestion,
    ),
    "stop": (
        "End a running search, or all, with the best so far: its own call then answers what was found.",
        questions.StopQuestion,
    ),
}
"""Those that are answered at once, by name: description and question."""
