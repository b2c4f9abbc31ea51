"""Chains: order, kinds, what trains, where gradients go, what sticks together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm_autoparallel.model.blocks.chain import (
    Attention,
    Block,
    Chain,
    Experts,
    FeedForward,
    LatentAttention,
    OutputHead,
    PredictionModule,
    TokenEmbedding,
    TransformerLayer,
)
from mm_autoparallel.model.blocks.expand import expand
from mm_autoparallel.model.blocks.parameters import count_chain_parameters
from mm_autoparallel.model.job.layers import Experts as ExpertLayers
from mm_autoparallel.model.job.layers import LatentAttention as LatentSizes
from mm_autoparallel.model.job.layers import Layers, Window
from mm_autoparallel.model.job.model import Decoder, Encoder, Images, MelFrames, Model, Patches, Projector
from mm_autoparallel.model.readers.model_file import read_model

FIXTURES = Path(__file__).parents[1] / "fixtures" / "mindspeed_mm_models"
FILES = sorted(FIXTURES.glob("*.json"))


def read(name: str) -> Chain:
    return expand(read_model(FIXTURES / f"{name}.json"))


def named(chain: Chain, name: str) -> Block:
    return next(block for block in chain.blocks if block.name == name)


def flow(chain: Chain) -> dict[str, tuple[bool, bool]]:
    """Block → (trains, passes a gradient on to what is before it)."""
    return {block.name: (block.trainable, block.propagates_gradient) for block in chain.blocks}


def small(vision: bool = True, audio: bool = True, text_layers: Layers | None = None) -> Model:
    layers = Layers(num_layers=2, hidden_size=64, ffn_size=128, num_heads=4, norm="layer")
    projector = Projector(layer_sizes=(64, 64))
    encoders = (
        Encoder(name="vision", stem=Patches(in_features=588), layers=layers, projector=projector),
        Encoder(name="audio", stem=MelFrames(num_mel_bins=80), layers=layers, projector=projector),
    )
    return Model(
        encoders=tuple(e for e, wanted in zip(encoders, (vision, audio), strict=True) if wanted),
        text=Decoder(vocab_size=100, layers=text_layers or layers),
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_model_is_a_chain_in_order(path: Path) -> None:
    model = read_model(path)
    chain = expand(model)
    assert chain.modalities == tuple(modality.name for modality in model.modalities)
    names = [block.name for block in chain.blocks]
    assert len(set(names)) == len(names)
    for modality in model.modalities:
        own = [block for block in chain.blocks if block.modality == modality.name]
        assert (own[0].name, own[-1].name) == (f"{modality.name}_pre", f"{modality.name}_post")
        assert [block.role for block in own] == sorted((b.role for b in own), key=["pre", "layer", "post"].index)
        assert chain.num_layers(modality.name) == modality.layers.num_layers
    kinds = {}
    for block in chain.blocks:
        assert kinds.setdefault(block.kind, block.structure) == block.structure


def test_qwen2vl_is_one_kind_a_modality() -> None:
    chain = read("qwen2vl_72b")
    assert [(block.name, block.count) for block in chain.blocks] == [
        ("vision_pre", 1),
        ("vision_layer", 32),
        ("vision_post", 1),
        ("text_pre", 1),
        ("text_layer", 80),
        ("text_post", 1),
    ]


def test_window_and_full_attention_alternate() -> None:
    layers = [block for block in read("qwen2.5vl_7b").blocks if block.role == "layer" and block.modality == "vision"]
    assert [(block.name, block.kind, block.count) for block in layers] == [
        entry
        for start in (0, 8, 16, 24)
        for entry in (
            (f"vision_window_layer_{start}", "vision_window_layer", 7),
            (f"vision_full_layer_{start + 7}", "vision_full_layer", 1),
        )
    ]
    spans = [b.structure.attention.span_tokens for b in layers if isinstance(b.structure, TransformerLayer)]
    assert spans == [64, None] * 4


def test_audio_attends_within_chunks_and_is_one_kind() -> None:
    (layers,) = [
        block for block in read("qwen2.5omni_7b").blocks if block.modality == "audio" and block.role == "layer"
    ]
    assert isinstance(layers.structure, TransformerLayer)
    assert (layers.name, layers.count, layers.structure.attention.span_tokens) == ("audio_layer", 32, 100)
    assert not layers.structure.attention.causal


def test_dense_layers_come_before_experts() -> None:
    experts = ExpertLayers(num_experts=8, top_k=2, ffn_size=32, shared_ffn_size=48, dense_layers=(0, 1))
    layers = Layers(num_layers=6, hidden_size=64, ffn_size=128, num_heads=4, norm="rms", experts=experts)
    chain = expand(small(vision=False, audio=False, text_layers=layers))
    dense, sparse = [block for block in chain.blocks if block.role == "layer"]
    assert (dense.name, dense.count, sparse.name, sparse.count) == ("text_dense_layer", 2, "text_expert_layer", 4)
    assert isinstance(dense.structure, TransformerLayer)
    assert isinstance(sparse.structure, TransformerLayer)
    assert dense.structure.mlp == FeedForward(128)
    assert sparse.structure.mlp == Experts(8, 2, FeedForward(32), shared=FeedForward(48))
    assert dense.structure.attention.causal


def test_vision_frozen_whole_has_no_backward_and_text_trains() -> None:
    """Qwen2-VL-72B as its file has it."""
    assert flow(read("qwen2vl_72b")) == {
        "vision_pre": (False, False),
        "vision_layer": (False, False),
        "vision_post": (False, False),
        "text_pre": (True, False),
        "text_layer": (True, True),
        "text_post": (True, True),
    }
    assert not named(read("qwen2vl_72b"), "vision_layer").has_backward


def test_a_projector_that_trains_behind_a_frozen_encoder() -> None:
    """InternVL2: gradients stop at the projector."""
    assert flow(read("internvl2_8b")) == {
        "vision_pre": (False, False),
        "vision_layer": (False, False),
        "vision_post": (True, False),
        "text_pre": (True, True),
        "text_layer": (True, True),
        "text_post": (True, True),
    }


def test_gradients_pass_through_a_frozen_decoder_to_what_trains_before_it() -> None:
    model = small(audio=False).with_freeze({"text": True, "vision": True, "vision_projector": False})
    assert flow(expand(model))["text_layer"] == (False, True)
    assert flow(expand(model))["text_pre"] == (False, True)
    assert flow(expand(model))["text_post"] == (False, True)
    frozen = expand(model.with_freeze({"vision_projector": True}))
    assert not any(block.has_backward for block in frozen.blocks)


def test_an_encoder_gets_no_gradient_from_another() -> None:
    chain = expand(small().with_freeze({"vision": False, "audio": True, "audio_projector": True}))
    assert flow(chain)["vision_layer"] == (True, True)
    assert flow(chain)["vision_pre"] == (True, False)
    assert flow(chain)["audio_layer"] == (False, False)
    assert flow(chain)["audio_post"] == (False, False)
    names = [block.name for block in chain.blocks]
    assert chain.sends_gradient(names.index("audio_layer"))  # the gradient of vision passes by on its way back
    assert not expand(small().with_freeze({"audio": False})).sends_gradient(names.index("vision_layer"))


@given(
    freeze=st.dictionaries(
        st.sampled_from(["vision", "vision_projector", "audio", "audio_projector", "text"]), st.booleans()
    )
)
def test_who_propagates_is_who_depends_on_something_that_trains(freeze: dict[str, bool]) -> None:
    """Against a walk over what each block's input depends on."""
    blocks = expand(small().with_freeze(freeze)).blocks
    for index, block in enumerate(blocks):
        before = [b for b in blocks[:index] if block.modality in ("text", b.modality)]
        assert block.propagates_gradient == any(b.trainable for b in before)


