"""Rows of the CP-SAT master: what every stage holds keeps within its limits, or exceeds them by as little as can be.

Integers are rounded as in the master: what is held down, limits up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from ortools.sat.python import cp_model

from mm_autoparallel.pipeline.placement.cuts.model import Master, run_blocks
from mm_autoparallel.pipeline.simulate.loads import allowed_bytes, allowed_host_bytes, graph_of
from mm_autoparallel.pipeline.stage_memory import Held, held_by

#: The memory limit, in integers as the step is; and that of the host, of which a mode may fill many times as much.
LIMIT_UNITS, HOST_UNITS = 2**27, 2**22


def limit_memory(master: Master) -> None:
    """Require every stage to fit its memory, and its host."""
    blocks = [run_blocks(master.segments, r) for r in range(len(master.segments.run_size))]
    for s in range(master.segments.problem.num_stages):
        limit_stage_memory(master, blocks, s)
        limit_stage_host(master, blocks, s)


def limit_stage_memory(
    master: Master, blocks: list[list[int]], stage: int, excess: cp_model.IntVar | int = 0, unit: float = 0.0
) -> None:
    """Require `stage` to fit its memory, or to exceed it by at most `excess` (in units of `unit` bytes, 0: its
    own)."""
    problem = master.segments.problem
    limit = float(allowed_bytes(problem)[stage]) - problem.stage_static_bytes[stage]

    transients = [max(problem.chain[e].transient_bytes for e in members) for members in blocks]
    room = _Room(limit, unit or max(limit, 1.0) / LIMIT_UNITS, excess)
    _limit_stage(master, blocks, stage, room, Held.at_work, transients)
    if master.segments.has_step and not room.is_none:
        _limit_step(master, blocks, stage, room)


def limit_stage_host(
    master: Master, blocks: list[list[int]], stage: int, excess: cp_model.IntVar | int = 0, unit: float = 0.0
) -> None:
    """The same of what `stage` keeps on its host; nothing where that is not limited."""
    if not master.segments.limits_host:
        return
    limit = float(allowed_host_bytes(master.segments.problem)[stage])
    unit = unit or max(limit, 1.0) / HOST_UNITS
    _limit_stage(master, blocks, stage, _Room(limit, unit, excess), Held.on_host, [0.0] * len(blocks))


class _Room(NamedTuple):
    """What a stage may hold, the unit it is counted in (bytes), and by how many units it may be exceeded."""

    limit_bytes: float
    unit_bytes: float
    excess: cp_model.IntVar | int

    def round_down(self, size_bytes: float) -> int:
        """Units of a size; of one that never fits, one more than what does."""
        whole = math.floor(size_bytes / self.unit_bytes)
        return min(whole, self.limit + 1) if isinstance(self.excess, int) else whole

    @property
    def is_none(self) -> bool:
        """Whether nothing fits."""
        return self.limit_bytes < 0.0 and isinstance(self.excess, int)

    @property
    def limit(self) -> int:
        return math.ceil(self.limit_bytes / self.unit_bytes)


def _limit_stage(
    master: Master,
    blocks: list[list[int]],
    stage: int,
    room: _Room,
    held_bytes: Callable[[Held, float, float], float],
    transients_bytes: list[float],
) -> None:
    """Require what `stage` holds in every state of its schedule to keep within its room.

    held_bytes: of what a block holds, with so many micro-batches in flight, and pending. transients_bytes: by run.
    """
    problem, model = master.segments.problem, master.model
    chain, mine, graph = problem.chain, problem.virtual_stages[stage], graph_of(problem)
    if room.is_none:
        model.add_bool_or([])
        return
    for row, rests in zip(graph.in_flight[stage].tolist(), graph.pending[stage].tolist(), strict=True):
        terms: list[cp_model.LinearExprT] = []
        for k, *counts in zip(mine, row, rests, strict=True):
            for r, members in enumerate(blocks):
                own = sum(room.round_down(held_bytes(held_by(chain[e]), *counts)) for e in members)
                terms.append(own * master.count[k][r])
                for (i, m), x in master.in_mode[k][r].items():
                    block = chain[members[i]]
                    in_mode = room.round_down(held_bytes(held_by(block, block.modes[m]), *counts))
                    terms.append((in_mode - room.round_down(held_bytes(held_by(block), *counts))) * x)
        model.add(sum(terms) <= room.limit + room.excess)
        for r, transient_bytes in enumerate(transients_bytes):
            transient = room.round_down(transient_bytes)
            if transient:
                for k in mine:
                    present = model.new_bool_var("")
                    model.add(master.count[k][r] == 0).only_enforce_if(present.negated())
                    model.add(sum(terms) <= room.limit + room.excess - transient).only_enforce_if(present)


def _limit_step(master: Master, blocks: list[list[int]], stage: int, room: _Room) -> None:
    """Require what `stage` holds during the optimizer's step to keep within its room."""
    problem, model = master.segments.problem, master.model
    most = max(block.step_once_bytes for block in problem.chain)
    held: list[cp_model.LinearExprT] = []
    shards: list[cp_model.LinearExprT] = []
    for k in problem.virtual_stages[stage]:
        for r, members in enumerate(blocks):
            of_run = [problem.chain[e] for e in members]
            held.append(sum(room.round_down(b.static_bytes + b.step_bytes) for b in of_run) * master.count[k][r])
            shards.append(sum(room.round_down(min(b.shard_bytes, most)) for b in of_run) * master.count[k][r])
    model.add(sum(held) <= room.limit + room.excess)
    by_shard = model.new_bool_var("")  # the lesser of the two keeps within the room if either does
    model.add(sum([*held, *shards]) <= room.limit + room.excess).only_enforce_if(by_shard)
    for r, members in enumerate(blocks):
        once = room.round_down(max(problem.chain[e].step_once_bytes for e in members))
        for k in problem.virtual_stages[stage] if once else ():
            present = model.new_bool_var("")
            model.add(master.count[k][r] == 0).only_enforce_if(present.negated())
            model.add(sum(held) <= room.limit + room.excess - once).only_enforce_if(present, by_shard.negated())
