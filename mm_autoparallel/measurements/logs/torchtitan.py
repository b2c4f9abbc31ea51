"""Reads logs of torchtitan: layout, batch, model and device from what it says while it starts, then its steps.

FSDP2 is ZeRO 3. A step is the batch's tokens over the tokens per second and device of its line, which is the mean since
the line before. Its memory is reserved, not allocated, and so not scored. Compiled layers, the recipe of FP8 or MXFP8
and asynchronous tensor parallelism are facts of the run where the log says them. Selective checkpointing is understood
where the log prints its configuration, and that names operators (`op`). What nothing here describes (a pipeline,
experts in FP8) is refused as in tables of this form. Sources: github pytorch/torchtitan, torchtitan/train.py,
components/metrics.py, components/quantization, distributed/parallel_dims.py, distributed/compile.py, models/llama3.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from mm_autoparallel.files import describe_value
from mm_autoparallel.measurements.logs.facts import Facts
from mm_autoparallel.measurements.logs.log import Log
from mm_autoparallel.measurements.logs.named import read_named_model
from mm_autoparallel.measurements.logs.progress import ran_out_of_memory
from mm_autoparallel.measurements.logs.run import Run, Step
from mm_autoparallel.measurements.text_models import llama_model
from mm_autoparallel.measurements.torchtitan import ROWWISE_UNDER_TENSORS, stack_workload
from mm_autoparallel.model.job.strategy import Strategy

_STEP = re.compile(
    r"\bstep:\s*(\d+)\s+.*?memory:\s*[\d.]+GiB\([\d.]+%\)\s+(?:tps|wps):\s*(\S+)"
    r"(?:\s+tflops:\s*([\d,.]+))?(?:\s+mfu:\s*([\d.]+)%)?"
)
_RATE = re.compile(r"\d{1,15}|\d{1,3}(?:,\d{3}){1,4}")
_MESH_LISTS = re.compile(r"Building \d+-D device mesh with \[([^\]]*)\], \[([^\]]*)\]")
_MESH_PAIRS = re.compile(r"Building device mesh with parallelism: ((?:\w+=\d+(?:, )?)+)")
_BATCH = re.compile(r"with local batch size (\d+), global batch size (\d+).*?sequence length (\d+)")
_TOKENS = re.compile(r"with (\d+) tokens per DP rank, (\d+) tokens per train step.*?maximum context length (\d+)")
_ACCUMULATION = re.compile(r"gradient accumulation steps (\d+)")
_MODEL = re.compile(r"Building (\S+) (\S+)(?: with \w+\((.*)\))?\s*$")
_JSON_MODEL = re.compile(r"Building (\S+) (\S+) with \{\s*$")
_SIZE = re.compile(r"\bsize: ([\d,]+) total parameters")
_DEVICE = re.compile(r"(?:CUDA|NPU|XPU|HIP) capacity: (.+?) with [\d.]+GiB memory")
_CHECKPOINTING = re.compile(r"Applied (\w+) activation checkpointing to the model")

_COMPILED = re.compile(r"Compiling (?:each |the )?\w*[Bb]lock")
_ASYNCHRONOUS = re.compile(r"[Aa]sync TP is enabled|[Aa]synchronous [Tt]ensor [Pp]arallel")
_FLOAT8 = re.compile(r"[Ff]loat8 (?:(\w+)(?: scaled)? )?training active(?: with recipe (\S+))?")
_MXFP8 = re.compile(r"Converted Linear layers to MXFP8Linear|MXFP8 training active")
_SELECTIVE_OPTION = re.compile(r"[\"']selective_ac_option[\"']: [\"'](\w+)[\"']")

_RECIPES = {"tensorwise": "fp8_current", "rowwise": "fp8_rowwise"}
"""What torchao calls a recipe of FP8 → its precision here; without a name it is the former."""

_REFUSED = {
    re.compile(r"Converted MoE layers .*float8|Converted .* to NVFP4"): "products of a recipe that is not represented",
    re.compile(r"Applied CPU Offloading"): "weights offloaded to the host",
}

_NAMES = {"dp": "dp_shard", "dp_shard_cp": "dp_shard"}
"""Older names of mesh dimensions."""


def is_torchtitan(log: Log) -> bool:
    """Whether its step lines are there."""
    return next(log.find(_STEP), None) is not None


def read_run(log: Log, facts: Facts) -> Run:
    """The run. Raises TableError or JobError with what is missing, contradicts or is not understood."""
    for pattern, what in _REFUSED.items():
        for line, _ in log.find(pattern):
            raise log.error(f"the run has {what}, which nothing here describes", line)
    recompute = log.find_same(_CHECKPOINTING, "activation checkpointing")
    by_operator = recompute == "selective" and log.find_same(_SELECTIVE_OPTION, "selective_ac_option") == "op"
    if recompute not in (None, "full") and not by_operator:
        raise log.error(
            f"the run has {recompute} activation checkpointing, which reruns operators that the log does not name; "
            "`mode = full` or `none` is understood, and `selective` where the log prints its configuration with "
            "selective_ac_option `op`"
        )
    degrees = _read_degrees(log)
    mbs, batch, seq_length = _read_batch(log)
    strategy = Strategy(
        pp=1,
        tp=degrees["tp"],
        cp=degrees["cp"],
        dp=degrees["dp_replicate"] * degrees["dp_shard"],
        mbs=mbs,
        zero=3,
        shard=degrees["dp_shard"] * degrees["cp"] if degrees["dp_replicate"] > 1 else 0,
    )
    if batch % (strategy.dp * mbs):
        raise log.error(f"the global batch of {batch} samples is no multiple of DP {strategy.dp} x {mbs} samples")
    steps, flops_per_s = _read_steps(log, batch * seq_length / strategy.world_size)
    size = log.find_same(_SIZE, "the model's size")
    return Run(
        software="torchtitan",
        model=_read_model(log, facts),
        strategy=strategy,
        workload={
            "global_batch_size": batch,
            "seq_length": seq_length,
            **stack_workload(strategy.tp),
            "precision": _read_precision(log, strategy.tp),
            "recompute_operators": ["second_products"] if by_operator else [],
            "facts": _read_stated(log, strategy.tp),
        },
        steps=steps,
        recompute_all=recompute == "full",
        device=log.find_same(_DEVICE, "the device"),
        parameters=int(size.replace(",", "")) if size else None,
        flops_per_s=flops_per_s,
        out_of_memory=ran_out_of_memory(log),
        remarks=("its memory is reserved memory, which is not predicted",),
    )


def _read_precision(log: Log, tp: int) -> str:
    """What linear layers multiply in. Raises TableError for a recipe that is not represented, or two of them."""
    found = {"mxfp8" for _ in log.find(_MXFP8)}
    for line, match in log.find(_FLOAT8):
        recipe = match[1] or match[2] or "tensorwise"
        if recipe not in _RECIPES:
            raise log.error(f"the recipe {recipe} of FP8 is not represented; known are {', '.join(_RECIPES)}", line)
        if recipe == "rowwise" and tp > 1:
            raise log.error(f"the run has {ROWWISE_UNDER_TENSORS}, which nothing here describes", line)
        found.add(_RECIPES[recipe])
    if len(found) > 1:
        raise log.error(f"it tells {' and '.join(sorted(found))}: two jobs in one log; divide it")
    return next(iter(found), "bf16")


def _read_stated(log: Log, tp: int) -> dict[str, Any]:
    """Facts of the run that differ from torchtitan's by itself."""
    facts: dict[str, Any] = {"compiled": True} if any(log.find(_COMPILED)) else {}
    return facts | ({"tp_overlap": "asynchronous"} if tp > 1 and any(log.find(_ASYNCHRONOUS)) else {})


