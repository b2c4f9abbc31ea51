"""Models of examples that no class of transformers is as it stands: `trace --model subgraph_profiles.models:NAME`.

Each is the class that comes nearest, from configs/NAME.json, with what differs put right.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    Qwen2_5OmniThinkerConfig,
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen3MoeConfig,
    Qwen3MoeModel,
)

from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.model.readers.job_file import read_job
from mm_autoparallel.profilers.huggingface import make_subject, shard_model
from mm_autoparallel.profilers.subject import Build, Layout, Subject
from mm_autoparallel.profilers.tensor_shard import cross_entropy

_HERE = Path(__file__).parent


def moonlight_16b(workload: Workload) -> Subject:
    """DeepSeek-V3's class in Moonlight's sizes; its router computes in fp32, which the job's arguments leave open."""
    return _subject("moonlight_16b", workload)


def deepseek_v3(workload: Workload) -> Subject:
    """The class limits the groups of experts that a token chooses from; it has no module that predicts further."""
    return _subject("deepseek_v3", workload)


def three_level_network(workload: Workload) -> Subject:
    """Qwen2-VL's class without biases before attention, and with the plain GELU in its vision layers."""

    def adapt(live: Any) -> None:
        for layer in live.model.language_model.layers:
            for name in ("q_proj", "k_proj", "v_proj"):
                getattr(layer.self_attn, name).bias = None
        for block in live.model.visual.blocks:
            block.mlp.act = nn.GELU()

    return _subject("three_level_network", workload, adapt)


def qwen3vl_30b_a3b(workload: Workload) -> Subject:
    """Qwen2.5-VL's tower and projector before the decoder of Qwen3-MoE, as model_30b_a3b.json joins them."""

    def adapt(live: Any) -> None:
        text = live.config.get_text_config()
        config = Qwen3MoeConfig(
            vocab_size=text.vocab_size,
            hidden_size=text.hidden_size,
            num_hidden_layers=text.num_hidden_layers,
            num_attention_heads=text.num_attention_heads,
            num_key_value_heads=text.num_key_value_heads,
            head_dim=128,
            moe_intermediate_size=768,
            num_experts=128,
            num_experts_per_tok=8,
            norm_topk_prob=True,
            attn_implementation=text._attn_implementation,
            dtype=live.dtype,
        )
        live.model.language_model = _Decoder(config).to(live.dtype)

    return _subject("qwen3vl_30b_a3b", workload, adapt)


def qwen25_omni_7b() -> Subject:
    """The class of Qwen2.5-Omni's thinker, with the bias of keys that model_7b.json has in its audio layers too."""
    document, _ = _read("qwen25_omni_7b")
    layers = {"vision": "visual.blocks", "audio": "audio_tower.layers", "text": "language_model.layers"}
    post = {"vision": "visual.merger", "audio": "audio_tower.proj"}
    layout = Layout(*({name: f"model.{path}" for name, path in parts.items()} for parts in (layers, post)))

    def build_model(build: Build) -> nn.Module:
        config = Qwen2_5OmniThinkerConfig(**document)
        text, vision, audio = config.text_config, config.vision_config, config.audio_config
        text.num_hidden_layers, vision.depth = build.depth["text"], build.depth["vision"]
        audio.encoder_layers, text.layer_types = build.depth["audio"], text.layer_types[: build.depth["text"]]
        config._attn_implementation = "sdpa"
        with build.device:
            live: Any = Qwen2_5OmniThinkerForConditionalGeneration._from_config(config, dtype=torch.bfloat16)
        for layer in live.model.audio_tower.layers:
            projection = layer.self_attn.k_proj
            projection.bias = nn.Parameter(projection.weight.new_zeros(projection.out_features))
        live.model.visual.requires_grad_(False)
        live.model.audio_tower.requires_grad_(False)
        mesh = build.tp_mesh if build.tp_mesh is not None and build.tp_mesh.size() > 1 else None
        if mesh is not None:
            shard_model(live, layout, mesh, build.sequence_parallel)
        vars(live)["tp_mesh"] = mesh
        trained: nn.Module = live.train()
        return trained

    return Subject(build_model, _step_omni, torch.optim.AdamW, layout, sequence_parallel=True)


_FRAMES_PER_TOKEN = 4  # of the spectrum: two by a convolution, two by pooling


def _step_omni(live: Any, num_samples: int, workload: Workload) -> Tensor:
    """Samples that begin with their images, then their recordings, then text."""
    config, images, recordings = live.config, workload.images_per_sample, workload.audios_per_sample
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 1000, (num_samples, workload.seq_length), generator=generator)
    image_tokens, audio_tokens = workload.image_tokens_per_sample, workload.audio_tokens_per_sample
    tokens[:, :image_tokens] = config.image_token_id
    tokens[:, image_tokens + 1 : image_tokens + 1 + audio_tokens] = config.audio_token_id
    side, vision = 2 * math.isqrt(image_tokens // images), config.vision_config
    features = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    frames = _FRAMES_PER_TOKEN * audio_tokens // recordings
    sounds = num_samples * recordings
    labels = tokens.roll(-1, dims=1)
    logits = live(
        input_ids=tokens,
        pixel_values=torch.randn(num_samples * images * side * side, features, dtype=live.dtype),
        image_grid_thw=torch.tensor([[1, side, side]] * (num_samples * images)),
        input_features=torch.randn(sounds, config.audio_config.num_mel_bins, frames, dtype=live.dtype),
        feature_attention_mask=torch.ones(sounds, frames, dtype=torch.long),
        use_cache=False,
    ).logits
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), vars(live)["tp_mesh"])


class _Decoder(Qwen3MoeModel):
    """Qwen3-MoE's decoder called as Qwen2.5-VL calls its own, whose positions have three parts."""

    def forward(self, position_ids: Tensor | None = None, **kwargs: Any) -> Any:
        whole = position_ids[0] if position_ids is not None and position_ids.dim() == 3 else position_ids
        return super().forward(position_ids=whole, **kwargs)


def _subject(name: str, workload: Workload, adapt: Callable[[Any], None] = lambda _: None) -> Subject:
    document, config = _read(name)
    return make_subject(document, read_job(_job(name)).model, workload, config, adapt)


def _read(name: str) -> tuple[dict[str, Any], Path]:
    path = _HERE / "configs" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")), path


def _job(name: str) -> Path:
    return _HERE.parent / "examples" / name / "job.yaml"
