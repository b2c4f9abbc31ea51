"""Every placement of a small decoder that has modes, and every order of it and the encoders beside it.

Stages are put together as `semantics` documents them, orders are those of `encoder_orders`.
"""

from __future__ import annotations

import math
from itertools import product

import brute_force
import numpy as np
from encoder_orders import Work, _add_encoder, _feed, best_step, one_f_one_b
from semantics import Document, content, fits, hops, limits, spread, stage_tails

MOST_ACTIONS = 24
"""Of the decoder and its encoder. More take minutes."""


def count_actions(stages: int, count: int, passes: int, trains: bool) -> int:
    return 2 * stages * count + passes * (1 + trains)


def best_beside(document: Document) -> float:
    """The least step of all placements and orders; infinite where nothing fits."""
    best = math.inf
    stages = document["num_stages"]
    for cut in brute_force.cuts(document):
        held = [brute_force.held_between(document, cut[s], cut[s + 1]) for s in range(stages)]
        options = [
            [content(document, s, held[s], modes) for modes in brute_force.mode_counts(document, held[s])]
            for s in range(stages)
        ]
        for chosen in product(*options):
            work = _work_of(document, held, list(chosen))
            if work is not None:
                best = best_step(work, best)
    return best


def _work_of(document: Document, held: list[list[int]], chosen: list[Document]) -> Work | None:
    """None where no order fits: the optimizer's step, or a stage's own order."""
    stages, count = document["num_stages"], document["num_microbatches"]
    own, (device_limits, _) = spread(document.get("stage_static_bytes", 0.0), stages), limits(document)
    there, back = hops(document, [max(e for e, n in enumerate(row) if n) for row in held])
    work = Work({}, {}, {}, {}, [], device_limits, stage_tails(document, np.array(held)))
    for s, of in enumerate(chosen):
        passing = of["step"] + min(of["step_once"], of["step_shard"])
        if not fits(own[s] + of["static"] + passing, device_limits[s]):
            return None
        work.fixed.append(own[s] + of["static"] + of["restored"] + of["transient"])
        before = None
        for kind, m in one_f_one_b(stages, count, s):
            op = ("", kind, s, m)
            work.device[op] = s
            work.length[op] = float(of["forward" if kind == "F" else "backward"][m])
            work.kept[op] = of["activation"]
            work.waits[op] = [(before, 0.0)] if before else []
            if kind == "F" and s > 0:
                work.waits[op].append((("", "F", s - 1, m), there[s - 1]))
            if kind == "B" and s < stages - 1:
                work.waits[op].append((("", "B", s + 1, m), back[s]))
            before = op
    back = [[s] for s in reversed(range(stages))]
    for turn, encoder in enumerate(document["encoders"]):
        first = turn % stages
        _add_encoder(work, document, encoder, back[first:] + back[:first])
    _feed(work, document)
    return work
