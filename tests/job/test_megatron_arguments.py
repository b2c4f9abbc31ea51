"""Megatron-LM's arguments as models: known totals, what follows from what, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mm_autoparallel.errors import JobError
from mm_autoparallel.integrations.huggingface.config import read_huggingface
from mm_autoparallel.model.blocks.expand import expand
from mm_autoparallel.model.blocks.parameters import count_chain_parameters, count_parameters
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.model.readers.foreign import Section
from mm_autoparallel.model.readers.megatron_arguments import read_megatron_arguments
from mm_autoparallel.model.readers.model_file import parse_inline_model

GPT_345M: dict[str, Any] = {
    "--num-layers": 24,
    "--hidden-size": 1024,
    "--num-attention-heads": 16,
    "--seq-length": 1024,
    "--max-position-embeddings": 1024,
    "--tokenizer-type": "GPT2BPETokenizer",
}
"""examples/gpt3/train_gpt3_345m_distributed.sh"""

LLAMA: dict[str, Any] = {
    "num_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "ffn_hidden_size": 11008,
    "swiglu": True,
    "normalization": "RMSNorm",
    "disable_bias_linear": True,
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
    "tokenizer_type": "Llama2Tokenizer",
}

MOONLIGHT: dict[str, Any] = {
    "num-layers": 27,
    "hidden-size": 2048,
    "num-attention-heads": 16,
    "ffn-hidden-size": 11264,
    "swiglu": True,
    "normalization": "RMSNorm",
    "disable-bias-linear": True,
    "position-embedding-type": "rope",
    "untie-embeddings-and-output-weights": True,
    "vocab-size": 163840,
    "multi-latent-attention": True,
    "qk-layernorm": True,
    "kv-lora-rank": 512,
    "num-experts": 64,
    "moe-router-topk": 6,
    "moe-ffn-hidden-size": 1408,
    "moe-shared-expert-intermediate-size": 2816,
    "moe-layer-freq": "([0]*1+[1]*26)",
}


def read(arguments: dict[str, Any], bert: bool = False) -> Model:
    return read_megatron_arguments(Section(arguments, Path("args.yaml")), bert=bert)


def count(arguments: dict[str, Any], bert: bool = False) -> int:
    return count_chain_parameters(expand(read(arguments, bert)))


def gpt(layers: int, width: int, vocab: int, positions: int) -> int:
    """Narayanan et al. 2021 (arXiv:2104.04473), equation 2, and the final norm, which it leaves out."""
    return 12 * layers * width**2 + 13 * layers * width + (vocab + positions) * width + 2 * width


def test_gpt_by_its_published_closed_form() -> None:
    assert count(GPT_345M) == gpt(24, 1024, 50304, 1024) == 354_871_296


def test_llama_is_that_of_its_config() -> None:
    theirs = read_huggingface(Section({"model_type": "llama"}, Path("config.json")))
    assert read(LLAMA).text == theirs.text
    assert count(LLAMA) == 6_738_415_616


def test_moonlight_has_16_billion() -> None:
    assert count(MOONLIGHT) / 1e9 == pytest.approx(15.96, abs=0.01)
    assert read(MOONLIGHT).text.layers.experts.dense_layers == (0,)  # type: ignore[union-attr]


def test_qwen3_next_is_that_of_its_config() -> None:
    """MindSpeed-LLM's flags for it (examples/mcore/qwen3_next), but for the vocabulary's padding."""
    flags = {
        "num_layers": 48,
        "hidden_size": 2048,
        "ffn_hidden_size": 5632,
        "num_attention_heads": 16,
        "group_query_attention": True,
        "num_query_groups": 2,
        "kv_channels": 256,
        "qk_layernorm": True,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "num_experts": 512,
        "moe_router_topk": 10,
        "moe_ffn_hidden_size": 512,
        "moe_shared_expert_intermediate_size": 512,
        "moe_shared_expert_gate": True,
        "swiglu": True,
        "normalization": "RMSNorm",
        "disable_bias_linear": True,
        "vocab_size": 151936,
        "position_embedding_type": "rope",
        "untie_embeddings_and_output_weights": True,
        "make_vocab_size_divisible_by": 1,
    }
    found = read_megatron_arguments(Section(flags, Path("arguments")))
    same = read_huggingface(Section({"model_type": "qwen3_next"}, Path("config.json")))
    assert count_chain_parameters(expand(found)) == count_chain_parameters(expand(same)) == 79_674_391_296
    assert found.text.layers.delta == same.text.layers.delta


def test_bert_by_hand() -> None:
    """Devlin et al. 2018's sizes with Megatron's norms: 24 layers of 1024, 512 positions, two token types."""
    sizes = GPT_345M | {"--seq-length": 512, "--max-position-embeddings": 512, "--vocab-size": 30522}
    width, vocab = 1024, 30592
    head = (width**2 + width) + 2 * width + vocab  # square matrix, norm, a bias per word
    classifier = (width**2 + width) + (2 * width + 2)
    assert count(sizes, bert=True) == gpt(24, width, vocab, 512) + 2 * width + head + classifier
    post = expand(read(sizes, bert=True)).blocks[-1].structure
    assert count_parameters(post, tp=4) == count_parameters(post) - vocab * 3 // 4
    text = read(sizes, bert=True).text
    assert (text.causal, text.masked) == (False, True)


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"swiglu": True, "ffn_hidden_size": None}, "ffn_size", 10880),
        ({"swiglu": False, "ffn_hidden_size": None}, "ffn_size", 16384),
        ({"group_query_attention": True, "num_query_groups": 8}, "num_kv_groups", 8),
        ({"num_query_groups": 8}, "num_kv_groups", 32),
        ({"kv_channels": 64}, "head_dim", 64),
        ({"add_qkv_bias": True}, "qkv_bias", True),
        ({"disable_bias_linear": False}, "output_bias", True),
        ({"qk_layernorm": True}, "qk_norm", "head"),
        ({"position_embedding_type": "none"}, "rotary", False),
        ({"position_embedding_type": None, "no_position_embedding": True}, "rotary", False),
        ({"position_embedding_type": None, "use_rotary_position_embeddings": True}, "rotary", True),
        ({"swiglu": False, "squared_relu": True}, "gated", False),
        ({"swiglu": False, "quick_geglu": True}, "gated", True),
    ],
)
def test_what_follows_from_what(changes: dict[str, Any], field: str, value: object) -> None:
    assert getattr(read(LLAMA | changes).text.layers, field) == value


@pytest.mark.parametrize(
    ("changes", "padded"),
    [
        ({}, 50304),
        ({"tensor_model_parallel_size": 8}, 51200),
        ({"make_vocab_size_divisible_by": 64}, 50304),
        ({"vocab_size": 131072}, 131072),
        ({"vocab_size": 131071, "tokenizer_type": "NullTokenizer"}, 131072),
        ({"padded_vocab_size": 50257}, 50257),
    ],
)
def test_the_vocabulary_is_padded_for_its_ranks(changes: dict[str, Any], padded: int) -> None:
    plain = {key.removeprefix("--").replace("-", "_"): value for key, value in GPT_345M.items()}
    assert read(plain | changes).text.vocab_size == padded


def test_values_may_stand_as_text() -> None:
    """As in a table's cells or behind flags."""
    assert read({key: str(value) for key, value in LLAMA.items()} | {"spec": "", "num_experts": " "}) == read(LLAMA)


