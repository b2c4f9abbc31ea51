"""Reads published steps and peaks of vision-language training whose models stand in the row as shapes (shapes.py).

`quality` says how well a row is known. A and B are predicted: a throughput with its launch script, and continuous
integration or hours of an epoch. C (device, layout or layers unstated) and D (no step) are read and refused, as are
ratios of runs with an image rank apart. `vision_frozen` and `text_frozen` decide a step by a factor: an empty cell is
two readings, the second as an alternative; so is the attention backend of Megatron-LM, which no column has. A peak in
MindSpeed-MM's logs is told after the first step.
"""

from __future__ import annotations

import re
from typing import Any

from mm_autoparallel.measurements.build import build_job, check_lawful, check_world
from mm_autoparallel.measurements.case import MeasuredCase
from mm_autoparallel.measurements.cluster_columns import precision_of
from mm_autoparallel.measurements.devices import find_device
from mm_autoparallel.measurements.image_rank import predict_gain
from mm_autoparallel.measurements.provenance import stated
from mm_autoparallel.measurements.shapes import model_of
from mm_autoparallel.measurements.table import LARGEST, MS_PER_UNIT, SMALLEST, Row, Unrepresentable
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.planner.plan import Plan
from mm_autoparallel.planner.twice import UNEVEN_FRACTION
from mm_autoparallel.units import MIB

REQUIRED = (
    "id family model vision vision_shape text text_shape device n nodes tp pp dp cp ep sharding mbs gbs "
    "tokens_per_sample image_tokens images patches_per_image token_note vision_frozen text_frozen lora "
    "vision_recompute text_recompute gradient_bytes vision_layers_per_stage text_layers_per_stage packing stack "
    "precision figure value unit step_ms memory_mib source revision quality note"
)

_NOT_SCORED = {"C": "device, layout or layers are not stated", "D": "it has no step"}
_ZERO = {"none": 1, "zero2": 2, "zero3": 3, "fsdp2": 3}
"""Megatron's and MindSpeed's distributed optimizer is ZeRO 1."""

_STACKS: dict[str, tuple[dict[str, Any], str]] = {
    "mindspeed": ({"stack": "mindspeed-mm"}, "mindspeed-mm"),
    "megatron": ({"stack": "megatron-te"}, "megatron-core"),
    "deepspeed": ({"implementation": "transformers", "facts": {"norms": "operators"}}, "deepspeed"),
}
"""Stack → what it makes of a workload, and what calibrations call it. DeepSpeed's rows train layers of transformers,
whose RMS norms are operators one by one (models/llama/modeling_llama.py, LlamaRMSNorm)."""

_REUSED_OPTIMIZER_BYTES = 10.0
"""--reuse-fp32-param keeps the bf16 weight as the upper half of the fp32 one, two bytes a parameter less."""

_SCRIPTS = {"ivit": {"keeps_gate": True, "keeps_joint": True}, "clip": {"keeps_gate": True}}
"""Facts of MindSpeed-MM's scripts for InternVL2 and LLaVA, by tower (mindspeed_mm.py); Qwen2-VL's fuse SwiGLU."""


def read_row(row: Row) -> MeasuredCase:
    """The case of one row. Raises TableError where it is malformed, Unrepresentable where it cannot be predicted."""
    _refuse_what_is_not_scored(row)
    strategy = Strategy(
        pp=row.count("pp"),
        tp=row.count("tp"),
        dp=row.count("dp"),
        mbs=row.count("mbs"),
        cp=row.count("cp"),
        ep=row.count("ep"),
        zero=_zero(row),
    )
    num_devices, device = check_world(row, strategy, "n"), find_device(row.text("device"))
    num_nodes = row.count("nodes")
    if num_devices % num_nodes:
        raise row.error("nodes", f"{num_nodes} nodes, which do not divide {num_devices} devices")
    known, software = _stack(row)
    model = model_of(row, strategy.tp)
    kernels: list[dict[str, Any]] = [{}, {"attention": "unfused"}] if row.text("stack") == "megatron" else [{}]
    jobs = [
        build_job(
            row,
            _with_frozen(model, *frozen),
            device,
            num_devices,
            _workload(row, strategy) | lengths | known | kernel,
            devices_per_node=num_devices // num_nodes,
        )
        for frozen in _readings(row)
        for kernel in kernels
        for lengths in _lengths(row, strategy)
    ]
    check_lawful(jobs[0], strategy)
    token_note = row.text("token_note", " ").strip()
    unstated = [f"whether {part} is frozen" for part in ("vision", "text") if not row.has(f"{part}_frozen")]
    unstated += [] if row.has("packing") else ["whether samples are padded or packed"]
    unstated += ["attention backend"] if len(kernels) > 1 else []
    unstated += ["tokens of a sample"] if token_note else []
    return MeasuredCase(
        table=row.path.name,
        row=row.index,
        name=row.text("id"),
        job=jobs[0],
        plan=_plan(row, jobs[0], strategy),
        software=software,
        measured_ms=_measured_ms(row, num_devices),
        measured_bytes=_peaks(row, num_devices, strategy.pp),
        out_of_memory=None,
        source=f"{row.text('source')}, {row.text('revision', 'no revision')}",
        content=row.cells,
        remarks=tuple(filter(None, (token_note, row.text("note", " ").strip()))),
        unstated=tuple(unstated),
        alternatives=tuple(jobs[1:]),
        first_step=row.text("stack") == "mindspeed",
    )


