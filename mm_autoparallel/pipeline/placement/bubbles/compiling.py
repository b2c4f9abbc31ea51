"""Compile the kernels of this room before any clock runs, where this machine never did."""

from __future__ import annotations

from mm_autoparallel.pipeline.encoder import Encoder
from mm_autoparallel.pipeline.encoders import EncodedProblem
from mm_autoparallel.pipeline.placement.bubbles.lanes import bound_lanes
from mm_autoparallel.pipeline.problem import ChainBlock, Placement, Problem
from mm_autoparallel.pipeline.simulate.encoders.play import Player, words_by_starts
from mm_autoparallel.pipeline.simulate.encoders.tasks import list_tasks
from mm_autoparallel.pipeline.simulate.rooms import compile_rooms


def compile_words() -> None:
    """Compile them, or wait for a process that does; standard error says why."""
    compile_rooms((_compile,))


def _compile() -> None:
    block = ChainBlock("one", "text", 1, 1.0, 1.0)
    decoder = Problem(1, 1, 1, "1f1b", (block,), (1.0,), (0.0,), (0.0,), (), ())
    encoder = Encoder("one", (1.0,), (1.0,), ((0,),), static_bytes=(0.0,), activation_bytes=(0.0,))
    player = Player(list_tasks(EncodedProblem(decoder, (encoder,)), Placement(((1,),), (((),),))))
    player.step_ms(words_by_starts(player.tasks, [1.0, 2.0, 0.0, 3.0]))
    bound_lanes(player, 0.0, 1.0, lambda: False)
