"""Words as text, one a device: the decoder's actions as schedules/action.py has them, `2F0`, and those of encoders with
the name behind, `2F0@vision`: pass 2, forward, stage 0 of the encoder's own pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mm_autoparallel.errors import PlanError
from mm_autoparallel.pipeline.encoder import Encoder
from mm_autoparallel.pipeline.schedules.action import FORWARD, format_action, parse_order
from mm_autoparallel.pipeline.simulate.encoders.play import Player, Words, write_words
from mm_autoparallel.pipeline.simulate.encoders.tasks import DECODER, Tasks


def write_orders(tasks: Tasks, words: Words) -> tuple[str, ...]:
    """The text of each device; joins are nobody's action."""
    player = Player(tasks)
    devices = range(tasks.problem.num_devices)
    return tuple(" ".join(_write(tasks, task) for task in player.tasks_of(words, device)) for device in devices)


def _write(tasks: Tasks, task: int) -> str:
    owner, kind, part, index = _key(tasks, task)
    if owner == DECODER:
        return format_action(kind, part // tasks.problem.decoder.num_stages, index)
    return f"{format_action(kind, part, index)}@{tasks.problem.encoders[owner].name}"


def read_orders(tasks: Tasks, texts: Sequence[str]) -> Words:
    """The words of texts, one a device of the decoder, as `write_orders` writes them.

    Raises PlanError, naming device and action, where one is no action of that device, comes out of its turn, or misses.
    """
    num_stages = tasks.problem.decoder.num_stages
    if len(texts) != num_stages:
        raise PlanError(f"orders has {len(texts)} entries; num_stages is {num_stages}, and each stage needs its own")
    owners = {encoder.name: owner for owner, encoder in enumerate(tasks.problem.encoders)} | {"": DECODER}
    lanes: list[list[int]] = []
    for lane in range(tasks.num_lanes):
        mine = [strand for strand, of in enumerate(tasks.strand_lane) if of == lane]
        if lane >= num_stages:  # of joins, in their one order
            lanes.append([strand for strand in mine for _ in tasks.strands[strand]])
            continue
        lanes.append(_read_device(tasks, lane, mine, texts[lane].split(), owners))
    return write_words(tasks, lanes)


def _read_device(
    tasks: Tasks, device: int, strands: Sequence[int], words: Sequence[str], owners: Mapping[str, int]
) -> list[int]:
    left = {strand: tasks.strands[strand].tolist()[::-1] for strand in strands}
    letters = []
    for word in words:
        text, _, name = word.partition("@")
        try:
            ((kind, chunk, index),) = parse_order(text).tolist()
        except ValueError as error:
            raise PlanError(f"orders[{device}]: {error}") from None
        owner = owners.get(name)
        part = chunk * tasks.problem.decoder.num_stages + device if owner == DECODER else chunk
        wanted = owner, kind, part, index
        turns = {(_key(tasks, of[-1])): strand for strand, of in left.items() if of}
        if wanted not in turns:
            turn = ", ".join(sorted(_write(tasks, of[-1]) for of in left.values() if of)) or "nothing"
            raise PlanError(f"orders[{device}] has {word} where in its turn would be {turn}")
        letters.append(turns[wanted])
        left[turns[wanted]].pop()
    missing = [_write(tasks, of[-1]) for of in left.values() if of]
    if missing:
        raise PlanError(f"orders[{device}] ends without {', '.join(missing)}")
    return letters


def _key(tasks: Tasks, task: int) -> tuple[int, int, int, int]:
    return int(tasks.owner[task]), int(tasks.kind[task]), int(tasks.part[task]), int(tasks.index[task])


def encoders_peak_bytes(encoders: Sequence[Encoder], text: str) -> float:
    """The most that encoders keep of passes in flight on a device of that order, frozen ones while they run."""
    by_name = {encoder.name: encoder for encoder in encoders}
    held_bytes = most_bytes = 0.0
    for word in text.split():
        action, _, name = word.partition("@")
        if not name:
            continue
        ((kind, part, _index),) = parse_order(action).tolist()
        size_bytes, is_frozen = by_name[name].activation_bytes[part], by_name[name].is_frozen
        held_bytes += size_bytes if kind == FORWARD else -size_bytes
        most_bytes = max(most_bytes, held_bytes)
        held_bytes -= size_bytes if is_frozen else 0.0
    return most_bytes
