"""EncodedProblem: a decoder's pipeline, and encoders whose work runs beside it, numbers only.

An encoder is no part of the decoder's chain. It is cut into pipelines of its own, which share the micro-batches: on the
decoder's devices, where its work takes what time the decoder leaves (bubbles: Optimus, arXiv:2408.03505), or on devices
of their own. Of each micro-batch the decoder's first forward waits for every encoder that feeds it.
"""

from __future__ import annotations

from dataclasses import dataclass

from mm_autoparallel.errors import JobError
from mm_autoparallel.pipeline.encoder import Encoder
from mm_autoparallel.pipeline.problem import Problem
from mm_autoparallel.pipeline.schedules.catalog import find_schedule


@dataclass(frozen=True)
class EncodedProblem:
    """`decoder` is the decoder alone: its limits are those of the devices, which also hold what encoders keep there."""

    decoder: Problem
    encoders: tuple[Encoder, ...]

    @property
    def first_stage(self) -> int:
        """The decoder's stage that its encoders meet."""
        return max((encoder.first_stage for encoder in self.encoders), default=0)

    @property
    def num_devices(self) -> int:
        """Of the decoder, and of encoders that have their own."""
        used = (device for encoder in self.encoders for pipeline in encoder.pipelines for device in pipeline)
        return max(self.decoder.num_stages, max(used, default=0) + 1)


def deal_pipelines(
    num_devices: int, num_stages: int, turn: int = 0, first_device: int = 0
) -> tuple[tuple[int, ...], ...]:
    """The pipelines of an encoder over `num_devices` devices, in the order they take passes: from the last one back,
    since the decoder's last stages are the last to begin. turn: how many the first pass lies further on, so that
    encoders that share devices do not meet. Raises ValueError where num_stages does not divide num_devices.
    """
    if num_devices % num_stages:
        raise ValueError(f"{num_stages} does not divide {num_devices}")
    cut = [tuple(range(at, at + num_stages)) for at in range(0, num_devices, num_stages)]
    back = [tuple(first_device + device for device in each) for each in reversed(cut)]
    turn %= len(back)
    return tuple(back[turn:] + back[:turn])


def check_encoders(problem: EncodedProblem) -> None:
    """Raise JobError, naming the encoder and the law, where encoders contradict one another or the decoder."""
    _check_decoder(problem.decoder)
    names = [encoder.name for encoder in problem.encoders]
    for encoder in problem.encoders:
        where = f'encoder "{encoder.name}"'
        if names.count(encoder.name) > 1:
            raise JobError(f"two encoders are called {encoder.name!r}; orders name them, so each needs its own name")
        for key in ("backward_ms", "static_bytes", "activation_bytes"):
            if len(getattr(encoder, key)) != encoder.num_stages:
                raise JobError(
                    f"{where}: {key} has {len(getattr(encoder, key))} entries, forward_ms {encoder.num_stages}"
                )
        if encoder.run != "bubbles" and not encoder.is_frozen:
            raise JobError(
                f'{where} has a backward, and run "{encoder.run}" makes its features in another step, with other '
                'weights: freeze it (backward_ms 0), or run it in "bubbles"'
            )
        if encoder.run != "bubbles" and (encoder.most_ahead is not None or encoder.follows):
            raise JobError(f'{where}: most_ahead and follows are of run "bubbles"; run is "{encoder.run}"')
        if encoder.follows:
            _check_following(problem, encoder)
        _check_first_stage(problem, encoder)


def _check_first_stage(problem: EncodedProblem, encoder: Encoder) -> None:
    where, num_stages = f'encoder "{encoder.name}"', problem.decoder.num_stages
    if not 0 <= encoder.first_stage < num_stages:
        raise JobError(
            f"{where}: first_stage is {encoder.first_stage}; stages of the decoder are 0 to {num_stages - 1}"
        )
    other = next((each for each in problem.encoders if each.first_stage != encoder.first_stage), None)
    if other is not None:
        raise JobError(
            f'{where} and "{other.name}" meet the decoder at the stages {encoder.first_stage} and {other.first_stage}; '
            "encoders beside one decoder need one first_stage"
        )
    lowest = min((device for pipeline in encoder.pipelines for device in pipeline), default=encoder.first_stage)
    if lowest < encoder.first_stage:
        raise JobError(f"{where} has a device of stage {lowest}, and stages before {encoder.first_stage} are of others")


def _check_decoder(decoder: Problem) -> None:
    schedule = find_schedule(decoder.schedule, decoder.num_chunks)
    if schedule.num_pieces > 1:
        raise JobError(
            f"schedule {decoder.schedule} runs pieces of sequences, and encoders run whole micro-batches beside whole "
            "ones; name another schedule"
        )
    if schedule.given_by == "placement":
        block = next((block for block in decoder.chain if block.backward_weight_ms), None)
        if block is not None:
            raise JobError(
                f'schedule free parts backwards, and beside encoders it takes whole ones: block "{block.name}" has a '
                "backward_weight_ms; leave it out, or name a schedule"
            )
        if decoder.host_limit_bytes:
            raise JobError(
                "schedule free beside encoders takes no host_limit_bytes: leave them out, or name a schedule"
            )
    elif decoder.splits or decoder.pairs:
        raise JobError(
            f"schedule {decoder.schedule} parts or pairs backwards, and encoders run beside whole ones alone: name "
            "gpipe, 1f1b, an interleaved one, given with whole backwards, or free"
        )
    if decoder.orders:
        forwards = [word for word in decoder.orders[0].split() if word.endswith("F0")]
        if forwards != [f"{m}F0" for m in range(decoder.num_microbatches)]:
            raise JobError(
                "orders[0] runs forwards of chunk 0 in another order than 0, 1, 2 …; encoders run their passes in that "
                "order, so name the micro-batches by it"
            )
    for block in decoder.chain:
        if block.microbatch_scale:
            raise JobError(f'block "{block.name}" has a microbatch_scale; encoders run beside equal micro-batches')


def _check_following(problem: EncodedProblem, encoder: Encoder) -> None:
    where = f'encoder "{encoder.name}"'
    by_name = {each.name: each for each in problem.encoders}
    before = by_name.get(encoder.follows)
    if before is None or before is encoder:
        others = ", ".join(name for name in by_name if name != encoder.name) or "none"
        raise JobError(f"{where} follows {encoder.follows!r}; other encoders are {others}")
    seen, at = {encoder.name}, before
    while at.follows:
        if at.name in seen or at.follows not in by_name:
            raise JobError(f"{where} follows {encoder.follows!r}, and going on from there never ends at a first one")
        seen.add(at.name)
        at = by_name[at.follows]
    twice = next((e for e in problem.encoders if e is not encoder and e.follows == encoder.follows), None)
    if twice is not None:
        raise JobError(
            f'{where} and "{twice.name}" both follow "{before.name}"; an encoder feeds the decoder or one other: let '
            "one of them follow the other"
        )
    if before.run != "bubbles":
        raise JobError(f'{where} follows "{before.name}", whose run is "{before.run}"; both need "bubbles"')
    if before.microbatches_per_pass != encoder.microbatches_per_pass:
        raise JobError(f'{where} and "{before.name}", which it follows, need one microbatches_per_pass')
    if encoder.is_frozen and not before.is_frozen:
        raise JobError(
            f'{where} is frozen and follows "{before.name}", which is not: gradients pass through it, so give what '
            "its backward takes"
        )
    if encoder.most_ahead is not None:
        raise JobError(f'{where} follows "{before.name}": its passes are ahead no longer than those, so cap them there')
