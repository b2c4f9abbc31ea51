"""Families of MindSpeed-MM's model.json beside Qwen2-VL's and InternVL's: each part has its published size."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from edited import set_value

from mm_autoparallel.errors import JobError
from mm_autoparallel.integrations.huggingface.config import read_huggingface
from mm_autoparallel.integrations.mindspeed_mm.model_reader import read_mindspeed_mm
from mm_autoparallel.model.blocks.chain import AudioStem
from mm_autoparallel.model.blocks.expand import expand
from mm_autoparallel.model.blocks.parameters import count_chain_parameters, count_parameters
from mm_autoparallel.model.blocks.tokens import count_tokens
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.model.operators.ends import list_operators
from mm_autoparallel.model.operators.operators import Share
from mm_autoparallel.model.readers.foreign import Section
from mm_autoparallel.model.readers.model_file import read_model

FOLDER = Path(__file__).parents[1] / "fixtures" / "mindspeed_mm_families"
VISION = "image_encoder.vision_encoder"


def read(name: str) -> Model:
    return read_model(FOLDER / f"{name}.json")


def parts(model: Model) -> dict[str, int]:
    """Parameters by part: the tower with its stem and norms, its projectors, the text with its ends."""
    found: Counter[str] = Counter()
    for block in expand(model).blocks:
        projector = block.name in ("vision_post", "vision_deepstack")
        found[block.name if projector else block.modality] += block.count * count_parameters(block.structure)
    return dict(found)


def changed(name: str, key: str, value: Any) -> Section:
    """The file `name` with the value at the dotted `key` replaced, or removed where it is `...`."""
    document = json.loads((FOLDER / f"{name}.json").read_text())
    set_value(document, key, value)
    return Section(document, Path("model.json"))


@pytest.mark.parametrize(
    ("name", "vision", "projector", "deepstack", "text"),
    [
        # CLIP ViT-L/14-336 without its last norm (2 x 1024), vicuna-7b-v1.5
        ("llava1.5_7b", 303_507_456 - 2048, 1024 * 4096 + 4096 + 4096 * 4096 + 4096, 0, 6_738_415_616),
        # SigLIP-so400m/14-384 without its pooling head; two matrices and the tokens of line ends and views
        ("deepseekvl2_27b", 412_987_248, 4608 * 2560 + 2560 + 2560 * 2560 + 2560 + 2 * 2560, 0, 27_033_546_240),
        # zai-org/GLM-4.1V-9B-Thinking
        ("glm4.1v_9b", 682_246_656, 185_081_856 + 25_169_920, 0, 9_400_279_040),
        # Qwen/Qwen3-VL-8B-Instruct and Qwen/Qwen3-VL-30B-A3B-Instruct
        ("qwen3vl_8b", 415_891_440, 40_119_040, 120_377_856, 8_190_735_360),
        ("qwen3vl_30b_a3b", 415_891_440, 30_679_808, 92_060_160, 30_532_122_624),
    ],
)
def test_parameters_of_every_part(name: str, vision: int, projector: int, deepstack: int, text: int) -> None:
    """As transformers 5.23 counts its classes of these sizes (SiglipVisionModel, DeepseekV3ForCausalLM and others)."""
    found = parts(read(name))
    assert found["text"] == text
    assert found["vision_post"] == projector
    assert found.get("vision_deepstack", 0) == deepstack
    assert found["vision"] == vision


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("glm4.1v_9b", 10_292_777_472),
        ("qwen3vl_8b", 8_767_123_696),
        ("qwen3vl_30b_a3b", 31_070_754_032),
    ],
)
def test_totals_of_published_checkpoints(name: str, total: int) -> None:
    assert count_chain_parameters(expand(read(name))) == total


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("qwen3_vl_8b", 8_767_123_696),
        ("qwen3_vl_32b", 33_357_390_064),
        ("qwen3_vl_235b_a22b", 235_670_022_896),
        ("glm4_5v", 107_710_927_360),
        ("magistral_small_2509", 24_011_361_280),
        ("internvl3_5_30b_a3b", 30_848_730_112),
        ("qwen3_omni_30b_a3b", 31_719_205_488),
        ("qwen3_asr_1_7b", 2_038_052_480),
        ("step3_vl_10b", 10_171_750_144),
    ],
)
def test_totals_of_configs_that_scripts_name(name: str, total: int) -> None:
    """As transformers counts its classes, and the model pages give them."""
    assert count_chain_parameters(expand(read_model(FOLDER.parent / "mindspeed_mm_configs" / f"{name}.json"))) == total


def config(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((FOLDER.parent / "mindspeed_mm_configs" / f"{name}.json").read_text())
    return document


def read_config(document: dict[str, Any]) -> Model:
    return read_huggingface(Section(document, Path("config.json")))


def count_of_class(torch: Any, build: Any) -> int:
    with torch.device("meta"):
        return sum(weight.numel() for weight in build().parameters())


@pytest.mark.slow
def test_parameters_of_speech_models_are_those_of_their_classes() -> None:
    """Qwen3-Omni's thinker; Qwen3-ASR in the form of its own code and in that of transformers."""
    torch = pytest.importorskip("torch")
    omni = pytest.importorskip("transformers.models.qwen3_omni_moe")
    asr = pytest.importorskip("transformers.models.qwen3_asr")
    thinker = config("qwen3_omni_30b_a3b")["thinker_config"]
    sizes = omni.Qwen3OmniMoeThinkerConfig(**thinker)
    found = count_of_class(torch, lambda: omni.Qwen3OmniMoeThinkerForConditionalGeneration(sizes))
    assert count_chain_parameters(expand(read_config(thinker))) == found
    own = config("qwen3_asr_1_7b")["thinker_config"]
    parts = {
        "audio_config": own["audio_config"] | {"model_type": "qwen3_asr_encoder"},
        "text_config": own["text_config"] | {"model_type": "qwen3"},
    }
    found = count_of_class(torch, lambda: asr.Qwen3ASRForConditionalGeneration(asr.Qwen3ASRConfig(**parts)))
    for document in (config("qwen3_asr_1_7b"), {"model_type": "qwen3_asr"} | parts):
        assert count_chain_parameters(expand(read_config(document))) == found


