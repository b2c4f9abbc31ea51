"""Real Hugging Face classes, tiny, and MindSpeed-MM's attribute names: layers found, parts right, gradients equal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import transformers  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from mm_autoparallel.profilers.layout import find_layout  # noqa: E402
from mm_autoparallel.profilers.split import Part, Split, backward_parts, find_split, run_cut  # noqa: E402
from mm_autoparallel.profilers.split_check import check_split, structural_kind  # noqa: E402
from mm_autoparallel.profilers.transformers_releases import fitting, is_older_than, read_config  # noqa: E402

if is_older_than(4, 52):
    pytest.skip("transformers before 4.52 keeps the parts of these models elsewhere", allow_module_level=True)

Step = Callable[[], Tensor]

TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
TEXT = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    **TOKENS,
}
IMAGE_TOKEN = 60
QWEN_IDS = {
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": 61,
    "vision_start_token_id": 62,
    "vision_end_token_id": 63,
    **TOKENS,
}


@dataclass(frozen=True)
class Case:
    """A model on a batch. layers, post: what its Layout must be. vision_pre: modules that must be in that part."""

    model: nn.Module
    step: Step
    layers: dict[str, str]
    post: dict[str, str]
    ends: dict[str, tuple[str, ...]]


CLIP = "model.vision_tower.vision_model" if is_older_than(5) else "model.vision_tower"
SQUARES = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "image_size": 4}


def build(model_type: str, name: str, text: dict[str, Any], vision: dict[str, Any], **keys: Any) -> Any:
    """A class of transformers, which may be older than it."""
    document = {"model_type": model_type, "text_config": text, "vision_config": vision, **keys}
    made = getattr(transformers, f"{name}ForConditionalGeneration", None)
    if made is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    return made(read_config(document)).train()


def qwen_batch(model: nn.Module, patch_features: int) -> Step:
    """Two samples of twelve tokens, four of them of an image of 4 × 4 patches."""
    ids = torch.randint(2, 50, (2, 12))
    ids[:, 3], ids[:, 4:8] = 62, IMAGE_TOKEN
    pixels, grid = torch.randn(32, patch_features), torch.tensor([[1, 4, 4], [1, 4, 4]])
    kinds = (ids == IMAGE_TOKEN).int()
    named = {"input_ids": ids, "pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": kinds}
    batch = fitting(named, model)
    return lambda: model(**batch, labels=ids).loss


def qwen2_vl() -> Case:
    rope = {"rope_type": "default", "mrope_section": [1, 1, 0], "rope_theta": 1e4}
    vision = {"depth": 2, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "mlp_ratio": 2, "patch_size": 2}
    text = TEXT | {"model_type": "qwen2_vl_text", "rope_parameters": rope}
    model = build("qwen2_vl", "Qwen2VL", text, vision, tie_word_embeddings=True, **QWEN_IDS)
    return Case(
        model,
        qwen_batch(model, 3 * 2 * 2 * 2),
        {"vision": "model.visual.blocks", "text": "model.language_model.layers"},
        {"vision": "model.visual.merger"},
        {
            "vision_pre": ("model.visual.patch_embed",),
            "vision_post": ("model.visual.merger",),
            "text_pre": ("model.language_model.embed_tokens",),
            "text_post": ("model.language_model.norm", "lm_head"),
        },
    )


def qwen2_5_vl() -> Case:
    rope = {"rope_type": "default", "mrope_section": [1, 1, 0], "rope_theta": 1e4}
    vision = {
        "depth": 3,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "patch_size": 2,
        "out_hidden_size": 16,
        "window_size": 8,
        "fullatt_block_indexes": [1],
    }
    text = TEXT | {"model_type": "qwen2_5_vl_text", "rope_parameters": rope}
    model = build("qwen2_5_vl", "Qwen2_5_VL", text, vision, **QWEN_IDS)
    return Case(
        model,
        qwen_batch(model, 3 * 2 * 2 * 2),
        {"vision": "model.visual.blocks", "text": "model.language_model.layers"},
        {"vision": "model.visual.merger"},
        {
            "vision_pre": ("model.visual.patch_embed",),
            "vision_post": ("model.visual.merger",),
            "text_pre": ("model.language_model.embed_tokens",),
            "text_post": ("model.language_model.norm", "lm_head"),
        },
    )


def qwen3_vl() -> Case:
    rope = {"rope_type": "default", "mrope_section": [1, 1, 0], "rope_theta": 1e4}
    vision = {
        "depth": 3,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "patch_size": 2,
        "out_hidden_size": 16,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 1],
    }
    text = TEXT | {"model_type": "qwen3_vl_text", "head_dim": 4, "rope_parameters": rope}
    model = build("qwen3_vl", "Qwen3VL", text, vision, **QWEN_IDS)
    return Case(
        model,
        qwen_batch(model, 3 * 2 * 2 * 2),
        {"vision": "model.visual.blocks", "text": "model.language_model.layers"},
        {"vision": "model.visual.merger"},
        {
            "vision_pre": ("model.visual.patch_embed", "model.visual.pos_embed"),
            "vision_post": (
                "model.visual.deepstack_merger_list.0",
                "model.visual.deepstack_merger_list.1",
                "model.visual.merger",
            ),
            "text_pre": ("model.language_model.embed_tokens",),
            "text_post": ("model.language_model.norm", "lm_head"),
        },
    )


def image_batch(model: nn.Module, num_tokens: int) -> Step:
    """Two samples of twelve tokens with one image of 4 × 4 pixels each."""
    ids = torch.randint(2, 50, (2, 12))
    ids[:, 1 : 1 + num_tokens] = IMAGE_TOKEN
    pixels = torch.randn(2, 3, 4, 4)
    return lambda: model(input_ids=ids, pixel_values=pixels, labels=ids).loss


def llava() -> Case:
    vision = SQUARES | {"model_type": "clip_vision_model", "num_hidden_layers": 3, "patch_size": 2}
    model = build("llava", "Llava", TEXT | {"model_type": "llama"}, vision, image_token_index=IMAGE_TOKEN)
    return Case(
        model,
        image_batch(model, 4),
        {"vision": f"{CLIP}.encoder.layers", "text": "model.language_model.layers"},
        {"vision": "model.multi_modal_projector"},
        {
            "vision_pre": (f"{CLIP}.embeddings", f"{CLIP}.pre_layrnorm"),
            "vision_post": (f"{CLIP}.post_layernorm", "model.multi_modal_projector"),
            "text_pre": ("model.language_model.embed_tokens",),
            "text_post": ("model.language_model.norm", "lm_head"),
        },
    )


def internvl() -> Case:
    vision = SQUARES | {"model_type": "internvl_vision", "num_hidden_layers": 2, "patch_size": 1}
    text = TEXT | {"model_type": "qwen2"}
    model = build("internvl", "InternVL", text, vision, image_token_id=IMAGE_TOKEN, tie_word_embeddings=False)
    return Case(
        model,
        image_batch(model, 4),
        {"vision": "model.vision_tower.encoder.layer", "text": "model.language_model.layers"},
        {"vision": "model.multi_modal_projector"},
        {
            "vision_pre": ("model.vision_tower.embeddings",),
            "vision_post": ("model.multi_modal_projector",),
            "text_pre": ("model.language_model.embed_tokens",),
            "text_post": ("model.language_model.norm", "lm_head"),
        },
    )


def llama() -> Case:
    config = transformers.LlamaConfig(**TEXT, attention_dropout=0.5)
    model = transformers.LlamaForCausalLM(config).train()
    ids = torch.randint(2, 50, (2, 12))
    return Case(
        model,
        lambda: model(input_ids=ids, labels=ids).loss,
        {"text": "model.layers"},
        {},
        {"text_pre": ("model.embed_tokens",), "text_post": ("model.norm", "lm_head")},
    )


class Layer(nn.Module):
    """Takes its hidden state by name and gives a pair, as Megatron-LM's layers do."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(size), nn.Linear(size, size)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor, None]:
        return hidden_states + self.mlp(self.norm(hidden_states)), attention_mask


