"""What `galvatron-search` and `galvatron-score` both take: upstream's YAML with overrides, or Paddle's flags."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
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
    "disable_sdp": (int, "1: no ZeRO 3; Paddle's: none of the vocabulary"),
    "disable_vtp": (int, "1: degree 1 alone, of layers too"),
    "parallel_search": (int, "read over: one process is enough"),
    "log_dir": (str, "read over: nothing is logged"),
}


OLDER_FLAGS: dict[str, tuple[type, str]] = {
    "model_size": (str, "the model, such as llama-7b"),
    "set_model_config_manually": (int, "1: sizes by the flags below"),
    "set_layernum_manually": (int, "1: --num_hidden_layers counts"),
    "set_seqlen_manually": (int, "1: --seq_length counts"),
    "hidden_size": (int, "the hidden size"),
    "num_hidden_layers": (int, "layers"),
    "num_attention_heads": (int, "heads, which name files of profiles"),
    "seq_length": (int, "tokens of a sequence"),
    "num_nodes": (int, "nodes"),
    "num_gpus_per_node": (int, "devices of a node"),
    "memory_constraint": (int, "GB of a device"),
    "min_bsz": (int, "smallest batch"),
    "max_bsz": (int, "largest batch"),
    "bsz_scale": (int, "from one batch to the next"),
    "settle_bsz": (int, "this batch alone"),
    "settle_chunk": (int, "this number of micro-batches alone"),
    "search_space": (str, "full, dp+tp, dp+pp, 3d, dp, sdp, tp or pp"),
    "sp_space": (str, "tp, or tp+sp with Ulysses"),
    "disable_dp": (int, "1: no DP without ZeRO 3"),
    "disable_tp": (int, "1: degree 1 alone"),
    "disable_vtp": (int, "1: degree 1 alone, of the vocabulary too"),
    "disable_pp": (int, "1: one stage"),
    "disable_sdp": (int, "1: no ZeRO 3"),
    "disable_ckpt": (int, "1: nothing is checkpointed"),
    "disable_tp_consec": (int, "1: devices of TP are neighbours"),
    "max_tp_deg": (int, "highest degree"),
    "max_pp_deg": (int, "most stages"),
    "default_dp_type": (str, "ddp or zero2"),
    "mixed_precision": (str, "bf16, fp16 or fp32"),
    "pipeline_type": (str, "gpipe or pipedream_flush"),
    "use_pipeline_costmodel": (int, "1"),
    "costmodel_coe": (float, "factor of layers' times"),
    "sequence_parallel": (bool, "activations are divided along the sequence"),
    "no_global_memory_buffer": (bool, "the buffer for gathered activations is not counted"),
    "no_async_grad_reduce": (bool, "gradients are exchanged after every micro-batch"),
    "memory_profiling_path": (Path, "where memory_profiling_….json lies"),
    "time_profiling_path": (Path, "where computation_profiling_….json lies"),
    "allreduce_bandwidth_config_path": (Path, "where allreduce_bandwidth_….json lies"),
    "p2p_bandwidth_config_path": (Path, "where p2p_bandwidth_….json lies"),
    "overlap_coe_path": (Path, "where overlap_coefficient.json lies"),
    "sp_time_path": (Path, "where sp_time_….json lies"),
    "output_config_path": (Path, "folder of the strategy"),
    "fine_grained_mode": (int, "0: one strategy for all layers"),
    "time_profile_mode": (str, "static, batch or sequence"),
    "memory_profile_mode": (str, "static or sequence"),
    "recommend_min_bsz": (int, "read over: all batches are searched"),
    "parallel_search": (int, "read over: one process is enough"),
    "worker": (int, "read over: one process is enough"),
    "log_dir": (str, "read over: nothing is logged"),
    "vocab_size": (int, "read over: no figure depends on it"),
    "make_vocab_size_divisible_by": (int, "read over: no figure depends on it"),
    "max_predictions_per_seq": (int, "read over: no figure depends on it"),
}
_OTHER_SPELLINGS = {
    "num_attention_heads": "-a",
    "seq_length": "-s",
    "make_vocab_size_divisible_by": "--make-vocab-size-divisible-by",
}
"""Of 2.4.0's parser, beside the name itself."""
_TAKERS = {"--paddle": PADDLE_FLAGS, "--cost-model 2.4.0": OLDER_FLAGS}
_METAVARS = {int: "N", float: "F", Path: "FILE", str: "WORD"}


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
    parser.add_argument(
        "--cost-model",
        choices=("2.4.1", "2.4.0"),
        default="2.4.1",
        help="of which Galvatron; 2.4.0 takes the flags of its search_dist.py in place of CONFIG.yaml",
    )
    for name, (kind, words) in (PADDLE_FLAGS | OLDER_FLAGS).items():
        both = [told for told, flags in _TAKERS.items() if name in flags]
        told = f"with {' or '.join(both)}: {PADDLE_FLAGS.get(name, (kind, words))[1]}"
        spellings = [f"--{name}", *([_OTHER_SPELLINGS[name]] if name in _OTHER_SPELLINGS else [])]
        if kind is bool:
            parser.add_argument(*spellings, action="store_const", const=True, help=told)
        elif name == "parallel_search":  # a switch in 2.4.0
            parser.add_argument(*spellings, type=kind, nargs="?", const=1, metavar="N", help=told)
        else:
            parser.add_argument(*spellings, type=kind, metavar=_METAVARS[kind], help=told)


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
    known = PADDLE_FLAGS | OLDER_FLAGS
    given = {name: getattr(arguments, name) for name in known if getattr(arguments, name) is not None}
    is_older = arguments.cost_model == "2.4.0"
    if arguments.paddle and is_older:
        raise JobError("--paddle stands beside --cost-model 2.4.0; Galvatron for Paddle has a cost model of its own")
    taker = "--paddle" if arguments.paddle else "--cost-model 2.4.0" if is_older else None
    for name in given:
        if taker is None or name not in _TAKERS[taker]:
            takers = " or ".join(told for told, flags in _TAKERS.items() if name in flags)
            raise JobError(f"--{name} goes with {takers} alone", key=name)
    if arguments.as_is and not arguments.paddle:
        raise JobError("--as-is goes with --paddle alone")
    if taker is not None and arguments.config is not None:
        raise JobError(f"{arguments.config} stands beside {taker}, whose search takes flags alone")
    if arguments.paddle:
        return _read_paddle(given, arguments.as_is, extensions)
    if is_older:
        return _read_older(given, extensions)
    if arguments.config is None:
        raise JobError(
            "CONFIG.yaml is missing: upstream's search_dist.yaml, or --paddle or --cost-model 2.4.0 with flags"
        )
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


def _read_older(given: dict[str, Any], extensions: Extensions) -> Space:
    from mm_autoparallel.integrations.galvatron.release_2_4_0 import OlderPlanner, search_older
    from mm_autoparallel.integrations.galvatron.release_2_4_0_flags import read_flags
    from mm_autoparallel.integrations.galvatron.strategy_file import format_strategy, read_strategy

    flags, read = read_flags({name: str(value) if isinstance(value, Path) else value for name, value in given.items()})
    warn(read.notes)
    planner = OlderPlanner(flags, read, extensions)
    return Space(
        planner.limit_mib,
        planner.reserve_mib,
        read.out / read.file_name,
        lambda should_stop: search_older(planner, should_stop),
        planner.score,
        format_strategy,
        lambda path: read_strategy(
            path, planner.num_devices, flags.pipeline_type, planner.default_dp_type, is_older=True
        ),
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

    if extensions.needs_whole_samples:
        raise JobError("--whole-samples does not go with --paddle, whose batches are cut into whole samples always")
    flags = read_flags(given)
    planner = PaddlePlanner(flags, is_as_is, extensions)

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
