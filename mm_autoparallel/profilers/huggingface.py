"""A Subject for a Hugging Face config.json: the class that transformers has for it, with random weights and samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mm_autoparallel.errors import ProfileError
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.profilers.layout import find_layout, layers_of
from mm_autoparallel.profilers.subject import Build, Layout, Subject
from mm_autoparallel.profilers.tensor_shard import cross_entropy, shard_layer, shard_sequence, shard_vocabulary
from mm_autoparallel.profilers.torch_releases import DeviceMesh
from mm_autoparallel.profilers.transformers_releases import check_attention, fitting, make_model, read_config

TEXT_TYPES = (
    "llama",
    "mistral",
    "mixtral",
    "phi3",
    "gpt2",
    "qwen2",
    "qwen3",
    "qwen2_moe",
    "qwen3_moe",
    "deepseek_v2",
    "deepseek_v3",
)
"""Of config.json; decoders without encoders."""

MODEL_TYPES = ("qwen2_vl", "qwen2_5_vl", "llava", "internvl", *TEXT_TYPES)
"""Of config.json; classes that transformers builds and whose batches are made here."""

_GRID_TYPES = ("qwen2_vl", "qwen2_5_vl")
"""Images of any size, as a list of patches with a grid; the others take squares of one size."""

_DTYPES = {2.0: torch.bfloat16, 4.0: torch.float32}


def make_subject(
    document: Mapping[str, Any],
    model: Model,
    workload: Workload,
    path: Path,
    adapt: Callable[[Any], None] = lambda _: None,
) -> Subject:
    """The subject for the config.json `document`, read from `path`, whose sizes and frozen parts are those of `model`.

    adapt: changes what the class builds, where the model differs from it, before it is frozen and divided.
    Weights have the workload's bytes: 2 are bf16, of which the optimizer keeps a copy in fp32, 4 are fp32. Attention is
    fused where the workload says flash. Raises ProfileError for a class or a precision that cannot be built, or a value
    that transformers refuses.
    """
    if document.get("model_type") not in MODEL_TYPES:
        raise ProfileError(
            f"model file {path}: model_type is {document.get('model_type')!r}, and models are built from random "
            f"weights for {', '.join(MODEL_TYPES)}; profile others from their own pretrain script "
            "(mm_autoparallel.hooks)"
        )
    if workload.weight_bytes not in _DTYPES:
        raise ProfileError(
            f"workload.weight_bytes is {workload.weight_bytes:g}; a model is built with 2 (bf16) or 4 (fp32) bytes a "
            "weight"
        )
    _check_config(document, path)
    dtype = _DTYPES[workload.weight_bytes]
    attention = "sdpa" if workload.attention == "flash" else "eager"
    check_attention(attention)

    def build_model(build: Build) -> nn.Module:
        config = _cut_config(document, build.depth)
        torch.manual_seed(0)
        with build.device:
            live = make_model(config, document["model_type"] in TEXT_TYPES, dtype, attention)
            adapt(live)
        _freeze(live, model)
        mesh = build.tp_mesh if build.tp_mesh is not None and build.tp_mesh.size() > 1 else None
        if mesh is not None:
            shard_model(live, find_layout(live), mesh, build.sequence_parallel)
        vars(live)["tp_mesh"] = mesh  # forward_step gets the model alone
        trained: nn.Module = live.train()
        return trained

    make_batch = lru_cache(maxsize=2)(_batch_maker(document))

    def forward_step(live: Any, num_samples: int, workload: Workload) -> Tensor:
        parameter = next(live.parameters())
        sizes = (workload.seq_length, workload.image_tokens_per_sample, workload.images_per_sample)
        batch = make_batch(num_samples, *sizes, parameter.device, dtype)
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        logits = live(**fitting(inputs, live), use_cache=False).logits
        mesh: DeviceMesh | None = vars(live)["tp_mesh"]
        return cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), mesh)

    # an image with a class token has a number of tokens that does not divide
    sequence_parallel = document["model_type"] in (*_GRID_TYPES, *TEXT_TYPES)
    # its classes train no modules that predict further tokens
    lacks = ("text_mtp",) if model.text.num_mtp else ()
    return Subject(build_model, forward_step, _make_optimizer, sequence_parallel=sequence_parallel, lacks=lacks)


def shard_model(live: Any, layout: Layout, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Divide a model of Hugging Face's classes among tensor parallel ranks, in place: layers, table and head.

    Raises ProfileError where a layer cannot be divided.
    """
    for modality, layers in layers_of(live, layout).items():
        for layer in layers:
            shard_layer(layer, mesh, sequence_parallel)
        if sequence_parallel:
            projector = live.get_submodule(layout.post[modality]) if modality in layout.post else None
            # samples of sounds are told apart, and pooled, before the projector
            shard_sequence(layers[0], projector, mesh, layers[-1] if modality == "audio" else None)
    shard_vocabulary(live.get_input_embeddings(), live.get_output_embeddings(), mesh, sequence_parallel)