def test_what_must_share_a_stage() -> None:
    marks = {block.name: (block.attach, block.pinned) for block in expand(small()).blocks}
    assert marks == {
        "vision_pre": ("next", None),
        "vision_layer": (None, None),
        "vision_post": ("previous", None),
        "audio_pre": ("next", None),
        "audio_layer": (None, None),
        "audio_post": ("previous", None),
        "text_pre": ("next", None),
        "text_layer": (None, None),
        "text_post": (None, "last"),
    }


def test_llava_keeps_clips_last_norm_and_qwen3_its_inner_projectors() -> None:
    folder = FIXTURES.parent / "huggingface"
    llava = expand(read_model(folder / "llava_1_5_7b.json"))
    assert [b.name for b in llava.blocks if b.role == "post"] == ["vision_norm", "vision_post", "text_post"]
    assert not named(llava, "vision_norm").trainable
    qwen3 = named(expand(read_model(folder / "qwen3_vl_30b_a3b.json")), "vision_deepstack")
    assert (qwen3.count, qwen3.trainable, qwen3.attach) == (3, True, "previous")


def test_windows_of_text_like_names_do_not_leak_into_uniform_layers() -> None:
    """A window without full layers is one kind, and is called like one."""
    layers = Layers(num_layers=3, hidden_size=64, ffn_size=128, num_heads=4, norm="rms", window=Window(num_tokens=16))
    chain = expand(small(vision=False, audio=False, text_layers=layers))
    assert [block.name for block in chain.blocks] == ["text_pre", "text_layer", "text_post"]


