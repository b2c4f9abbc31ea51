"""`tinker`: Tinker's folders, options and files, with its own figures or this package's plan."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm_autoparallel.cli import tinker_profile
from mm_autoparallel.cli.output import print_document, print_line
from mm_autoparallel.cli.tinker_options import MODES, OPTIONS
from mm_autoparallel.errors import Interrupted, JobError, NoFeasiblePlan
from mm_autoparallel.reports.terminal import Progress, say, warn, writing
from mm_autoparallel.signals import stop_on_signal

if TYPE_CHECKING:
    from mm_autoparallel.integrations.tinker.cost import Cluster, Score
    from mm_autoparallel.integrations.tinker.ours import Planned
    from mm_autoparallel.integrations.tinker.profiles import Folder

HELP = "measure, search and simulate in Tinker's form"
DESCRIPTION = (
    "Measure the blocks of a launch script's model into a folder of Tinker's form (profile), search such a folder or "
    "simulate one strategy of it, or measure, search and write launch scripts (all). --model tinker gives "
    "Tinker's own figures; ours (the default) simulates the pipeline, lets each stage recompute its own number of "
    "layers, and counts the exchange of gradients. Options are Tinker's, in parameter_config.json too."
)
SCHEMA = "mm-autoparallel/tinker/1"
_TABLE = "rank,tp,pp,dp,sp,ep,dist_opt,mbs,num_layer_list,recompute,token_per_npu_per_sec,time_cost (ms),mem_cost (MB)"
_US_PER_MS = 1000.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options: Tinker's under their names, then this project's own."""
    parser.add_argument("-m", "--mode", choices=MODES, default="all", help="what is done (default: all)")
    parser.add_argument("-config", "--config_path", type=Path, metavar="FILE.json", help="options in sections by mode")
    parser.add_argument(
        "--is_full_tune", type=_yes_or_no, default=False, metavar="true|false", help="the script tunes; read, no figure"
    )
    parser.add_argument("-d", "--detail", action="store_true", help="with simulate: each stage's time and memory")
    for option in OPTIONS:
        parser.add_argument(
            *option.flags,
            dest=option.name,
            type=option.kind,
            choices=option.words or None,
            metavar=None if option.words else "N" if option.kind is int else "WORD",
            help=f"{option.help} (default: {option.default})" if option.default is not None else option.help,
        )
    parser.add_argument("--model", choices=("ours", "tinker"), default="ours", help="whose figures (default: ours)")
    parser.add_argument("--json", action="store_true", help="print one JSON document on standard output")
    tinker_profile.add_arguments(parser)


