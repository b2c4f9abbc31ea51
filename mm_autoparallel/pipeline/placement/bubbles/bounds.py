"""Steps that no order of a decoder and its encoders goes below.

*Lead*: the decoder's first forward waits for one pass of every encoder that feeds it, so all of the decoder's work lies
behind that. *Way back*: where backwards are whole, the last of its first stage ends all of the decoder's work, and one
backward pass of every trainable encoder follows it. *Loads*: a device runs all that lies on it, one after the other:
passes of encoders are dealt to it whatever layers it holds, so of all ways to cut the chain the fullest device counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.encoder import Encoder
from mm_autoparallel.pipeline.encoders import EncodedProblem
from mm_autoparallel.pipeline.laid_out import list_layouts, relaxed
from mm_autoparallel.pipeline.placement.bounds.bound import Look
from mm_autoparallel.pipeline.placement.bounds.cuts import Cuts
from mm_autoparallel.pipeline.placement.bounds.gaps import Strand, find_actions, find_tasks
from mm_autoparallel.pipeline.placement.bounds.kept_paths import Beside
from mm_autoparallel.pipeline.placement.bounds.one_chunk import goes_back_and_forth
from mm_autoparallel.pipeline.placement.bounds.pairs import Pair
from mm_autoparallel.pipeline.placement.segments import cut_into_segments
from mm_autoparallel.pipeline.problem import Problem
from mm_autoparallel.pipeline.schedules.catalog import find_schedule
from mm_autoparallel.pipeline.simulate.encoders.tasks import Tasks, decoder_on_devices
from mm_autoparallel.pipeline.simulate.graph import TaskGraph, full_graph

Floats = NDArray[np.float64]


def lead_ms(problem: EncodedProblem) -> float:
    """Before the decoder can begin: the longest forward pass with its way, that of what an encoder follows included."""
    return max((_way_ms(problem, encoder, "forward_ms") for encoder in problem.encoders), default=0.0)


def way_back_ms(problem: EncodedProblem) -> float:
    """After the decoder's last backward: the longest of a way and a backward pass, to the first of what is followed."""
    return max((_way_ms(problem, encoder, "backward_ms") for encoder in problem.encoders), default=0.0)


def _after_ms(problem: EncodedProblem, tails_ms: Floats) -> float:
    """After the decoder's last backward: the way back, and what its last device does then. tails_ms: of the decoder's
    devices at least."""
    back = way_back_ms(problem)
    devices = {device for encoder in problem.encoders for pipeline in encoder.pipelines for device in pipeline}
    tails = (tails_ms[device] if device < problem.decoder.num_stages else 0.0 for device in devices)
    return back + float(min(tails, default=0.0)) if back else 0.0


def _way_ms(problem: EncodedProblem, encoder: Encoder, key: str) -> float:
    """Through `encoder` and all those before it; nothing where it does not run in the step, or has no such pass."""
    by_name = {each.name: each for each in problem.encoders}
    total_ms = 0.0
    while encoder.run == "bubbles" and not encoder.first_stage:  # stages before need not wait for it
        if key == "forward_ms" or not encoder.is_frozen:
            hops_ms = encoder.feed_ms + (encoder.num_stages - 1) * encoder.stage_hop_ms
            total_ms += sum(getattr(encoder, key)) + hops_ms
        if not encoder.follows:
            break
        encoder = by_name[encoder.follows]
    return total_ms


def encoder_loads_ms(problem: EncodedProblem) -> Floats:
    """[devices, 3] what passes of encoders take on each: forwards and backwards of this step, and passes for others."""
    loads = np.zeros((problem.num_devices, 3))
    for encoder in problem.encoders:
        for index in range(encoder.num_passes(problem.decoder.num_microbatches) if encoder.run != "cached" else 0):
            pipeline = encoder.pipelines[index % len(encoder.pipelines)]
            times = zip(pipeline, encoder.forward_ms, encoder.backward_ms, strict=True)
            for device, forward_ms, backward_ms in times:
                loads[device] += (forward_ms, backward_ms, 0.0) if encoder.run == "bubbles" else (0.0, 0.0, forward_ms)
    return loads


def read_ms(problem: EncodedProblem) -> float:
    """What reading a step's cached features takes, which nothing but the step itself hides."""
    count = problem.decoder.num_microbatches
    return max(
        (
            encoder.num_passes(count) * encoder.output_bytes * encoder.read_ms_per_byte
            for encoder in problem.encoders
            if encoder.run == "cached"
        ),
        default=0.0,
    )


