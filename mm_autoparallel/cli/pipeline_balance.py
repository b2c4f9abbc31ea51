"""`pipeline-search -yaml` with a file of SAPP pipeline balance: its init file, or the layer file made of one."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm_autoparallel.cli.output import print_document, print_line
from mm_autoparallel.errors import JobError
from mm_autoparallel.reports.terminal import Progress, say, warn, write_file, writing
from mm_autoparallel.signals import stop_on_signal
from mm_autoparallel.units import format_bytes

if TYPE_CHECKING:
    from mm_autoparallel.integrations.mindformers.sapp_layers import SappLayers
    from mm_autoparallel.integrations.mindformers.search.layouts import FoundLayout

SCHEMA = "mm-autoparallel/pipeline-balance/1"
MICRO_BATCHES, MEMORY_MB, STAGES, CHUNKS = 4, 56000, 4, 1
"""Defaults of pipeline balance's -mb, -mem, -s and -i."""


def run_balance(arguments: argparse.Namespace, document: dict[str, Any], output: Path, use_highs: bool) -> int:
    """Read, decompose, solve, write the lists to put into a pretrain YAML. Exit code 3 where nothing fits."""
    layers, num_stages = _read(arguments, document, output)
    warn(layers.notes)
    from mm_autoparallel.integrations.mindformers.pipeline_problem import ORDERS
    from mm_autoparallel.integrations.mindformers.sapp_layers import build_balance_problem
    from mm_autoparallel.integrations.mindformers.search.layouts import (
        Solver,
        extract_layout,
        find_layout,
        overfull_notes,
    )
    from mm_autoparallel.pipeline.placement import compile_kernels

    num_chunks = arguments.i or CHUNKS
    problem = build_balance_problem(
        layers,
        num_stages,
        num_chunks,
        arguments.mb or MICRO_BATCHES,
        arguments.mem or MEMORY_MB,
        "1f1b" if num_chunks == 1 else ORDERS[arguments.order],
    )
    compile_kernels()
    with stop_on_signal() as stop:
        progress = Progress()
        time_limit_s = arguments.t if arguments.t < sys.maxsize else math.inf
        stem = output / arguments.yaml.stem
        solver = Solver(
            use_highs, stem, time_limit_s, stop.is_set, lambda step: progress.show(f"best so far: {step:.3f}")
        )
        if arguments.extract:
            found = extract_layout(problem, arguments.solution, arguments.yaml)
            warn(overfull_notes(found))
        else:
            try:
                with writing(output):
                    found = find_layout(problem, solver)
            finally:
                progress.close()
    lists = _lists(found, layers)
    path = output / f"{arguments.yaml.stem}_strategy.yaml"
    write_file(path, "".join(f"{key}: {json.dumps(value)}\n" for key, value in lists.items()))
    if arguments.json:
        print_document(_document(arguments, found, lists))
    else:
        _print(found, lists)
        say(f"written to {path}")
    return 0


def _read(arguments: argparse.Namespace, document: dict[str, Any], output: Path) -> tuple[SappLayers, int]:
    """The layers and the number of stages; of an init file its layer file is written."""
    from mm_autoparallel.integrations.mindformers.memory_decomposition import decompose_memory
    from mm_autoparallel.integrations.mindformers.sapp_init import is_sapp_init, read_sapp_init
    from mm_autoparallel.integrations.mindformers.sapp_layers import format_layers, layers_from_init, read_sapp_layers

    if not is_sapp_init(document):
        return read_sapp_layers(arguments.yaml), arguments.s or STAGES
    init = read_sapp_init(arguments.yaml)
    memory = decompose_memory(init)
    warn([*init.notes, *memory.notes])
    path = output / f"{arguments.yaml.stem}.json"
    write_file(path, format_layers(layers_from_init(init, memory)))
    say(f"layers with their memory are in {path}")
    return read_sapp_layers(path), arguments.s or init.num_stages


def _lists(found: FoundLayout, layers: SappLayers) -> dict[str, Any]:
    """What goes into a pretrain YAML, by its keys there."""
    problem, layout = found.problem, found.layout
    base = layers.num_layers // problem.num_virtual_stages
    none = [[0] * problem.num_stages for _ in range(problem.num_chunks)]
    selected = {key: [list(row) for row in grid] for key, _, grid in layout.selected}
    return {
        "offset": [[held - base for held in row] for row in layout.layers],
        "recompute": [list(row) for row in layout.recompute],
        "select_recompute": selected.get("select_recompute", none),
        "select_comm_recompute": selected.get("select_comm_recompute", none),
        "pp_interleave_num": problem.num_chunks,
    }


def _document(arguments: argparse.Namespace, found: FoundLayout, lists: dict[str, Any]) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "file": str(arguments.yaml),
        "status": found.status,
        "objective": found.objective_ms,
        "lower_bound": found.lower_bound_ms,
        "step": found.timeline.step_ms,
        **lists,
        "peak_memory_bytes": [math.ceil(peak) for peak in found.timeline.peak_memory_bytes],
        "memory_limit_bytes": [math.floor(limit) for limit in found.problem.memory_limit_bytes],
        "models": [str(model) for model in found.models],
    }


def _print(found: FoundLayout, lists: dict[str, Any]) -> None:
    peaks, limits = found.timeline.peak_memory_bytes, found.problem.memory_limit_bytes
    for stage, (peak, limit) in enumerate(zip(peaks, limits, strict=True)):
        held = " + ".join(str(row[stage]) for row in found.layout.layers)
        print_line(f"stage {stage}: {held} layers, {format_bytes(peak)} of {format_bytes(limit)}")
    for key, value in lists.items():
        print_line(f"{key}: {value}")
    bound = "" if found.lower_bound_ms is None else f", none is below {found.lower_bound_ms:.6f}"
    print_line(f"step {found.timeline.step_ms:.6f} ({found.status.lower()}{bound})")


def check_options(arguments: argparse.Namespace, defaults: dict[str, Any]) -> None:
    """Raise JobError where an option is given that only a pretrain YAML has a use for."""
    given = next((name for name, default in defaults.items() if getattr(arguments, name) != default), None)
    if given is not None:
        raise JobError(
            f"-{given} is for pretrain YAMLs; {arguments.yaml} is a file of SAPP, which says all that itself"
        )