def class_name(document: Mapping[str, Any]) -> str:
    """The class that is built for a config.json: the one that it names, else its model type."""
    named = document.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else str(document.get("model_type"))


def scale_workload(document: Mapping[str, Any], workload: Workload, seq_length: int) -> Workload:
    """`workload` with samples of `seq_length` tokens, of which images occupy the same part, as nearly as they can."""
    if not workload.image_tokens_per_sample:
        return workload.model_copy(update={"seq_length": seq_length})
    part, images = seq_length / workload.seq_length, workload.images_per_sample
    if document["model_type"] in _GRID_TYPES:
        per_image = 4 * max(1, round(part * workload.image_tokens_per_sample / images / 4))
    else:
        per_image = workload.image_tokens_per_sample // images
        images = max(1, round(part * images))
    changed = {"image_tokens_per_sample": per_image * images, "images_per_sample": images}
    return workload.model_copy(update={"seq_length": seq_length, **changed})


def _check_config(document: Mapping[str, Any], path: Path) -> None:
    from huggingface_hub import errors

    # Newer releases check the types of all keys; what older ones raise comes from whoever trips over a value first.
    refusal = getattr(errors, "StrictDataclassError", ValueError)
    try:
        read_config(document)
    except (refusal, ValueError, TypeError, KeyError, AttributeError) as failure:
        reason = " ".join(str(failure).split())
        raise ProfileError(
            f"model file {path}: transformers builds no {document['model_type']} from it: {reason}"
        ) from None


def _cut_config(document: Mapping[str, Any], depth: Mapping[str, int]) -> Any:
    """The configuration with the first so many layers of each modality."""
    config = read_config(document)
    text = config.get_text_config()
    text.num_hidden_layers = depth["text"]
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[: depth["text"]]
    if "vision" not in depth:
        return config
    vision = config.vision_config
    if hasattr(vision, "depth"):
        vision.depth = depth["vision"]
    else:
        vision.num_hidden_layers = depth["vision"]
    return config


def _freeze(live: nn.Module, model: Model) -> None:
    """Gradients for what the job trains, and for nothing else."""
    if not model.encoders:
        live.requires_grad_(not model.text.freeze)
        return
    (encoder,) = model.encoders
    layout = find_layout(live)
    tower = layout.layers["vision"].rsplit(".", 1)[0].removesuffix(".encoder")
    for name, parameter in live.named_parameters():
        if f"{name}.".startswith(f"{layout.post['vision']}."):
            parameter.requires_grad_(not encoder.projector.freeze)
        elif name.startswith(f"{tower}."):
            parameter.requires_grad_(not encoder.freeze)
        else:
            parameter.requires_grad_(not model.text.freeze)


Batch = dict[str, Tensor]