@pytest.mark.parametrize(
    ("frequency", "dense"),
    [
        (1, ()),
        (3, (1, 2, 4, 5)),
        ([0, 0, 1, 1, 1, 1], (0, 1)),
        ("([0]*2+[1]*4)*1", (0, 1)),
        ("[0,1]*3", (0, 2, 4)),
        ("([0]+[1]*2)*2", (0, 3)),
    ],
)
def test_which_layers_have_experts(frequency: object, dense: tuple[int, ...]) -> None:
    sizes = LLAMA | {"num_layers": 6, "num_experts": 8, "moe_layer_freq": frequency}
    experts = read(sizes).text.layers.experts
    assert experts is not None
    assert (experts.dense_layers, experts.top_k, experts.ffn_size) == (dense, 2, 11008)


def test_a_job_may_hold_the_arguments() -> None:
    assert parse_inline_model(LLAMA, Path("job.yaml")).text == read(LLAMA).text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_attention_heads": 33}, "num_attention_heads is 33; it must divide hidden_size 4096"),
        ({"normalization": "L2"}, 'normalization is "L2"; one of LayerNorm, RMSNorm is expected'),
        (
            {"tokenizer_type": "HuggingFaceTokenizer"},
            "vocab_size is nothing; a whole number is expected, or a tokenizer",
        ),
        ({"spec": "own.layers spec"}, "a model with layers of a specification of one's own is not understood"),
        ({"decoder_num_layers": 12}, "a model with an encoder before the decoder is not understood"),
        ({"position_embedding_type": "relative"}, "one of learned_absolute, rope, yarn, mrope, none is expected"),
        ({"num_experts": 8, "moe_router_topk": 9}, "moe_router_topk is 9; it is at most num_experts 8"),
        ({"num_experts": 8, "moe_layer_freq": "[2]*32"}, "lists like ([0]*1+[1]*26), are expected"),
        ({"num_experts": 8, "moe_layer_freq": "[1]*31"}, "32 numbers 0 or 1, one a layer, are expected"),
        ({"squared_relu": True}, "squared_relu is true; swiglu is another activation"),
        ({"swiglu": "yes"}, 'swiglu is "yes"; true or false is expected'),
        (
            {"position_embedding_type": "learned_absolute", "seq_length": 4096, "max_position_embeddings": 2048},
            "max_position_embeddings is 2048; it must be at least seq_length 4096",
        ),
        (
            {"num_experts": 8, "moe_grouped_gemm": True, "disable_bias_linear": False},
            "moe_grouped_gemm is true; grouped products know no biases",
        ),
    ],
)
def test_what_is_wrong_or_of_another_form_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError) as caught:
        read(LLAMA | changes)
    assert "model file args.yaml: " in str(caught.value)
    assert words in str(caught.value)
