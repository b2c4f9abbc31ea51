"""Check the certificate of a decoder with encoders beside it: play its orders again, and bound all others.

The play is one of its own: actions and what each waits for are listed from the problem, and devices run their words.
The bound of all placements and orders is put together from that of the decoder alone, whose own certificate is checked
first. Nothing of the decoder begins before one pass of the slowest encoder has reached it, and, as its backwards are
whole, its first stage's last one ends all of its work, behind which the slowest way back follows; all devices together
run all work.

The decoder alone may be counted beside what each device holds of encoders all the time, and of one more pass where the
device holds that whenever it is at its fullest: a pass is kept from before its first micro-batch's forward until its
last one's backward has ended.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from mm_autoparallel.errors import PlanError
from mm_autoparallel.pipeline.certify.verify import EQUAL_FRACTION, Verification, verify
from mm_autoparallel.pipeline.encoder import Encoder
from mm_autoparallel.pipeline.encoders import EncodedProblem
from mm_autoparallel.pipeline.laid_out import has_layouts
from mm_autoparallel.pipeline.problem import Placement, Problem
from mm_autoparallel.pipeline.schedules.action import BACKWARD, FORWARD, format_action, parse_order
from mm_autoparallel.pipeline.schedules.catalog import find_schedule
from mm_autoparallel.pipeline.simulate.lawful import check_placement
from mm_autoparallel.pipeline.simulate.loads import (
    Loads,
    graph_of,
    overfull_hosts,
    overfull_stages,
    peak_host_bytes,
    sum_loads,
)
from mm_autoparallel.units import GB

if TYPE_CHECKING:
    from mm_autoparallel.pipeline.certify.beside import EncodedCertificate

Action = tuple[str, int, int, int]
"""The encoder's name, empty of the decoder; forward or backward; its stage or virtual stage; micro-batch or pass."""
#: What sums of bytes in another order may differ by.
BYTES_FRACTION = 1e-12


@dataclass(eq=False)
class _Work:
    """Of every action: its device, what it takes, what it waits for with the way between, and what it keeps."""

    device: dict[Action, int] = field(default_factory=dict)
    length_ms: dict[Action, float] = field(default_factory=dict)
    waits_ms: dict[Action, list[tuple[Action, float]]] = field(default_factory=dict)
    kept_bytes: dict[Action, float] = field(default_factory=dict)

    def add(
        self, action: Action, device: int, length_ms: float, kept_bytes: float, waits: list[tuple[Action, float]]
    ) -> None:
        self.device[action], self.length_ms[action] = device, length_ms
        self.kept_bytes[action], self.waits_ms[action] = kept_bytes, waits


def verify_beside(certificate: EncodedCertificate, time_limit_s: float = np.inf) -> Verification:
    """Confirm every claim of `certificate`. Raises PlanError as `verify` does."""
    began = time.monotonic()
    problem, step_ms, bound_ms = certificate.problem, certificate.step_ms, certificate.lower_bound_ms
    played_ms = _play(certificate)
    if abs(played_ms - step_ms) > EQUAL_FRACTION * played_ms:
        raise PlanError(f"step_ms is {step_ms!r}, but these orders take {played_ms!r} ms")
    if bound_ms > step_ms * (1.0 + EQUAL_FRACTION):
        raise PlanError(f"lower_bound_ms is {bound_ms!r}, but the orders beside it take {step_ms!r} ms: it is no bound")
    gap_fraction = max(0.0, 1.0 - bound_ms / step_ms) if step_ms > 0 else 0.0
    if abs(certificate.gap_fraction - gap_fraction) > EQUAL_FRACTION:
        raise PlanError(
            f"gap_fraction is {certificate.gap_fraction}, but lower_bound_ms is {gap_fraction:.3g} below step_ms"
        )
    _check_decoder(problem, certificate.decoder.problem)
    try:
        found = verify(certificate.decoder, max(0.0, time_limit_s - (time.monotonic() - began)))
    except PlanError as error:
        raise PlanError(f"of the decoder alone: {error}") from None
    shown_ms = find_confirmable_ms(problem, found.lower_bound_ms or 0.0)
    if bound_ms > shown_ms * (1.0 + EQUAL_FRACTION):
        raise PlanError(
            f"lower_bound_ms is {bound_ms!r}, and what the decoder alone takes and its encoders need beside it shows "
            f"{shown_ms!r} ms: more is not confirmed"
        )
    return Verification(step_ms, bound_ms, gap_fraction, "beside", found.num_cuts, time.monotonic() - began)


