"""Every word of every stage, one after another: what checks `word_search`, for the smallest problems."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

import numpy as np
from free_orders import Stages, Token, moments_of, play_tokens


def words(count: int, fifo: bool = True) -> Iterator[list[Token]]:
    """All words of one stage; fifo: only those whose actions of a kind take micro-batches in their order, B and I
    being one kind."""
    done: dict[int, str] = dict.fromkeys(range(count), "")
    word: list[Token] = []

    def grow() -> Iterator[list[Token]]:
        left = False
        for m in range(count):
            for letter in {"": "F", "F": "BI", "FI": "W"}.get(done[m], ""):
                left = True
                if fifo and any(_waits(done[other], letter) for other in range(m)):
                    continue
                before = done[m]
                done[m] += letter
                word.append((m, letter))
                yield from grow()
                word.pop()
                done[m] = before
        if not left:
            yield list(word)

    yield from grow()


def _waits(done: str, letter: str) -> bool:
    """Whether an earlier micro-batch has yet to run what this letter is."""
    if letter == "F":
        return not done
    if letter in "BI":
        return len(done) < 2
    return done in ("", "F", "FI")


def number_of_words(count: int, fifo: bool = True) -> int:
    return sum(1 for _ in words(count, fifo))


def best_of_all(of: Stages, allowed: np.ndarray, count: int, fifo: bool = True) -> float:
    """The smallest step over all words that fit; inf where none does. allowed [stage, in flight, pending]."""
    every = list(words(count, fifo))
    of_stage = []
    for s, fits in enumerate(allowed):
        mine = [word for word in every if all(fits[moment] for moment in moments_of(word))]
        if s == 0:  # names of equal micro-batches say nothing
            mine = [word for word in mine if [m for m, letter in word if letter == "F"] == list(range(count))]
        of_stage.append(mine)
    best = math.inf
    for choice in product(*of_stage):
        best = min(best, play_tokens(of, choice))
    return best
