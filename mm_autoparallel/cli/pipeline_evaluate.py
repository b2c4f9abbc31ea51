"""`pipeline-search -yaml FILE --evaluate y`: what a pretrain YAML's own offset and recompute take and hold."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from mm_autoparallel.cli.output import print_document, print_line
from mm_autoparallel.reports.terminal import say
from mm_autoparallel.units import format_bytes

if TYPE_CHECKING:
    from mm_autoparallel.integrations.mindformers.layout import Layout
    from mm_autoparallel.integrations.mindformers.memory_figures import MemoryFigures
    from mm_autoparallel.integrations.mindformers.pretrain_yaml import Pretrain
    from mm_autoparallel.pipeline.problem import Problem

SCHEMA = "mm-autoparallel/pipeline-evaluate/1"


def run_evaluation(pretrain: Pretrain, layout: Layout, problem: Problem, memory: MemoryFigures, as_json: bool) -> int:
    """Simulate `layout`, the YAML's own, and print it; nothing is written. One that does not fit is simulated too, and
    marked. Raises PlanError where operators that run again have different counts.
    """
    from mm_autoparallel.integrations.mindformers.memory_causes import format_causes, list_stage_causes
    from mm_autoparallel.integrations.mindformers.pipeline_problem import placement_of
    from mm_autoparallel.pipeline.placement import compile_kernels
    from mm_autoparallel.pipeline.simulate.loads import overfull_stages
    from mm_autoparallel.pipeline.simulate.step import simulate

    compile_kernels()
    timeline = simulate(problem, placement_of(problem, layout))
    peaks, limits = timeline.peak_memory_bytes, problem.memory_limit_bytes
    causes = list_stage_causes(problem, memory, layout, peaks)
    over = overfull_stages(problem, peaks)
    grids = {"layers": layout.layers, "recompute": layout.recompute}
    selected = {f"{key} {pattern}".strip(): grid for key, pattern, grid in layout.selected}
    if as_json:
        document: dict[str, Any] = {
            "schema": SCHEMA,
            "yaml": str(pretrain.path),
            "step": timeline.step_ms,
            "fits": not over,
            "overfull_stages": over,
            "peak_memory_bytes": [math.ceil(peak) for peak in peaks],
            "memory_limit_bytes": [math.floor(limit) for limit in limits],
            "memory_by_cause": [dict(of_stage) for of_stage in causes],
            "memory_source": memory.source,
            **{name: [list(row) for row in grid] for name, grid in grids.items()},
            "selected": {name: [list(row) for row in grid] for name, grid in selected.items()},
        }
        print_document(document)
        return 0
    for stage, (peak, limit) in enumerate(zip(peaks, limits, strict=True)):
        held, again, *others = (
            " + ".join(str(row[stage]) for row in grid) for grid in (*grids.values(), *selected.values())
        )
        some = "".join(f", {count} in {name}" for count, name in zip(others, selected, strict=True))
        excess = f" ({format_bytes(peak - limit)} too much)" if stage in over else ""
        room = f"{format_bytes(peak)} of {format_bytes(limit)}{excess}"
        print_line(f"stage {stage}: {held} layers, {again} recomputed{some}: {room}")
        print_line(f"  {format_causes(causes[stage])}")
    fits = f"does not fit on {len(over)} of {problem.num_stages} stages" if over else "fits"
    print_line(f"step {timeline.step_ms:.6f} (forwards of one layer); {fits}")
    say(f"memory from {memory.source}; {pretrain.path} is as it was")
    return 0
