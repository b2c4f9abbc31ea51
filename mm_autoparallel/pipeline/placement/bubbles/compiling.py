"""Compile the kernel of this room before any clock runs, where this machine never did."""

from __future__ import annotations

from functools import cache

from mm_autoparallel.pipeline.encoders import EncodedProblem
from mm_autoparallel.pipeline.problem import ChainBlock, Placement, Problem
from mm_autoparallel.pipeline.simulate.compiled import first_compilation
from mm_autoparallel.pipeline.simulate.encoders.play import Player, words_by_starts
from mm_autoparallel.pipeline.simulate.encoders.tasks import list_tasks
from mm_autoparallel.signals import interrupted_by_signals


@cache
def compile_words() -> None:
    """Compile it, or wait for a process that does; standard error says why."""
    with interrupted_by_signals(), first_compilation("play.play_words"):
        block = ChainBlock("one", "text", 1, 1.0, 1.0)
        decoder = Problem(1, 1, 1, "1f1b", (block,), (1.0,), (0.0,), (0.0,), (), ())
        player = Player(list_tasks(EncodedProblem(decoder, ()), Placement(((1,),), (((),),))))
        player.step_ms(words_by_starts(player.tasks, [0.0, 1.0]))
