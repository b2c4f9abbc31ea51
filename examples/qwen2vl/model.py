"""Model: Qwen2-VL as a chain of parts made of Hugging Face's modules, of which any contiguous piece is a stage.

    vision.pre → vision.layers → vision.post → text.pre → text.layers → text.post
    patches      blocks          merger        embedding  decoder       norm, head, loss

One tensor goes from part to part: vision hidden states (patches, width), image features (image tokens, text width),
then text hidden states (samples, sequence, width). The whole model is the stage that holds every part, so training on
one device, on a pipeline and under a profiler runs the same lines.

Every part draws its weights from a generator of its own, seeded by the run's seed and the part's name: a rank that
builds three layers of eighty gets the weights that the whole model has there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import Qwen2VLConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import (
    PatchEmbed,
    PatchMerger,
    Qwen2VLDecoderLayer,
    Qwen2VLRMSNorm,
    Qwen2VLRotaryEmbedding,
    Qwen2VLVisionBlock,
    Qwen2VLVisionRotaryEmbedding,
)
from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids

from data import SampleShape
from losses import next_token_loss

Shard = Callable[[nn.Module, str], None]
"""Divides a part, given with its role (`vision_pre`, `vision_layer` …), among tensor parallel ranks, in place."""

Fill = Callable[[nn.Module, str, str, int], None]
"""Copies weights into a whole part, given with its modality, role and number."""

VISION_TOWER = frozenset({("vision", "pre"), ("vision", "layer")})
PROJECTOR = frozenset({("vision", "post")})
"""Modality and role of the vision encoder's parts; its merger is the projector, which Megatron-LM trains beside it."""