def _read_degrees(log: Log) -> dict[str, int]:
    degrees = {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "ep": 1}
    found = log.find_same(_MESH_PAIRS, "the device mesh")
    lists = None if found else next(log.find(_MESH_LISTS), None)
    if found:
        pairs = [pair.strip().split("=") for pair in found.strip(", ").split(",")]
    elif lists:
        names = [name.strip(" '\"") for name in lists[1][1].split(",")]
        pairs = [list(pair) for pair in zip(names, (size.strip() for size in lists[1][2].split(",")), strict=False)]
    else:
        raise log.error(
            "it does not tell the device mesh (`Building … device mesh with …`), so not the layout; give the whole log"
        )
    for name, size in pairs:
        degrees[_NAMES.get(name, name)] = int(size)
    for name in ("pp", "ep"):
        if degrees[name] > 1:
            raise log.error(f"{name} is {degrees[name]}, beside which the log does not say what is sharded when")
    return degrees


def _read_batch(log: Log) -> tuple[int, int, int]:
    """Samples of a micro-batch and of a step, and tokens of a sample."""
    told = {(int(m[1]), int(m[2]), int(m[3])) for _, m in log.find(_BATCH)}
    if not told:
        for _, match in log.find(_TOKENS):
            tokens, step_tokens, length = (int(match[group]) for group in (1, 2, 3))
            accumulation = next((int(m[1]) for _, m in log.find(_ACCUMULATION)), 1)
            told.add((tokens // (length * accumulation), step_tokens // length, length))
    if not told:
        raise log.error(
            "it does not tell batch and length (`local batch size …, global batch size …, sequence length …`); give "
            "the whole log"
        )
    if len(told) > 1:
        raise log.error(f"it tells {len(told)} batches: two jobs in one log; divide it")
    return told.pop()


def _read_steps(log: Log, tokens_per_device: float) -> tuple[tuple[Step, ...], tuple[float, ...]]:
    """Those of the first rank that logs: several processes may. Also operations a second of each."""
    steps: list[Step] = []
    flops_per_s: list[float] = []
    rank: int | None = None
    for line, match in log.find(_STEP):
        if not steps:
            rank = line.rank
        if line.rank != rank:
            continue
        rate = int(match[2].replace(",", "")) if _RATE.fullmatch(match[2]) else 0
        if rate <= 0:
            raise log.error(
                f"{describe_value(match[2])} tokens per second; a whole number above zero is expected, with nothing or "
                "commas between its thousands",
                line,
            )
        steps.append(Step(tokens_per_device / rate * 1e3, int(match[1])))
        if match[4] and float(match[4]) > 100:
            raise log.error(f"it counts an MFU of {match[4]} %, which no run reaches", line)
        if match[3]:
            flops_per_s.append(float(match[3].replace(",", "")) * 1e12)
    return tuple(steps), tuple(flops_per_s)


def _read_model(log: Log, facts: Facts) -> Mapping[str, Any]:
    """From the arguments of the model where they stand behind its name, else by that name, or what a person gives."""
    given = facts.given.get("model")
    for line, match in log.find(_MODEL):
        name, flavour, text = match[1], match[2], match[3]
        if flavour == "device":  # the mesh
            continue
        if text is not None and given is None and name.startswith("llama"):
            return _from_arguments(log, facts, dict(re.findall(r"(\w+)=([^,]+)", text)), line.number)
        return read_named_model(log, facts, f"{name}-{flavour}".lower())
    for line, match in log.find(_JSON_MODEL):
        if given is None and match[1].startswith("llama"):
            return _from_document(log, line.number)
        return read_named_model(log, facts, f"{match[1]}-{match[2]}".lower())
    return read_named_model(log, facts, None)


def _from_arguments(log: Log, facts: Facts, text: Mapping[str, str], number: int) -> Mapping[str, Any]:
    """`dim=4096, n_layers=32, …`: feed-forwards are two thirds of four widths, times ffn_dim_multiplier, rounded up."""

    def count(name: str, default: int | None = None) -> int:
        value = text.get(name, "None").strip()
        if value == "None" and default is not None:
            return default
        if not value.isdigit() or int(value) < 1:
            raise log.error(f"{name} of the model built in line {number} is {value}; a whole number is expected")
        return int(value)

    width, heads = count("dim"), count("n_heads")
    multiple, multiplier = count("multiple_of", 256), text.get("ffn_dim_multiplier", "None").strip()
    hidden = int(2 * 4 * width / 3)
    hidden = hidden if multiplier == "None" else int(float(multiplier) * hidden)
    vocabulary = text.get("vocab_size", "-1").strip()
    return llama_model(
        count("n_layers"),
        width,
        -(-hidden // multiple) * multiple,
        heads,
        count("n_kv_heads", heads),
        facts.count(log, "vocab_size", int(vocabulary) if vocabulary.isdigit() else None),
    )


def _from_document(log: Log, number: int) -> Mapping[str, Any]:
    """The model's configuration as JSON over many lines (releases of 2026): sizes of its parts."""
    rank = log.lines[number - 1].rank
    rest = [line.text for line in log.lines[number:] if line.rank == rank]
    document, _ = _decode(log, "{" + "\n".join(rest), number)
    try:
        first = document["layers"][0]
        attention, feed_forward = first["attention"], first["feed_forward"]
        heads = attention["n_heads"]
        return llama_model(
            len(document["layers"]),
            document["dim"],
            feed_forward["w1"]["out_features"],
            heads,
            attention.get("n_kv_heads") or heads,
            document["vocab_size"],
        )
    except (KeyError, IndexError, TypeError) as failure:
        raise log.error(
            f"the configuration of the model in line {number} has no {failure}; give --fact model=NAME or a model file"
        ) from None


def _decode(log: Log, text: str, number: int) -> tuple[Any, int]:
    try:
        return json.JSONDecoder().raw_decode(text)
    except json.JSONDecodeError as failure:
        raise log.error(f"the model's configuration in line {number} is no whole JSON: {failure.msg}") from None