def bound_all(problem: EncodedProblem, decoder_ms: float) -> float:
    """No placement of the decoder's blocks, in whatever order of all actions, takes less. decoder_ms: the same of the
    decoder alone."""
    decoder = problem.decoder
    own_tails = np.array(decoder.stage_tail_ms)
    tails = [(block.count, (block.tail_ms, *(each.tail_ms for each in list_layouts(block)))) for block in decoder.chain]
    most_tail = float(own_tails.max()) + sum(count * max(each) for count, each in tails)
    after = _after_ms(problem, own_tails)
    loads = encoder_loads_ms(problem).sum(axis=1)
    pass_ms = sum(block.count * (block.forward_ms + block.backward_ms) for block in relaxed(decoder).chain)
    work = decoder.num_microbatches * pass_ms * min(decoder.time_factors)
    on_stages = float(loads[: decoder.num_stages].sum()) + work + float(own_tails.sum())
    return max(
        lead_ms(problem) + decoder_ms,
        lead_ms(problem) + decoder_ms - most_tail + after if after else 0.0,
        on_stages / decoder.num_stages,
        float(loads.max()),
        read_ms(problem),
    )


def decoder_beside(problem: EncodedProblem) -> Problem:
    """The decoder with what its devices hold of encoders at their fullest moments at least, among what stages hold.

    With 1F1B a stage is as full as ever when it begins a micro-batch that is late enough. What encoders keep of that
    micro-batch for its backward lies on their devices then.
    """
    return _with_kept(problem, (-1, 0), 1)


def _with_kept(problem: EncodedProblem, part_of: tuple[int, int], number: int) -> Problem:
    """The same where a stage keeps `number` passes of one part of an encoder, more than one, at some such moment."""
    decoder = decoder_on_devices(problem)
    num_stages, count = decoder.num_stages, decoder.num_microbatches
    held = np.zeros(num_stages)
    if decoder.num_chunks > 1 or not goes_back_and_forth(decoder.schedule, num_stages, count):
        return decoder
    for owner, encoder in enumerate(problem.encoders):
        num_pipelines, num_passes = len(encoder.pipelines), encoder.num_passes(count)
        if encoder.run != "bubbles" or encoder.is_frozen:
            continue
        for turn, pipeline in enumerate(encoder.pipelines[:num_passes]):
            last = turn + (num_passes - 1 - turn) // num_pipelines * num_pipelines
            num_begun = encoder.microbatches_of(last, count).stop
            whole = np.zeros(num_stages)  # all pieces of a pass, at one moment; several of one piece at another
            for part, (device, kept_bytes) in enumerate(zip(pipeline, encoder.activation_bytes, strict=True)):
                if device < num_stages and (owner, part) == part_of and number > 1:
                    held[device] = max(held[device], number * kept_bytes)
                if device < num_stages and num_begun >= min(num_stages - device, count):
                    whole[device] += kept_bytes
            held = np.maximum(held, whole)
    static = np.array(decoder.stage_static_bytes) + held
    return replace(decoder, stage_static_bytes=tuple(static.tolist()))


def list_cuts(problem: EncodedProblem, look: Look) -> Cuts | None:
    """All ways to cut the decoder's chain, whose bound holds for every placement in whatever order of all actions, each
    with the modes that its memory asks for; None with several chunks, or where they are too many. Raises what `look`
    does."""
    decoder = relaxed(decoder_beside(problem))
    if decoder.num_chunks > 1:
        return None
    loads = encoder_loads_ms(problem)[: decoder.num_stages]
    beside = Beside(lead_ms(problem), way_back_ms(problem), *np.ascontiguousarray(loads.T))
    cuts = Cuts.of_segments(cut_into_segments(decoder), beside, look)
    if cuts is None or find_schedule(decoder.schedule, 1).given_by != "rule":
        return cuts
    graph = full_graph(decoder.schedule, decoder.num_stages, 1, decoder.num_microbatches)
    feed_ms, return_ms = _ways_ms(problem)
    return replace(
        cuts,
        graph=graph,
        strands=tuple(_list_strands(problem, graph)),
        feed_ms=feed_ms,
        return_ms=return_ms,
        pairs=tuple(_list_pairs(problem, graph)),
        beside_kept=lambda part_of, kept: cut_into_segments(relaxed(_with_kept(problem, part_of, kept))),
    )


def _ways_ms(problem: EncodedProblem) -> tuple[Floats, Floats]:
    """[M] what precedes each first forward, and what follows each last backward: passes of a pipeline take turns."""
    count = problem.decoder.num_microbatches
    feed, back = np.full(count, lead_ms(problem)), np.full(count, way_back_ms(problem))
    followed = {encoder.follows for encoder in problem.encoders}
    for encoder in problem.encoders:
        if encoder.run != "bubbles" or encoder.name in followed or encoder.first_stage:
            continue
        num_passes, num_pipelines = encoder.num_passes(count), len(encoder.pipelines)
        in_turn = sum if encoder.in_pieces else max  # of a pass before, on the same device or on the slowest
        for index in range(num_passes):
            before, behind = index // num_pipelines, (num_passes - 1 - index) // num_pipelines
            mine = encoder.microbatches_of(index, count)
            own = sum(encoder.forward_ms) + (encoder.num_stages - 1) * encoder.stage_hop_ms + encoder.feed_ms
            feed[mine] = np.maximum(feed[mine], own + before * in_turn(encoder.forward_ms))
            if not encoder.is_frozen:
                own = sum(encoder.backward_ms) + (encoder.num_stages - 1) * encoder.stage_hop_ms + encoder.feed_ms
                back[mine[-1]] = max(back[mine[-1]], own + behind * in_turn(encoder.backward_ms))
    return feed, back