GPT_LAYERS = Layers(num_layers=4, hidden_size=64, ffn_size=256, num_heads=4, norm="layer", gated=False, rotary=False)


def test_learned_positions_and_masked_heads_stand_at_the_ends() -> None:
    bert = Decoder(vocab_size=100, layers=GPT_LAYERS, num_positions=32, causal=False, masked=True, tied=True)
    pre, layer, post = expand(Model(text=bert)).blocks
    assert pre.structure == TokenEmbedding(100, 64, num_positions=32, num_types=2)
    assert post.structure == OutputHead(100, 64, "layer", tied=True, masked=True)
    assert isinstance(layer.structure, TransformerLayer)
    assert layer.structure.attention == Attention(4, 4, 16, causal=False, rotary=False)


def test_prediction_modules_lie_before_the_head_on_its_stage() -> None:
    experts = ExpertLayers(num_experts=8, top_k=2, ffn_size=32, dense_layers=(0,))
    layers = GPT_LAYERS.model_copy(update={"experts": experts})
    chain = expand(Model(text=Decoder(vocab_size=100, layers=layers, num_mtp=2)))
    module, head = chain.blocks[-2:]
    assert (module.name, module.count, module.pinned, head.name) == ("text_mtp", 2, "last", "text_post")
    assert module.structure == PredictionModule(chain.blocks[2].structure, 100)  # type: ignore[arg-type]
    assert chain.num_layers("text") == 4


def test_latent_attention_gives_heads_their_sizes() -> None:
    latent = LatentSizes(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12)
    layers = Layers(num_layers=1, hidden_size=64, ffn_size=128, num_heads=4, norm="rms", latent=latent)
    assert (layers.head_dim, layers.num_kv_groups) == (24, 4)
    structure = expand(Model(text=Decoder(vocab_size=100, layers=layers))).blocks[1].structure
    assert isinstance(structure, TransformerLayer)
    assert structure.attention == LatentAttention(4, 0, 32, 16, 8, 12)


DIT = {"in_features": 16, "bias": True}
DIT_LAYERS = {
    "num_layers": 28,
    "hidden_size": 1152,
    "ffn_size": 4608,
    "num_heads": 16,
    "norm": "layer",
    "gated": False,
    "mlp_bias": True,
    "qkv_bias": True,
    "output_bias": True,
    "rotary": False,
    "modulated": True,
}


def test_dit_by_its_published_count() -> None:
    """DiT-XL/2 at 256 x 256 (Peebles & Xie 2022): 675,129,632, of which 256 fixed positions of 1152 are not trained."""
    images = Images(stem=Patches(**DIT), num_outputs=32, pooled=False, num_labels=1001)
    model = Model(text=Decoder(layers=Layers(**DIT_LAYERS), images=images, causal=False))
    chain = expand(model)
    assert [block.name for block in chain.blocks] == ["text_pre", "text_layer", "text_post"]
    assert count_chain_parameters(chain) == 675_129_632 - 256 * 1152


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 10}, "a model of images has no vocab_size"),
        ({"causal": True}, "causal is false"),
        ({"images": None}, "vocab_size is missing"),
        ({"images": None, "vocab_size": 10}, "modulated layers need a condition"),
        ({"images": Images(stem=Patches(**DIT), num_outputs=32)}, "modulated layers and images.num_labels go together"),
        ({"layers": {**DIT_LAYERS, "norm": "rms"}}, "modulated layers have layer norms"),
    ],
)
def test_what_models_of_images_cannot_be(changes: dict[str, Any], words: str) -> None:
    images = Images(stem=Patches(**DIT), num_outputs=32, pooled=False, num_labels=1001)
    fields = {"layers": DIT_LAYERS, "images": images, "causal": False} | changes
    with pytest.raises(ValueError, match=words):
        Decoder(**fields)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_kv_groups": 2}, "leave num_kv_groups and head_dim out"),
        ({"head_dim": 16}, "leave num_kv_groups and head_dim out"),
        ({"qk_norm": "head"}, "knows no qkv_bias, qk_norm or window"),
    ],
)
def test_what_latent_attention_cannot_be(changes: dict[str, Any], words: str) -> None:
    latent = LatentSizes(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12)
    fields = {"num_layers": 1, "hidden_size": 64, "ffn_size": 8, "num_heads": 4, "norm": "rms", "latent": latent}
    with pytest.raises(ValueError, match=words):
        Layers(**(fields | changes))
