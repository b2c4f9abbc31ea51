"""Reads logs of LLM Foundry (Composer): the configuration that it prints, then blocks of metrics for batches.

A step is the inverse of `throughput/batches_per_sec`, a mean over the last batches (its speed monitor's window, ten by
default), so entries move slowly; where that is not logged there is no time. `memory/peak_allocated_mem` is in units of
1e9 bytes, of the rank that logs. Sources: github mosaicml/llm-foundry, llmfoundry/command_utils/train.py, utils/
config_utils.py (log_config), models/mpt/configuration_mpt.py; mosaicml/composer, callbacks/speed_monitor.py and
memory_monitor.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mm_autoparallel.errors import TableError
from mm_autoparallel.files import describe_value, read_document
from mm_autoparallel.measurements.gpt import gpt_model
from mm_autoparallel.measurements.logs.facts import Facts
from mm_autoparallel.measurements.logs.log import Log
from mm_autoparallel.measurements.logs.named import read_named_model
from mm_autoparallel.measurements.logs.progress import ran_out_of_memory
from mm_autoparallel.measurements.logs.run import Run, Step
from mm_autoparallel.model.job.strategy import Strategy

_BATCH = re.compile(r"^\s*\[(?:epoch=\d+/\d+ )?batch=\d+/\d+\]:?")
_METRIC = re.compile(r"\bTrain ([\w./-]+): (-?[\d.]+(?:[eE][-+]?\d+)?)\s*$")
_RATE = re.compile(r"\bTrain (throughput/batches_per_sec|memory/peak_allocated_mem): (.*?)\s*$")
_LOGGED = re.compile(r"Logging config")
_NODES = re.compile(r"^\s*num_gpus_per_node: (\d+)\s*$")
_WORLD_NODES = re.compile(r"^\s*num_nodes: (\d+)\s*$")
_KEY = re.compile(r"^(?:[A-Za-z_][\w/-]*:|\s+\S|- )")
_DEVICE = re.compile(r"gpu_flop count not found for (.+?) with precision")

_SHARDING = {"FULL_SHARD": (3, True), "SHARD_GRAD_OP": (3, False), "NO_SHARD": (0, True), "HYBRID_SHARD": (3, True)}
"""FSDP's strategy → ZeRO stage, and whether gathered weights are given up after the forward (torch/distributed/fsdp,
ShardingStrategy: SHARD_GRAD_OP keeps them until the backward)."""

_KERNELS = {"torch": "torch", "flash": "flash-2", "triton": "triton"}
"""Its attn_impl → whose kernel runs."""


def is_llm_foundry(log: Log) -> bool:
    """Whether Composer's blocks of metrics are there."""
    return any(_BATCH.search(line.text) for line in log.lines) and next(log.find(_METRIC), None) is not None