def _refuse_what_is_not_scored(row: Row) -> None:
    quality, figure = row.text("quality"), row.text("figure")
    if quality not in ("A", "B", *_NOT_SCORED):
        raise row.error("quality", f"{quality!r} is no quality known here; known are A, B, C, D")
    if figure == "ratio":
        raise Unrepresentable(
            "it is the ratio of a run with an image rank apart to one without, which is no step: "
            f"{row.positive('value'):g} % less, and by the costs of its layers {100 * predict_gain(row):.1f} %"
        )
    if quality in _NOT_SCORED:
        raise Unrepresentable(f"it is of quality {quality} and not scored: {_NOT_SCORED[quality]}")
    if figure != "step":
        raise Unrepresentable(f"the figure {figure!r} is not predicted; a step is")
    if row.flag("lora", False):
        raise Unrepresentable("it trains low-rank adapters, whose rank and places the table does not say")
    precision_of(row)


_RATE_FRACTION = 0.02
"""What a step may differ by from the figure that it was made of. Assumed: both are rounded."""


def _measured_ms(row: Row, num_devices: int) -> float | None:
    """The step, which must be what its published figure makes: a time, samples a second (SPS), or tokens a second and
    device (TPS). Hours of an epoch make none without its samples. Raises TableError where the two contradict.
    """
    step_ms = row.measurement("step_ms")
    if step_ms is None or not row.has("value"):
        return step_ms
    unit = row.text("unit")
    if unit == "SPS":
        told_ms = row.count("gbs") / row.positive("value") * 1e3
    elif unit == "TPS":
        told_ms = row.count("gbs") * row.count("tokens_per_sample") / num_devices / row.positive("value") * 1e3
    elif unit == "h":
        return step_ms
    elif unit in MS_PER_UNIT:
        told_ms = row.in_unit("value", "unit", MS_PER_UNIT)
    else:
        known = ", ".join((*MS_PER_UNIT, "SPS", "TPS"))
        raise Unrepresentable(f"the unit {unit!r} of its figure is not understood; known are {known}")
    if abs(told_ms / step_ms - 1) > _RATE_FRACTION:
        raise row.error("step_ms", f"{step_ms:g} ms, and {row.text('value')} {unit} make {told_ms:.6g} ms")
    return step_ms


def _zero(row: Row) -> int:
    sharding = row.text("sharding")
    if sharding not in _ZERO:
        raise Unrepresentable(f"the sharding {sharding!r} is not understood; known are {', '.join(_ZERO)}")
    return _ZERO[sharding]


def _stack(row: Row) -> tuple[dict[str, Any], str]:
    stack = row.text("stack")
    if stack not in _STACKS:
        raise Unrepresentable(f"the stack {stack!r} is not understood; known are {', '.join(_STACKS)}")
    return _STACKS[stack]


def _readings(row: Row) -> list[tuple[bool, bool]]:
    """(vision frozen, text frozen) as the row says it, first; where it is silent, both ways."""
    stated = [[row.flag(column)] if row.has(column) else [True, False] for column in ("vision_frozen", "text_frozen")]
    return [(vision, text) for vision in stated[0] for text in (stated[1] if len(stated[1]) == 1 else [False, True])]


def _with_frozen(model: dict[str, Any], vision: bool, text: bool) -> dict[str, Any]:
    """The model with its parts frozen so. A tower's projector trains, but Qwen2-VL's, frozen with it in model.json."""
    (encoder,) = model["encoders"]
    projector = encoder["projector"] | {"freeze": vision and bool(encoder["layers"].get("packed"))}
    frozen = encoder | {"freeze": vision, "projector": projector}
    return model | {"encoders": [frozen], "text": model["text"] | {"freeze": text}}