class Layers(nn.Module):
    def __init__(self, size: int, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(size) for _ in range(count)])

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden, _ = layer(hidden_states=hidden, attention_mask=None)
        return hidden


class Encoder(nn.Module):
    """`blocks` holds the layers; audio has its projector inside and calls it once for every recording."""

    def __init__(self, features: int, size: int, out_size: int | None) -> None:
        super().__init__()
        self.patch_embed, self.blocks = nn.Linear(features, size), Layers(size, 2)
        self.proj = nn.Linear(size, out_size) if out_size else None

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.blocks(self.patch_embed(inputs))
        return torch.cat([self.proj(recording) for recording in hidden.split(2)]) if self.proj else hidden


class Modality(nn.Module):
    def __init__(self, features: int, size: int, out_size: int, inner_projector: bool) -> None:
        super().__init__()
        self.encoder = Encoder(features, size, out_size if inner_projector else None)
        self.projector = None if inner_projector else nn.Linear(size, out_size)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.encoder(inputs)
        return self.projector(hidden) if self.projector else hidden


class Decoder(nn.Module):
    def __init__(self, vocab_size: int, size: int) -> None:
        super().__init__()
        self.embedding, self.decoder = nn.Embedding(vocab_size, size), Layers(size, 3)
        self.output_layer = nn.Linear(size, vocab_size, bias=False)

    def forward(self, decoder_input: Tensor) -> Tensor:
        return self.output_layer(self.decoder(decoder_input))


