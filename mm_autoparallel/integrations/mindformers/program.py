"""The pipeline as a mixed-integer linear program, for other people's solvers: columns, rows, and MPS text.

Columns are named as the pipeline search of MindFormers users names them: `x_TYPE_s_c` layers of a kind in chunk c of
stage s, `ra_TYPE_s_c` recomputed ones of them, `rs_TYPE_s_c` those of which selected operators are, and so on for every
mode (MODE_COLUMNS), TYPE being type1 for the dense and type2 for the other layers. Starts of all tasks are columns too.
Long runs are compressed: the steady state counts as the load of its busiest stage, so the program's objective can read
lower than the step; its placements are simulated exactly like any other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple

from mm_autoparallel.errors import JobError
from mm_autoparallel.pipeline.problem import RECOMPUTE, ChainBlock, Placement, Problem
from mm_autoparallel.pipeline.schedules.action import BACKWARD
from mm_autoparallel.pipeline.simulate.graph import full_graph, short_graph
from mm_autoparallel.pipeline.simulate.loads import allowed_bytes
from mm_autoparallel.pipeline.stage_memory import held_by
from mm_autoparallel.units import MIB

MODE_COLUMNS = {RECOMPUTE: "ra", "select": "rs", "comm": "rc", "both": "rb"}
"""What columns of layers in a mode begin with; those of other modes with `r_` and the mode's name."""

LAYERS = "x"
"""What columns of layers in any mode begin with."""

SMALL_TASKS = 600
"""Tried: 62 layers on 4 stages of 4 chunks, 256 tasks, take HiGHS 8 s; 6 stages of 4 chunks, 576, more than 30 s."""

_Counts = Mapping[tuple[str, int, int], int]
"""Columns by what they begin with, chain block and virtual stage."""


class Column(NamedTuple):
    """A variable between `least` and `most`."""

    name: str
    least: float
    most: float
    integer: bool


class Row(NamedTuple):
    """least ≤ Σ coefficient · column ≤ most; coefficients by the column's index."""

    least: float
    most: float
    coefficients: Mapping[int, float]


@dataclass
class Program:
    """Minimise column `objective`."""

    columns: list[Column] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    objective: int = 0

    def add_column(self, name: str, most: float = math.inf, integer: bool = False) -> int:
        """A new column from 0 to `most`; its index."""
        self.columns.append(Column(name, 0.0, most, integer))
        return len(self.columns) - 1

    def add_row(self, coefficients: Mapping[int, float], least: float = -math.inf, most: float = math.inf) -> None:
        """A new row."""
        self.rows.append(Row(least, most, coefficients))


def count_columns(problem: Problem) -> dict[tuple[str, int, int], str]:
    """The names of the columns that a placement is read from: (beginning, chain block, virtual stage) → name."""
    layers = [e for e, block in enumerate(problem.chain) if block.layer]
    first_type = 3 - min(2, len(layers))  # a model of one kind of layer has only the second type
    names = {}
    for index, e in enumerate(layers):
        for k in range(problem.num_virtual_stages):
            chunk, stage = divmod(k, problem.num_stages)
            for what in (LAYERS, *_mode_columns(problem.chain[e])):
                names[what, e, k] = f"{what}_type{first_type + index}_{stage}_{chunk}"
    return names


def is_small(problem: Problem) -> bool:
    """Whether the program of `problem` counts every task by itself, and is small enough for a solver to end with it."""
    graph = short_graph(problem.schedule, problem.num_stages, problem.num_chunks, problem.num_microbatches)
    return graph.num_skipped_periods == 0 and graph.num_tasks <= SMALL_TASKS


def build_program(problem: Problem) -> Program:
    """The program of `problem`. Raises JobError where it has what no row expresses (see the message)."""
    _check_expressible(problem)
    program = Program()
    counts = {
        key: program.add_column(name, most=problem.chain[key[1]].count, integer=True)
        for key, name in count_columns(problem).items()
    }
    _place_layers(program, problem, counts)
    _limit_memory(program, problem, counts)
    _order_tasks(program, problem, counts)
    return program


def placement_from_columns(problem: Problem, values: Mapping[str, float]) -> Placement:
    """The placement that column values say. Raises JobError where a column is missing or no whole number."""
    names = count_columns(problem)
    counts = {}
    for key, name in names.items():
        if name not in values:
            raise JobError(f"column {name} is missing; {len(names)} columns x_…, ra_… and so on are expected")
        counts[key] = round(values[name])
        if abs(values[name] - counts[key]) > 1e-4:
            raise JobError(f"column {name} is {values[name]:g}; a whole number of layers is expected")
    last = problem.num_virtual_stages - 1
    for e, block in enumerate(problem.chain):
        if not block.layer:
            counts[LAYERS, e, 0 if block.pinned == "first" else last] = block.count
    virtual = range(problem.num_virtual_stages)
    return Placement(
        tuple(tuple(counts.get((LAYERS, e, k), 0) for e in range(len(problem.chain))) for k in virtual),
        tuple(
            tuple(
                tuple(counts.get((what, e, k), 0) for what in _mode_columns(block))
                for e, block in enumerate(problem.chain)
            )
            for k in virtual
        ),
    )