def _batch_maker(document: Mapping[str, Any]) -> Callable[..., Batch]:
    """(samples, tokens, image tokens, images of a sample, device, dtype) → inputs of the model, and labels."""
    config = read_config(document)
    vocabulary = config.get_text_config().vocab_size
    image_token = getattr(config, "image_token_id", None) or getattr(config, "image_token_index", vocabulary)

    def make(
        num_samples: int, seq_length: int, image_tokens: int, num_images: int, device: torch.device, dtype: torch.dtype
    ) -> Batch:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, min(vocabulary, image_token), (num_samples, seq_length), generator=generator)
        batch: Batch = {}
        if image_tokens:
            per_image = _check_images(document, config, seq_length, image_tokens, num_images)
            for image in range(num_images):
                first = image * (per_image + 1)  # a token of text between two images tells them apart
                tokens[:, first : first + per_image] = image_token
            batch |= _pixels(config, document["model_type"], num_samples * num_images, per_image, generator, dtype)
            if document["model_type"] in _GRID_TYPES:
                batch["mm_token_type_ids"] = (tokens == image_token).int()
        batch |= {"input_ids": tokens, "labels": tokens.roll(-1, dims=1)}
        return {name: tensor.to(device) for name, tensor in batch.items()}

    return make


def _check_images(document: Mapping[str, Any], config: Any, seq_length: int, image_tokens: int, num_images: int) -> int:
    """Tokens of one image. Raises ProfileError where images of the model cannot occupy what the workload says."""
    if image_tokens % num_images or seq_length < image_tokens + num_images:
        raise ProfileError(
            f"workload: {num_images} images of {image_tokens} tokens in samples of {seq_length} cannot be made: each "
            "image needs equally many tokens, and a token of text beside it"
        )
    per_image = image_tokens // num_images
    if document["model_type"] not in _GRID_TYPES:
        side = config.vision_config.image_size
        side = side if isinstance(side, int) else side[0]
        patch = config.vision_config.patch_size
        patch = patch if isinstance(patch, int) else patch[0]
        right = int((side // patch) ** 2 * getattr(config, "downsample_ratio", 1.0) ** 2)
        if per_image != right:
            raise ProfileError(
                f"workload: an image is to occupy {per_image} tokens, and images of {document['model_type']} with this "
                f"configuration occupy {right}; give image_tokens_per_sample as images_per_sample x {right}"
            )
    return per_image


def _pixels(
    config: Any, model_type: str, num_images: int, per_image: int, generator: torch.Generator, dtype: torch.dtype
) -> Batch:
    vision = config.vision_config
    if model_type not in _GRID_TYPES:
        side = vision.image_size if isinstance(vision.image_size, int) else vision.image_size[0]
        return {"pixel_values": torch.randn(num_images, 3, side, side, generator=generator).to(dtype)}
    merge = vision.spatial_merge_size
    rows = next(rows for rows in range(math.isqrt(per_image), 0, -1) if per_image % rows == 0)
    grid = torch.tensor([[1, rows * merge, per_image // rows * merge]]).repeat(num_images, 1)
    channels = getattr(vision, "in_channels", None) or vision.in_chans
    features = channels * vision.temporal_patch_size * vision.patch_size**2
    pixels = torch.randn(num_images * per_image * merge**2, features, generator=generator)
    return {"pixel_values": pixels.to(dtype), "image_grid_thw": grid}


def _make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW, with fp32 copies of weights that are narrower."""
    live = list(parameters)
    return torch.optim.AdamW(live) if live[0].dtype == torch.float32 else _CopyingAdamW(live)


class _CopyingAdamW(torch.optim.AdamW):
    """Steps fp32 copies of the weights, as mixed precision training does (arXiv:1710.03740), and rounds them back."""

    def __init__(self, live: list[nn.Parameter]) -> None:
        self._live = live
        self._copies = [nn.Parameter(parameter.detach().float()) for parameter in live]
        super().__init__(self._copies)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step with the gradients of the live weights; those without one stay as they are."""
        for copied, parameter in zip(self._copies, self._live, strict=True):
            copied.grad = None if parameter.grad is None else parameter.grad.float()
        result = super().step(closure)
        for copied, parameter in zip(self._copies, self._live, strict=True):
            parameter.copy_(copied)
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of the live weights, as the loop of a training script asks for it."""
        for parameter in self._live:
            if set_to_none or parameter.grad is None:
                parameter.grad = None
            else:
                parameter.grad.zero_()
