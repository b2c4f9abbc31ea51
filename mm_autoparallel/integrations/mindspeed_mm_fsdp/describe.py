"""A training under MindSpeed-MM's FSDP trainer as sections of a job: its launch script, its YAML, its config.json.

Weights, gradients and Adam's moments are fp32 shards; bf16 weights are gathered (modelhub.py builds the model in fp32,
fully_shard_parallel.py gives torch FSDP2 the dtypes). What recomputes is what `recompute_plan` names, what is offloaded
each layer's input (features/memory/async_offload.py).
"""

from __future__ import annotations

import math
from pathlib import Path

from mm_autoparallel.errors import JobError
from mm_autoparallel.files import describe_value, is_folder, is_there, read_document
from mm_autoparallel.integrations.described import Described
from mm_autoparallel.integrations.huggingface import hub_cache
from mm_autoparallel.integrations.mindspeed_mm_fsdp.launch import Launch, read_launch
from mm_autoparallel.integrations.mindspeed_mm_fsdp.module_patterns import count_layers, find_layer_lists
from mm_autoparallel.integrations.mindspeed_mm_fsdp.trainer_yaml import FEATURES, WHAT, Trainer, read_trainer, value_at
from mm_autoparallel.model.job.model import Encoder, Model
from mm_autoparallel.model.readers.model_file import read_model

_STATE_BYTES = 12
"""Of one weight: itself and two moments of Adam in fp32."""

_DIVIDES_SEQUENCES = ("qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
_DIVIDES_LATER = (*_DIVIDES_SEQUENCES, "qwen3_omni_moe", "kimi_k25")
"""model_id of models whose forward divides sequences among Ulysses ranks (mindspeed_mm/fsdp/models): in 26.0, and after
it."""

_TYPES = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "qwen3_omni_moe", "qwen3_asr", "kimi_k25")
"""model_id that is the model_type of the config.json too."""

_OTHER_KINDS = {
    "qwen3_tts": "a model that speaks, with a decoder of its own for each group of sound codes",
    "moss_tts_delay": "a model that speaks, with tables and heads for many sound codes at a time",
    "ltx2": "a model that makes videos",
    "kimi_k3": "whose layers attend by Kimi's delta rule and by latent attention beside it",
    "mimo_v25": "whose layers with windows have other key and value heads than those without",
}
"""model_id → what it is, where no reader describes it."""

_MAX_CP = 16
"""Assumed: beyond it every rank of a group has few heads left."""


