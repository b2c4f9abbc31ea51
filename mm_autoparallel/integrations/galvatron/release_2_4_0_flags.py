"""The flags of Galvatron 2.4.0's search, read as a configuration of 2.4.1 and what that does not say.

Source: module galvatron.core.search_engine.arguments and the models' meta_configs of hetu-galvatron 2.4.0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from mm_autoparallel.errors import JobError
from mm_autoparallel.integrations.galvatron.configuration import (
    WHAT,
    Configuration,
    Search,
    check_configuration,
    read_profiles,
)
from mm_autoparallel.validation import parse_record

_SCRIPT = Path("search_dist.py")
"""What the flags are given to; profiles that they do not name lie as seen from beside it."""
_MODELS = {
    "llama-0.3b": (1024, 16, 24, 2048),
    "llama-7b": (4096, 32, 32, 2048),
    "llama-13b": (5120, 40, 40, 4096),
    "llama-30b": (8192, 64, 48, 4096),
    "llama2-70b": (8192, 64, 80, 4096),
    "qwen2.5-7b": (3584, 28, 28, 131072),
    "qwen2.5-72b": (8192, 64, 80, 131072),
    "gpt-0.3b": (1024, 16, 24, 1024),
    "gpt-1.5b": (1600, 32, 48, 1024),
    "gpt-2.7b": (2560, 32, 32, 2048),
    "gpt-6.7b": (4096, 32, 32, 2048),
    "bert-base-uncased": (768, 12, 12, 512),
    "bert-large-uncased": (1024, 16, 24, 512),
    "bert-huge-uncased-32": (1280, 16, 32, 512),
    "bert-huge-uncased-48": (1280, 16, 48, 512),
}
"""Hidden size, heads, layers and length of a sequence by `--model_size`, of its meta_configs."""
ONE_STRATEGY = ("3d", "dp", "sdp", "tp", "pp")
_SWITCHES = (
    *("set_model_config_manually", "set_layernum_manually", "set_seqlen_manually", "use_pipeline_costmodel"),
    *("disable_vtp", "disable_sdp", "disable_tp_consec"),
)
_SIZES = {
    "hidden_size": "",
    "num_attention_heads": "",
    "num_hidden_layers": "set_layernum_manually",
    "seq_length": "set_seqlen_manually",
}
"""Flags of sizes, and what makes 2.4.0 look at one by itself."""
_SPACES = ("full", "dp+tp", "dp+pp", *ONE_STRATEGY)


@dataclass(frozen=True)
class Flags:
    """Flags of its search_dist.py with a part in a figure, by their names and with their defaults."""

    model_size: str = "llama-7b"
    set_model_config_manually: int = 0
    set_layernum_manually: int = 0
    set_seqlen_manually: int = 0
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    seq_length: int = 128
    num_nodes: int = 1
    num_gpus_per_node: int = 8
    memory_constraint: int = 24
    min_bsz: int = 8
    max_bsz: int = 10240
    bsz_scale: int = 8
    settle_bsz: int = -1
    settle_chunk: int = -1
    search_space: str = "full"
    sp_space: str = "tp"
    disable_dp: int = 0
    disable_tp: int = 0
    disable_vtp: int = 0
    disable_pp: int = 0
    disable_sdp: int = 0
    disable_ckpt: int = 0
    disable_tp_consec: int = 0
    max_tp_deg: int = 8
    max_pp_deg: int = 8
    default_dp_type: str = "ddp"
    mixed_precision: str = "bf16"
    pipeline_type: str = "gpipe"
    use_pipeline_costmodel: int = 1
    time_factor: float = 1.0
    """--costmodel_coe: of times of layers."""
    sequence_parallel: bool = False
    no_global_memory_buffer: bool = False
    no_async_grad_reduce: bool = False
    memory_profiling_path: str | None = None
    time_profiling_path: str | None = None
    allreduce_bandwidth_config_path: str | None = None
    p2p_bandwidth_config_path: str | None = None
    overlap_coe_path: str | None = None
    sp_time_path: str | None = None
    output_config_path: str | None = None
    fine_grained_mode: int = 1
    time_profile_mode: str = "static"
    memory_profile_mode: str = "static"

    @property
    def is_sharding_off(self) -> bool:
        """disable_sdp, which some of its spaces set."""
        return bool(self.disable_sdp) or self.search_space in ("dp+tp", "dp+pp", "3d")


def read_flags(values: Mapping[str, Any]) -> tuple[Flags, Search]:
    """From values of flags by their names, None where nobody says, and the profiles that they name. Raises JobError
    that names flag, or file and key."""
    named = {**values, "time_factor": values.get("costmodel_coe")}
    flags = Flags(**{each.name: named[each.name] for each in fields(Flags) if named.get(each.name) is not None})
    for name, words in {"search_space": _SPACES, "sp_space": ("tp", "tp+sp")}.items():
        if getattr(flags, name) not in words:
            raise JobError(f"--{name} is {getattr(flags, name)!r}; one of {', '.join(words)} is expected", key=name)
    for name in _SWITCHES:
        if getattr(flags, name) not in (0, 1):
            raise JobError(f"--{name} is {getattr(flags, name)}; 0 or 1 is expected", key=name)
    if not flags.use_pipeline_costmodel:
        raise JobError(
            "--use_pipeline_costmodel is 0, with which Galvatron 2.4.0 finds nothing; 1 is expected",
            key="use_pipeline_costmodel",
        )
    if flags.is_sharding_off and flags.disable_dp:
        raise JobError("--disable_dp and --disable_sdp are both on; no way to divide samples is left", key="disable_dp")
    sizes = _model_sizes(flags)
    configuration = parse_record(Configuration, _sections(flags, sizes), WHAT, _SCRIPT)
    check_configuration(configuration, f"{WHAT} {_SCRIPT}")
    models = [flags.model_size, f"hidden{sizes['hidden_size']}_head{sizes['num_heads']}"]
    hardware, profile = read_profiles(configuration, _SCRIPT, models, sizes["seq_length"], is_older=True)
    off = [name for name in ("dp", "tp", "pp", "sdp", "ckpt") if getattr(flags, f"disable_{name}")]
    off += ["tpconsec"] if flags.disable_tp_consec else []
    search = Search(
        _SCRIPT,
        configuration,
        flags.model_size.rsplit("/", maxsplit=1)[-1],
        sizes["hidden_size"],
        sizes["num_layers"],
        sizes["seq_length"],
        hardware,
        profile,
        tuple(off),
        tuple(_left_out(flags, values)),
    )
    return flags, search


def _left_out(flags: Flags, values: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each size that is given and that 2.4.0 does not look at."""
    for name, switch in _SIZES.items():
        is_taken = flags.set_model_config_manually or (switch and getattr(flags, switch))
        if values.get(name) is not None and not is_taken:
            needed = f"--{switch or 'set_model_config_manually'} 1"
            yield f"--{name} is left out, as Galvatron 2.4.0 does without {needed}"