def _workload(row: Row, strategy: Strategy) -> dict[str, Any]:
    note = row.text("note", " ")
    sequence_parallel = "sequence parallel" in note
    step = (2 * strategy.cp if strategy.cp > 1 else 1) * (strategy.tp if sequence_parallel else 1)
    of_mindspeed = row.text("stack") == "mindspeed"
    workload: dict[str, Any] = {
        "global_batch_size": row.count("gbs"),
        "seq_length": -(-row.count("tokens_per_sample") // step) * step,
        "image_tokens_per_sample": row.count("image_tokens"),
        "images_per_sample": row.count("images"),
        "sequence_parallel": sequence_parallel,
        "gradient_bytes": row.positive("gradient_bytes"),
        "overlap_grad_reduce": False,
        "overlap_param_gather": False,
        "deterministic": "deterministic" in note,
        "replicate_towers": row.text("stack") in ("mindspeed", "megatron"),
    }
    if of_mindspeed:
        facts = next((facts for tower, facts in _SCRIPTS.items() if row.text("vision").startswith(tower)), {})
        workload |= {"cross_entropy": "shifted"} | stated(facts)
    return workload | {"optimizer_bytes": _REUSED_OPTIMIZER_BYTES} if "reuse-fp32-param" in note else workload


def _lengths(row: Row, strategy: Strategy) -> list[dict[str, Any]]:
    """What unequal samples make of a workload; both ways where the row is silent. Megatron-LM pads them all
    (--decoder-seq-length), MindSpeed-MM where a row says so.
    """
    free: dict[str, Any] = {"length_spread_fraction": UNEVEN_FRACTION, "variable_seq_lengths": strategy.pp > 1}
    if not row.has("packing"):
        return [free, {}]
    packing = row.text("packing")
    if packing not in ("none", "padded", "packed"):
        raise Unrepresentable(f"packing {packing!r} is not understood; known are none, padded and packed")
    if packing != "none" or row.text("stack") == "megatron":
        return [{}]
    return [free]


def _plan(row: Row, job: Job, strategy: Strategy) -> Plan:
    """Layers as the row lays them, all on one stage where there is one. All of a part's recompute or none; none of one
    that is frozen with nothing trained before it, whose forward keeps nothing.
    """
    layers = {}
    for modality in job.model.modalities:
        column, num_layers = f"{modality.name}_layers_per_stage", modality.layers.num_layers
        if row.has(column):
            layers[modality.name] = _layers(row, column, strategy.pp, num_layers)
        elif strategy.pp > 1:
            raise Unrepresentable(f"{column} is blank, and PP {strategy.pp} asks on which stages these layers lie")
        else:
            layers[modality.name] = (num_layers,)
    recompute = {}
    for name, counts in layers.items():
        text = row.text(f"{name}_recompute", "none")
        if text not in ("none", "full"):
            raise Unrepresentable(f"{name}_recompute {text!r} is not understood; known are full, and nothing")
        keeps = name == "text" or not job.model.encoders[0].freeze
        recompute[name] = counts if text == "full" and keeps else (0,) * strategy.pp
    return Plan(strategy, layers, recompute, job.workload.global_batch_size)


def _layers(row: Row, column: str, pp: int, num_layers: int) -> tuple[int, ...]:
    text = row.text(column)
    if not all(re.fullmatch("[0-9]{1,9}", part) for part in text.split(";")):
        raise row.error(column, f"{text!r} is no list of whole numbers such as `32;0;0;0`")
    counts = tuple(map(int, text.split(";")))
    if len(counts) != pp or sum(counts) != num_layers:
        raise row.error(
            column, f"{len(counts)} numbers that make {sum(counts)}; {pp} that make {num_layers} are expected"
        )
    return counts


def _peaks(row: Row, num_devices: int, pp: int) -> dict[int, float] | None:
    """Stage → peak bytes of its fullest rank, of a cell such as `0:24900;2:27331`, ranks and MiB."""
    if not row.has("memory_mib"):
        return None
    peaks: dict[int, float] = {}
    for part in row.text("memory_mib").split(";"):
        found = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,12}(?:\.[0-9]{1,9})?)", part)
        if found is None or not SMALLEST <= float(found[2]) <= LARGEST:
            raise row.error("memory_mib", f"{part!r} is no `rank:MiB`")
        if int(found[1]) >= num_devices:
            raise row.error("memory_mib", f"it names rank {found[1]} of {num_devices}")
        stage = int(found[1]) // (num_devices // pp)
        peaks[stage] = max(peaks.get(stage, 0.0), float(found[2]) * MIB)
    return peaks