def test_parameters_of_step3_vl_are_those_of_its_parts() -> None:
    """Its own code is not in transformers; its tower with the convolutions is Step3.7's there, its decoder Qwen3's."""
    torch = pytest.importorskip("torch")
    step = pytest.importorskip("transformers.models.step3p7")
    qwen = pytest.importorskip("transformers.models.qwen3")
    document = config("step3_vl_10b")
    tower, text = step.Step3p7VisionConfig(**document["vision_config"]), qwen.Qwen3Config(**document["text_config"])
    found = count_of_class(torch, lambda: step.Step3p7VisionModel(tower))
    found += count_of_class(torch, lambda: qwen.Qwen3ForCausalLM(text)) + 6144 * 4096
    assert count_chain_parameters(expand(read_config(document))) == found


def test_speech_becomes_tokens_by_convolutions() -> None:
    """Eight mel frames a token; layers see the tokens of 800 frames, of which every 100 are 13."""
    audio = read_config(config("qwen3_asr_1_7b")).encoders[0]
    assert audio.layers.window is not None
    assert audio.layers.window.num_tokens == 8 * 13
    tokens = count_tokens(audio, Workload(global_batch_size=1, seq_length=512, audio_tokens_per_sample=104))
    assert (tokens.input_tokens, tokens.layer_tokens, tokens.output_tokens) == (832, 104, 104)
    stem = AudioStem(num_mel_bins=128, hidden_size=1024, conv_channels=480)
    operators = list_operators(stem, tokens, Share(mbs=1))
    places = [416 * 64, 208 * 32, 104 * 16]
    counts = [places[0] * 9 * 480, *(count * 9 * 480 * 480 for count in places[1:]), 104 * 16 * 480 * 1024]
    assert [product.flops for product in operators.products] == [2 * count for count in counts]
    assert operators.kept_bytes(trainable=True) == 2 * 832 * 128 + 2 * 2 * 480 * sum(places)


def test_convolutions_merge_before_the_matrices() -> None:
    model = read_config(config("step3_vl_10b"))
    workload = Workload(global_batch_size=1, seq_length=512, image_tokens_per_sample=169)
    tokens = count_tokens(model.encoders[0], workload)
    assert tokens.layer_tokens == 52 * 52
    post = next(block.structure for block in expand(model).blocks if block.name == "vision_post")
    operators = list_operators(post, tokens, Share(mbs=1))
    counts = [26 * 26 * 9 * 1536 * 3072, 13 * 13 * 9 * 3072 * 6144, 13 * 13 * 6144 * 4096]
    assert [product.flops for product in operators.products] == [2 * count for count in counts]
    assert [product.entry for product in operators.products] == [True, False, False]
    kept = 2 * (52 * 52 * 1536 + 26 * 26 * 3072 + 13 * 13 * 6144)
    assert (operators.kept_bytes(trainable=True), operators.input_bytes) == (kept, 2 * 52 * 52 * 1536)