def describe(
    path: Path,
    *,
    model_config: Path | None = None,
    world_size: int | None = None,
    seq_length: int | None = None,
    image_tokens: int | None = None,
    images: int | None = None,
) -> Described:
    """The training that the launch script or the YAML at `path` describes.

    model_config: a config.json, or its folder, in the place of the YAML's model_name_or_path. world_size: devices,
    where the script leaves them to the machine. seq_length: tokens of a sample, in the place of cutoff_len.
    image_tokens, images: of a sample, in the place of one image of image_max_pixels.
    Raises JobError where a file is missing or malformed, and where the training is none that is planned.
    """
    launch = read_launch(path)
    trainer = read_trainer(launch.yaml_path, launch.checkout)
    devices = world_size or launch.world_size
    if devices is None:
        raise JobError(
            f"{WHAT} {launch.yaml_path}: how many devices train is not known from it, and with that the global batch; "
            "give the launch script, or the world size"
        )
    if devices % trainer.cp:
        raise JobError(
            f"{WHAT} {launch.yaml_path}: ulysses_parallel_size {trainer.ulysses} x ring_attention_size {trainer.ring} "
            f"does not divide the {devices} devices"
        )
    _check_kind(trainer)
    config_path = find_config(trainer, launch, model_config)
    _check_type(trainer, config_path)
    notes: list[str] = []
    model = read_model(config_path)
    model = model.with_freeze(_read_freeze(trainer, model, notes))
    tokens = _read_tokens(trainer, model, config_path, seq_length, (image_tokens, images or 1), notes)
    notes += _list_notes(trainer)
    workload = {
        "global_batch_size": trainer.mbs * trainer.accumulation * (devices // trainer.cp),
        **tokens,
        **_read_precision(trainer, notes),
        "attention": "unfused" if _attention(trainer) == "eager" else "flash",
        "sequence_parallel": False,
        "implementation": "transformers",
        "stack": "mindspeed-fsdp",
        "cross_entropy": "transformers",
        "deterministic": trainer.section("training").flag("use_deter_comp", False),
        "context_parallel": "ring" if trainer.ring > 1 else "all_to_all",
        "loss_chunk_tokens": trainer.loss_chunk_tokens,
        "text_chunk_samples": _read_chunk(trainer, model),
        # fsdp2/distributed/context_parallel, ulysses_cp_attention.py
        **({"facts": {"repeated_groups": "always"}} if trainer.layout.of_llm and trainer.ulysses > 1 else {}),
    }
    return Described(model, workload, _list_limits(trainer, model, devices, notes), devices, tuple(notes))


def find_config(trainer: Trainer, launch: Launch, model_config: Path | None = None) -> Path:
    """The model's config.json: the one given, else in the folder that model_name_or_path names, else of what was
    downloaded from Hugging Face's hub under that name.

    Raises JobError where there is none.
    """
    if model_config is not None:
        found = model_config / "config.json" if is_folder(model_config) else model_config
        if not is_there(found):
            raise JobError(f"model config {model_config}: there is no such file, nor a config.json in such a folder")
        return found
    section = trainer.section("model")
    named = section.text("model_name_or_path", "")
    folders = [folder for folder in (launch.checkout, launch.yaml_path.parent) if folder]
    for folder in folders:
        found = folder / named / "config.json"
        if named and is_there(found):
            return found
    if (cached := hub_cache.find_config(named)) is not None:
        return cached
    raise JobError(
        f"{WHAT} {trainer.path}: model.model_name_or_path is {describe_value(named or None)}, and there is no "
        "config.json in such a folder on this machine; give the model's config.json (--model-config PATH)"
    )


def list_paths(trainer: Trainer, model: Model) -> dict[str, str]:
    """modality → its list of layers, by the patterns that the YAML has for FSDP, recompute and offload."""
    lists = (
        value_at(trainer.document, path)
        for path in (
            ("parallel", "fsdp_plan", "apply_modules"),
            trainer.layout.recompute_modules,
            trainer.layout.offload_modules,
        )
    )
    patterns = [name for held in lists if isinstance(held, list) for name in held if isinstance(name, str)]
    return find_layer_lists(patterns, [modality.name for modality in model.modalities])


def _check_kind(trainer: Trainer) -> None:
    """Raises JobError for a kind of model that no config.json would make readable."""
    kind = trainer.section("model").text("model_id", "")
    if kind in _OTHER_KINDS:
        raise JobError(f"{WHAT} {trainer.path}: model.model_id is {kind}, {_OTHER_KINDS[kind]}, which is not planned")


def _check_type(trainer: Trainer, config_path: Path) -> None:
    model_id = trainer.section("model").text("model_id", "")
    model_type = read_document(config_path, "model file").get("model_type")
    if model_id in _TYPES and model_type != model_id:
        raise JobError(
            f"{WHAT} {trainer.path}: model.model_id is {model_id}, and {config_path} is the config.json of "
            f"{describe_value(model_type)}; give that of the model that is trained"
        )


def _attention(trainer: Trainer) -> str:
    return trainer.section("model").text("attn_implementation", "flash_attention_2")


# ------------------------------------------------------------------------------------------------------------- workload


def _read_tokens(
    trainer: Trainer,
    model: Model,
    config_path: Path,
    seq_length: int | None,
    given: tuple[int | None, int],
    notes: list[str],
) -> dict[str, int]:
    """Samples as long as they may be, each with the images that are given, or with one as large as it may be."""
    data = trainer.section("data", "dataset_param")
    if seq_length is None:
        basic = data.section("basic_parameters", {})
        if not basic.has("cutoff_len"):
            raise JobError(
                f"{WHAT} {trainer.path}: {basic.where('cutoff_len')} is missing, so how long samples are is not known; "
                "give the sequence length"
            )
        seq_length = basic.count("cutoff_len")
        notes.append(
            f"every sample is taken as long as cutoff_len allows, {seq_length} tokens; give the sequence length if "
            "your samples are shorter"
        )
    tokens = {"seq_length": seq_length}
    image_tokens, num_images = given
    viewer = next((encoder for encoder in model.encoders if encoder.media == "images"), None)
    if viewer and image_tokens is not None:
        tokens |= {"image_tokens_per_sample": image_tokens, "images_per_sample": num_images}
    elif viewer:
        pixels = data.section("preprocess_parameters", {}).number("image_max_pixels", 0)
        side = _read_token_side(config_path, viewer)
        if pixels and side:
            most = min(seq_length, max(1, pixels // side**2))
            tokens["image_tokens_per_sample"] = most
            notes.append(
                f"every sample is taken to hold one image of the {pixels} pixels that image_max_pixels allows, {most} "
                "tokens of it"
            )
        else:
            notes.append(
                "how many tokens images are cannot be told from the YAML, so images count as none; give their tokens"
            )
    if model.encoders and not viewer:
        tokens |= {"audio_tokens_per_sample": seq_length, "audios_per_sample": 1}
        notes.append("how long audio is stands in the data alone, so every sample is taken to be one recording")
    elif any(encoder.media == "audios" for encoder in model.encoders):
        notes.append("how long audio is stands in the data alone, so audio counts as none")
    return tokens


def _read_chunk(trainer: Trainer, model: Model) -> int:
    """Samples that the decoder's layers run at a time; 0 where chunkmbs_plan does not name all of them."""
    features = trainer.section("features")
    plan = features.section("chunkmbs_plan", {})
    if trainer.layout is not FEATURES or not features.flag("enable_chunk_mbs", False):
        return 0
    patterns = plan.content.get("apply_modules") or []
    path, num_layers = list_paths(trainer, model).get("text"), model.text.layers.num_layers
    if not isinstance(patterns, list) or path is None or plan.number("batch_dim", 0):
        return 0
    names = [name for name in patterns if isinstance(name, str)]
    return plan.count("chunk_mbs", 1) if count_layers(names, path, num_layers) == num_layers else 0


def _read_token_side(config_path: Path, encoder: Encoder) -> int:
    """Pixels of the side of one image token; 0 where the file does not say how large patches are."""
    document = read_document(config_path, "model file")
    held = document.get("thinker_config", document)
    vision = held.get("vision_config") if isinstance(held, dict) else None
    side = vision.get("patch_size") if isinstance(vision, dict) else None
    return side * math.isqrt(encoder.projector.merge_tokens) if isinstance(side, int) and side > 0 else 0


def _read_precision(trainer: Trainer, notes: list[str]) -> dict[str, float]:
    plan = trainer.section("parallel", "fsdp_plan")
    gathered_bytes = 4 if plan.text("param_dtype", "fp32") in ("fp32", "float32") else 2
    if plan.text("reduce_dtype", "fp32") not in ("fp32", "float32"):
        notes.append("gradients are counted in fp32, as they are kept; reduce_dtype makes their traffic half of that")
    return {
        "weight_bytes": float(gathered_bytes),
        "gradient_bytes": 4.0,
        "optimizer_bytes": float(_STATE_BYTES - gathered_bytes),
    }


# --------------------------------------------------------------------------------------------------------------- search


def _list_limits(trainer: Trainer, model: Model, devices: int, notes: list[str]) -> dict[str, object]:
    """What the trainer can run of this model, and what a plan can say in its YAML."""
    limits: dict[str, object] = {"pp": [1], "tp": [1], "zero": [3], "reshard": [True, False]}
    limits["cp"], limits["cp_kind"] = _list_cp(trainer, model, devices, notes)
    limits["ep"] = _list_ep(trainer, model, devices, notes)
    shards = {0, *((trainer.shard,) if 1 < trainer.shard < devices else ())}
    if trainer.layout.sums_copies_once:
        shards |= {shard for shard in _divisors(devices) if 1 < shard < devices}
    limits["shard"] = sorted(shards)
    paths = list_paths(trainer, model)
    unnamed = [modality.name for modality in model.modalities if modality.name not in paths and not modality.freeze]
    if unnamed:
        notes.append(
            f"no pattern of the YAML names the layers of {' and '.join(unnamed)} ({{*}}), so that no layer is planned "
            "to recompute; name them in fsdp_plan.apply_modules"
        )
        limits["modes"] = []
    elif value_at(trainer.document, trainer.layout.offload_modules) is not None:
        limits["modes"] = ["recompute_offload", "recompute"]
    else:
        limits["modes"] = ["recompute"]
    return limits


def _list_cp(trainer: Trainer, model: Model, devices: int, notes: list[str]) -> tuple[list[int], list[str]]:
    if trainer.layout.of_llm:
        return [trainer.cp], ["ring" if trainer.ring > 1 else "all_to_all"]
    if trainer.ring > 1:
        return [1, trainer.ring], ["ring"]
    able = _DIVIDES_LATER if trainer.layout is FEATURES else _DIVIDES_SEQUENCES
    if trainer.section("model").text("model_id", "") not in able:
        if trainer.ulysses == 1:
            notes.append("ulysses_parallel_size stays 1: this model is not known to divide its sequences")
        return [trainer.ulysses], ["all_to_all"]
    heads = math.gcd(*(size for m in model.modalities for size in (m.layers.num_heads, m.layers.num_kv_groups)))
    sizes = {size for size in _divisors(math.gcd(heads, devices)) if size <= _MAX_CP}
    return sorted(sizes | {trainer.ulysses}), ["all_to_all"]


def _list_ep(trainer: Trainer, model: Model, devices: int, notes: list[str]) -> list[int]:
    experts = model.text.layers.experts
    if not experts:
        return [1]
    if not trainer.expert_modules:
        notes.append("ep_plan.apply_modules names no experts, so the trainer deals none out and EP stays 1")
        return [1]
    return _divisors(math.gcd(experts.num_experts, devices))


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


# --------------------------------------------------------------------------------------------------- freezing and notes


def _read_freeze(trainer: Trainer, model: Model, notes: list[str]) -> dict[str, bool]:
    """Part → frozen, for every part of the model, by the names in model.freeze."""
    section = trainer.section("model")
    listed = section.content.get("freeze") or []
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise section.refuse("freeze", "a list of names of modules is expected")
    parts = dict.fromkeys([modality.name for modality in model.modalities], False)
    parts |= {f"{encoder.name}_projector": False for encoder in model.encoders}
    unknown = []
    for name in listed:
        frozen = [part for part in _name_frozen(name) if part in parts]
        parts |= dict.fromkeys(frozen, True)
        unknown += [] if frozen else [name]
    if unknown:
        notes.append(f"model.freeze names {', '.join(unknown)}, which is no whole part and counts as trained")
    notes += [
        f"the convolutions behind the {encoder.name} layers count as trained with its projector"
        for encoder in model.encoders
        if encoder.projector.convolutions and parts[encoder.name] and not parts[f"{encoder.name}_projector"]
    ]
    if parts["text"]:
        notes.append("the vocabulary's head counts as frozen with the decoder's layers")
    return parts


def _name_frozen(name: str) -> tuple[str, ...]:
    """Parts that freezing the module called `name` freezes.

    Projectors of `visual` and `audio_tower` lie inside, those beside a `vision_tower` or `vision_model` do not.
    """
    words = name.split(".")
    last = words[-1]
    tower = next((word for word in words if "vis" in word or "audio" in word), "")
    owner = "audio" if "audio" in tower else "vision"
    if "merger" in last or "proj" in last:
        return (f"{owner}_projector",)
    if tower and last == tower:
        return (owner, f"{owner}_projector") if tower in ("visual", "audio_tower") else (owner,)
    if tower:
        return (owner,) if last in ("blocks", "layers", "encoder", "resblocks") else ()
    return ("text",) if last in ("language_model", "layers", "model") else ()


def _list_notes(trainer: Trainer) -> list[str]:
    notes = [
        f"{name} is not read by this release of MindSpeed-MM, so what it asks for does not happen"
        for name in trainer.ignored
    ]
    training, model, features = (trainer.section(name) for name in ("training", "model", "features"))
    optimizer = training.text("optimizer", "adamw")
    if optimizer != "adamw":
        notes.append(f"training.optimizer {optimizer} is planned as adamw, whose states lie on the device")
    if features.flag("enable_ep_balance", False):
        raise features.refuse("enable_ep_balance", "copies of experts are not planned; false is expected")
    if model.number("mtp_num_layers", 0):
        notes.append("mtp_num_layers: modules that predict further tokens are not counted")
    return notes
