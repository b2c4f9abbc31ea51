"""The tools that give reasons: explain and why_not, as tools.py has the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mm_autoparallel.api.jobs import read_job
from mm_autoparallel.mcp import answers, questions
from mm_autoparallel.mcp.answers import cut
from mm_autoparallel.mcp.calls import Call, remarks_of
from mm_autoparallel.units import format_ms

if TYPE_CHECKING:
    from mm_autoparallel.api.explanation import Explanation
    from mm_autoparallel.planner.plan import Plan

MAX_SOURCES = 5
"""Sources of costs that an explanation names: those that the step owes most to. Assumed."""


def explain(question: questions.ExplainQuestion, call: Call) -> answers.ExplainAnswer:
    """Where the step goes, how sure that is, what memory would bring."""
    from mm_autoparallel.reports.estimates import describe_strategy

    found, file = _explain(question, call, question.against, top_k=question.top_k)
    document = found.document()
    return answers.ExplainAnswer(
        file=file,
        warnings=cut(found.warnings),
        remarks=remarks_of(call),
        step_ms=found.sensitivity.estimates[0].step_ms,
        plans=tuple(
            f"plan {number}: {name}: {describe_strategy(one.plan)}: step {format_ms(one.step_ms)}"
            for number, (name, one) in enumerate(zip(found.names, found.sensitivity.estimates, strict=True), start=1)
        ),
        sentences=_sentences(found),
        change_fraction=document["change_fraction"],
        sources=tuple(_source(one) for one in document["sources"][:MAX_SOURCES]),
        memory=answers.Memory(**{key: document["memory"][key] for key in answers.Memory.model_fields}),
    )


def why_not(question: questions.WhyNotQuestion, call: Call) -> answers.WhyNotAnswer:
    """What the best plan with other sizes takes, or why there is none."""
    found, file = _explain(question, call, (), wish=question.wish)
    document = found.document()
    why = document["why_not"]
    other = why["plan"]
    return answers.WhyNotAnswer(
        file=file,
        warnings=cut(found.warnings),
        remarks=remarks_of(call),
        asked=why["asked"],
        step_ms=document["plans"][0]["e2e_time"],
        other_step_ms=other and other["e2e_time"],
        other_fits=other and other["fits"],
        other_strategy=_name(found),
        status=why["status"],
        reason=why["reason"],
        outside_search=why["outside_search"],
        causes=tuple(answers.Cause(**one) for one in why["causes"] if one["plan_ms"] or one["other_ms"]),
        sentences=_sentences(found, from_word="why not"),
    )


def _explain(
    question: questions.ExplainQuestion | questions.WhyNotQuestion,
    call: Call,
    against: Sequence[str],
    top_k: int | None = None,
    wish: str | None = None,
) -> tuple[Explanation, str | None]:
    """What `explain` of the face finds, and the file that holds all of it, where one is asked for."""
    from mm_autoparallel import api

    path = call.folder.read(question.job)
    paths = {name: call.folder.read(name) for name in (question.plan, *against)}
    out = call.folder.write_optional(question.out, question.overwrite, [path, *paths.values()])
    job = read_job(path, question.changes)
    plans: dict[str, Plan] = {name: api.read_plan(one, job) for name, one in paths.items()}
    api.load_solver()
    found = api.explain(
        job,
        plans,
        why_not=wish,
        top_k=top_k,
        time_limit_s=question.time_limit_s,
        should_stop=call.should_stop,
        on_progress=call.tell,
    )
    return found, call.folder.put_result(out, question.overwrite, found)


def _sentences(found: Explanation, from_word: str = "") -> tuple[str, ...]:
    """What is said in words, without tables and what continues them; from what begins with `from_word` on."""
    from mm_autoparallel.api.explained import list_parts

    said = [part for part in list_parts(found) if isinstance(part, str) and part and not part.startswith("and ")]
    begin = next(number for number, part in enumerate(said) if part.startswith(from_word))
    return cut(said[begin:])


def _source(one: Mapping[str, Any]) -> answers.Source:
    first = one["plans"][0]
    return answers.Source(
        name=one["name"],
        time_source=one["time_source"],
        error_fraction=one["error_fraction"],
        share_fraction=first["elasticity"],
        low_step_ms=first["step_ms_low"],
        high_step_ms=first["step_ms_high"],
    )


def _name(found: Explanation) -> str:
    from mm_autoparallel.planner.search.space import describe_strategy

    assert found.why_not is not None
    return describe_strategy(found.why_not.strategy)
