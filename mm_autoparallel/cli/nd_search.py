"""`nd-search --yaml_path FILE.yaml`: which divisions of a MindFormers model fit, and YAMLs of those to profile."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm_autoparallel.cli.arguments import count, megabytes
from mm_autoparallel.cli.output import print_document, print_line
from mm_autoparallel.errors import JobError
from mm_autoparallel.reports.terminal import say, warn, write_file, write_table
from mm_autoparallel.signals import stop_on_signal
from mm_autoparallel.units import MIB

if TYPE_CHECKING:
    from mm_autoparallel.integrations.mindformers.pretrain_yaml import Pretrain
    from mm_autoparallel.integrations.mindformers.search.nd_search import Searched, ToProfile

HELP = "search the divisions of a MindFormers pretrain YAML and choose which to profile"
DESCRIPTION = (
    "List every division of a MindFormers pretrain YAML's devices with its memory or the reason it is removed, and "
    "write YAMLs of about 20 that fit the devices at hand and whose profiles tell most. Memory is worked out from "
    "sizes, or read from earlier dry runs; nothing is started."
)
SCHEMA = "mm-autoparallel/nd-search/1"
CP_SAT, HIGHS = "CP-SAT", "HIGHS"
CANDIDATES, SPACE, PROFILE_YAMLS, FULL_YAMLS = "nd_candidate_config.csv", "nd_space.csv", "profile_yaml", "dryrun_yaml"
SIZES = ("dp", "tp", "pp", "ep")
COLUMNS = (*SIZES, "cp", "op", "vp", "mbs", "status", "peakMem", "limit", "source", "reason")

DATASET = Path("./config/dataset/wiki103-4k.mindrecord")
_PATHS = {
    "mindformers_dir": ("./mindformers", "folder of run_mindformer.py"),
    "register_path": ("./register/", "folder of registered models"),
    "small_dataset": ("./config/dataset/wiki4096.mindrecord", "data set of dry runs"),
    "env_json": ("./config/env_config.json", "environment of dry runs, a JSON mapping of names to texts"),
}
"""What dry runs take, none of which is started: a path that is given must be there."""

_NARROWED = (
    ("dp", "data parallel"),
    ("tp", "tensor parallel"),
    ("pp", "pipeline"),
    ("cp", "context parallel"),
    ("ep", "expert parallel"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options: those of the ND search under their names and with its defaults, then this project's own."""
    parser.add_argument(
        "--yaml_path",
        type=Path,
        default=Path("./config/pretrain_deepseek3_128p.yaml"),
        metavar="FILE.yaml",
        help="pretrain YAML whose devices are divided",
    )
    parser.add_argument("--dryrun_data_dir", type=Path, metavar="DIR", help="dry runs of candidates, a folder for each")
    parser.add_argument(
        "--profile_data_dir", type=Path, metavar="DIR", help="candidates profiled already, a folder for each"
    )
    parser.add_argument("--parallel_num", type=count, default=2, metavar="N", help="processes that work memory out")
    parser.add_argument("--rank_num", type=count, default=64, metavar="N", help="devices to profile on")
    parser.add_argument(
        "--solver_name", type=str.upper, choices=(CP_SAT, HIGHS), default=CP_SAT, help="of the ranking that comes next"
    )
    parser.add_argument("--max_expert_parallel", type=count, default=64, metavar="N", help="the largest ep")
    parser.add_argument(
        "--output_path", type=Path, default=Path("./output/nd_output/"), metavar="DIR", help="where results go"
    )
    parser.add_argument("--gbs", type=count, default=1024, metavar="N", help="global batch size of every candidate")
    parser.add_argument(
        "--dataset",
        type=Path,
        default=DATASET,
        metavar="PATH",
        help="data set of profiling runs, written into their YAMLs where it is given",
    )
    for name, (default, what) in _PATHS.items():
        parser.add_argument(
            f"--{name}", type=Path, default=Path(default), metavar="PATH", help=f"{what}; only checked to be there"
        )
    for name, what in _NARROWED:
        parser.add_argument(
            f"--{name}", type=count, nargs="+", metavar="N", help=f"look at these {what} sizes alone (default: all)"
        )
    parser.add_argument(
        "--reserve", type=megabytes, metavar="MB", help="of every stage, for what memory from sizes does not tell"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document on standard output")


def run(arguments: argparse.Namespace) -> int:
    """Search, choose, write. Exit code 3 where nothing fits; nothing is written then."""
    _check_paths(arguments)
    from mm_autoparallel.integrations.mindformers.dry_runs import find_candidate_folders, read_dry_runs
    from mm_autoparallel.integrations.mindformers.memory_keys import batch_notes, division_notes
    from mm_autoparallel.integrations.mindformers.pretrain_yaml import read_pretrain
    from mm_autoparallel.integrations.mindformers.search.division import Scope
    from mm_autoparallel.integrations.mindformers.search.nd_search import (
        choose_trials,
        list_candidates,
        search_divisions,
    )
    from mm_autoparallel.integrations.mindformers.search.sized_memory import describe_reserve

    pretrain = read_pretrain(arguments.yaml_path)
    warn(pretrain.notes)
    named = {name: getattr(arguments, name) for name, _ in _NARROWED}
    sizes = {name: tuple(given) for name, given in named.items() if given}
    scope = Scope(arguments.max_expert_parallel, sizes, arguments.reserve)
    dry_runs = read_dry_runs(arguments.dryrun_data_dir) if arguments.dryrun_data_dir else {}
    profiled = find_candidate_folders(arguments.profile_data_dir) if arguments.profile_data_dir else {}
    with stop_on_signal() as stop:
        searched = search_divisions(pretrain, arguments.gbs, scope, dry_runs, arguments.parallel_num, stop.is_set)
        candidates = list_candidates(searched, pretrain, is_whole=not stop.is_set())
        chosen = choose_trials(candidates, pretrain, arguments.gbs, arguments.rank_num, profiled, arguments.reserve)
    written = _write_yamls(arguments, pretrain, chosen)
    warn([*division_notes(pretrain), *batch_notes(pretrain, arguments.gbs)])
    say(describe_reserve(pretrain, arguments.reserve))
    rows = [_row(entry) for entry in searched]
    short = [{key: row[key] for key in (*SIZES, "peakMem")} for row in map(_row, candidates)]
    write_table(arguments.output_path / CANDIDATES, (*SIZES, "peakMem"), short)
    write_table(arguments.output_path / SPACE, COLUMNS, rows)
    if arguments.json:
        profiles = [_profile_row(entry, written) for entry in chosen]
        print_document({"schema": SCHEMA, "candidates": short, "profiles": profiles, "space": rows})
    else:
        _print(arguments, rows, chosen, written)
    return 0


def _check_paths(arguments: argparse.Namespace) -> None:
    from mm_autoparallel.files import is_there, read_document

    defaults = {name: Path(default) for name, (default, _) in _PATHS.items()}
    for name, default in {**defaults, "dataset": DATASET}.items():
        path = getattr(arguments, name)
        if path != default and not is_there(path):
            raise JobError(f"--{name} {path}: there is no such path; it may be left out, for nothing is started")
    if arguments.env_json != defaults["env_json"]:
        content = read_document(arguments.env_json, "environment file")
        if not all(isinstance(value, str) for value in content.values()):
            raise JobError(f"--env_json {arguments.env_json}: a mapping of names to texts is expected")


def _write_yamls(arguments: argparse.Namespace, pretrain: Pretrain, chosen: Sequence[ToProfile]) -> dict[str, str]:
    """Candidate → its YAML for profiling, each read back; beside them those of whole candidates, for the ranking."""
    from mm_autoparallel.integrations.mindformers.divided_yaml import format_divided
    from mm_autoparallel.integrations.mindformers.profile_table import name_candidate
    from mm_autoparallel.integrations.mindformers.search.division import divide

    profiles_dir = arguments.profile_data_dir or Path("./profile_data")
    dataset = None if arguments.dataset == DATASET else str(arguments.dataset)
    texts: dict[Path, str] = {}
    written = {}
    for entry in chosen:
        division, layout = entry.searched.division, entry.searched.layout
        if entry.trial is None or layout is None:
            continue
        name = name_candidate(division.candidate)
        whole = divide(pretrain, division, arguments.gbs)
        output = str(profiles_dir / name)
        path = arguments.output_path / PROFILE_YAMLS / f"{name}_pretrain.yaml"
        texts[path] = format_divided(pretrain, entry.trial.divided, entry.trial.layout, output, dataset)
        texts[arguments.output_path / FULL_YAMLS / f"{name}.yaml"] = format_divided(pretrain, whole, layout)
        written[name] = str(path)
    for path, text in texts.items():
        write_file(path, text)
    _check_yamls(texts)
    for folder in (PROFILE_YAMLS, FULL_YAMLS):
        others = [path.name for path in sorted((arguments.output_path / folder).glob("*.yaml")) if path not in texts]
        if others:
            warn([f"{arguments.output_path / folder} holds {', '.join(others)} too, of an earlier search; remove them"])
    return written


def _check_yamls(paths: Iterable[Path]) -> None:
    """Raise PlanError or JobError where a YAML that was written is none that can be read."""
    from mm_autoparallel.integrations.mindformers.layout import read_layout
    from mm_autoparallel.integrations.mindformers.pretrain_yaml import read_pretrain

    for path in paths:
        read_layout(read_pretrain(path))


def _row(entry: Searched) -> dict[str, Any]:
    division = entry.division
    sizes = {name: getattr(division, name) for name in (*SIZES, "cp", "op", "vp", "mbs")}
    return {
        **sizes,
        "status": entry.status,
        "peakMem": None if entry.peak_bytes is None else round(entry.peak_bytes / MIB),
        "limit": None if entry.limit_bytes is None else round(entry.limit_bytes / MIB),
        "source": entry.source,
        "reason": entry.reason,
    }


def _profile_row(entry: ToProfile, written: dict[str, str]) -> dict[str, Any]:
    from mm_autoparallel.integrations.mindformers.profile_table import name_candidate

    candidate = entry.searched.division.candidate
    return {
        **dict(zip(SIZES, candidate, strict=True)),
        "yaml": written.get(name_candidate(candidate)),
        "reason": entry.reason,
    }


def _print(
    arguments: argparse.Namespace, rows: Sequence[dict[str, Any]], chosen: Sequence[ToProfile], written: dict[str, str]
) -> None:
    numbers = {status: sum(row["status"] == status for row in rows) for status in ("unlawful", "out of memory", "fits")}
    print_line(f"{len(rows)} divisions: {', '.join(f'{number} {status}' for status, number in numbers.items())}")
    for entry in chosen:
        row = _row(entry.searched)
        end = f"not profiled: {entry.reason}"
        if entry.trial:
            small = entry.trial.divided
            end = f"profiled as DP {small.dp} PP {small.pp} with {small.num_layers} layers"
        print_line(
            f"DP {row['dp']} TP {row['tp']} PP {row['pp']} EP {row['ep']} CP {row['cp']} "
            f"(OP {row['op']} VPP {row['vp']} MBS {row['mbs']}): {row['peakMem']} of {row['limit']} MB; {end}"
        )
    output = arguments.output_path
    say(f"{len(written)} YAMLs to profile are in {output / PROFILE_YAMLS}")
    say(f"every division with its memory and the reason it is removed is in {output / SPACE}")
    options = {
        "yaml_path": output / FULL_YAMLS,
        "profile_data_dir": arguments.profile_data_dir or "profile_data",
        "nd_path": output / CANDIDATES,
        "gbs": arguments.gbs,
        "solver_name": arguments.solver_name,
    }
    if arguments.reserve is not None:
        options["reserve"] = f"{arguments.reserve / MIB:g}"
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    say(f"then: {shlex.join(['mm-autoparallel', 'rank', *words])}")
    say("(a table of what was profiled does in place of the profiler's timelines: --parser_result TABLE.csv)")
