"""An encoder with parallel sizes of its own in MindSpeed-MM: --hetero-parallel and --hetero-encoder-mbs-scale.

model.json has `tp`, `pp` and `cp` of each module, beside vision_encoder and in text_decoder (hetero_align_config).
Those of the launch script are all 1, and its global batch counts as if every device were a replica: it is divided by
the decoder's TP x PP x CP (patchs/validate_args_patch.py). The encoder runs on the decoder's devices: in every
micro-batch beside one stage (training.py), in phases before several (patchs/hetero_pipeline_patches.py), where one call
takes `scale` micro-batches of all decoder replicas.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.files import describe_value
from mm_autoparallel.integrations.json_text import set_json_value
from mm_autoparallel.integrations.launch_script import read_number
from mm_autoparallel.integrations.mindspeed_mm import flags
from mm_autoparallel.integrations.mindspeed_mm.launch_script import ScriptSizes
from mm_autoparallel.integrations.shell_text import LaunchScript
from mm_autoparallel.model.job.arrangement import Arrangement, EncoderRun, ModuleLayout
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.planner.plan import Plan

VISION, TEXT = "vision", "text"
SINCE = "26.0"
"""The first release whose launch scripts may do this with a global batch that is counted so."""
_SECTIONS = {VISION: "image_encoder", TEXT: "text_decoder"}
_BEHIND = {VISION: "vision_encoder", TEXT: "num_layers"}
"""The key behind which a module's sizes are written where they are not there."""
_KEYS = ("tp", "pp", "cp")


def is_hetero(script: LaunchScript) -> bool:
    """Whether the script gives modules sizes of their own."""
    return script.has_flag(flags.HETERO)


def list_reasons(plan: Plan, model: Model) -> Iterator[str]:
    """Why MindSpeed-MM does not run the layout of `plan`, which is no chain; its decoder is not looked at."""
    arrangement, decoder = plan.strategy.arrangement, plan.strategy.of_decoder()
    assert arrangement is not None
    encoder = arrangement.encoder
    if arrangement.others:
        yield (
            f"its layout is {arrangement.name}, a module for each encoder, and MindSpeed-MM's files have one; "
            "plan with search.layouts [chain]"
        )
        return
    if arrangement.apart or arrangement.encoder_run != _run_beside(decoder.pp):
        yield (
            f"its layout is {arrangement.name} beside a decoder of PP {decoder.pp}, and MindSpeed-MM runs encoders on "
            "the decoder's devices, inline beside one stage and in phases before several (--hetero-parallel); plan "
            "with workload.stack mindspeed-mm and search.layouts [chain, colocated]"
        )
        return
    if encoder.name != VISION or [one.name for one in model.encoders] != [VISION]:
        told = ", ".join(one.name for one in model.encoders) or "none"
        yield f"its layout gives {encoder.name} sizes of its own beside {told}, and one encoder, {VISION}, is written"
        return
    own = model.encoders[0]
    if not (own.freeze and own.projector.freeze):
        yield (
            f"its {encoder.name} or its projector trains, and beside --hetero-parallel MindSpeed-MM runs encoders "
            "forward only (hetero_pipeline, all_gather_dp_group); freeze both, or plan with search.layouts [chain]"
        )
    if encoder.pp > 1 or encoder.cp > 1:
        yield f"its {encoder.name} has PP {encoder.pp} and CP {encoder.cp}; every device holds it whole"
    if decoder.zero == 3:
        yield (
            f"ZeRO {decoder.zero}: torch FSDP2 wraps whole models, and --hetero-parallel changes the groups between "
            "encoder and decoder; no run of both is known, so plan with search.zero [0, 1]"
        )
    if decoder.vpp > 1:
        yield (
            f"VPP {decoder.vpp}: beside --hetero-parallel MindSpeed-MM runs 1f1b alone "
            "(forward_backward_pipelining_without_interleaving); plan with search.max_vpp 1"
        )
    scale, rest = divmod(encoder.dp * encoder.mbs, decoder.dp * decoder.mbs)
    if rest or scale < 1 or plan.num_microbatches % scale or (scale > 1 and decoder.pp == 1):
        yield (
            f"a call of the encoder takes {encoder.dp * encoder.mbs} samples, and {flags.HETERO_SCALE} makes that a "
            f"whole number of the decoder's micro-batches of {decoder.dp * decoder.mbs}, which divides the "
            f"{plan.num_microbatches} of a step and is 1 beside one stage; plan with another MBS of the encoder"
        )


def _run_beside(pp: int) -> EncoderRun:
    return "phases" if pp > 1 else "inline"


def scale_of(strategy: Strategy) -> int:
    """Micro-batches of all decoder replicas in one call of the encoder; 0 where that is no whole one."""
    assert strategy.arrangement is not None
    encoder, decoder = strategy.arrangement.encoder, strategy.of_decoder()
    return encoder.dp * encoder.mbs // (decoder.dp * decoder.mbs)


def list_conditions(strategy: Strategy) -> list[str]:
    """What a person must see to, a sentence each."""
    told = [
        f"--hetero-parallel with these files needs MindSpeed-MM {SINCE} or newer, and pretrain_vlm.py with an encoder "
        "that takes image_grid_thw (Qwen2-VL and newer)"
    ]
    if scale_of(strategy) > 1:
        told.append(
            f"{flags.HETERO_SCALE} {scale_of(strategy)} deals samples to micro-batches by their images "
            "(DecoderRerunDataIterator): every sample needs exactly one"
        )
    return told