def columns_from_placement(problem: Problem, placement: Placement) -> dict[str, float]:
    """The columns that `placement_from_columns` reads, for a solver to begin with."""
    values = {}
    for (what, e, k), name in count_columns(problem).items():
        in_modes = dict(zip(_mode_columns(problem.chain[e]), placement.modes[k][e], strict=True))
        values[name] = float(placement.layers[k][e] if what == LAYERS else in_modes[what])
    return values


def format_mps(program: Program, name: str) -> str:
    """The program as free-format MPS text (the format of IBM's MPSX, as HiGHS, CBC and SCIP read it)."""
    entries: list[list[str]] = [[] for _ in program.columns]
    entries[program.objective].append("cost 1")
    kinds, sides = ["N cost"], []
    for index, (least, most, coefficients) in enumerate(program.rows):
        row = f"r{index}"
        kind = "E" if least == most else "G" if math.isinf(most) else "L"
        kinds.append(f"{kind} {row}")
        sides.append(f"rhs {row} {least if kind == 'G' else most:.15g}")
        for index_of, coefficient in coefficients.items():
            entries[index_of].append(f"{row} {coefficient:.15g}")
    lines = [f"NAME {name}", "ROWS", *(f" {kind}" for kind in kinds), "COLUMNS"]
    for integer in (True, False):
        lines += [f" mark 'MARKER' '{'INTORG' if integer else 'INTEND'}'"]
        for column, of_column in zip(program.columns, entries, strict=True):
            if column.integer == integer:
                lines += [f" {column.name} {entry}" for entry in of_column]
    lines += ["RHS", *(f" {side}" for side in sides), "BOUNDS"]
    lines += [f" UP bound {c.name} {c.most:.15g}" for c in program.columns if not math.isinf(c.most)]
    return "\n".join([*lines, "ENDATA"]) + "\n"


def _mode_columns(block: ChainBlock) -> list[str]:
    """What the columns of layers of `block` in each of its modes begin with."""
    return [MODE_COLUMNS.get(mode.name, f"r_{mode.name}") for mode in block.modes]


def _check_expressible(problem: Problem) -> None:
    chain = problem.chain
    complaints = (
        (any(problem.stage_time_factor), "stages of unequal speed (stage_time_factor)"),
        (any(mode.host_bytes for block in chain for mode in block.modes), "traffic to the host"),
        (any(problem.host_limit_bytes) and any(b.host_static_bytes for b in chain), "limits of host memory"),
        (any(problem.p2p_ms) or any(problem.p2p_ms_per_byte), "times of transfers between stages"),
        (any(block.microbatch_scale for block in chain), "micro-batches of unequal times"),
        (any(block.layer and (block.pinned or block.attach) for block in chain), "layers that are pinned or attached"),
        (any(not block.layer and not block.pinned for block in chain), "ends that are not pinned"),
        (any(block.transient_bytes for block in chain if block.layer), "layers with passing memory"),
        (any(block.tail_ms for block in chain if block.layer), "layers with a tail"),
    )
    for holds, what in complaints:
        if holds:
            raise JobError(f"the linear program knows no {what}; solve this problem with CP-SAT")


def _place_layers(program: Program, problem: Problem, counts: _Counts) -> None:
    """Sums, a layer in every chunk, kinds in the chain's order, modes in the order of a group's layers."""
    virtual = range(problem.num_virtual_stages)
    layers = [e for e, block in enumerate(problem.chain) if block.layer]
    total = problem.num_layers
    most = problem.max_layers_per_chunk or total
    for e in layers:
        count = problem.chain[e].count
        program.add_row({counts[LAYERS, e, k]: 1.0 for k in virtual}, count, count)
    for k in virtual:
        program.add_row({counts[LAYERS, e, k]: 1.0 for e in layers}, least=1.0)
        if most < total:
            program.add_row({counts[LAYERS, e, k]: 1.0 for e in layers}, most=most)
        for e in layers:
            in_modes = {counts[what, e, k]: -1.0 for what in _mode_columns(problem.chain[e])}
            program.add_row({counts[LAYERS, e, k]: 1.0, **in_modes}, least=0.0)
    for index in range(1, len(layers)):
        earlier, later = layers[:index], layers[index]
        open_ = [program.add_column(f"before{index}_{k}", 1.0, True) for k in (*virtual, problem.num_virtual_stages)]
        for k in virtual:  # open[k]: some earlier layer may still come in chunk k or after it
            program.add_row({open_[k]: 1.0, open_[k + 1]: -1.0}, least=0.0)
            program.add_row({**{counts[LAYERS, e, k]: 1.0 for e in earlier}, open_[k]: -float(total)}, most=0.0)
            program.add_row({counts[LAYERS, later, k]: 1.0, open_[k + 1]: float(total)}, most=total)
    for before, after in combinations(layers, 2):
        modes = _mode_columns(problem.chain[before]), _mode_columns(problem.chain[after])
        if problem.chain[before].group != problem.chain[after].group or not all(modes):
            continue
        for k in virtual:
            for m in range(len(modes[0])):  # all of the kind before run in modes up to m, or none of the kind after
                whole = program.add_column(f"whole{before}_{after}_{m}_{k}", 1.0, True)
                first, then = (
                    [counts[what, e, k] for what in names[: m + 1]]
                    for names, e in zip(modes, (before, after), strict=True)
                )
                program.add_row({**dict.fromkeys(then, 1.0), whole: -float(total)}, most=0.0)
                program.add_row(
                    {counts[LAYERS, before, k]: 1.0, **dict.fromkeys(first, -1.0), whole: float(total)}, most=total
                )


