"""What `galvatron-search` and `galvatron-score` both take: upstream's YAML with overrides, or Paddle's flags."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm_autoparallel.cli.output import print_line
from mm_autoparallel.errors import JobError
from mm_autoparallel.reports.terminal import warn

if TYPE_CHECKING:
    from collections.abc import Callable

    from mm_autoparallel.integrations.galvatron.score import Extensions, Score
    from mm_autoparallel.integrations.galvatron.search import Found
    from mm_autoparallel.integrations.galvatron.strategy_file import Assignment

PADDLE_FLAGS: dict[str, tuple[type, str]] = {
    "time_profile_mode": (str, "static, batch or sequence"),
    "memory_profile_mode": (str, "static or sequence"),
    "num_layertype": (int, "kinds of layers: 1"),
    "hidden_size_list": (int, "the hidden size"),
    "layernum_list": (int, "layers, as --layernum"),
    "seqlen_list": (int, "tokens of a sequence"),
    "profile_gpu_num": (int, "devices, as --world_size"),
    "time_profile_data_path": (Path, "computation_profiling_….json"),
    "memory_profile_data_path": (Path, "memory_profiling_….json"),
    "overlap_coe_path": (Path, "overlap_coefficient.json"),
    "allreduce_coe_path": (Path, "allreduce_bandwidth_….json"),
    "p2p_coe_path": (Path, "p2p_bandwidth_….json"),
    "sp_time_path": (Path, "sp_time_….json"),
    "search_granularity": (str, "fine-grained"),
    "world_size": (int, "devices"),
    "min_bsz": (int, "smallest batch"),
    "max_bsz": (int, "largest batch"),
    "bsz_step": (int, "from one batch to the next"),
    "max_tp_size": (int, "highest degree of a layer"),
    "max_pp_size": (int, "most stages"),
    "mixed_precision_type": (str, "bf16, fp16 or fp32"),
    "memory_upper_limit": (int, "GB of a device"),
    "sp_space": (str, "tp, or tp+sp with Ulysses"),
    "layernum": (int, "layers"),
    "disable_sdp": (int, "1: the vocabulary is not sharded"),
    "disable_vtp": (int, "1: degree 1 alone, of layers too"),
    "parallel_search": (int, "read over: one process is enough"),
    "log_dir": (str, "read over: nothing is logged"),
}


@dataclass(frozen=True)
class Space:
    """One of the two as the verbs use it. out: where its own search writes; tell: what to print of a plan besides."""

    limit_mib: int
    reserve_mib: int
    out: Path
    search: Callable[[Callable[[], bool]], Found]
    score: Callable[[Assignment], Score]
    format: Callable[[Assignment], str]
    read: Callable[[Path], Assignment]
    num_layers: int
    tell: Callable[[Assignment], None]


def add_space(parser: argparse.ArgumentParser) -> None:
    """The options of `read_space`."""
    parser.add_argument("config", type=Path, nargs="?", metavar="CONFIG.yaml", help="upstream's search_dist.yaml")
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="such as search_engine.model_info.num_layers=8"
    )
    parser.add_argument(
        "--reserve-fraction",
        type=share,
        metavar="F",
        help="of a device, kept free (Galvatron: 0.2 or 0.3, above 20 GB)",
    )
    parser.add_argument("--paddle", action="store_true", help="Galvatron for Paddle: its flags in place of CONFIG.yaml")
    parser.add_argument("--as-is", action="store_true", help="with --paddle: keep three slips of its cost model")
    for name, (kind, words) in PADDLE_FLAGS.items():
        metavar = {int: "N", Path: "FILE", str: "WORD"}[kind]
        parser.add_argument(f"--{name}", type=kind, metavar=metavar, help=f"with --paddle: {words}")


def share(text: str) -> float:
    """A part of a whole, from 0 up to but not 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is no part of a whole; a number from 0 to below 1 is expected")
    return value


def read_space(arguments: argparse.Namespace, extensions: Extensions) -> Space:
    """What the options name, read. Raises JobError that names file and key, or flag."""
    given = {name: getattr(arguments, name) for name in PADDLE_FLAGS if getattr(arguments, name) is not None}
    if arguments.paddle:
        if arguments.config is not None:
            raise JobError(f"{arguments.config} stands beside --paddle, whose search takes flags alone")
        return _read_paddle(given, arguments.as_is, extensions)
    if given or arguments.as_is:
        raise JobError(f"--{next(iter(given), 'as-is').replace('as_is', 'as-is')} goes with --paddle alone")
    if arguments.config is None:
        raise JobError("CONFIG.yaml is missing: upstream's search_dist.yaml, or --paddle with the flags of its search")
    return _read_upstream(arguments.config, arguments.overrides, extensions)


def _read_upstream(config: Path, overrides: list[str], extensions: Extensions) -> Space:
    from mm_autoparallel.integrations.galvatron.configuration import read_search
    from mm_autoparallel.integrations.galvatron.score import Planner
    from mm_autoparallel.integrations.galvatron.search import search
    from mm_autoparallel.integrations.galvatron.strategy_file import format_strategy, read_strategy

    read = read_search(config, overrides)
    warn(read.notes)
    planner, parallelism = Planner(read, extensions), read.configuration.parallelism_info
    kinds = parallelism.pipeline_type, parallelism.default_dp_type
    return Space(
        planner.limit_mib,
        planner.reserve_mib,
        read.out / read.file_name,
        lambda should_stop: search(planner, should_stop),
        planner.score,
        format_strategy,
        lambda path: read_strategy(path, planner.num_devices, *kinds),
        read.num_layers,
        lambda _: None,
    )


def _read_paddle(given: dict[str, Any], is_as_is: bool, extensions: Extensions) -> Space:
    from mm_autoparallel.integrations.galvatron.paddle import (
        FILE,
        PaddlePlanner,
        format_fine_grained,
        map_to_trainer,
        read_fine_grained,
        read_flags,
        search_paddle,
    )

    if replace(extensions, reserve_fraction=None) != type(extensions)():
        raise JobError(
            "--uneven, --count-every-stage, --count-resharding and --whole-samples do not go with --paddle, whose "
            "batches are cut into whole samples always"
        )
    flags = read_flags(given)
    planner = PaddlePlanner(flags, is_as_is, extensions.reserve_fraction)

    def tell(plan: Assignment) -> None:
        trainer, notes = map_to_trainer(plan)
        print_line("for the trainer: " + ", ".join(f"{name} {value}" for name, value in trainer.items()))
        warn(notes)

    return Space(
        planner.limit_mib,
        planner.reserve_mib,
        Path("configs") / FILE,
        lambda should_stop: search_paddle(planner, should_stop),
        planner.score,
        format_fine_grained,
        lambda path: read_fine_grained(path, flags.world_size),
        flags.layernum,
        tell,
    )
