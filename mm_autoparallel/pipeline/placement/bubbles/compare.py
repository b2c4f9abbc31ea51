"""What the same work takes in other ways: phases before and after the decoder's pipeline, an even chain; and what
features come to that are made elsewhere."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mm_autoparallel.pipeline.encoders import EncodedProblem
from mm_autoparallel.pipeline.placement.bubbles.bounds import encoder_loads_ms
from mm_autoparallel.pipeline.problem import Placement
from mm_autoparallel.pipeline.schedules.action import FORWARD
from mm_autoparallel.pipeline.simulate.encoders.play import Player, write_words
from mm_autoparallel.pipeline.simulate.encoders.tasks import DECODER, JOIN, Tasks, list_tasks
from mm_autoparallel.pipeline.simulate.step import simulate


@dataclass(frozen=True)
class Comparison:
    """Steps of one placement in ms. decoder_ms: of the decoder alone. phases_ms: every device runs its encoder forwards
    first and its encoder backwards last, memory aside; None where fewer passes may be ahead of the decoder. chain_ms:
    were the encoders' work spread evenly over the decoder's stages as a part of its chain, the last stage's share with
    its way there and back (a bound, not an order).
    """

    decoder_ms: float
    phases_ms: float | None
    chain_ms: float


def compare(problem: EncodedProblem, placement: Placement) -> Comparison:
    """The comparison for a placement of the decoder. Raises PlanError where it is none."""
    tasks = list_tasks(problem, placement)
    in_phases_ms = phases_ms(tasks)
    decoder_ms = simulate(problem.decoder, placement).step_ms
    return Comparison(decoder_ms, in_phases_ms if math.isfinite(in_phases_ms) else None, chain_ms(tasks))


def phases_ms(tasks: Tasks) -> float:
    """The step of all encoder forwards, then the decoder, then all encoder backwards, each device on its own; joins and
    strands keep their order, and shares of different encoders follow one another. inf where `most_ahead` forbids it."""
    lanes: list[list[int]] = [[] for _ in range(tasks.num_lanes)]
    by_turn: list[list[tuple[int, int, int, int]]] = [[] for _ in range(tasks.num_lanes)]
    for strand, lane in enumerate(tasks.strand_lane):
        for at, task in enumerate(tasks.strands[strand].tolist()):
            owner = int(tasks.owner[task])
            phase = 1 if owner in (DECODER, JOIN) else 0 if tasks.kind[task] == FORWARD else 2
            turn = at if phase == 1 else int(tasks.index[task])
            by_turn[lane].append((phase, turn, _depth(tasks, task), strand))
    for lane, letters in enumerate(by_turn):
        lanes[lane] = [strand for *_, strand in sorted(letters)]
    return Player(tasks, is_limited=False).step_ms(write_words(tasks, lanes))


def _depth(tasks: Tasks, task: int) -> int:
    """How many passes of encoders one waits for: what is followed runs first."""
    depth, at = 0, int(tasks.dependency[task])
    while at < tasks.num_tasks and tasks.owner[at] >= 0:
        depth, at = depth + 1, int(tasks.dependency[at])
    return depth


def chain_ms(tasks: Tasks) -> float:
    """(M + (P - 1) / chunks) · an even stage's forward and backward, and the hops of one chunk; see Comparison.

    The last stage waits for as much of the first chunk as P - 1 stages hold, and they for its last gradient.
    """
    decoder, loads = tasks.problem.decoder, tasks.loads
    per_microbatch = float(loads.forward_ms.sum() + loads.backward_ms.sum())
    per_microbatch += float(encoder_loads_ms(tasks.problem).sum()) / decoder.num_microbatches
    first, num_stages = slice(0, decoder.num_stages - 1), decoder.num_stages
    hops = float(loads.hop_forward_ms[first].sum() + loads.hop_backward_ms[first].sum())
    num_passes = decoder.num_microbatches + (num_stages - 1) / decoder.num_chunks
    return num_passes * per_microbatch / num_stages + hops


def features_bytes(problem: EncodedProblem) -> float:
    """What the outputs of one step come to that are not made in it: prefetched ones for each step of depth, cached ones
    as they are read."""
    count = problem.decoder.num_microbatches
    return sum(
        encoder.num_passes(count) * encoder.output_bytes * (encoder.prefetch_depth if encoder.run == "prefetch" else 1)
        for encoder in problem.encoders
        if encoder.run != "bubbles"
    )