def find_confirmable_ms(problem: EncodedProblem, decoder_ms: float) -> float:
    """What no placement and order goes below, where the decoder alone is not below decoder_ms."""
    decoder, encoders = problem.decoder, problem.encoders
    by_name = {encoder.name: encoder for encoder in encoders}

    def way_ms(encoder: Encoder, is_forward: bool) -> float:
        """Through it and all that it follows, to the decoder's first stage or back."""
        if encoder.run != "bubbles" or encoder.first_stage:
            return 0.0
        passes = encoder.forward_ms if is_forward else encoder.backward_ms
        own_ms = sum(passes) + (encoder.num_stages - 1) * encoder.stage_hop_ms + encoder.feed_ms
        before = by_name.get(encoder.follows)
        rest_ms = way_ms(before, is_forward) if before else 0.0
        return rest_ms + (own_ms if is_forward or any(encoder.backward_ms) else 0.0)

    lead_ms = max((way_ms(encoder, True) for encoder in encoders), default=0.0)
    back_ms = max((way_ms(encoder, False) for encoder in encoders), default=0.0)
    shown = [lead_ms + decoder_ms]
    if not has_layouts(problem.decoder):
        most_tail_ms = max(decoder.stage_tail_ms) + sum(block.count * block.tail_ms for block in decoder.chain)
        shown.append(lead_ms + decoder_ms - most_tail_ms + back_ms if back_ms else 0.0)
        shown.append(_mean_load_ms(problem))
    for encoder in encoders:
        if encoder.run == "cached":
            passes = -(-decoder.num_microbatches // encoder.microbatches_per_pass)
            shown.append(passes * encoder.output_bytes * encoder.read_ms_per_byte)
    return max(shown)


def _mean_load_ms(problem: EncodedProblem) -> float:
    """All work on the decoder's devices, shared out evenly, or that of a device of an encoder's own."""
    decoder = problem.decoder
    by_device = [0.0] * problem.num_devices
    for encoder in problem.encoders:
        passes = -(-decoder.num_microbatches // encoder.microbatches_per_pass) if encoder.run != "cached" else 0
        for index in range(passes):
            pipeline = encoder.pipelines[index % len(encoder.pipelines)]
            for at, device in enumerate(pipeline):
                by_device[device] += encoder.forward_ms[at] + encoder.backward_ms[at]
    fastest = min(decoder.time_factors)
    total_ms = sum(by_device[: decoder.num_stages]) + sum(decoder.stage_tail_ms)
    for block in decoder.chain:
        fewest_ms = block.forward_ms + block.backward_ms
        fewest_ms += min([0.0, *(mode.extra_forward_ms + mode.extra_backward_ms for mode in block.modes)])
        total_ms += decoder.num_microbatches * block.count * fewest_ms * fastest
    return max(total_ms / decoder.num_stages, *by_device)


def _check_decoder(problem: EncodedProblem, alone: Problem) -> None:
    """Raise PlanError where `alone` is not the decoder beside at most what its devices hold of encoders anyway."""
    decoder = problem.decoder
    if replace(alone, stage_static_bytes=decoder.stage_static_bytes) != decoder:
        raise PlanError("proof.decoder is of another decoder than the problem's")
    held = _held_always(problem)
    for stage, (told, own) in enumerate(zip(alone.stage_static_bytes, decoder.stage_static_bytes, strict=True)):
        most = own + held[stage] + _held_when_full(problem, stage)
        if told > most * (1.0 + BYTES_FRACTION):
            raise PlanError(
                f"proof.decoder counts {told / GB:.3f} GB on device {stage} at all times, and of the decoder and its "
                f"encoders {most / GB:.3f} GB are there"
            )


def _held_always(problem: EncodedProblem) -> list[float]:
    """What each device holds of encoders all the time, in bytes."""
    held = [0.0] * problem.num_devices
    followed = {encoder.follows for encoder in problem.encoders}
    for encoder in problem.encoders:
        passes = -(-problem.decoder.num_microbatches // encoder.microbatches_per_pass)
        if encoder.run != "cached":
            for pipeline in encoder.pipelines:
                for device, size in zip(pipeline, encoder.static_bytes, strict=True):
                    held[device] += size
        ahead = passes if encoder.most_ahead is None else min(passes, encoder.most_ahead)
        at_once = {"bubbles": ahead, "prefetch": passes * encoder.prefetch_depth, "cached": 1}[encoder.run]
        held[encoder.first_stage] += encoder.output_bytes * at_once if encoder.name not in followed else 0.0
    return held


def _held_when_full(problem: EncodedProblem, stage: int) -> float:
    """What a device of one chunk holds of passes, at least, at some moment with its most micro-batches in flight."""
    decoder = problem.decoder
    if decoder.num_chunks > 1 or find_schedule(decoder.schedule, 1).given_by == "placement":
        return 0.0
    graph = graph_of(decoder)
    mine = np.flatnonzero(graph.stage == stage)
    at = {(int(graph.kind[t]), int(graph.micro_batch[t])): turn for turn, t in enumerate(mine.tolist())}
    in_flight = np.cumsum(np.where(graph.kind[mine] == FORWARD, 1, -1))
    kept = np.zeros(len(mine))
    for encoder in problem.encoders:
        if encoder.run != "bubbles" or not any(encoder.backward_ms):
            continue
        size, count = encoder.microbatches_per_pass, decoder.num_microbatches
        for index in range(-(-count // size)):
            pipeline = encoder.pipelines[index % len(encoder.pipelines)]
            first, last = index * size, min(count, (index + 1) * size) - 1
            for part, device in enumerate(pipeline):
                if device == stage:
                    kept[at[FORWARD, first] : at[BACKWARD, last] + 1] += encoder.activation_bytes[part]
    return float(kept[in_flight == in_flight.max()].max())


def _play(certificate: EncodedCertificate) -> float:
    """The step of its orders in ms. Raises PlanError where they are not the problem's, never end, or do not fit."""
    problem, orders = certificate.problem, certificate.orders
    decoder = problem.decoder
    if len(orders) != problem.num_devices:
        raise PlanError(f"placement.order has {len(orders)} entries, and there are {problem.num_devices} devices")
    words = tuple(" ".join(word for word in order.split() if "@" not in word) for order in orders[: decoder.num_stages])
    is_free = find_schedule(decoder.schedule, decoder.num_chunks).given_by == "placement"
    placement = replace(certificate.placement, orders=words if is_free else ())
    try:
        check_placement(decoder, placement)
    except PlanError as error:
        raise PlanError(f"placement: {error}") from None
    _check_schedule(decoder, placement, words)
    loads = sum_loads(decoder, placement)
    work = _list_work(problem, loads)
    actions = [_read_device(problem, device, order) for device, order in enumerate(orders)]
    _check_passes(actions)
    free, ends = [0.0] * len(actions), dict[Action, float]()
    if sorted(action for each in actions for action in each) != sorted(work.device) or any(
        work.device[action] != device for device, each in enumerate(actions) for action in each
    ):
        raise PlanError("placement.order does not run every action of the problem once, on its device")
    heads, moved = [0] * len(actions), True
    while moved:
        moved = False
        for device, each in enumerate(actions):
            while heads[device] < len(each) and all(before in ends for before, _ in work.waits_ms[each[heads[device]]]):
                action = each[heads[device]]
                ready = max((ends[before] + way_ms for before, way_ms in work.waits_ms[action]), default=0.0)
                free[device] = ends[action] = max(free[device], ready) + work.length_ms[action]
                heads[device], moved = heads[device] + 1, True
    if len(ends) < len(work.device):
        raise PlanError("placement.order never ends: devices wait for one another")
    _check_memory(problem, placement, loads, work, actions)
    for stage in range(decoder.num_stages):
        free[stage] += float(loads.tail_ms[stage])
    cached = [encoder for encoder in problem.encoders if encoder.run == "cached"]
    reads = (
        -(-decoder.num_microbatches // each.microbatches_per_pass) * each.output_bytes * each.read_ms_per_byte
        for each in cached
    )
    return max(*free, *reads, 0.0)


def _check_schedule(decoder: Problem, placement: Placement, words: Sequence[str]) -> None:
    """Raise PlanError where a device runs the decoder's actions in another order than the schedule's."""
    graph = graph_of(decoder, placement)
    for stage, text in enumerate(words):
        mine = np.flatnonzero(graph.stage == stage)
        rows = zip(graph.kind[mine].tolist(), graph.place[mine].tolist(), graph.micro_batch[mine].tolist(), strict=True)
        named = " ".join(format_action(kind, place // decoder.num_stages, m) for kind, place, m in rows)
        if text != named:
            raise PlanError(f"placement.order[{stage}] runs the decoder's actions in another order than its schedule")


def _read_device(problem: EncodedProblem, device: int, order: str) -> list[Action]:
    names, found = {encoder.name for encoder in problem.encoders}, []
    by_chunk = problem.decoder.virtual_stages
    for word in order.split():
        text, mark, name = word.partition("@")
        try:
            ((kind, part, index),) = parse_order(text).tolist()
        except ValueError as error:
            raise PlanError(f"placement.order[{device}]: {error}") from None
        if (mark and name not in names) or (not mark and (device >= len(by_chunk) or part >= len(by_chunk[device]))):
            raise PlanError(f"placement.order[{device}] has {word}, which is no action of that device")
        found.append((name, kind, part if mark else by_chunk[device][part], index))
    return found


def _check_passes(actions: Sequence[Sequence[Action]]) -> None:
    """Raise PlanError where a device runs passes of one encoder's stage in another order than their own."""
    for device, each in enumerate(actions):
        last: dict[tuple[str, int, int], int] = {}
        for name, kind, part, index in each:
            if name and last.get((name, kind, part), -1) >= index:
                raise PlanError(f"placement.order[{device}] runs pass {index} of {name} out of its turn")
            last[name, kind, part] = index


def _list_work(problem: EncodedProblem, loads: Loads) -> _Work:
    decoder, work = problem.decoder, _Work()
    count, end = decoder.num_microbatches, decoder.num_virtual_stages - 1
    of_stage = {k: stage for stage, virtual in enumerate(decoder.virtual_stages) for k in virtual}
    for k in range(end + 1):
        kept = float(loads.activation_bytes[k])
        for m in range(count):
            there = [(("", FORWARD, k - 1, m), float(loads.hop_forward_ms[k - 1]))] if k else []
            back = (
                (("", BACKWARD, k + 1, m), float(loads.hop_backward_ms[k])) if k < end else (("", FORWARD, k, m), 0.0)
            )
            work.add(("", FORWARD, k, m), of_stage[k], float(loads.forward_ms[k, 0]), kept, there)
            work.add(("", BACKWARD, k, m), of_stage[k], float(loads.backward_ms[k, 0]), kept, [back])
    by_name = {encoder.name: encoder for encoder in problem.encoders}
    followers = {encoder.follows: encoder for encoder in problem.encoders if encoder.follows}
    for encoder in problem.encoders:
        if encoder.run != "cached":
            for index in range(-(-count // encoder.microbatches_per_pass)):
                _add_pass(work, encoder, index, (by_name.get(encoder.follows), followers.get(encoder.name)), count)
    return work


def _add_pass(
    work: _Work, encoder: Encoder, index: int, beside: tuple[Encoder | None, Encoder | None], count: int
) -> None:
    """The actions of one pass, and the decoder's that wait for it. beside: the encoder that it follows, and the one
    that follows it."""
    before, follower = beside
    name, size, end = encoder.name, encoder.microbatches_per_pass, encoder.num_stages - 1
    fed = range(index * size, min(count, (index + 1) * size))
    for part, device in enumerate(encoder.pipelines[index % len(encoder.pipelines)]):
        waits = [((name, FORWARD, part - 1, index), encoder.stage_hop_ms)] if part else []
        if before is not None and not part:
            waits = [((before.name, FORWARD, before.num_stages - 1, index), before.feed_ms)]
        work.add((name, FORWARD, part, index), device, encoder.forward_ms[part], encoder.activation_bytes[part], waits)
        if encoder.is_frozen:
            continue
        if part < end:
            waits = [((name, BACKWARD, part + 1, index), encoder.stage_hop_ms)]
        elif follower is not None:
            waits = [((follower.name, BACKWARD, 0, index), encoder.feed_ms)]
        else:
            waits = [(("", BACKWARD, encoder.first_stage, m), encoder.feed_ms) for m in fed]
        work.add(
            (name, BACKWARD, part, index), device, encoder.backward_ms[part], encoder.activation_bytes[part], waits
        )
    if encoder.run != "bubbles":
        return
    if encoder.most_ahead is not None and index >= encoder.most_ahead:
        begun = range((index - encoder.most_ahead) * size, min(count, (index - encoder.most_ahead + 1) * size))
        work.waits_ms[name, FORWARD, 0, index] += [(("", FORWARD, encoder.first_stage, m), 0.0) for m in begun]
    if follower is None:
        for m in fed:
            work.waits_ms["", FORWARD, encoder.first_stage, m].append(((name, FORWARD, end, index), encoder.feed_ms))


def _check_memory(
    problem: EncodedProblem, placement: Placement, loads: Loads, work: _Work, actions: Sequence[Sequence[Action]]
) -> None:
    """Raise PlanError, naming the device, where one holds more than its limit."""
    decoder, held = problem.decoder, _held_always(problem)
    frozen = {encoder.name for encoder in problem.encoders if encoder.is_frozen}
    peaks = []
    for device, each in enumerate(actions):
        now = most = 0.0
        for action in each:
            kept = work.kept_bytes[action]
            most = max(most, now + kept) if action[1] == FORWARD else most
            now += kept * (0 if action[0] in frozen else 1 if action[1] == FORWARD else -1)
        peaks.append(held[device] + most)
    stages = slice(0, decoder.num_stages)
    at_work = loads.static_bytes + loads.restored_bytes + loads.transient_bytes + np.array(peaks[stages])
    at_end = loads.static_bytes + loads.step_bytes + np.array(held[stages])
    on_stages = np.maximum(at_work, at_end)
    for stage in overfull_stages(decoder, on_stages):
        raise PlanError(f"placement: device {stage} holds {on_stages[stage] / GB:.3f} GB, above its limit")
    for stage in overfull_hosts(decoder, peak_host_bytes(decoder, loads, graph_of(decoder, placement))):
        raise PlanError(f"placement: stage {stage} keeps more on its host than its limit there")
    for encoder in problem.encoders:
        for device in (each for pipeline in encoder.pipelines for each in pipeline if each >= decoder.num_stages):
            if encoder.run != "cached" and peaks[device] > encoder.limit_bytes * (1.0 + BYTES_FRACTION):
                raise PlanError(f"placement: device {device} holds {peaks[device] / GB:.3f} GB, above its limit")
