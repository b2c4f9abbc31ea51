"""Steps that no order of a decoder and its encoders goes below.

*Lead*: the decoder's first forward waits for one pass of every encoder that feeds it, so all of the decoder's work lies
behind that. *Way back*: where backwards are whole, the last of its first stage ends all of the decoder's work, and one
backward pass of every trainable encoder follows it. *Loads*: a device runs all that lies on it, one after the other:
passes of encoders are dealt to it whatever layers it holds, so of all ways to cut the chain the fullest device counts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.encoder import Encoder
from mm_autoparallel.pipeline.encoders import EncodedProblem
from mm_autoparallel.pipeline.laid_out import has_layouts, list_layouts, relaxed
from mm_autoparallel.pipeline.placement.bounds.one_chunk import fitting_loads
from mm_autoparallel.pipeline.placement.segments import cut_into_units
from mm_autoparallel.pipeline.schedules.catalog import find_schedule
from mm_autoparallel.pipeline.simulate.encoders.tasks import Tasks, decoder_on_devices

Floats = NDArray[np.float64]


def lead_ms(problem: EncodedProblem) -> float:
    """Before the decoder can begin: the longest forward pass with its way, that of what an encoder follows included."""
    return max((_way_ms(problem, encoder, "forward_ms") for encoder in problem.encoders), default=0.0)


def way_back_ms(problem: EncodedProblem) -> float:
    """After the decoder's last backward: the longest of a way and a backward pass, to the first of what is followed."""
    return max((_way_ms(problem, encoder, "backward_ms") for encoder in problem.encoders), default=0.0)


def _way_ms(problem: EncodedProblem, encoder: Encoder, key: str) -> float:
    """Through `encoder` and all those before it; nothing where it does not run in the step, or has no such pass."""
    by_name = {each.name: each for each in problem.encoders}
    total_ms = 0.0
    while encoder.run == "bubbles":
        if key == "forward_ms" or not encoder.is_frozen:
            hops_ms = encoder.feed_ms + (encoder.num_stages - 1) * encoder.stage_hop_ms
            total_ms += sum(getattr(encoder, key)) + hops_ms
        if not encoder.follows:
            break
        encoder = by_name[encoder.follows]
    return total_ms


def encoder_loads_ms(problem: EncodedProblem) -> Floats:
    """[devices] what passes of encoders take on each."""
    loads = np.zeros(problem.num_devices)
    for encoder in problem.encoders:
        for index in range(encoder.num_passes(problem.decoder.num_microbatches) if encoder.run != "cached" else 0):
            pipeline = encoder.pipelines[index % len(encoder.pipelines)]
            times = zip(pipeline, encoder.forward_ms, encoder.backward_ms, strict=True)
            for device, forward_ms, backward_ms in times:
                loads[device] += forward_ms + backward_ms
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
    after = way_back_ms(problem)
    loads = encoder_loads_ms(problem)
    pass_ms = sum(block.count * (block.forward_ms + block.backward_ms) for block in relaxed(decoder).chain)
    work = decoder.num_microbatches * pass_ms * min(decoder.time_factors)
    on_stages = float(loads[: decoder.num_stages].sum()) + work + float(own_tails.sum())
    return max(
        lead_ms(problem) + decoder_ms,
        lead_ms(problem) + decoder_ms - most_tail + after if after else 0.0,
        on_stages / decoder.num_stages,
        _fullest_ms(problem, loads[: decoder.num_stages] + own_tails),
        float(loads.max()),
        read_ms(problem),
    )


def _fullest_ms(problem: EncodedProblem, own_ms: Floats) -> float:
    """What the fullest stage runs at least, however the decoder's layers are shared out, in the modes that its memory
    asks for where its order is a rule's. own_ms: [P] what it runs whatever it holds. With several chunks nothing."""
    decoder = relaxed(decoder_on_devices(problem))
    if decoder.num_chunks > 1:
        return 0.0
    units = cut_into_units(decoder)
    passes_ms = (units.forward_ms + units.backward_ms)[units.start]
    loads_ms = np.array(decoder.time_factors)[:, None, None] * (passes_ms[None, :] - passes_ms[:, None])
    if not has_layouts(problem.decoder) and find_schedule(decoder.schedule, 1).given_by == "rule":
        loads_ms = fitting_loads(units, loads_ms)
    tails_ms = units.tail_ms[units.start]
    at = np.arange(len(units.start))
    later = at[:, None] < at[None, :]
    least = np.where(at == 0, 0.0, np.inf)
    for stage, own in enumerate(own_ms):
        held = decoder.num_microbatches * loads_ms[stage] + tails_ms[None, :] - tails_ms[:, None] + own
        fullest = np.where(later, np.maximum(least[:, None], held), np.inf).min(axis=0)
        least = np.where((at >= units.first[stage + 1]) & (at <= units.last[stage + 1]), fullest, np.inf)
    return float(least[-1]) * (1.0 - 1e-9) if np.isfinite(least[-1]) else 0.0


def bound_placed(tasks: Tasks, decoder_ms: float) -> float:
    """The same where the decoder is placed. decoder_ms: its step alone, in its order, or a bound on all its orders."""
    problem = tasks.problem
    after = way_back_ms(problem)
    loads = np.bincount(tasks.lane, weights=tasks.length_ms, minlength=tasks.num_lanes) + tasks.tails_ms
    return max(
        lead_ms(problem) + decoder_ms,
        lead_ms(problem) + decoder_ms - float(tasks.tails_ms.max()) + after if after else 0.0,
        float(loads.max()),
        read_ms(problem),
    )