def _yes_or_no(text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return text.lower() in ("true", "1")


def run(arguments: argparse.Namespace) -> int:
    """Measure the script's model, where that is asked for; read the folder; simulate or search it."""
    from mm_autoparallel.cli.tinker_options import read_settings

    mode = arguments.mode
    settings = read_settings(mode, vars(arguments), arguments.config_path)
    needed = {"profile": ("pretrain_script_path",), "all": ("pretrain_script_path", "global_batch_size")}
    for name in needed.get(mode, ("profiled_data_path", "global_batch_size")):
        if settings[name] is None:
            section = "profile" if mode == "all" and name == "pretrain_script_path" else mode.replace("all", "search")
            raise JobError(f"--mode {mode} needs --{name}, or {section}.{name} in --config_path")
    _check_numbers(mode, settings)
    if mode not in needed:
        _refuse_profiling_options(arguments, mode)
        return _read_and_plan(arguments, settings)
    if tinker_profile.is_rank():
        return tinker_profile.measure_rank(arguments, settings)
    path = tinker_profile.profile(arguments, settings)
    say(f"wrote {path}")
    if mode == "all":
        return _read_and_plan(arguments, {**settings, "profiled_data_path": str(path)})
    if arguments.json:
        print_document({"schema": SCHEMA, "mode": mode, "folder": str(path)})
    else:
        print_line(str(path))
    return 0


def _check_numbers(mode: str, settings: Mapping[str, Any]) -> None:
    for name in ("global_batch_size", "num_nodes", "num_npus_per_node") if mode != "profile" else ():
        if settings[name] < 1:
            raise JobError(f"--{name} is {settings[name]}; a whole number of at least 1 is expected")


def _refuse_profiling_options(arguments: argparse.Namespace, mode: str) -> None:
    """Raises JobError for what says how to measure, where nothing is measured."""
    for name in ("traced", "device", "model_config", "vocab_size"):
        if getattr(arguments, name):
            raise JobError(f"--{name.replace('_', '-')} goes with --mode profile or all, and this is {mode}")


def _read_and_plan(arguments: argparse.Namespace, settings: Mapping[str, Any]) -> int:
    from mm_autoparallel.integrations.tinker.cost import Cluster
    from mm_autoparallel.integrations.tinker.profiles import find_folder, read_folder

    folder = read_folder(find_folder(settings["profiled_data_path"]))
    warn(folder.notes)
    cluster = Cluster(settings["num_nodes"], settings["num_npus_per_node"])
    return (_simulate if arguments.mode == "simulate" else _search)(arguments, settings, folder, cluster)


# --------------------------------------------------------------------------------------------------------- simulating


def _simulate(arguments: argparse.Namespace, settings: Mapping[str, Any], folder: Folder, cluster: Cluster) -> int:
    from mm_autoparallel.integrations.tinker.cost import Chain, Choice
    from mm_autoparallel.integrations.tinker.ours import simulate_layers
    from mm_autoparallel.integrations.tinker.profiles import Config

    config = Config(settings["simu_tp"], settings["simu_sp"], settings["simu_ep"], settings["micro_batch_size"])
    again = bool(settings["recompute"])
    choice = Choice(config, settings["simu_pp"], bool(settings["dist_opt"]), again, settings["global_batch_size"])
    chain = Chain(folder, cluster, choice)
    score = chain.score(_read_layers(settings["num_layer_list"], choice.pp, folder))
    ours_ms = None if arguments.model == "tinker" else simulate_layers(chain, score.layers)
    if arguments.json:
        print_document(
            {"schema": SCHEMA, "mode": "simulate", "model": arguments.model, "tinker": _document(score)}
            | ({} if ours_ms is None else {"step_ms": ours_ms, "tinker_error": _signed(score, ours_ms)})
        )
        return 0
    for line in _table([(score, ours_ms)]):
        print_line(line)
    if ours_ms is not None:
        print_line(f"ours: {ours_ms:.3f} ms a step; Tinker's model {_signed(score, ours_ms):+.1%} of that")
    if arguments.detail:
        print_line("stage,layers,time of a micro-batch (ms),memory (MB)")
        for stage, (layers, us, mib) in enumerate(zip(score.layers, score.stage_us, score.stage_mib, strict=True)):
            print_line(f"{stage},{layers},{us / _US_PER_MS:.3f},{mib:.2f}")
    return 0


def _read_layers(text: str | None, pp: int, folder: Folder) -> tuple[int, ...]:
    if text is None:
        if folder.num_layers is None or folder.num_layers % pp:
            raise JobError(
                f"--num_layer_list is needed: {folder.num_layers} layers are not dealt evenly to {pp} stages"
            )
        return (folder.num_layers // pp,) * pp
    words = text.strip("[] ").split(",")
    if not all(word.strip().isdigit() and int(word) > 0 for word in words):
        raise JobError(f"--num_layer_list {text!r} is not understood; it is such as 4,4,4,4")
    return tuple(map(int, words))


def _signed(score: Score, ours_ms: float) -> float:
    """How far Tinker's step is from ours."""
    return score.step_us / _US_PER_MS / ours_ms - 1.0


# ---------------------------------------------------------------------------------------------------------- searching


def _search(arguments: argparse.Namespace, settings: Mapping[str, Any], folder: Folder, cluster: Cluster) -> int:
    from mm_autoparallel.integrations.tinker.ours import plan_folder
    from mm_autoparallel.integrations.tinker.results import BEST
    from mm_autoparallel.integrations.tinker.search import search

    batch, limit = settings["global_batch_size"], settings["memory_limit"]
    began_s = time.perf_counter()
    planned: tuple[Planned, ...] = ()
    nothing = f"nothing in {folder.path} fits {limit} MB on {cluster.num_devices} devices with a batch of {batch}"
    with Progress() as progress, stop_on_signal() as stop:

        def look() -> None:
            """Between two strategies."""
            if stop.is_set():
                raise Interrupted("stopped; nothing was written")
            progress.show(lambda _: f"searching {folder.path}, {time.perf_counter() - began_s:.0f} s")

        scores = search(folder, cluster, batch, limit, look)
        if scores and arguments.model == "ours":
            from mm_autoparallel.pipeline.placement import compile_kernels

            compile_kernels()
            planned = plan_folder(folder, cluster, batch, limit, look=look, should_stop=stop.is_set)
            look()
    if not (planned if arguments.model == "ours" else scores):
        raise NoFeasiblePlan(nothing)
    took_s = time.perf_counter() - began_s
    best: list[tuple[Score, float | None]] = [(each.tinker, each.step_ms) for each in planned] or [
        (score, None) for score in scores[:BEST]
    ]
    files = _write(settings, folder, cluster, scores, planned)
    if arguments.json:
        rows = [
            {"rank": rank, "tinker": _document(score)}
            | ({} if step_ms is None else {"step_ms": step_ms, **_placed(planned[rank - 1])})
            for rank, (score, step_ms) in enumerate(best, 1)
        ]
        files_named = [str(path) for path in files]
        print_document(
            {"schema": SCHEMA, "mode": "search", "model": arguments.model, "best": rows, "files": files_named}
        )
    else:
        for line in _table(best, planned):
            print_line(line)
    say(f"{len(scores)} ways of Tinker's search, {took_s:.1f} s; wrote {files[0].parent}")
    return 0


def _placed(planned: Planned) -> dict[str, Any]:
    return {"layers": [*planned.layers], "recompute": [*planned.recompute], "status": planned.result.status}


def _write(
    settings: Mapping[str, Any], folder: Folder, cluster: Cluster, scores: Sequence[Score], planned: Sequence[Planned]
) -> list[Path]:
    """results.csv, the log, and the ten best in the person's launch script where one is named, in a new folder."""
    from mm_autoparallel.integrations.export import write_files
    from mm_autoparallel.integrations.tinker.results import (
        BEST,
        CONFIGS,
        RESULTS,
        format_results,
        name_folder,
        name_script,
        patch_script,
    )

    when = time.strftime("%Y-%m-%d-%H-%M-%S")
    named = name_folder(folder, settings["global_batch_size"], settings["memory_limit"], cluster, when)
    out = Path(settings["output_dir"]) / named
    texts = {out / RESULTS: format_results(scores)}
    best = [each.tinker for each in planned] or scores[:BEST]
    lines = [shlex.join(sys.argv), *folder.notes, *_table([(score, None) for score in best])]
    texts[out / f"{named}.log"] = "\n".join(lines) + "\n"
    script = settings["pretrain_script_path_search"] or settings["pretrain_script_path"]
    if script:
        for rank, score in enumerate(best, 1):
            texts[out / CONFIGS / name_script(folder, rank, score)] = patch_script(Path(script), score)
    with writing(out):
        write_files(texts, overwrite=False)
    return [*texts]


# ------------------------------------------------------------------------------------------------------------- telling


def _document(score: Score) -> dict[str, Any]:
    config, choice = score.choice.config, score.choice
    return {
        "tp": config.tp,
        "pp": choice.pp,
        "dp": score.dp,
        "sp": config.sp,
        "ep": config.ep,
        "dist_opt": int(choice.dist_opt),
        "mbs": config.mbs,
        "num_layer_list": [*score.layers],
        "recompute": int(choice.recompute),
        "token_per_npu_per_sec": score.tokens_per_device_s,
        "time_cost_ms": score.step_us / _US_PER_MS,
        "mem_cost_mb": score.peak_mib,
        "stage_time_ms": [us / _US_PER_MS for us in score.stage_us],
        "stage_mem_mb": [*score.stage_mib],
    }


def _table(rows: Sequence[tuple[Score, float | None]], planned: Sequence[Planned] = ()) -> list[str]:
    """Tinker's table; with our own plans, their layers that recompute and their step at the end."""
    lines = [_TABLE + (",ours: recompute,ours: step (ms)" if planned else "")]
    for rank, (score, step_ms) in enumerate(rows, 1):
        found = _document(score)
        layers = "_".join(map(str, score.layers))
        words = [str(found[name]) for name in ("tp", "pp", "dp", "sp", "ep", "dist_opt", "mbs")]
        figures = [f"{score.tokens_per_device_s:.1f}", f"{found['time_cost_ms']:.3f}", f"{score.peak_mib:.2f}"]
        own = ["_".join(map(str, planned[rank - 1].recompute)), f"{step_ms:.3f}"] if planned else []
        lines.append(",".join([str(rank), *words, layers, str(found["recompute"]), *figures, *own]))
    return lines