class VLMModel(nn.Module):
    """MindSpeed-MM's names; image tokens are put among the embedded text in place, then audio runs."""

    def __init__(self) -> None:
        super().__init__()
        self.image_encoder = Modality(6, 8, 12, inner_projector=False)
        self.audio_encoder = Modality(5, 4, 12, inner_projector=True)
        self.text_decoder = Decoder(20, 12)

    def forward(self, ids: Tensor, images: Tensor, audio: Tensor) -> Tensor:
        vision = self.image_encoder(images)
        embedded = self.text_decoder.embedding(ids).clone()
        embedded[0:3] = vision
        embedded[4:8] = self.audio_encoder(audio)
        return nn.functional.cross_entropy(self.text_decoder(embedded), ids)


def mindspeed_mm() -> Case:
    model = VLMModel()
    ids, images, audio = torch.randint(20, (10,)), torch.randn(3, 6), torch.randn(4, 5)
    return Case(
        model,
        lambda: model(ids, images, audio),
        {
            "vision": "image_encoder.encoder.blocks.layers",
            "audio": "audio_encoder.encoder.blocks.layers",
            "text": "text_decoder.decoder.layers",
        },
        {"vision": "image_encoder.projector", "audio": "audio_encoder"},
        {
            "vision_pre": ("image_encoder.encoder.patch_embed",),
            "vision_post": ("image_encoder.projector",),
            "audio_pre": ("audio_encoder.encoder.patch_embed",),
            "audio_post": ("audio_encoder.encoder.proj",),
            "text_pre": ("text_decoder.embedding",),
            "text_post": ("text_decoder.output_layer",),
        },
    )


CASES = [qwen2_vl, qwen2_5_vl, qwen3_vl, llava, internvl, llama, mindspeed_mm]


@pytest.fixture(params=CASES, ids=lambda make: make.__name__)
def case(request: pytest.FixtureRequest) -> Case:
    torch.set_num_threads(1)
    torch.manual_seed(7)
    return request.param()


def part_named(split: Split, name: str) -> Part:
    return next(part for part in split.parts if part.name == name)


def test_the_layout_is_found(case: Case) -> None:
    found = find_layout(case.model)
    assert (dict(found.layers), dict(found.post)) == (case.layers, case.post)


def test_gradients_equal_those_of_the_whole_model(case: Case) -> None:
    case.step().backward()
    reached = [name for name, parameter in case.model.named_parameters() if parameter.grad is not None]
    assert len(reached) > len(list(case.model.parameters())) / 2
    check_split(case.model, find_layout(case.model), case.step)


def test_modules_lie_in_their_parts(case: Case) -> None:
    split = find_split(case.model, find_layout(case.model), case.step)
    ends = {part.name: part.modules for part in split.parts if part.role != "layer"}
    assert ends == case.ends
    held = {id(parameter) for part in split.parts for parameter in part.parameters}
    assert held == {id(parameter) for parameter in case.model.parameters()}


