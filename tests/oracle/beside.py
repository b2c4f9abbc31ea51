"""Every placement of a small decoder that has modes, and every order of it and the encoders beside it.

Stages are put together as `semantics` documents them, orders are those of `encoder_orders`.
"""

from __future__ import annotations

import math
from itertools import product

import brute_force
import numpy as np
from encoder_orders import Work, _add_encoder, _feed, best_step, in_turn
from semantics import Document, content, fits, hops, limits, num_virtual_stages, spread, stage_tails

MOST_ACTIONS = 24
"""Of the decoder and its encoder. More take minutes."""


def count_actions(stages: int, count: int, passes: int, trains: bool, chunks: int = 1) -> int:
    return 2 * stages * chunks * count + passes * (1 + trains)


def best_beside(document: Document) -> float:
    """The least step of all placements and orders; infinite where nothing fits."""
    best = math.inf
    stages, total = document["num_stages"], num_virtual_stages(document)
    for cut in brute_force.cuts(document):
        held = [brute_force.held_between(document, cut[k], cut[k + 1]) for k in range(total)]
        options = [
            [content(document, k % stages, held[k], modes) for modes in brute_force.mode_counts(document, held[k])]
            for k in range(total)
        ]
        for chosen in product(*options):
            work = _work_of(document, held, list(chosen))
            if work is not None:
                best = best_step(work, best)
    return best


def _work_of(document: Document, held: list[list[int]], chosen: list[Document]) -> Work | None:
    """None where no order fits: the optimizer's step, or a stage's own order."""
    stages, count, total = document["num_stages"], document["num_microbatches"], len(held)
    own, (device_limits, _) = spread(document.get("stage_static_bytes", 0.0), stages), limits(document)
    there, back = hops(document, [max(e for e, n in enumerate(row) if n) for row in held])
    work = Work({}, {}, {}, {}, [], device_limits, stage_tails(document, np.array(held)))
    for s in range(stages):
        parts = chosen[s::stages]
        static, passing, shard = (sum(of[name] for of in parts) for name in ("static", "step", "step_shard"))
        passing += min(max(of["step_once"] for of in parts), shard)
        if not fits(own[s] + static + passing, device_limits[s]):
            return None
        working = sum(of["restored"] for of in parts) + max(of["transient"] for of in parts)
        work.fixed.append(own[s] + static + working)
        before = None
        for kind, k, m in in_turn(stages, total // stages, count, s):
            op, of = ("", kind, k, m), chosen[k]
            work.device[op] = s
            work.length[op] = float(of["forward" if kind == "F" else "backward"][m])
            work.kept[op] = of["activation"]
            work.waits[op] = [(before, 0.0)] if before else []
            if kind == "F" and k > 0:
                work.waits[op].append((("", "F", k - 1, m), there[k - 1]))
            if kind == "B" and k < total - 1:
                work.waits[op].append((("", "B", k + 1, m), back[k]))
            before = op
    for turn, encoder in enumerate(document["encoders"]):
        back = [[s] * encoder.get("pieces", 1) for s in reversed(range(encoder.get("first_stage", 0), stages))]
        first = turn % len(back)
        _add_encoder(work, document, encoder, back[first:] + back[:first])
    _feed(work, document)
    return work