def _model_sizes(flags: Flags) -> dict[str, int]:
    """Of the flags where they are said to be set by hand, else of the model that is named."""
    given = (flags.hidden_size, flags.num_attention_heads, flags.num_hidden_layers, flags.seq_length)
    if flags.set_model_config_manually:
        known = given
    elif flags.model_size in _MODELS:
        known = _MODELS[flags.model_size]
    else:
        raise JobError(
            f"--model_size is {flags.model_size!r}; one of {', '.join(_MODELS)} is expected, or "
            "--set_model_config_manually 1 with --hidden_size, --num_hidden_layers and --seq_length",
            key="model_size",
        )
    hidden_size, num_heads, num_layers, seq_length = known
    return {
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "num_layers": given[2] if flags.set_layernum_manually else num_layers,
        "seq_length": given[3] if flags.set_seqlen_manually else seq_length,
    }


def _sections(flags: Flags, sizes: Mapping[str, int]) -> dict[str, Any]:
    """The flags as the configuration of 2.4.1 has them."""

    def take(*names: str) -> dict[str, Any]:
        return {name: getattr(flags, name) for name in names}

    batches = take("max_bsz", "bsz_scale", "settle_bsz", "settle_chunk")
    scale = max(1, flags.bsz_scale)
    return {
        "profiling_info": take(*(each.name for each in fields(Flags) if each.name.endswith("_path")))
        | take("time_profile_mode", "memory_profile_mode"),
        "model_info": {name: sizes[name] for name in ("hidden_size", "num_layers")},
        "common_train_info": take("sequence_parallel")
        | {"seq_length": sizes["seq_length"], "global_memory_buffer": not flags.no_global_memory_buffer},
        "parallelism_info": take("default_dp_type", "pipeline_type", "mixed_precision")
        | {"async_grad_reduce": not flags.no_async_grad_reduce},
        "hardware_info": take("num_nodes", "num_gpus_per_node", "memory_constraint"),
        "batch_size_info": batches | {"min_bsz": max(flags.min_bsz, scale) // scale * scale},
        "search_space_info": take("disable_dp", "disable_tp", "disable_pp", "disable_ckpt", "max_tp_deg", "max_pp_deg")
        | {"disable_fsdp": flags.disable_sdp},
        "options_info": take("output_config_path", "fine_grained_mode"),
        "debug_info": {"debug_costmodel_coe": flags.time_factor},
    }