def _list_strands(problem: EncodedProblem, graph: TaskGraph) -> Iterator[Strand]:
    """The strands of passes on the decoder's devices, of encoders that feed it or run for other steps."""
    for encoder, passes, part, stage in _list_passes(problem, graph):
        yield _forwards(encoder, graph, passes, part, stage)
        if not encoder.is_frozen:
            yield _backwards(encoder, graph, passes, part, stage)


def _list_pairs(problem: EncodedProblem, graph: TaskGraph) -> Iterator[Pair]:
    """Those of encoders that train."""
    decoder = problem.decoder
    is_limited = goes_back_and_forth(decoder.schedule, decoder.num_stages, decoder.num_microbatches)
    for encoder, passes, part, stage in _list_passes(problem, graph):
        if encoder.run == "bubbles" and not encoder.is_frozen:
            own = encoder, graph, passes, part, stage
            keeps = is_limited and encoder.activation_bytes[part] > 0.0
            yield Pair((problem.encoders.index(encoder), part), _forwards(*own), _backwards(*own), keeps)


def _list_passes(problem: EncodedProblem, graph: TaskGraph) -> Iterator[tuple[Encoder, list[range], int, int]]:
    """Of each pipeline of an encoder that feeds the decoder or runs for other steps, and each of its stages on a device
    of the decoder: the micro-batches of its passes, which stage of the encoder's, and which of the decoder's."""
    count = problem.decoder.num_microbatches
    followed = {encoder.follows for encoder in problem.encoders}
    for encoder in problem.encoders:
        for turn, pipeline in enumerate(encoder.pipelines):
            indices = range(turn, encoder.num_passes(count), len(encoder.pipelines))
            passes = [encoder.microbatches_of(index, count) for index in indices]
            for part, stage in enumerate(pipeline):
                if not (encoder.run == "cached" or encoder.name in followed or stage >= graph.num_stages or not passes):
                    yield encoder, passes, part, stage


def _forwards(encoder: Encoder, graph: TaskGraph, passes: list[range], part: int, stage: int) -> Strand:
    before_ms = sum(encoder.forward_ms[:part]) + part * encoder.stage_hop_ms
    behind_ms = sum(encoder.forward_ms[part + 1 :]) + (encoder.num_stages - 1 - part) * encoder.stage_hop_ms
    nowhere = np.zeros(len(passes), dtype=np.int64)
    end, fed = np.full_like(nowhere, 2 * graph.num_microbatches), nowhere - 1
    if encoder.run == "bubbles":
        behind_ms += encoder.feed_ms
        precede = find_actions(graph, stage, True)
        end = np.array([precede[passed].min() for passed in passes])
        fed = find_tasks(graph, encoder.first_stage, True)[[passed[0] for passed in passes]]
    return Strand(stage, encoder.forward_ms[part], before_ms, behind_ms, nowhere - 1, fed, nowhere, end)


def _backwards(encoder: Encoder, graph: TaskGraph, passes: list[range], part: int, stage: int) -> Strand:
    before_ms = sum(encoder.backward_ms[part + 1 :]) + (encoder.num_stages - 1 - part) * encoder.stage_hop_ms
    behind_ms = sum(encoder.backward_ms[:part]) + part * encoder.stage_hop_ms
    precede = find_actions(graph, stage, False)
    first = np.array([precede[passed].max() + 1 for passed in passes])
    waited = find_tasks(graph, encoder.first_stage, False)[[passed[-1] for passed in passes]]
    end = np.full_like(first, 2 * graph.num_microbatches)
    before_ms += encoder.feed_ms
    return Strand(stage, encoder.backward_ms[part], before_ms, behind_ms, waited, np.full_like(first, -1), first, end)


def bound_placed(tasks: Tasks, decoder_ms: float) -> float:
    """The same where the decoder is placed. decoder_ms: its step alone, in its order, or a bound on all its orders."""
    problem = tasks.problem
    after = _after_ms(problem, tasks.tails_ms)
    loads = np.bincount(tasks.lane, weights=tasks.length_ms, minlength=tasks.num_lanes) + tasks.tails_ms
    return max(
        lead_ms(problem) + decoder_ms,
        lead_ms(problem) + decoder_ms - float(tasks.tails_ms.max()) + after if after else 0.0,
        float(loads.max()),
        read_ms(problem),
    )