class Held(Protocol):
    """What a stage holds of one role: a Piece, or a plan's record with these names among its own."""

    @property
    def modality(self) -> str: ...
    @property
    def role(self) -> str: ...
    @property
    def first(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def recomputed(self) -> int: ...


@dataclass(frozen=True)
class Piece:
    """Consecutive parts of one role that a stage holds.

    modality: `vision` or `text`. role: `pre`, `layer` or `post`. first, count: which layers, counted in the modality.
    recomputed: how many of them, the first ones, run again in the backward instead of keeping their activations.
    """

    modality: str
    role: str
    first: int = 0
    count: int = 1
    recomputed: int = 0


def whole_chain(depth: dict[str, int]) -> tuple[Piece, ...]:
    """Every part of a model with so many layers of each modality."""
    return tuple(
        piece
        for modality in ("vision", "text")
        for piece in (Piece(modality, "pre"), Piece(modality, "layer", 0, depth[modality]), Piece(modality, "post"))
    )


class VisionPre(nn.Module):
    """Patch embedding: pixels (samples, patches, features) → (samples · patches, width)."""

    def __init__(self, config: Qwen2VLConfig) -> None:
        super().__init__()
        vision = config.vision_config
        self.patch_embed = PatchEmbed(
            vision.patch_size, vision.temporal_patch_size, vision.in_channels, vision.embed_dim
        )

    def forward(self, pixel_values: Tensor) -> Tensor:
        # A micro-batch is a view of its batch; autograd would keep the whole batch for it.
        return self.patch_embed(pixel_values.flatten(0, 1).clone())


class VisionPost(nn.Module):
    """Merger: (patches, width) → (image tokens, text width)."""

    def __init__(self, config: Qwen2VLConfig) -> None:
        super().__init__()
        vision = config.vision_config
        self.merger = PatchMerger(vision.hidden_size, vision.embed_dim, vision.spatial_merge_size)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.merger(hidden)


class TextPre(nn.Module):
    """Token embedding, with image features in the place of the image tokens: → (samples, sequence, width)."""

    def __init__(self, config: Qwen2VLConfig) -> None:
        super().__init__()
        self.image_token_id = config.image_token_id
        self.embed_tokens = nn.Embedding(config.text_config.vocab_size, config.text_config.hidden_size)

    def forward(self, features: Tensor, input_ids: Tensor) -> Tensor:
        embedded = self.embed_tokens(input_ids)
        places = (input_ids == self.image_token_id).unsqueeze(-1)
        return embedded.masked_scatter(places, features.to(embedded.dtype))


class TextPost(nn.Module):
    """Final norm, output matrix and the loss of every next token: (samples, sequence, width) → scalar."""

    def __init__(self, config: Qwen2VLConfig) -> None:
        super().__init__()
        text = config.text_config
        self.norm = Qwen2VLRMSNorm(text.hidden_size, eps=text.rms_norm_eps)
        self.lm_head = nn.Linear(text.hidden_size, text.vocab_size, bias=False)

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return next_token_loss(self.lm_head(self.norm(hidden)), labels, self.lm_head.weight)


class Tower(nn.Module):
    """What a stage holds of one modality: perhaps its pre, a run of its layers, perhaps its post."""

    def __init__(self, pre: nn.Module | None, layers: Sequence[nn.Module], post: nn.Module | None, recomputed: int):
        super().__init__()
        self.pre = pre
        self.layers = nn.ModuleList(layers)
        self.post = post
        self.recomputed = recomputed

    def run_layers(self, hidden: Tensor, angles: tuple[Tensor, Tensor], **arguments: object) -> Tensor:
        """Every layer in turn, the first `recomputed` ones under activation checkpointing. angles: cosines, sines."""
        for index, layer in enumerate(self.layers):
            run = partial(_run_layer, layer, arguments)
            if index < self.recomputed and torch.is_grad_enabled():
                # What a checkpoint keeps are its positional tensors.
                hidden = checkpoint(run, hidden, *angles, use_reentrant=False)
            else:
                hidden = run(hidden, *angles)
        return hidden


def _run_layer(
    layer: nn.Module, arguments: dict[str, object], hidden: Tensor, cosines: Tensor, sines: Tensor
) -> Tensor:
    return layer(hidden, position_embeddings=(cosines, sines), **arguments)


class Stage(nn.Module):
    """A contiguous piece of the chain. Its output is the loss where it holds `text.post`, else what the next one takes.

    The batch reaches every stage by keyword; a stage uses what its parts need (`wanted`). `hidden` is the tensor of the
    stage before it; the first has none.
    """

    def __init__(self, config: Qwen2VLConfig, vision: Tower | None, text: Tower | None) -> None:
        super().__init__()
        self.merge = config.vision_config.spatial_merge_size
        self.vision = vision
        self.text = text
        # The tables of rotary angles have no parameters; every stage that holds layers computes its own.
        self.vision_rotary = Qwen2VLVisionRotaryEmbedding(config.vision_config) if vision and vision.layers else None
        self.text_rotary = Qwen2VLRotaryEmbedding(config.text_config) if text and text.layers else None

    @property
    def wanted(self) -> tuple[str, ...]:
        """Names of the batch's tensors that its parts read."""
        names = []
        if self.vision is not None:
            names += ["pixel_values"] if self.vision.pre is not None else []
            names += ["image_grid"] if self.vision.layers else []
        if self.text is not None:
            names += ["input_ids"] if self.text.pre is not None else []
            names += ["position_ids"] if self.text.layers else []
            names += ["labels"] if self.text.post is not None else []
        return tuple(names)

    def forward(
        self,
        hidden: Tensor | None = None,
        *,
        pixel_values: Tensor | None = None,
        image_grid: Tensor | None = None,
        input_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        if self.vision is not None:
            if self.vision.pre is not None:
                hidden = self.vision.pre(pixel_values)
            if self.vision_rotary is not None:
                hidden = self._run_vision_layers(hidden, image_grid)
            if self.vision.post is not None:
                hidden = self.vision.post(hidden)
        if self.text is not None:
            if self.text.pre is not None:
                hidden = self.text.pre(hidden, input_ids)
            if self.text_rotary is not None:
                angles = self.text_rotary(hidden, position_ids.transpose(0, 1))
                # Without a mask, scaled_dot_product_attention runs with is_causal.
                hidden = self.text.run_layers(hidden, angles)
            if self.text.post is not None:
                hidden = self.text.post(hidden, labels)
        return hidden

    def _run_vision_layers(self, hidden: Tensor, image_grid: Tensor) -> Tensor:
        """Attention stays inside an image; the ends of images are kept on the CPU, where the layers split by them."""
        grid = image_grid.flatten(0, 1).cpu()
        angles = self.vision_rotary(hidden, get_vision_position_ids(grid, self.merge).to(hidden.device))
        return self.vision.run_layers(hidden, angles, cu_seqlens=get_vision_cu_seqlens(grid))


# ------------------------------------------------------------------------------------------------------- building


@dataclass(frozen=True)
class Recipe:
    """How parts are made: from which configuration, with which seed and spread of weights, on what, in which type.

    shard: divides a part among tensor parallel ranks. fill: gives a part weights from elsewhere, over those drawn.
    frozen: modality and role of the parts that do not train.
    """

    config: Qwen2VLConfig
    seed: int
    init_std_scale: float
    device: torch.device
    dtype: torch.dtype
    shard: Shard | None = None
    fill: Fill | None = None
    frozen: frozenset[tuple[str, str]] = frozenset()


def build_stage(recipe: Recipe, pieces: Iterable[Held]) -> Stage:
    """The stage that holds `pieces`, in the chain's order, ready to train."""
    held: dict[str, dict[str, list[nn.Module]]] = {
        modality: {"pre": [], "layer": [], "post": []} for modality in ("vision", "text")
    }
    recomputed = {"vision": 0, "text": 0}
    for piece in pieces:
        modality, role = piece.modality, piece.role
        for index in range(piece.first, piece.first + piece.count):
            held[modality][role].append(build_part(recipe, modality, role, index))
        recomputed[modality] += piece.recomputed
    towers = {
        modality: Tower(_only(parts["pre"]), parts["layer"], _only(parts["post"]), recomputed[modality])
        for modality, parts in held.items()
    }
    present = {m: t if t.layers or t.pre is not None or t.post is not None else None for m, t in towers.items()}
    stage = Stage(recipe.config, present["vision"], present["text"]).train()
    for rotary in (stage.vision_rotary, stage.text_rotary):
        if rotary is not None:
            rotary.to(recipe.device)
    return stage


def build_part(recipe: Recipe, modality: str, role: str, index: int) -> nn.Module:
    """One part with its weights drawn, of type `recipe.dtype`, divided among tensor parallel ranks if they are several.

    Memory on the device peaks at one whole part, whatever the model's size.
    """
    with torch.device("meta"):
        part = _MAKERS[modality, role](recipe.config, index)
    part = part.to_empty(device=recipe.device)
    name = f"{modality}.{role}.{index}"
    digest = hashlib.sha256(f"{recipe.seed} {name}".encode()).digest()
    generator = torch.Generator(recipe.device).manual_seed(int.from_bytes(digest[:7], "big"))
    for path, parameter in part.named_parameters():
        _draw(path, parameter.data, recipe.init_std_scale, generator)
    if recipe.fill is not None:
        recipe.fill(part, modality, role, index)
    part = part.to(recipe.dtype)
    if recipe.shard is not None:
        recipe.shard(part, f"{modality}_{role}")
    return part.requires_grad_((modality, role) not in recipe.frozen)


def count_frozen(stages: Sequence[Sequence[Held]], frozen: frozenset[tuple[str, str]]) -> int:
    """How many virtual stages come before the first that holds a part that trains."""
    trains = [any((piece.modality, piece.role) not in frozen for piece in pieces) for pieces in stages]
    return trains.index(True)


_MAKERS: dict[tuple[str, str], Callable[[Qwen2VLConfig, int], nn.Module]] = {
    ("vision", "pre"): lambda config, _: VisionPre(config),
    ("vision", "layer"): lambda config, _: Qwen2VLVisionBlock(config.vision_config),
    ("vision", "post"): lambda config, _: VisionPost(config),
    ("text", "pre"): lambda config, _: TextPre(config),
    ("text", "layer"): lambda config, index: Qwen2VLDecoderLayer(config.text_config, index),
    ("text", "post"): lambda config, _: TextPost(config),
}


def _draw(path: str, values: Tensor, std_scale: float, generator: torch.Generator) -> None:
    """Matrices are normal, biases zero, norms one: what Hugging Face's _init_weights does."""
    if path.endswith("bias"):
        values.zero_()
    elif values.dim() == 1:
        values.fill_(1.0)
    else:
        values.normal_(0.0, std_scale, generator=generator)


def _only(parts: list[nn.Module]) -> nn.Module | None:
    return parts[0] if parts else None


def output_of(
    piece: Held, config: Qwen2VLConfig, num_samples: int, shape: SampleShape, dtype: torch.dtype, trains: bool = True
) -> Tensor:
    """What a stage whose last piece is `piece` hands on for a micro-batch, as a tensor without storage.

    trains: whether that stage or one before it does, so that a gradient comes back.
    """
    vision, merge = config.vision_config, config.vision_config.spatial_merge_size
    tokens = num_samples * shape.image_tokens(merge)
    sizes: tuple[int, ...]
    if piece.modality == "text":
        sizes = (num_samples, shape.seq_length, config.text_config.hidden_size)
    elif piece.role == "post":
        sizes = (tokens, vision.hidden_size)
    else:
        sizes = (tokens * merge**2, vision.embed_dim)
    return torch.empty(sizes, device="meta", dtype=dtype, requires_grad=trains)