def read_run(log: Log, facts: Facts) -> Run:
    """The run. Raises TableError or JobError with what is missing, contradicts or is not understood."""
    config = _read_config(log)
    model, fsdp = _section(log, config, "model"), config.get("fsdp_config") or {}
    if str(config.get("precision", "amp_bf16")) not in ("amp_bf16", "amp_fp16"):
        raise log.error(f"precision is {config['precision']}; amp_bf16 and amp_fp16 are understood")
    world = _read_world(log, config)
    batch = facts.count(log, "global_batch_size", _whole(log, config, "global_train_batch_size"))
    seq_length = facts.count(log, "seq_length", _whole(log, config, "max_seq_len"))
    mbs = _whole(log, config, "device_train_microbatch_size")
    if mbs is None:
        raise log.error(
            f"device_train_microbatch_size is {config.get('device_train_microbatch_size')}; a whole number is "
            "expected: `auto` changes while it runs"
        )
    zero, reshard = _read_sharding(log, fsdp)
    if batch % (world * mbs):
        raise log.error(f"global_train_batch_size is {batch}, no multiple of {world} devices x {mbs} samples")
    strategy = Strategy(pp=1, tp=1, dp=world, mbs=mbs, zero=zero, reshard=reshard)
    metrics = _read_metrics(log)
    rates = metrics.get("throughput/batches_per_sec", ())
    steps = tuple(Step(1e3 / rate, number) for number, rate in enumerate(rates) if rate > 0)
    if any(share > 1 for share in metrics.get("throughput/device/mfu", ())):
        raise log.error("throughput/device/mfu is above 1, which no run reaches: its device or batch is another one")
    _check_tokens(log, metrics, seq_length, batch, world)
    device = next((match[1] for _, match in log.find(_DEVICE)), None)
    pure = str(fsdp.get("mixed_precision", "PURE")).upper() == "PURE"
    return Run(
        software="llm-foundry",
        model=_read_model(log, facts, model, seq_length),
        strategy=strategy,
        workload={
            "global_batch_size": batch,
            "seq_length": seq_length,
            "sequence_parallel": False,
            "implementation": "transformers",
            "cross_entropy": "fused",
            "gradient_bytes": 2.0 if pure else 4.0,
            "attention": "unfused" if _attention(model) == "torch" else "flash",
            "facts": {"attention": _KERNELS[_attention(model)]} if _attention(model) in _KERNELS else {},
        },
        steps=steps,
        recompute_all=fsdp.get("activation_checkpointing") is True,
        devices_per_node=_read_devices_per_node(log),
        device=device,
        peak_bytes=_peak_bytes(metrics),
        parameters=_whole(log, config, "n_params"),
        out_of_memory=ran_out_of_memory(log),
    )


def _read_config(log: Log) -> Mapping[str, Any]:
    """The YAML between `Logging config` and the next line that is none."""
    starts = [line.number for line, _ in log.find(_LOGGED)]
    if not starts:
        raise log.error(
            "it does not tell its configuration (the YAML behind `Logging config`); give the whole log, with "
            "log_config left on"
        )
    first = next(index for index, line in enumerate(log.lines) if line.number == starts[-1]) + 1
    lines = []
    for line in log.lines[first:]:
        if line.text.strip() and not _KEY.match(line.text):
            break
        lines.append(line.text)
    if not any(line.strip() for line in lines):
        raise log.error("nothing stands behind `Logging config`, where its configuration is expected")
    what = f"configuration behind line {starts[-1]} of log"
    return read_document(log.path, what, TableError, part="\n".join(lines))