def _limit_memory(program: Program, problem: Problem, counts: _Counts) -> None:
    """Every set of micro-batches that is in flight at once fits, in MiB (pipeline/simulate/loads.py, peak_bytes)."""
    graph = full_graph(problem.schedule, problem.num_stages, problem.num_chunks, problem.num_microbatches)
    limits = allowed_bytes(problem)
    for stage in range(problem.num_stages):
        ends = [block for block in problem.chain if not block.layer and _stage_of_end(problem, block) == stage]
        fixed = problem.stage_static_bytes[stage] + sum(block.count * block.static_bytes for block in ends)
        fixed += max((block.transient_bytes for block in ends), default=0.0)
        for in_flight in graph.in_flight[stage]:
            coefficients: dict[int, float] = {}
            bound = float(limits[stage]) - fixed
            for chunk, held in enumerate(in_flight.tolist()):
                k = chunk * problem.num_stages + stage
                for e, block in enumerate(problem.chain):
                    if not block.layer:
                        if k == (0 if block.pinned == "first" else problem.num_virtual_stages - 1):
                            bound -= held * block.count * block.activation_bytes
                        continue
                    coefficients[counts[LAYERS, e, k]] = held_by(block).at_work(held) / MIB
                    for what, mode in zip(_mode_columns(block), block.modes, strict=True):
                        more_bytes = held * (mode.activation_bytes - block.activation_bytes) + mode.restored_bytes
                        coefficients[counts[what, e, k]] = more_bytes / MIB
            program.add_row(coefficients, most=bound / MIB)


def _stage_of_end(problem: Problem, block: ChainBlock) -> int:
    return 0 if block.pinned == "first" else problem.num_stages - 1


def _order_tasks(program: Program, problem: Problem, counts: _Counts) -> None:
    """Starts of tasks, each after the one its stage runs before it and the one whose data it takes; then the step."""
    graph = short_graph(problem.schedule, problem.num_stages, problem.num_chunks, problem.num_microbatches)
    num_virtual = problem.num_virtual_stages
    durations = []
    for kind in ("f", "b"):
        for k in range(num_virtual):
            chunk, stage = divmod(k, problem.num_stages)
            column = program.add_column(f"{kind}_duration_{stage}_{chunk}")
            durations.append(column)
            row, fixed = {column: 1.0}, 0.0
            for e, block in enumerate(problem.chain):
                each_ms = block.forward_ms if kind == "f" else block.backward_ms
                if block.layer:
                    row[counts[LAYERS, e, k]] = -each_ms
                    for what, mode in zip(_mode_columns(block), block.modes, strict=True):
                        row[counts[what, e, k]] = -(mode.extra_forward_ms if kind == "f" else mode.extra_backward_ms)
                elif k == (0 if block.pinned == "first" else num_virtual - 1):
                    fixed += block.count * each_ms
            program.add_row(row, fixed, fixed)
    starts = []
    last: dict[int, int] = {}
    for task in range(graph.num_tasks):
        kind = "backward" if graph.kind[task] == BACKWARD else "forward"
        stage, chunk, micro_batch = (int(of[task]) for of in (graph.stage, graph.chunk, graph.micro_batch))
        starts.append(program.add_column(f"{kind}_s_{stage}_{chunk}_{micro_batch}"))
        for before in {last.get(stage, graph.num_tasks), int(graph.dependency[task])} - {graph.num_tasks}:
            duration = durations[int(graph.duration[before])]
            program.add_row({starts[task]: 1.0, starts[before]: -1.0, duration: -1.0}, least=0.0)
        last[stage] = task
    program.objective = program.add_column("step")
    steady = program.add_column("stable_duration")
    for stage, task in last.items():
        ends = [block for block in problem.chain if not block.layer and _stage_of_end(problem, block) == stage]
        tail_ms = problem.stage_tail_ms[stage] + sum(block.count * block.tail_ms for block in ends)
        row = {program.objective: 1.0, starts[task]: -1.0, durations[int(graph.duration[task])]: -1.0}
        row[steady] = -float(graph.num_skipped_periods)
        program.add_row(row, least=tail_ms)
        of_stage = [
            durations[kind * num_virtual + k] for kind in (0, 1) for k in range(stage, num_virtual, problem.num_stages)
        ]
        program.add_row({steady: 1.0, **{column: -float(problem.num_stages) for column in of_stage}}, least=0.0)