def as_chain(plan: Plan, model: Model) -> Plan:
    """The decoder of `plan` as a chain whose first stage has the encoder, for the laws of any chain."""
    decoder = plan.strategy.of_decoder()
    if not plan.strategy.away:
        return replace(plan, strategy=decoder)
    behind = (0,) * (decoder.pp - 1)
    layers = {VISION: (model.encoders[0].layers.num_layers, *behind), TEXT: plan.layers[TEXT]}
    recompute = {VISION: (0,) * decoder.pp, TEXT: plan.recompute[TEXT]}
    return replace(plan, strategy=decoder, layers=layers, recompute=recompute)


# ------------------------------------------------------------------------------------------------------------ writing


def set_modules(text: str, strategy: Strategy) -> str:
    """The text of model.json with the sizes of both modules in it; all else stays byte for byte."""
    assert strategy.arrangement is not None
    for name, sizes in ((VISION, strategy.arrangement.encoder), (TEXT, strategy.of_decoder())):
        after = _BEHIND[name]
        for key in _KEYS:
            text = set_json_value(text, (_SECTIONS[name], key), getattr(sizes, key), after)
            after = key
    return text


def set_switches(script: LaunchScript, strategy: Strategy) -> LaunchScript:
    """`script` with --hetero-parallel, and the scale where it is not 1."""
    scale = scale_of(strategy)
    if script.has_flag(flags.HETERO_SCALE):
        script = script.set_flag(flags.HETERO_SCALE, scale, {})
    elif scale > 1:
        script = script.add_flags([f"{flags.HETERO_SCALE} {scale}"], behind=flags.PIPELINE)
    return script if is_hetero(script) else script.add_flags([flags.HETERO], behind=flags.PIPELINE)


# ------------------------------------------------------------------------------------------------------------ reading


def read_modules(
    script: LaunchScript, found: ScriptSizes, document: Mapping[str, Any], path: Path, world_size: int
) -> tuple[Strategy, int]:
    """The strategy that the script and the model.json at `path` train under, and its global batch.

    Raises JobError or PlanError naming the size that is missing, malformed, contradicts others or is not planned.
    """
    where = f"launch script {script.path}"
    for flag, name in flags.SIZES.items():
        if found.sizes[name] != 1 and name != "ep":
            raise JobError(
                f"{where}: it passes {flag} {found.sizes[name]} beside {flags.HETERO}, which takes sizes from "
                f"{path} and 1 from the script"
            )
    own, beside = (_read_sizes(document, path, _SECTIONS[name]) for name in (TEXT, VISION))
    group, width = own["tp"] * own["pp"] * own["cp"], beside["tp"] * beside["cp"]
    if world_size % group or world_size % width:
        raise PlanError(f"{path}: text_decoder takes {group} devices and image_encoder {width}; {world_size} is no "
                        "multiple of both")  # fmt: skip
    scale = read_number(script, flags.HETERO_SCALE, {}, default=1)
    if beside["pp"] > 1 or beside["cp"] > 1:
        raise PlanError(
            f"{path}: image_encoder has pp {beside['pp']} and cp {beside['cp']}; planned is an encoder that is whole "
            "on every device"
        )
    if own["pp"] == 1 and scale > 1:
        raise PlanError(
            f"{where}: {flags.HETERO_SCALE} is {scale} beside a decoder of one stage, whose micro-batches then hold "
            f"{scale} times as many samples as {flags.MICRO_BATCH} says; take it out"
        )
    batch, rest = divmod(found.global_batch_size, group)
    dp = world_size // group
    micro_batch = dp * found.mbs
    if rest or batch % (micro_batch * scale):
        raise PlanError(
            f"{where}: {flags.GLOBAL_BATCH} {found.global_batch_size} is divided by the {group} devices of a decoder "
            f"replica, and what is left must be a multiple of DP {dp} x MBS {found.mbs} x scale {scale}"
        )
    samples, num_encoders = micro_batch * scale, world_size // beside["tp"]
    if samples % num_encoders:
        raise PlanError(
            f"{where}: a call of the encoder takes {samples} samples, which its {num_encoders} replicas do not share "
            f"evenly; give {flags.HETERO_SCALE} or {flags.MICRO_BATCH} another number"
        )
    encoder = ModuleLayout(VISION, 1, beside["tp"], num_encoders, samples // num_encoders)
    strategy = Strategy(
        pp=own["pp"],
        tp=own["tp"],
        dp=dp,
        mbs=found.mbs,
        cp=own["cp"],
        ep=found.sizes["ep"],
        zero=found.zero,
        sequence_parallel=found.sequence_parallel or own["tp"] == 1,
        tp_overlap="mc2" if found.fuses_products and found.sequence_parallel and own["tp"] > 1 else "",
        arrangement=Arrangement("colocated", _run_beside(own["pp"]), encoder),
    )
    is_chain = own["pp"] == own["cp"] == 1 and own["tp"] == beside["tp"]
    return replace(strategy, arrangement=None) if is_chain else strategy, batch


def count_ranks(document: Mapping[str, Any], path: Path) -> int:
    """Devices of a replica of the decoder. Raises JobError naming the size that is missing or malformed."""
    own = _read_sizes(document, path, _SECTIONS[TEXT])
    return own["tp"] * own["pp"] * own["cp"]


def _read_sizes(document: Mapping[str, Any], path: Path, section: str) -> dict[str, int]:
    part = document.get(section)
    found: dict[str, int] = {}
    for key in _KEYS:
        value = part.get(key) if isinstance(part, Mapping) else None
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1 << 20:
            raise JobError(
                f"model file {path}: {section}.{key} is {describe_value(value)}; beside {flags.HETERO} a whole number "
                "of at least 1 is expected"
            )
        found[key] = value
    return found