def _section(log: Log, config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = config.get(key)
    if not isinstance(found, Mapping):
        raise log.error(f"{key} is missing in the configuration that it prints; a mapping is expected")
    return found


def _whole(log: Log, config: Mapping[str, Any], key: str) -> int | None:
    """A whole number of at least 1; None where it is missing or `auto`."""
    value = config.get(key)
    if value is None or value == "auto":
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise log.error(f"{key} is {value}; a whole number of at least 1 is expected")
    return value


def _read_world(log: Log, config: Mapping[str, Any]) -> int:
    """Devices: n_gpus of the configuration, and nodes times devices of each as Composer prints them."""
    stated = _whole(log, config, "n_gpus")
    nodes, per_node = log.find_same(_WORLD_NODES, "num_nodes"), log.find_same(_NODES, "num_gpus_per_node")
    counted = int(nodes) * int(per_node) if nodes and per_node else None
    if stated is not None and counted is not None and stated != counted:
        raise log.error(f"n_gpus is {stated}, and num_nodes {nodes} x num_gpus_per_node {per_node} are {counted}")
    found = stated or counted
    if found is None:
        raise log.error("it does not tell the number of devices (n_gpus, or num_nodes and num_gpus_per_node)")
    return found


def _read_devices_per_node(log: Log) -> int | None:
    found = log.find_same(_NODES, "num_gpus_per_node")
    return None if found is None else int(found)


def _read_sharding(log: Log, fsdp: Mapping[str, Any]) -> tuple[int, bool]:
    if not fsdp:
        return 0, True
    name = str(fsdp.get("sharding_strategy", "FULL_SHARD")).upper()
    if name not in _SHARDING or name == "HYBRID_SHARD":
        known = ", ".join(strategy for strategy in _SHARDING if strategy != "HYBRID_SHARD")
        raise log.error(f"fsdp_config.sharding_strategy is {name}; {known} are understood")
    if fsdp.get("activation_cpu_offload") is True:
        raise log.error("fsdp_config.activation_cpu_offload is true, which no row here can say")
    return _SHARDING[name]


def _read_metrics(log: Log) -> dict[str, list[float]]:
    """Name of a metric → its values, block after block."""
    metrics: dict[str, list[float]] = {}
    for _, match in log.find(_METRIC):
        metrics.setdefault(match[1], []).append(float(match[2]))
    for line, match in log.find(_RATE):
        if not _METRIC.search(line.text):
            raise log.error(f"{match[1]} is {describe_value(match[2])}; a number with a point is expected", line)
    return metrics


def _check_tokens(log: Log, metrics: Mapping[str, list[float]], seq_length: int, batch: int, world: int) -> None:
    """Raises TableError where tokens and batches per second are of another batch."""
    batches, tokens = (metrics.get(f"throughput/{name}_per_sec", []) for name in ("batches", "device/tokens"))
    if batches and tokens and batches[-1] > 0:
        told = tokens[-1] * world / batches[-1]
        if told > 1.05 * batch * seq_length:
            raise log.error(
                f"{tokens[-1]:g} tokens a second and device at {batches[-1]:g} batches a second are {told:,.0f} tokens "
                f"a batch, and {batch} samples of {seq_length} have {batch * seq_length:,}"
            )


def _peak_bytes(metrics: Mapping[str, list[float]]) -> float | None:
    peaks = metrics.get("memory/peak_allocated_mem")
    return max(peaks) * 1e9 if peaks else None


def _attention(model: Mapping[str, Any]) -> str:
    settings = model.get("attn_config") or {}
    return str(settings.get("attn_impl", "flash"))


def _read_model(log: Log, facts: Facts, model: Mapping[str, Any], seq_length: int) -> Mapping[str, Any]:
    """MPT from its sizes; another model by name or file."""
    if model.get("name") != "mpt_causal_lm":
        return read_named_model(log, facts, None)
    attention, feed_forward = model.get("attn_config") or {}, model.get("ffn_config") or {}
    width, heads = _whole(log, model, "d_model"), _whole(log, model, "n_heads")
    num_layers, vocabulary = _whole(log, model, "n_layers"), _whole(log, model, "vocab_size")
    for name, value in (("d_model", width), ("n_heads", heads), ("n_layers", num_layers)):
        if value is None:
            raise log.error(f"model.{name} is missing in the configuration that it prints")
    assert width is not None
    assert heads is not None
    assert num_layers is not None
    document = gpt_model("mpt", width, heads, num_layers, seq_length, facts.count(log, "vocab_size", vocabulary))
    text = document["text"]
    text["tied"] = model.get("tie_word_embeddings") is not False
    layers = text["layers"]
    biased = model.get("no_bias") is False
    layers |= {"mlp_bias": biased, "qkv_bias": biased, "output_bias": biased}
    layers["ffn_size"] = int(model.get("expansion_ratio", 4) * width)
    if str(feed_forward.get("ffn_type", "mptmlp")) not in ("mptmlp", "mptglu"):
        raise log.error(f"model.ffn_config.ffn_type is {feed_forward['ffn_type']}; mptmlp and mptglu are understood")
    layers["gated"] = feed_forward.get("ffn_type") == "mptglu"
    layers["ffn_size"] = int(feed_forward.get("ffn_hidden_size") or layers["ffn_size"])
    kind = str(attention.get("attn_type", "multihead_attention"))
    layers["num_kv_groups"] = {"multihead_attention": 0, "multiquery_attention": 1}.get(
        kind, int(attention.get("kv_n_heads") or 0)
    )
    if str(model.get("norm_type", "low_precision_layernorm")).endswith("rmsnorm"):
        layers["norm"] = "rms"
    rope = attention.get("rope") is True
    layers["rotary"] = rope
    if rope or attention.get("alibi") is True or model.get("learned_pos_emb") is False:
        text["num_positions"] = 0
    return document