def test_layers_of_one_modality_are_of_one_kind(case: Case) -> None:
    layout = find_layout(case.model)
    for path in layout.layers.values():
        assert len({structural_kind(layer) for layer in case.model.get_submodule(path)}) == 1


def test_stubs_give_the_ends_gradients_without_running_a_layer(case: Case) -> None:
    layout = find_layout(case.model)
    split = find_split(case.model, layout, case.step)
    runs = run_cut(case.model, layout, case.step, stub_layers=True, split=split)
    backward_parts(runs)
    for part in split.parts:
        trained = [parameter.grad is not None for parameter in part.parameters]
        if part.role == "layer":
            assert not any(trained), part.name
    for end in ("vision_pre", "vision_post", "text_pre", "text_post"):
        if end in case.ends:
            assert any(parameter.grad is not None for parameter in part_named(split, end).parameters), end


def test_a_frozen_encoder_keeps_its_parts_and_gets_no_gradient(case: Case) -> None:
    layout = find_layout(case.model)
    if "vision" not in layout.layers:
        pytest.skip("text only")
    whole = find_split(case.model, layout, case.step)
    for part in whole.parts:
        for parameter in part.parameters if part.modality == "vision" and part.role != "post" else ():
            parameter.requires_grad_(False)
    check_split(case.model, layout, case.step)
    split = find_split(case.model, layout, case.step)
    assert [part.modules for part in split.parts] == [part.modules for part in whole.parts]
    runs = {run.part.name: run for run in run_cut(case.model, layout, case.step, split=split)}
    assert runs["vision_layer_0"].outputs == () == runs["vision_layer_0"].inputs
    assert len(runs["vision_post"].outputs) > 0
    assert runs["vision_post"].inputs == ()


def test_an_encoder_run_without_gradients_is_told_by_the_clock() -> None:
    torch.manual_seed(0)
    case = qwen2_vl()
    visual = case.model.model.visual
    visual.forward = torch.no_grad()(visual.forward)
    split = find_split(case.model, find_layout(case.model), case.step)
    assert {name: part_named(split, name).modules for name in case.ends} == case.ends


def test_tied_weights_belong_to_both_ends() -> None:
    case = qwen2_vl()
    split = find_split(case.model, find_layout(case.model), case.step)
    table = case.model.get_input_embeddings().weight
    holders = [part.name for part in split.parts if any(parameter is table for parameter in part.parameters)]
    assert holders == ["text_pre", "text_post"]


def test_deepstack_is_part_of_the_encoders_end_and_told() -> None:
    torch.manual_seed(0)
    case = qwen3_vl()
    remarks = check_split(case.model, find_layout(case.model), case.step)
    assert any("What vision_post gives is read by text_layer_1" in remark for remark in remarks), remarks


def test_a_layer_that_the_projector_leaves_out_is_told() -> None:
    torch.manual_seed(0)
    case = llava()
    remarks = check_split(case.model, find_layout(case.model), case.step)
    assert any("reads the output of vision_layer_2" in remark for remark in remarks), remarks
    assert any("What vision_layer_1 gives is read by vision_post" in remark for remark in remarks), remarks


def test_parts_open_and_close_around_what_they_own() -> None:
    case = qwen2_vl()
    layout = find_layout(case.model)
    told: list[str] = []
    run_cut(case.model, layout, case.step, lambda part: told.append(part.name), lambda part: told.append("/"))
    opened = [name for name in told if name != "/"]
    assert told == [word for name in opened for word in (name, "/")]
    # text is embedded before the patches are
    assert opened[:3] == ["vision_pre", "text_pre", "vision_pre"]
    assert opened[3:] == [
        *("vision_layer_0", "vision_layer_1", "vision_post", "text_pre"),
        *("text_layer_0", "text_layer_1", "text_layer_2", "text_post"),
    ]


def test_a_layers_call_can_be_repeated() -> None:
    case = llama()
    layout = find_layout(case.model)
    run = run_cut(case.model, layout, case.step)[1]
    assert run.part.name == "text_layer_0"
    assert run.kwargs["past_key_values"] is None
    layer = case.model.get_submodule(run.part.modules[0]).eval()
    again = [layer(*run.args, **run.kwargs) for _ in range(2)]
    assert torch.equal(*again)
    assert again[0].shape == run.args[0].shape
