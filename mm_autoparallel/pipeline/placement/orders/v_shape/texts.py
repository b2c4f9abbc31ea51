"""Texts of a V's words and back, and the words of V-shaped schedules that have names."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from mm_autoparallel.pipeline.placement.orders.figures import INPUT, NUM_KINDS, WEIGHT
from mm_autoparallel.pipeline.placement.orders.v_shape.words import NUM_LETTERS, Words
from mm_autoparallel.pipeline.schedules.action import KINDS, StageOrder, parse_order
from mm_autoparallel.pipeline.schedules.catalog import SCHEDULES, V_CHUNKS

#: Letters of a chunk for each kind of action, as `schedules/action` numbers them: F, B, I, W.
_LETTERS = {"F": (0,), "B": (INPUT, WEIGHT), "I": (INPUT,), "W": (WEIGHT,)}


def write_word(word: Words, is_whole: tuple[bool, bool]) -> str:
    """A stage's order as text; is_whole: of each chunk, its backwards are whole, and weight gradients part of them."""
    ran = [0] * NUM_LETTERS
    texts = []
    for letter in word.tolist():
        chunk, kind = divmod(letter, NUM_KINDS)
        if not (is_whole[chunk] and kind == NUM_KINDS - 1):
            texts.append(f"{ran[letter]}{'B' if is_whole[chunk] and kind == INPUT else 'FIW'[kind]}{chunk}")
        ran[letter] += 1
    return " ".join(texts)


def read_word(text: str) -> tuple[Words, tuple[bool, bool]] | None:
    """The word [6M] of a stage's order, and of each chunk whether its backwards are whole; None where of one chunk some
    are and some are not."""
    order = parse_order(text)
    whole = []
    for chunk in range(V_CHUNKS):
        kinds = {KINDS[kind] for kind in order[order[:, 1] == chunk, 0].tolist()}
        if "B" in kinds and "I" in kinds:
            return None
        whole.append("B" in kinds)
    return _word_of(order), (whole[0], whole[1])


@lru_cache(maxsize=4)
def named_words(num_stages: int, num_microbatches: int) -> tuple[Words, ...]:
    """The words [P, 6M] of every V-shaped schedule with a name that runs no pairs: whole backwards count as both their
    parts, one after the other."""
    found = []
    for schedule in SCHEDULES.values():
        if schedule.v_shaped and not schedule.pairs and num_microbatches >= schedule.least_rounds * num_stages:
            orders = [schedule.order(num_stages, V_CHUNKS, num_microbatches, s) for s in range(num_stages)]
            found.append(np.array([_word_of(order) for order in orders]))
    return tuple(found)


def _word_of(order: StageOrder) -> Words:
    letters = [chunk * NUM_KINDS + kind for action, chunk, _ in order.tolist() for kind in _LETTERS[KINDS[action]]]
    return np.array(letters, dtype=np.int8)