@pytest.mark.parametrize(
    ("name", "part", "key", "value", "reason"),
    [
        ("step3_vl_10b", "vision_config", "use_cls_token", True, "use_cls_token is true; false is expected"),
        ("step3_vl_10b", "vision_config", "mlp_ratio", "big", 'mlp_ratio is "big"; a number from 0.01 to 100'),
        ("qwen3_asr_1_7b", "thinker_config", "audio_config", {"n_window_infer": 750}, "a multiple of two times n_win"),
        ("qwen3_omni_30b_a3b", "thinker_config", "audio_config", {"d_model": 1001}, "must divide the width 1001"),
    ],
)
def test_what_such_models_have_not(name: str, part: str, key: str, value: Any, reason: str) -> None:
    document = config(name)
    document[part][key] = value
    with pytest.raises(JobError) as failure:
        read_config(document)
    assert reason in str(failure.value)


def test_deepseek_v3_with_images() -> None:
    """671 B without its module that predicts a further token."""
    model = read("deepseekv3_vl")
    assert model.text.num_mtp == 1
    without = model.model_copy(update={"text": model.text.model_copy(update={"num_mtp": 0})})
    assert parts(without)["text"] == 671_026_404_352
    assert model.text.layers.latent is not None
    assert model.text.layers.latent.q_lora_rank == 1536


def test_deepstack_and_positions_train_in_a_frozen_tower() -> None:
    (vision,) = read("qwen3vl_8b").encoders
    assert (vision.freeze, vision.num_deepstack) == (True, 3)
    blocks = {block.name: block for block in expand(read("qwen3vl_8b")).blocks}
    assert blocks["vision_pre"].trainable
    assert blocks["vision_deepstack"].trainable
    assert not blocks["vision_post"].trainable
    layers = [block for block in blocks.values() if block.modality == "vision" and block.role == "layer"]
    assert layers
    assert all(block.propagates_gradient and not block.trainable for block in layers)


def test_llava_counts_the_vocabulary_under_its_own_name() -> None:
    model = read("llava1.5_7b")
    assert model.text.vocab_size == 32000
    assert model.text.freeze
    assert not model.encoders[0].projector.freeze
    assert model.encoders[0].layers.quick_gelu


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        (
            "deepseekvl2_27b",
            "text_decoder.multi_latent_attention",
            ...,
            "its attention is latent, and the launch script",
        ),
        ("deepseekvl2_27b", "text_decoder.kv_lora_rank", ..., "text_decoder.kv_lora_rank is missing"),
        ("deepseekvl2_27b", f"{VISION}.model_name", "siglip_base", "one of siglip_so400m_patch14_384, .* is expected"),
        ("deepseekvl2_27b", f"{VISION}.select_layer", -2, "the last layer, -1, is expected"),
        ("deepseekvl2_27b", "image_encoder.vision_projector.input_dim", 1024, "the vision encoder is 1152 wide"),
        ("deepseekvl2_27b", "image_encoder.vision_projector.model_id", "mlp", "DeepSeekVL2MLP is expected behind"),
        ("glm4.1v_9b", "image_encoder.vision_projector.model_id", "mlp", "GlmMLP is expected behind glm4v_vit"),
        ("glm4.1v_9b", "image_encoder.vision_projector.out_hidden_size", 2048, "gives tokens of 4096"),
        ("qwen3vl_8b", f"{VISION}.deepstack_visual_indexes", [8, 27], "layers are 0 to 26"),
        ("qwen3vl_8b", f"{VISION}.max_position_embeddings", ..., "max_position_embeddings is missing"),
        ("llava1.5_7b", f"{VISION}.model_id", "MiniCPMViT", "one of qwen2vit, .*, glm4v_vit is expected"),
    ],
)
def test_what_is_wrong_is_said_by_its_key(name: str, key: str, value: Any, message: str) -> None:
    with pytest.raises(JobError, match=message):
        read_mindspeed_mm(changed(name, key, value))
