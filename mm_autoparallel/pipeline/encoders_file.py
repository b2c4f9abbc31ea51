"""`encoders` of a PROBLEM.json: read into encoders.Encoder. The other keys are problem_file.py's, and mean the same."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from mm_autoparallel.errors import JobError
from mm_autoparallel.pipeline.encoder import Encoder
from mm_autoparallel.pipeline.encoders import EncodedProblem, check_encoders, deal_pipelines
from mm_autoparallel.pipeline.problem import Problem
from mm_autoparallel.pipeline.problem_file import ProblemEntry, Sizes, Times, problem_from_entry, read_entry, spread
from mm_autoparallel.records import Count, Few, Name, Noun, Number, Size, Time, TimePerByte

MAX_PASSES = 20_000
"""Assumed: of one encoder in a step, over its stages. Each is an action whose place in the order is looked for."""


class EncoderEntry(Noun):
    """One of `encoders`; see encoders.Encoder for what the figures mean."""

    name: Name
    run: Literal["bubbles", "prefetch", "cached"] = "bubbles"
    forward_ms: Times
    backward_ms: Times = 0.0
    num_stages: Few = 1
    pieces: Few = 1
    devices: Literal["decoder", "own"] = "decoder"
    num_pipelines: Few | None = None
    microbatches_per_pass: Count = 1
    feed_ms: Time = 0.0
    stage_hop_ms: Time = 0.0
    static_bytes: Sizes = 0.0
    activation_bytes: Sizes = 0.0
    output_bytes: Size = 0.0
    first_stage: Number = 0
    most_ahead: Count | None = None
    follows: Name | None = None
    memory_limit_bytes: Size | None = None
    prefetch_depth: Count | None = None
    read_ms_per_byte: TimePerByte | None = None


class EncodedProblemEntry(ProblemEntry):
    """A problem file with `encoders`."""

    encoders: Annotated[tuple[EncoderEntry, ...], Field(min_length=1, max_length=8)] | None = None


def read_any_problem(path: Path) -> Problem | EncodedProblem:
    """The problem in the file at `path`, with its encoders where it has some. Raises JobError as `read_problem`."""
    return read_entry(path, EncodedProblemEntry, problem_from_any)


def problem_from_any(entry: EncodedProblemEntry) -> Problem | EncodedProblem:
    """What `entry` describes. Raises JobError where its parts contradict each other."""
    decoder = problem_from_entry(entry)
    if entry.encoders is None:
        return decoder
    encoders: list[Encoder] = []
    own, first_own = 0, decoder.num_stages
    for index, each in enumerate(entry.encoders):
        encoders.append(_encoder(each, decoder, f"encoders[{index}]", len(encoders) - own, first_own))
        if each.devices == "own":
            own, first_own = own + 1, first_own + each.num_stages * (each.num_pipelines or 1)
    problem = EncodedProblem(decoder, tuple(encoders))
    check_encoders(problem)
    return problem


def _encoder(entry: EncoderEntry, decoder: Problem, where: str, turn: int, first_own: int) -> Encoder:
    """turn: how many encoders on the decoder's devices come before it. first_own: the first device that is nobody's."""
    count, number = entry.num_stages, entry.num_pipelines or 1
    if entry.first_stage >= decoder.num_stages:
        raise JobError(
            f"{where}.first_stage is {entry.first_stage}; stages of the decoder are 0 to {decoder.num_stages - 1}"
        )
    if entry.pieces > 1 and (count > 1 or entry.devices == "own"):
        raise JobError(
            f"{where}.pieces is {entry.pieces}: passes of one stage on the decoder's devices are cut into pieces, so "
            'that they lie in more gaps; leave out num_stages and devices "own", or pieces'
        )
    size = min(entry.microbatches_per_pass, decoder.num_microbatches)
    num_passes = -(-decoder.num_microbatches // size)
    of_own = [key for key in ("num_pipelines", "memory_limit_bytes") if getattr(entry, key) is not None]
    if number > num_passes:
        raise JobError(
            f"{where}.num_pipelines is {number}, and it runs {num_passes} passes a step: use no more than that"
        )
    number_run = count * entry.pieces * num_passes
    if number_run > MAX_PASSES:
        raise JobError(f"{where} runs {number_run:,} forwards a step; at most {MAX_PASSES:,} are ordered")
    if entry.devices == "own":
        pipelines = deal_pipelines(count * number, count, 0, first_own)
    elif of_own:
        raise JobError(f'{where}.{of_own[0]} is of encoders with devices "own"; this one is on the decoder\'s')
    elif (decoder.num_stages - entry.first_stage) % count:
        there = (
            f"{decoder.num_stages - entry.first_stage} stages of the decoder from first_stage {entry.first_stage} on"
            if entry.first_stage
            else f"decoder's num_stages, {decoder.num_stages}"
        )
        raise JobError(
            f"{where}.num_stages is {count}, which does not divide the {there}: its pipelines lie side by side on the "
            "decoder's devices"
        )
    else:
        pipelines = deal_pipelines(decoder.num_stages - entry.first_stage, count, turn, entry.first_stage)
        pipelines = tuple(pipeline * entry.pieces for pipeline in pipelines)
    for key, run in (("prefetch_depth", "prefetch"), ("read_ms_per_byte", "cached")):
        if getattr(entry, key) is not None and entry.run != run:
            raise JobError(f'{where}.{key} is of run "{run}", and run is "{entry.run}"')

    def per_stage(key: str) -> tuple[float, ...]:
        value = getattr(entry, key)
        if entry.pieces > 1:
            if isinstance(value, tuple):
                return spread(value, entry.pieces, f"{where}.{key}", f"pieces is {entry.pieces}")
            return (value / entry.pieces,) * entry.pieces
        return spread(value, count, f"{where}.{key}", f"num_stages is {count}")

    return Encoder(
        name=entry.name,
        forward_ms=per_stage("forward_ms"),
        backward_ms=per_stage("backward_ms"),
        pipelines=pipelines,
        run=entry.run,
        microbatches_per_pass=size,
        feed_ms=entry.feed_ms,
        stage_hop_ms=entry.stage_hop_ms if count > 1 else 0.0,
        static_bytes=per_stage("static_bytes"),
        activation_bytes=per_stage("activation_bytes"),
        output_bytes=entry.output_bytes,
        most_ahead=entry.most_ahead,
        follows=entry.follows or "",
        limit_bytes=float("inf") if entry.memory_limit_bytes is None else entry.memory_limit_bytes,
        prefetch_depth=entry.prefetch_depth or 1,
        read_ms_per_byte=entry.read_ms_per_byte or 0.0,
        first_stage=entry.first_stage,
    )
