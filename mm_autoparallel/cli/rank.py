"""`rank --parser_result TABLE.csv`: candidates of an ND search by the step of their best pipelines."""

from __future__ import annotations

import argparse
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm_autoparallel.cli.arguments import count, megabytes, seconds
from mm_autoparallel.cli.output import print_document, print_line
from mm_autoparallel.errors import Interrupted, JobError, NoFeasiblePlan, PlanError, Unfinished
from mm_autoparallel.reports.terminal import say, warn, write_file, write_table, writing
from mm_autoparallel.signals import stop_on_signal
from mm_autoparallel.units import MIB

if TYPE_CHECKING:
    from mm_autoparallel.integrations.mindformers.pretrain_yaml import Pretrain
    from mm_autoparallel.integrations.mindformers.profile_table import ProfiledCandidate
    from mm_autoparallel.integrations.mindformers.search.ranking import RankedCandidate

HELP = "rank candidates of an ND search by their best pipelines"
DESCRIPTION = (
    "Find the best pipeline (layers, recompute, chunks a stage) of every candidate's MindFormers YAML, at the times "
    "that were profiled of it, and write the candidates in the order of their steps. Memory is worked out from sizes."
)
SCHEMA = "mm-autoparallel/rank/1"
OUTPUT = Path("pipeline_output")
ND_PATH = Path("/config/nd_result.csv")
MINDFORMERS = Path("./mindformers/run_mindformer.py")
CP_SAT, HIGHS = "CP-SAT", "HIGHS"
PROFILE_YAMLS = "profile_yaml"
"""Beside the candidates' YAMLs: those that were profiled, as `nd-search` leaves them."""
COLUMNS = (
    *("rank", "dp", "tp", "pp", "ep", "pp_interleave_num"),
    *("cost", "gap", "status", "offset", "recompute", "peakMem", "reason"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options: those of the search's ranking under their names, then this project's own."""
    parser.add_argument(
        "--yaml_path", type=Path, default=Path("./output/dryrun_yaml"), metavar="DIR", help="the candidates' YAMLs"
    )
    parser.add_argument("--parser_result", type=Path, metavar="TABLE.csv", help="what was profiled of each candidate")
    parser.add_argument(
        "--profile_data_dir",
        type=Path,
        default=Path("./profile_data/"),
        metavar="DIR",
        help="timelines of profiled candidates, a folder for each; read where there is no --parser_result",
    )
    parser.add_argument("--gbs", type=count, default=1024, metavar="N", help="global batch size of every candidate")
    parser.add_argument(
        "--nd_path", type=Path, default=ND_PATH, metavar="CSV", help="all candidates; by default read where it is there"
    )
    parser.add_argument(
        "--solver_name", type=str.upper, choices=(CP_SAT, HIGHS), default=CP_SAT, help="HIGHS: highspy, as a check"
    )
    parser.add_argument(
        "--mindformers_dir",
        type=Path,
        default=MINDFORMERS,
        metavar="PATH",
        help="checked to be there if it is given; nothing is started",
    )
    parser.add_argument(
        "--time-limit", type=seconds, default=10.0, metavar="S", help="for each number of chunks of each candidate"
    )
    parser.add_argument(
        "--reserve", type=megabytes, metavar="MB", help="of every stage, for what memory from sizes does not tell"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document on standard output")


def run(arguments: argparse.Namespace) -> int:
    """Read everything, join it without gaps, rank, write the CSV. Exit code 3 where no candidate fits."""
    from mm_autoparallel.files import is_folder, is_there

    if arguments.mindformers_dir != MINDFORMERS and not is_there(arguments.mindformers_dir):
        raise JobError(f"--mindformers_dir {arguments.mindformers_dir}: there is no such path; it may be left out")
    from mm_autoparallel.integrations.mindformers.highs import check_highs
    from mm_autoparallel.integrations.mindformers.memory_keys import batch_notes, division_notes
    from mm_autoparallel.integrations.mindformers.profile_table import read_candidates, read_profile_table
    from mm_autoparallel.integrations.mindformers.profile_traces import read_profiles
    from mm_autoparallel.integrations.mindformers.search.layouts import Solver
    from mm_autoparallel.integrations.mindformers.search.ranking import (
        check_candidates,
        rank_candidates,
        read_candidate_yamls,
    )
    from mm_autoparallel.integrations.mindformers.search.sized_memory import describe_reserve

    if arguments.parser_result is not None:
        profiled = read_profile_table(arguments.parser_result)
    else:
        if not is_folder(arguments.profile_data_dir):
            raise JobError(
                f"--profile_data_dir {arguments.profile_data_dir}: there is no such folder; one with a folder of "
                "timelines for each candidate is expected, or --parser_result TABLE.csv with a row for each"
            )
        profiled = read_profiles(arguments.profile_data_dir, arguments.yaml_path.parent / PROFILE_YAMLS)
    is_listed = arguments.nd_path != ND_PATH or ND_PATH.exists()
    listed = read_candidates(arguments.nd_path) if is_listed else None
    yamls = read_candidate_yamls(arguments.yaml_path)
    check_candidates(yamls, profiled, listed)
    first = next(iter(yamls.values()))
    warn(dict.fromkeys(note for pretrain in yamls.values() for note in pretrain.notes))
    warn([*division_notes(first), *batch_notes(first, arguments.gbs)])
    say(describe_reserve(first, arguments.reserve))

    from mm_autoparallel.pipeline.placement import compile_kernels

    compile_kernels()
    with stop_on_signal() as stop:
        use_highs = arguments.solver_name == HIGHS
        if use_highs:
            check_highs()
        solver = Solver(use_highs, OUTPUT / "model", arguments.time_limit, stop.is_set)
        with writing(OUTPUT):
            ranked = rank_candidates(yamls, profiled, arguments.gbs, solver, arguments.reserve)
    path = OUTPUT / time.strftime("test_result_%Y%m%d%H%M%S.csv")
    rows = [_row(place, entry) for place, entry in enumerate(ranked, start=1)]
    write_table(path, COLUMNS, rows)
    best = _try_best(yamls[ranked[0].candidate], ranked[0]) if ranked[0].layout else None
    if arguments.json:
        print_document({"schema": SCHEMA, "table": str(path), "best": best and str(best), "candidates": rows})
    else:
        for row in rows:
            gap = "not proven" if row["gap"] is None else f"gap {row['gap']:.2%}"
            cost = str(row["reason"]) if row["cost"] is None else f"cost {row['cost']:.6g}, {gap}"
            name = f"DP{row['dp']} TP{row['tp']} PP{row['pp']} EP{row['ep']}"
            print_line(f"{row['rank']}. {name}: {row['status']}, {cost}")
        say(f"written to {path}")
        if best:
            say(f"the first, with its offset and recompute, is {best}: run it, or look at it and search on:")
            say(f"then: {_next_command(best, profiled[ranked[0].candidate], arguments)}")
    if ranked[0].layout is not None:
        return 0
    if all(entry.status == "infeasible" for entry in ranked):
        return NoFeasiblePlan.exit_code
    return Interrupted.exit_code if stop.is_set() else Unfinished.exit_code


def _try_best(source: Pretrain, best: RankedCandidate) -> Path | None:
    """`_write_best`, whose failure becomes a warning and takes nothing of the ranking away."""
    try:
        return _write_best(source, best)
    except (JobError, PlanError) as error:
        warn([f"the first has no YAML of its own: {error}"])
        return None


def _write_best(source: Pretrain, best: RankedCandidate) -> Path:
    """The YAML of the fastest candidate, that runs its layout; read back. Raises JobError or PlanError where not."""
    from mm_autoparallel.integrations.mindformers.divided_yaml import format_divided
    from mm_autoparallel.integrations.mindformers.layout import read_layout
    from mm_autoparallel.integrations.mindformers.pretrain_yaml import read_pretrain
    from mm_autoparallel.integrations.mindformers.profile_table import name_candidate

    assert best.layout is not None
    path = OUTPUT / f"best_{name_candidate(best.candidate)}.yaml"
    write_file(path, format_divided(source, best.pretrain, best.layout))
    read = read_layout(read_pretrain(path))
    if (read.layers, read.recompute) != (best.layout.layers, best.layout.recompute):
        raise PlanError(f"{path} as it was written holds {read.layers}; {best.layout.layers} was found")
    return path


def _next_command(best: Path, profiled: ProfiledCandidate, arguments: argparse.Namespace) -> str:
    """`pipeline-search` of `best`, which proves its lists, with the ratios that were profiled."""
    ratios = profiled.ratios
    options = {
        "-layer_ratio": ratios.layer_factor,
        "-b_ratio": ratios.backward_factor,
        "-head_loss": ratios.head_factor,
        "-ra_ratio": ratios.recompute_factor,
    }
    words = [word for name, value in options.items() for word in (name, f"{value:g}")]
    if arguments.reserve is not None:
        words += ["--reserve", f"{arguments.reserve / MIB:g}"]
    return shlex.join(["mm-autoparallel", "pipeline-search", "-yaml", str(best), *words, "--evaluate", "y"])


def _row(place: int, entry: RankedCandidate) -> dict[str, Any]:
    dp, tp, pp, ep = entry.candidate
    layout, base = entry.layout, entry.pretrain.base_layers
    return {
        "rank": place,
        "dp": dp,
        "tp": tp,
        "pp": pp,
        "ep": ep,
        "pp_interleave_num": entry.pretrain.vp if layout else None,
        "cost": entry.cost_ms,
        "gap": entry.gap_fraction,
        "status": entry.status,
        "offset": [[held - base for held in row] for row in layout.layers] if layout else None,
        "recompute": [list(row) for row in layout.recompute] if layout else None,
        "peakMem": round(entry.peak_bytes / MIB, 1) if entry.peak_bytes is not None else None,
        "reason": entry.reason,
    }
