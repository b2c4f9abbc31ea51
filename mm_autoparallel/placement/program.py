"""The pipeline as a mixed-integer linear program, for other people's solvers: columns, rows, and MPS text.

Columns are named as the pipeline search of MindFormers users names them: `x_TYPE_s_c` layers of a kind in chunk c of
stage s, `ra_TYPE_s_c` recomputed ones of them, TYPE being type1 for the dense and type2 for the other layers. Starts of
all tasks are columns too. Long runs are compressed: the steady state counts as the load of its busiest stage, so the
program's objective can read lower than the step; its placements are simulated exactly like any other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from mm_autoparallel.errors import JobError
from mm_autoparallel.problem import RECOMPUTE, ChainBlock, Placement, Problem, place_in_modes, recomputed
from mm_autoparallel.schedules.action import BACKWARD
from mm_autoparallel.simulate.graph import full_graph, short_graph
from mm_autoparallel.simulate.loads import allowed_bytes
from mm_autoparallel.units import MIB


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
    """The names of the columns that a placement is read from: (`x` or `ra`, chain block, virtual stage) → name."""
    layers = [e for e, block in enumerate(problem.chain) if block.layer]
    first_type = 3 - min(2, len(layers))  # a model of one kind of layer has only the second type
    names = {}
    for index, e in enumerate(layers):
        for k in range(problem.num_virtual_stages):
            chunk, stage = divmod(k, problem.num_stages)
            for what in ("x", "ra"):
                names[what, e, k] = f"{what}_type{first_type + index}_{stage}_{chunk}"
    return names


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
    shape = (problem.num_virtual_stages, len(problem.chain))
    layers, recompute = np.zeros(shape, dtype=int), np.zeros(shape, dtype=int)
    for (what, e, k), name in names.items():
        if name not in values:
            raise JobError(f"column {name} is missing; {len(names)} columns x_… and ra_… are expected")
        count = round(values[name])
        if abs(values[name] - count) > 1e-4:
            raise JobError(f"column {name} is {values[name]:g}; a whole number of layers is expected")
        (layers if what == "x" else recompute)[k, e] = count
    for e, block in enumerate(problem.chain):
        if not block.layer:
            layers[0 if block.pinned == "first" else -1, e] = block.count
    return place_in_modes(problem, layers.tolist(), {RECOMPUTE: recompute.tolist()})


def columns_from_placement(problem: Problem, placement: Placement) -> dict[str, float]:
    """The columns that `placement_from_columns` reads, for a solver to begin with."""
    again = recomputed(problem, placement)
    return {
        name: float((placement.layers if what == "x" else again)[k][e])
        for (what, e, k), name in count_columns(problem).items()
    }


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


def _check_expressible(problem: Problem) -> None:
    chain = problem.chain
    complaints = (
        (any(problem.stage_time_factor), "stages of unequal speed (stage_time_factor)"),
        (any(block.modes != (block.recompute,) for block in chain if block.modes), "modes but recompute"),
        (any(mode.extra_forward_ms for block in chain for mode in block.modes), "recompute that slows the forward"),
        (any(mode.host_bytes for block in chain for mode in block.modes), "traffic to the host"),
        (any(problem.host_limit_bytes) and any(b.host_static_bytes for b in chain), "limits of host memory"),
        (any(problem.p2p_ms) or any(problem.p2p_ms_per_byte), "times of transfers between stages"),
        (any(block.microbatch_scale for block in chain), "micro-batches of unequal times"),
        (any(block.layer and (block.pinned or block.attach) for block in chain), "layers that are pinned or attached"),
        (any(not block.layer and not block.pinned for block in chain), "ends that are not pinned"),
        (any(block.transient_bytes for block in chain if block.layer), "layers with passing memory"),
        (any(block.recompute and block.recompute.restored_bytes for block in chain), "memory restored by recompute"),
        (any(block.tail_ms for block in chain if block.layer), "layers with a tail"),
    )
    for holds, what in complaints:
        if holds:
            raise JobError(f"the linear program knows no {what}; solve this problem with CP-SAT")


def _place_layers(program: Program, problem: Problem, counts: Mapping[tuple[str, int, int], int]) -> None:
    """Sums, a layer in every chunk, kinds in the chain's order, recompute of the first layers of a group."""
    virtual = range(problem.num_virtual_stages)
    layers = [e for e, block in enumerate(problem.chain) if block.layer]
    total = problem.num_layers
    most = problem.max_layers_per_chunk or total
    for e in layers:
        count = problem.chain[e].count
        program.add_row({counts["x", e, k]: 1.0 for k in virtual}, count, count)
    for k in virtual:
        program.add_row({counts["x", e, k]: 1.0 for e in layers}, least=1.0)
        if most < total:
            program.add_row({counts["x", e, k]: 1.0 for e in layers}, most=most)
        for e in layers:
            program.add_row({counts["x", e, k]: 1.0, counts["ra", e, k]: -1.0}, least=0.0)
            if problem.chain[e].recompute is None:
                program.add_row({counts["ra", e, k]: 1.0}, most=0.0)
    for index in range(1, len(layers)):
        earlier, later = layers[:index], layers[index]
        open_ = [program.add_column(f"before{index}_{k}", 1.0, True) for k in (*virtual, problem.num_virtual_stages)]
        for k in virtual:  # open[k]: some earlier layer may still come in chunk k or after it
            program.add_row({open_[k]: 1.0, open_[k + 1]: -1.0}, least=0.0)
            program.add_row({**{counts["x", e, k]: 1.0 for e in earlier}, open_[k]: -float(total)}, most=0.0)
            program.add_row({counts["x", later, k]: 1.0, open_[k + 1]: float(total)}, most=total)
    for before, after in pairwise(layers):
        if problem.chain[before].group != problem.chain[after].group:
            continue
        for k in virtual:  # all of the kind before recompute, or none of the kind after it does
            whole = program.add_column(f"whole{before}_{k}", 1.0, True)
            program.add_row({counts["ra", after, k]: 1.0, whole: -float(total)}, most=0.0)
            program.add_row(
                {counts["x", before, k]: 1.0, counts["ra", before, k]: -1.0, whole: float(total)}, most=total
            )


def _limit_memory(program: Program, problem: Problem, counts: Mapping[tuple[str, int, int], int]) -> None:
    """Every set of micro-batches that is in flight at once fits, in MiB (simulate/loads.py, peak_bytes)."""
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
                    coefficients[counts["x", e, k]] = (block.static_bytes + held * block.activation_bytes) / MIB
                    if block.recompute:
                        saved = block.recompute.activation_bytes - block.activation_bytes
                        coefficients[counts["ra", e, k]] = held * saved / MIB
            program.add_row(coefficients, most=bound / MIB)


def _stage_of_end(problem: Problem, block: ChainBlock) -> int:
    return 0 if block.pinned == "first" else problem.num_stages - 1


def _order_tasks(program: Program, problem: Problem, counts: Mapping[tuple[str, int, int], int]) -> None:
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
                    row[counts["x", e, k]] = -each_ms
                    if kind == "b" and block.recompute:
                        row[counts["ra", e, k]] = -block.recompute.extra_backward_ms
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
