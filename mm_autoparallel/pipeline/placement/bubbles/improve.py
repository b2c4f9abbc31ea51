"""Words by annealing: letters change places on their lane, and the simulator's engine says what that gives."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy as np

from mm_autoparallel.pipeline.simulate.encoders.play import Player, Words

#: Warmth of the start and of the end of a run, in parts of the step.
WARM, COLD = 0.01, 0.0002


def anneal(
    player: Player, words: Words, num_moves: int, target_ms: float, should_stop: Callable[[], bool], seed: int
) -> tuple[float, Words]:
    """The best step and words of so many moves from `words`, which end at target_ms.

    Beside a decoder of several chunks, whose letters are many and in one order, letters of encoders alone are moved.
    """
    random_numbers = random.Random(seed)
    tasks = player.tasks
    now = words.copy()
    longest = [int((row >= 0).sum()) for row in now]
    lanes = [lane for lane, length in enumerate(longest) if len(set(now[lane, :length].tolist())) > 1]
    moves_all = tasks.problem.decoder.num_chunks == 1
    of_encoder = np.array([bool(tasks.owner[strand[0]] >= 0) for strand in tasks.strands])
    step_ms = best_ms = player.step_ms(now)
    best = now.copy()
    warm_ms, cold_ms = WARM * step_ms, COLD * step_ms
    for move in range(num_moves if lanes else 0):
        if best_ms <= target_ms * (1.0 + 1e-12) or (move % 64 == 0 and should_stop()):
            break
        lane = random_numbers.choice(lanes)
        length = longest[lane]
        places = range(length) if moves_all else np.flatnonzero(of_encoder[now[lane, :length]]).tolist()
        source = places[random_numbers.randrange(len(places))]
        reach = random_numbers.choice((1, 2, 4, length))
        target = min(length - 1, max(0, source + random_numbers.randint(-reach, reach)))
        if now[lane, source] == now[lane, target]:
            continue
        old = now[lane].copy()
        letters = old[:length].tolist()
        letters.insert(target, letters.pop(source))
        now[lane, :length] = letters
        new_ms = player.step_ms(now) if player.fits(now, [lane]) else math.inf
        heat_ms = warm_ms * (cold_ms / warm_ms) ** (move / num_moves) if warm_ms > 0.0 else 1.0
        if new_ms <= step_ms or (
            new_ms < math.inf and random_numbers.random() < math.exp((step_ms - new_ms) / heat_ms)
        ):
            step_ms = new_ms
            if step_ms < best_ms:
                best_ms, best = step_ms, now.copy()
        else:
            now[lane] = old
    assert len(best) == tasks.num_lanes
    return best_ms, best
