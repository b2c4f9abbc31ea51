"""`pipeline-search -yaml FILE`: offset and recompute of a MindFormers pretrain YAML, found and written into it."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm_autoparallel.cli.arguments import count, megabytes, seconds
from mm_autoparallel.cli.output import print_document, print_line
from mm_autoparallel.cli.pipeline_balance import check_options, run_balance
from mm_autoparallel.cli.pipeline_evaluate import run_evaluation
from mm_autoparallel.errors import JobError, NoFeasiblePlan, PlanError
from mm_autoparallel.reports.terminal import Progress, say, warn, writing
from mm_autoparallel.signals import stop_on_signal
from mm_autoparallel.units import describe_range, format_bytes

if TYPE_CHECKING:
    from mm_autoparallel.integrations.mindformers.memory_figures import MemoryFigures
    from mm_autoparallel.integrations.mindformers.pipeline_problem import Ratios
    from mm_autoparallel.integrations.mindformers.pretrain_yaml import Pretrain
    from mm_autoparallel.integrations.mindformers.search.layouts import FoundLayout
    from mm_autoparallel.pipeline.problem import Problem

HELP = "balance the pipeline of a MindFormers pretrain YAML"
DESCRIPTION = (
    "Find the offset and recompute of a MindFormers pretrain YAML with which its pipeline is fastest within the memory "
    "limits, and write them into it; nothing else in it changes. Times are shares of the forward of one expert layer. "
    "No dry run is started: memory is worked out from the sizes in the YAML, or read from --memory."
)
SCHEMA = "mm-autoparallel/pipeline-search/1"
OUTPUT = Path("pipeline_output")
"""Where the exported model goes, in the working directory."""

CP_SAT, HIGHS = "CP-SAT", "HIGHS"
PRETRAIN_ONLY: dict[str, Any] = {
    "mindformers": None,
    "layer_ratio": 0.33,
    "b_ratio": 2.0,
    "head_loss": 1.5,
    "ra_ratio": 1.0,
    "dryrun": True,
    "check": True,
    "memory": None,
    "select": False,
    "select_ratio": None,
    "model_config": None,
    "reserve": None,
    "evaluate": False,
}
"""Options that say what a file of SAPP says itself, with their defaults."""

_YES, _NO = ("y", "yes", "true", "1"), ("n", "no", "false", "0")

_SMALLEST_RATIO, _LARGEST_RATIO = 1e-6, 1e6
"""Of one time over another. Assumed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options: those of the pipeline search with one dash or two, then this project's own with two."""

    def add(name: str, **more: Any) -> None:
        parser.add_argument(f"-{name}", f"--{name}", dest=name, **more)

    add("yaml", type=Path, required=True, metavar="FILE.yaml", help="the pretrain YAML to solve; it is written to")
    add("mindformers", type=Path, metavar="RUN_MINDFORMER.py", help="checked to be there; no dry run is started")
    add("solver_name", type=str.upper, choices=(CP_SAT, HIGHS), default=CP_SAT, help="HIGHS: highspy, as a check")
    add("layer_ratio", type=_above_0, default=0.33, metavar="X", help="forward of a dense layer / of an expert layer")
    add("b_ratio", type=_above_0, default=2.0, metavar="X", help="backward / forward")
    add("head_loss", type=_at_least_0, default=1.5, metavar="X", help="head and loss / forward of an expert layer")
    add("ra_ratio", type=_at_least_0, default=1.0, metavar="X", help="recompute / forward of an expert layer")
    add("t", type=seconds, default=sys.maxsize, metavar="S", help="end with the best so far after S seconds")
    add(
        "dryrun",
        type=_yes_or_no,
        default=True,
        metavar="y|n",
        help="n: --memory has figures of a dry run; else by sizes",
    )
    add("check", type=_yes_or_no, default=True, metavar="y|n", help="y: read the YAML back and simulate what it says")
    add(
        "extract", type=_yes_or_no, default=False, metavar="y|n", help="y: write what -solution says instead of solving"
    )
    add("solution", type=Path, metavar="FILE.sol", help="a solution of the exported model, as HiGHS writes it")
    parser.add_argument(
        "--model_config",
        type=Path,
        metavar="CONFIG.json",
        help="config.json of the YAML's model, in place of the one in its pretrained_model_dir",
    )
    parser.add_argument(
        "--memory", type=Path, metavar="FILE", help="figures of earlier dry runs: act_mem=673 and so on"
    )
    parser.add_argument(
        "--select",
        type=_yes_or_no,
        default=False,
        metavar="y|n",
        help="y: search select recompute of the YAML's operators too",
    )
    parser.add_argument(
        "--select_ratio", type=_at_least_0, metavar="X", help="select recompute / backward (else by sizes, or 0.04)"
    )
    for name, what in (
        ("mb", "micro-batches (4)"),
        ("mem", "memory of a device in MB (56000)"),
        ("s", "stages (those of the init file, else 4)"),
        ("i", "chunks a stage (1)"),
    ):
        parser.add_argument(f"-{name}", f"--{name}", dest=name, type=count, metavar="N", help=f"of a SAPP file: {what}")
    parser.add_argument(
        "--order", choices=("default", "low_memory"), default="default", help="which order more chunks a stage run in"
    )
    parser.add_argument(
        "--reserve", type=megabytes, metavar="MB", help="of every stage, for what memory from sizes does not tell"
    )
    parser.add_argument(
        "--evaluate",
        type=_yes_or_no,
        default=False,
        metavar="y|n",
        help="y: simulate the lists that the YAML has; nothing is written",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document on standard output")


def run(arguments: argparse.Namespace) -> int:
    """Read, solve or extract, write, check. Exit code 3 where nothing fits; the YAML is then as it was."""
    _check_together(arguments)
    from mm_autoparallel.files import read_document
    from mm_autoparallel.integrations.mindformers.sapp_init import check_other_sapp

    document = read_document(arguments.yaml, "MindFormers YAML")
    check_other_sapp(document, arguments.yaml)
    if "memory_usage" in document or "layers_description" in document:
        check_options(arguments, PRETRAIN_ONLY)
        return run_balance(arguments, document, OUTPUT, arguments.solver_name == HIGHS)
    given = next((name for name in ("mb", "mem", "s", "i") if getattr(arguments, name) is not None), None)
    if given is not None:
        raise JobError(f"-{given} goes with a file of SAPP pipeline balance; a pretrain YAML says it itself")
    from mm_autoparallel.integrations.mindformers.layout import (
        layout_changes,
        read_layout,
        stale_offset_notes,
        stale_selections,
        with_counts,
    )
    from mm_autoparallel.integrations.mindformers.memory_keys import division_notes
    from mm_autoparallel.integrations.mindformers.pipeline_problem import Ratios, build_pipeline_problem
    from mm_autoparallel.integrations.mindformers.pretrain_yaml import read_pretrain
    from mm_autoparallel.integrations.yaml_text import set_yaml_values

    pretrain = read_pretrain(arguments.yaml, arguments.model_config)
    own = read_layout(pretrain) if arguments.evaluate else None
    memory = _find_memory(arguments, pretrain, arguments.select or bool(own and own.selected))
    stale = [] if own else stale_offset_notes(pretrain)
    warn([*pretrain.notes, *division_notes(pretrain), *stale, *memory.notes])
    ratios = Ratios(
        arguments.layer_ratio, arguments.b_ratio, arguments.head_loss, arguments.ra_ratio, arguments.select_ratio
    )
    problem = build_pipeline_problem(pretrain, ratios, memory, arguments.order)
    if own:
        return run_evaluation(pretrain, own, problem, memory, arguments.json)

    from mm_autoparallel.integrations.mindformers.search.layouts import (
        Solver,
        extract_layout,
        find_layout,
        overfull_notes,
    )
    from mm_autoparallel.integrations.mindformers.search.lowest_memory import with_causes
    from mm_autoparallel.pipeline.placement import compile_kernels

    compile_kernels()
    with stop_on_signal() as stop:
        name = OUTPUT / arguments.yaml.stem
        time_limit_s = arguments.t if arguments.t < sys.maxsize else math.inf
        if arguments.extract:
            found = extract_layout(problem, arguments.solution, pretrain.path)
            warn(overfull_notes(found))
        else:
            progress = Progress()
            solver = Solver(
                arguments.solver_name == HIGHS,
                name,
                time_limit_s,
                stop.is_set,
                lambda step: progress.show(f"best so far: {step:.3f}"),
            )
            try:
                with writing(OUTPUT):
                    found = find_layout(problem, solver)
            except NoFeasiblePlan as error:
                raise with_causes(error, pretrain, memory) from None
            finally:
                progress.close()
    changes = layout_changes(pretrain, with_counts(pretrain, found.layout, _searched_keys(arguments, problem)))
    warn([*stale_selections(pretrain, changes), *_faster_before(arguments, pretrain, ratios, found)])
    _write(pretrain, set_yaml_values(pretrain.text, changes))
    if arguments.check:
        _check(pretrain, found, arguments.model_config)
    if arguments.json:
        print_document(_document(pretrain, found, memory))
    else:
        _print(pretrain, found, memory)
    return 0


def _check_together(arguments: argparse.Namespace) -> None:
    from mm_autoparallel.files import is_there

    if arguments.extract and arguments.solution is None:
        raise JobError("-extract y needs -solution FILE.sol: the solution to extract")
    if arguments.solution is not None and not arguments.extract:
        raise JobError("-solution is read with -extract y only; give both or neither")
    if arguments.mindformers is not None and not is_there(arguments.mindformers):
        raise JobError(f"-mindformers {arguments.mindformers}: there is no such file; it may be left out")
    if arguments.reserve is not None and arguments.memory is not None:
        raise JobError("--reserve is of memory from sizes, and --memory gives figures in its place; give one of them")
    if arguments.evaluate and arguments.extract:
        raise JobError("--evaluate y takes the lists that the YAML has, and -extract y those of a solution; give one")
    if arguments.select_ratio is not None and not arguments.select:
        raise JobError("--select_ratio goes with --select y; give both or neither")


def _faster_before(arguments: argparse.Namespace, pretrain: Pretrain, ratios: Ratios, found: FoundLayout) -> list[str]:
    """That the YAML's own lists were faster, because they recompute selected operators, which were not searched."""
    from mm_autoparallel.integrations.mindformers.layout import read_layout
    from mm_autoparallel.integrations.mindformers.pipeline_problem import build_pipeline_problem, placement_of
    from mm_autoparallel.integrations.mindformers.search.sized_memory import size_memory
    from mm_autoparallel.pipeline.simulate.loads import overfull_stages
    from mm_autoparallel.pipeline.simulate.step import simulate

    if arguments.select or arguments.memory is not None or arguments.extract:
        return []
    try:
        own = read_layout(pretrain)
        if not own.selected:
            return []
        problem = build_pipeline_problem(
            pretrain, ratios, size_memory(pretrain, True, arguments.reserve), arguments.order
        )
        timeline = simulate(problem, placement_of(problem, own))
    except (JobError, PlanError):  # of another pipeline, or selected in a way that is not searched
        return []
    if overfull_stages(problem, timeline.peak_memory_bytes) or timeline.step_ms >= found.timeline.step_ms:
        return []
    return [
        f"the lists that {pretrain.path} had take {timeline.step_ms:.6f} and fit; what was found takes "
        f"{found.timeline.step_ms:.6f}: --select y searches selected operators too"
    ]


def _find_memory(arguments: argparse.Namespace, pretrain: Pretrain, with_select: bool) -> MemoryFigures:
    from mm_autoparallel.integrations.mindformers.memory_figures import read_memory_figures

    if arguments.memory is not None:
        return read_memory_figures(arguments.memory, pretrain, with_select)
    if not arguments.dryrun:
        warn(["-dryrun n: no --memory FILE has figures of a dry run, so memory is worked out from sizes all the same"])
    from mm_autoparallel.integrations.mindformers.search.sized_memory import size_memory

    return size_memory(pretrain, with_select, arguments.reserve)


def _searched_keys(arguments: argparse.Namespace, problem: Problem) -> list[str]:
    """Keys of recompute lists beside `recompute` that the search decided."""
    from mm_autoparallel.integrations.mindformers.recompute_kinds import COMM, SELECT
    from mm_autoparallel.integrations.mindformers.selected_operators import COMM_KEY, SELECT_KEY

    offered = {mode.name for block in problem.chain for mode in block.modes}
    return [key for key, kind in ((SELECT_KEY, SELECT), (COMM_KEY, COMM)) if arguments.select and kind in offered]


def _write(pretrain: Pretrain, text: str) -> None:
    """Write the YAML, unless somebody else has while the search ran. Where it is a link, its target is written."""
    from mm_autoparallel.files import BYTE_ORDER_MARK, read_text, write_text_atomically

    there = read_text(pretrain.path, "MindFormers YAML", "YAML text", with_marks=True)
    if there.lstrip(BYTE_ORDER_MARK) != pretrain.text:
        raise PlanError(f"{pretrain.path} was changed while the search ran, and is left alone; start it again")
    if text != pretrain.text:
        marks = there.removesuffix(pretrain.text)
        with writing(pretrain.path):
            write_text_atomically(pretrain.path.resolve(), marks + text)


def _check(pretrain: Pretrain, found: FoundLayout, config_json: Path | None) -> None:
    from mm_autoparallel.integrations.mindformers.layout import read_layout
    from mm_autoparallel.integrations.mindformers.pretrain_yaml import read_pretrain
    from mm_autoparallel.integrations.mindformers.search.layouts import check_layout

    check_layout(found, read_layout(read_pretrain(pretrain.path, config_json)), pretrain.path)


def _document(pretrain: Pretrain, found: FoundLayout, memory: MemoryFigures) -> dict[str, Any]:
    from mm_autoparallel.integrations.mindformers.memory_causes import list_stage_causes

    offset = [[held - pretrain.base_layers for held in row] for row in found.layout.layers]
    peaks = found.timeline.peak_memory_bytes
    return {
        "schema": SCHEMA,
        "yaml": str(pretrain.path),
        "status": found.status,
        "objective": found.objective_ms,
        "lower_bound": found.lower_bound_ms,
        "step_any_layers": found.any_layers_ms,
        "step": found.timeline.step_ms,
        "solve_s": round(found.solve_s, 3),
        "offset": offset,
        "layers": [list(row) for row in found.layout.layers],
        "recompute": [list(row) for row in found.layout.recompute],
        "selected": {key: [list(row) for row in grid] for key, _, grid in found.layout.selected},
        "peak_memory_bytes": [math.ceil(peak) for peak in peaks],
        "memory_limit_bytes": [math.floor(limit) for limit in found.problem.memory_limit_bytes],
        "memory_by_cause": [dict(causes) for causes in list_stage_causes(found.problem, memory, found.layout, peaks)],
        "memory_source": memory.source,
        "models": [str(model) for model in found.models],
    }


def _print(pretrain: Pretrain, found: FoundLayout, memory: MemoryFigures) -> None:
    document = _document(pretrain, found, memory)
    for stage, (peak, limit) in enumerate(
        zip(found.timeline.peak_memory_bytes, found.problem.memory_limit_bytes, strict=True)
    ):
        held, again = (
            " + ".join(str(row[stage]) for row in grid) for grid in (found.layout.layers, found.layout.recompute)
        )
        print_line(f"stage {stage}: {held} layers, {again} recomputed, {format_bytes(peak)} of {format_bytes(limit)}")
    print_line(f"offset: {document['offset']}")
    print_line(f"recompute_config.recompute: {document['recompute']}")
    for key, grid in document["selected"].items():
        print_line(f"recompute_config.{key}: {grid}")
    bound = "" if found.lower_bound_ms is None else f", none is below {found.lower_bound_ms:.6f}"
    print_line(f"objective {found.objective_ms:.6f} ({found.status.lower()}{bound}), found in {found.solve_s:.2f} s")
    if found.any_layers_ms > found.objective_ms * (1.0 + 1e-6):
        say(
            f"the solver's objective counts long runs by their busiest stage; simulated exactly, its placement takes "
            f"{found.any_layers_ms:.6f}"
        )
    if found.timeline.step_ms > found.any_layers_ms * (1.0 + 1e-6):
        say(
            f"as MindFormers runs it, recomputing the first layers of each chunk, a step takes "
            f"{found.timeline.step_ms:.6f}; the objective counts recompute of any layers"
        )
    say(f"memory from {memory.source}; written to {pretrain.path}")


def _yes_or_no(text: str) -> bool:
    if text.lower() in _YES:
        return True
    if text.lower() in _NO:
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is neither y nor n")


def _above_0(text: str) -> float:
    value = _at_least_0(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def _at_least_0(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value == 0 or _SMALLEST_RATIO <= value <= _LARGEST_RATIO):
        raise argparse.ArgumentTypeError(f"{text!r} is neither 0 nor {describe_range(_SMALLEST_RATIO, _LARGEST_RATIO)}")
    return value
