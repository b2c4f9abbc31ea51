"""Words as text, one a device: the decoder's actions as schedules/action.py has them, `2F0`, and those of encoders with
the name behind, `2F0@vision`: pass 2, forward, stage 0 of the encoder's own pipeline."""

from __future__ import annotations

from mm_autoparallel.pipeline.simulate.encoders.play import Player, Words
from mm_autoparallel.pipeline.simulate.encoders.tasks import Tasks
from mm_autoparallel.pipeline.schedules.action import format_action


def write_orders(tasks: Tasks, words: Words) -> tuple[str, ...]:
    """The text of each device; joins are nobody's action."""
    player = Player(tasks)
    num_stages = tasks.problem.decoder.num_stages
    texts = []
    for device in range(tasks.problem.num_devices):
        actions = []
        for task in player.tasks_of(words, device):
            owner, part = int(tasks.owner[task]), int(tasks.part[task])
            chunk = part // num_stages if owner < 0 else part
            text = format_action(int(tasks.kind[task]), chunk, int(tasks.index[task]))
            actions.append(text if owner < 0 else f"{text}@{tasks.problem.encoders[owner].name}")
        texts.append(" ".join(actions))
    return tuple(texts)
