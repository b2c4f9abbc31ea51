"""Models whose layers attend by a gated delta rule (Qwen3.5, 3.6): read, counted as their class does, bytes by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mm_autoparallel.errors import JobError
from mm_autoparallel.integrations.huggingface.config import read_huggingface
from mm_autoparallel.model.blocks.chain import DeltaAttention, Experts, FeedForward, TransformerLayer
from mm_autoparallel.model.blocks.expand import expand
from mm_autoparallel.model.blocks.parameters import count_chain_parameters, count_parameters
from mm_autoparallel.model.blocks.tokens import TokenCounts
from mm_autoparallel.model.costs.stage import build_problem
from mm_autoparallel.model.job.hashing import hash_job
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.job.strategy_law import unlawful_reason
from mm_autoparallel.model.operators.ends import list_operators
from mm_autoparallel.model.operators.operators import Share
from mm_autoparallel.model.readers.foreign import Section
from mm_autoparallel.model.readers.job_file import parse_job

FIXTURES = Path(__file__).parents[1] / "fixtures" / "huggingface"
EXPERTS, DENSE = FIXTURES / "qwen3_5_35b_a3b.json", FIXTURES / "qwen3_5_9b.json"


def load(path: Path = DENSE, **text: Any) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text())
    document["text_config"] |= text
    return document


def read(document: dict[str, Any]) -> Model:
    return read_huggingface(Section(document, Path("config.json")))


def make_job(model: Model, **search: Any) -> Job:
    return parse_job(
        {
            "model": model.model_dump(),
            "cluster": {"num_nodes": 2, "devices_per_node": 8, "device": "ascend-910b-64g"},
            "workload": {"global_batch_size": 16, "seq_length": 4096, "context_parallel": "all_to_all"},
            "search": search,
        },
        Path("job"),
    )


@pytest.mark.parametrize("size", ["tp", "cp"])
def test_mindspeed_llm_divides_no_layers_with_a_memory(size: str) -> None:
    model = read(load(DENSE))
    strategy = Strategy(**{"pp": 1, "tp": 1, "dp": 8, "mbs": 1, "cp": 1, size: 2})
    plain = make_job(model)
    workloads = [plain.workload.model_copy(update={"stack": stack}) for stack in ("megatron-te", "mindspeed")]
    found = [unlawful_reason(plain.model, plain.cluster, each, strategy) for each in workloads]
    assert found[0] is None
    assert "MindSpeed-LLM's layers with a delta rule run with 1 of each" in str(found[1])


def test_three_of_four_layers_have_a_memory_of_their_own() -> None:
    model = read(load(EXPERTS))
    layers = [block for block in expand(model).blocks if block.modality == "text" and block.role == "layer"]
    assert [block.count for block in layers] == [3, 1] * 10
    delta, full = layers[0].structure, layers[1].structure
    assert isinstance(delta, TransformerLayer)
    assert isinstance(full, TransformerLayer)
    assert delta.attention == DeltaAttention(16, 32, 128, 128, 4)
    assert not isinstance(full.attention, DeltaAttention)
    assert isinstance(full.mlp, Experts)
    assert full.mlp.shared_gate
    assert model.encoders[0].deepstack is None


def test_the_file_says_which_layers_attend_in_full() -> None:
    types = ["full_attention", "linear_attention"] * 2
    model = read(load(num_hidden_layers=4, layer_types=types))
    assert model.text.layers.delta
    assert model.text.layers.delta.full_layers == (0, 2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 32}, "32 of linear_attention and full_attention are expected"),
        ({"linear_num_key_heads": "many"}, "linear_num_key_heads"),
        ({"full_attention_interval": 0}, "full_attention_interval is 0"),
    ],
)
def test_what_no_such_model_has(text: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError, match=words):
        read(load(**text))


@pytest.mark.parametrize("path", [EXPERTS, DENSE])
def test_parameters_are_those_of_the_class(path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    document = load(path)
    config = transformers.CONFIG_MAPPING[document["model_type"]](**document)
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config)
    assert count_chain_parameters(expand(read(document))) == sum(weight.numel() for weight in model.parameters())


H, HEADS, DIM, N = 512, 8, 64, 256
LAYER = TransformerLayer(H, "rms", DeltaAttention(4, HEADS, DIM, DIM, 4), FeedForward(1024))


def test_bytes_of_a_layer_by_hand() -> None:
    """Kept beside what norms and feed-forward keep: numbers a token, two bytes each unless said otherwise."""
    share, tokens = Share(mbs=1), TokenCounts(N, N, N, 1)
    operators = list_operators(LAYER, tokens, share)
    key, value = 4 * DIM, HEADS * DIM
    mixed = 2 * key + value
    expected = {
        "query, key and value before the convolution": 2 * N * mixed,
        "query and key for every value head, and value": 2 * N * 3 * value,
        "fp32 gates and strengths before and after they are formed": N * HEADS * (2 * 2 + 3 * 4),
        "matrix of pairs of each chunk": 2 * N * HEADS * 64,
        "norm of the output input": 2 * N * value + 4 * N * HEADS,
        "gate of the output": 2 * N * value,
        "gated output, input of the last product": 2 * N * value,
    }
    found = {saved.name: saved.size_bytes for saved in operators.saved}
    assert {name: found[name] for name in expected} == expected
    first, last = operators.products[:2]
    assert (first.output_count, last.input_count) == (mixed + value + 2 * HEADS, value)
    assert count_parameters(LAYER) == (
        2 * H  # norms of the layer
        + H * (mixed + value + 2 * HEADS)
        + 4 * mixed
        + 2 * HEADS
        + DIM
        + value * H
        + 3 * H * 1024
    )


def test_time_grows_with_tokens_not_with_their_pairs() -> None:
    def flops(num_tokens: int) -> float:
        attention = list_operators(LAYER, TokenCounts(num_tokens, num_tokens, num_tokens, 1), Share(mbs=1)).attention
        assert attention
        return attention.forward_flops

    assert flops(8 * N) == 8 * flops(N)
    # of a token: three products with the memory, and with a chunk's tokens three of keys, two of values, one of pairs
    assert flops(N) == 2 * N * HEADS * (3 * DIM * DIM + 64 * (5 * DIM + 64))


def test_heads_are_divided_and_dealt_whole() -> None:
    model = read(load(linear_num_key_heads=2))
    job = make_job(model)

    def reason(**sizes: Any) -> str:
        strategy = Strategy(**({"pp": 1, "tp": 1, "dp": 4, "mbs": 1} | sizes))
        return str(unlawful_reason(job.model, job.cluster, job.workload, strategy))

    assert "TP 4 does not divide the delta rule's key heads of text, 2" in reason(tp=4)
    assert "does not divide the delta rule's key heads of text, 2" in reason(cp=4)
    assert reason(tp=2) == reason(cp=2) == "None"
    parts = [build_problem(job, Strategy(1, tp, 4, 1)).chain for tp in (1, 2)]
    layers = [next(block for block in chain if block.name.startswith("text_delta")) for chain in parts]
    assert layers[1].activation_bytes == layers[0].activation_bytes / 2  # under sequence parallelism all is divided


def test_jobs_without_them_are_the_jobs_they_were() -> None:
    """Plans carry a hash of their job; what these layers added has no say in that of others."""
    layers = {"num_layers": 1, "hidden_size": 8, "ffn_size": 8, "num_heads": 1, "norm": "rms"}
    job = make_job(Model.model_validate({"text": {"vocab_size": 64, "layers": layers}}))
    known = "8a735c200b8178dcd47456340e8901daeae4c602df64d5a19b7572750d42fdf1"  # as it was before these were read
    assert hash_job(job.model, job.cluster, job.workload) == known
