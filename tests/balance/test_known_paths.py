"""Paths that the balancer remembers: the play beside them is the simulator's, and no step is shorter than they are."""

from __future__ import annotations

import numpy as np
import pytest

from mm_autoparallel.pipeline.balance.known_paths import know_none, lengthen, play_and_note, reach, reach_within
from mm_autoparallel.pipeline.balance.law import Law
from mm_autoparallel.pipeline.balance.ordering import play_all

LAYERS = ((6, 2, 0, 0), (0, 4, 9, 7))
LAWS = [
    Law("1f1b", 4, 1, LAYERS),
    Law("1f1b", 4, 1, LAYERS, frozen=(True, False)),
    Law("interleaved_1f1b", 2, 2, LAYERS),
    Law("zb_h1", 4, 1, LAYERS),
    Law("dualpipev", 2, 2, LAYERS),
]
NUM_MICROBATCHES = 8


@pytest.mark.parametrize("law", LAWS, ids=lambda law: f"{law.schedule}{law.frozen}")
def test_no_step_is_below_a_known_path(law: Law) -> None:
    random = np.random.default_rng(5)
    tasks = law.tasks(NUM_MICROBATCHES)
    paths = know_none(tasks, 1)
    held_ms = random.uniform(0.2, 3.0, (NUM_MICROBATCHES, 2))
    times_ms = np.empty((1, tasks.num_durations))

    def play() -> float:
        step_ms = float(play_all(held_ms, tasks, times_ms)[0])
        assert play_and_note(times_ms[0], tasks, paths, 0) == step_ms
        assert paths.length_ms[0].max() == pytest.approx(step_ms, rel=1e-12)
        return step_ms

    reached = []
    for _ in range(60):
        known = np.einsum("mcp,mp->c", paths.shares[0], held_ms)
        assert paths.length_ms[0] == pytest.approx(known, rel=1e-9)  # each is still the sum of what it takes
        m, to = random.choice(NUM_MICROBATCHES, 2, replace=False)
        encoder_ms, decoder_ms = held_ms[m] * random.uniform(-0.5, 0.9, 2)
        if random.random() < 0.5:
            bound_ms = reach_within(paths, 0, m, to, encoder_ms, decoder_ms)
            held_ms[to] += encoder_ms, decoder_ms
            lengthen(paths, 0, to, encoder_ms, decoder_ms)
        else:
            bound_ms = reach(paths, 0, m, -encoder_ms, -decoder_ms)
        held_ms[m] -= encoder_ms, decoder_ms
        lengthen(paths, 0, m, -encoder_ms, -decoder_ms)
        step_ms = play()
        assert bound_ms <= step_ms * (1 + 1e-9)
        reached.append(bound_ms / step_ms)
    assert max(reached[5:]) > 0.999  # what it knows is worth something
