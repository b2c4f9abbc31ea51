"""Config classes of MindFormers become decoders with the parameters of the published models."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from edited import format_layout

from mm_autoparallel.errors import JobError
from mm_autoparallel.integrations.mindformers.divided_yaml import format_divided
from mm_autoparallel.integrations.mindformers.layout import Layout, read_layout
from mm_autoparallel.integrations.mindformers.memory_keys import division_notes
from mm_autoparallel.integrations.mindformers.model_job import build_job
from mm_autoparallel.integrations.mindformers.pipeline_problem import Ratios, build_pipeline_problem
from mm_autoparallel.integrations.mindformers.pretrain_yaml import Pretrain, read_pretrain
from mm_autoparallel.integrations.mindformers.search.sized_memory import size_memory
from mm_autoparallel.model.blocks.expand import expand
from mm_autoparallel.model.blocks.parameters import count_chain_parameters

Write = Callable[..., Path]

DEEPSEEK_V3 = {"use_legacy": False, "model_config": {"model_type": "deepseek_v3", "qk_layernorm": True}}
QWEN3_32B = {
    "model_type": "qwen3",
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A pretrain YAML of the model's sizes, and of what else is given."""

    def form(model_config: dict[str, Any], **more: Any) -> Path:
        document: dict[str, Any] = {
            "parallel_config": {"pipeline_stage": 2, "micro_batch_num": 4},
            "parallel": {"enable_parallel_optimizer": True, "pipeline_config": {"pipeline_interleave": True}},
            "context": {"max_device_memory": "58GB"},
            "model": {"model_config": {"seq_length": 4096, **model_config}},
        }
        path = tmp_path / "pretrain.yaml"
        path.write_text(yaml.safe_dump(document | more, sort_keys=False), encoding="utf-8")
        return path

    return form


def billions(pretrain: Pretrain) -> float:
    return round(count_chain_parameters(expand(build_job(pretrain).model)) / 1e9, 3)


LEGACY: list[tuple[str, dict[str, Any], dict[str, Any], float]] = [
    # published counts of the checkpoints: Qwen 7B and 14B, ChatGLM3 6B, InternLM 7B, InternLM2 20B, StarCoder, GPT-2,
    # DeepSeek-V2, Baichuan2 13B, Mixtral 8x7B, Qwen2 57B, GLM-4 9B
    (
        "QwenConfig",
        {"hidden_size": 4096, "num_layers": 32, "num_heads": 32, "vocab_size": 151936, "intermediate_size": 11008},
        {},
        7.721,
    ),
    (
        "QwenConfig",
        {"hidden_size": 5120, "num_layers": 40, "num_heads": 40, "vocab_size": 152064, "intermediate_size": 13696},
        {},
        14.167,
    ),
    (
        "ChatGLM2Config",
        {
            "hidden_size": 4096,
            "num_layers": 28,
            "num_attention_heads": 32,
            "padded_vocab_size": 65024,
            "ffn_hidden_size": 13696,
        },
        {},
        6.244,
    ),
    (
        "ChatGLM2Config",
        {
            "hidden_size": 4096,
            "num_layers": 40,
            "num_attention_heads": 32,
            "padded_vocab_size": 151552,
            "ffn_hidden_size": 13696,
        },
        {},
        9.400,
    ),
    ("InternLMConfig", {"hidden_size": 4096, "num_layers": 32, "num_heads": 32, "vocab_size": 103168}, {}, 7.322),
    (
        "InternLM2Config",
        {"hidden_size": 6144, "num_layers": 48, "num_heads": 48, "vocab_size": 92544, "intermediate_size": 16384},
        {},
        19.861,
    ),
    ("WizardCoderConfig", {"hidden_size": 6144, "num_layers": 40, "num_heads": 48, "vocab_size": 49153}, {}, 15.517),
    (
        "GPT2Config",
        {"hidden_size": 768, "num_layers": 12, "num_heads": 12, "vocab_size": 50257, "max_position_embeddings": 1024},
        {},
        0.124,
    ),
    ("GLMConfig", {"hidden_size": 4096, "num_layers": 28, "num_heads": 32, "vocab_size": 130528}, {}, 6.173),
    (
        "LlamaConfig",
        {"hidden_size": 5120, "num_layers": 40, "num_heads": 40, "vocab_size": 125696, "intermediate_size": 13696},
        {},
        13.897,
    ),
    (
        "LlamaConfig",
        {
            "hidden_size": 4096,
            "num_layers": 32,
            "num_heads": 32,
            "n_kv_heads": 8,
            "vocab_size": 32000,
            "intermediate_size": 14336,
        },
        {"expert_num": 8, "num_experts_chosen": 2},
        46.703,
    ),
    (
        "LlamaConfig",
        {
            "hidden_size": 3584,
            "num_layers": 28,
            "num_heads": 28,
            "n_kv_heads": 4,
            "vocab_size": 151936,
            "intermediate_size": 2560,
            "qkv_has_bias": True,
        },
        {"expert_num": 64, "num_experts_chosen": 8, "shared_expert_num": 8.0, "use_shared_expert_gating": True},
        57.409,
    ),
    (
        "DeepseekV2Config",
        {"hidden_size": 5120, "num_layers": 60, "num_heads": 128, "vocab_size": 102400, "intermediate_size": 12288},
        {
            "expert_num": 160,
            "num_experts_chosen": 6,
            "moe_intermediate_size": 1536,
            "shared_expert_num": 2,
            "first_k_dense_replace": 1,
        },
        235.741,
    ),
    (
        "TelechatConfig",
        {"hidden_size": 4096, "num_layers": 30, "num_heads": 32, "vocab_size": 160256, "ffn_dim_multiplier": 12288},
        {},
        7.856,
    ),
    (
        "YiZhaoConfig",
        {
            "hidden_size": 4096,
            "num_layers": 54,
            "num_attention_heads": 32,
            "padded_vocab_size": 151552,
            "ffn_hidden_size": 13696,
        },
        {},
        12.255,
    ),
    (
        "IFlytekSparkConfig",
        {"hidden_size": 5120, "num_layers": 40, "num_heads": 40, "vocab_size": 60000, "ffn_hidden_size": 28672},
        {},
        13.313,
    ),
]


@pytest.mark.parametrize(("name", "sizes", "experts", "count"), LEGACY)
def test_a_config_class_has_the_parameters_of_its_model(
    write: Write, name: str, sizes: dict[str, Any], experts: dict[str, Any], count: float
) -> None:
    more = {"moe_config": experts} if experts else {}
    assert billions(read_pretrain(write({"type": name} | sizes, **more))) == count


@pytest.mark.parametrize(
    ("model", "count"),
    [
        (DEEPSEEK_V3["model_config"], 682.636),  # 671.026 and one module of multi-token prediction
        (QWEN3_32B, 32.762),
        (
            {"model_type": "qwen3_moe", "num_hidden_layers": 48, "head_dim": 128},
            30.532,
        ),
        (
            {"model_type": "telechat3_moe", "num_hidden_layers": 45, "first_k_dense_replace": 1, "qk_layernorm": True},
            104.576,
        ),
    ],
)
def test_todays_yaml_takes_what_it_leaves_out_from_the_class(write: Write, model: dict[str, Any], count: float) -> None:
    assert billions(read_pretrain(write(model, use_legacy=False))) == count


def test_todays_prediction_module_stands_behind_the_layers_of_offset(write: Write) -> None:
    """61 layers in 16 chunks leave 13 for offset; DeepseekV3Config counts the module among them, which makes 14."""
    grid = [[1] * 8, [1, 1, 1, 1, 1, 1, 1, -2]]
    sizes = {**DEEPSEEK_V3["model_config"], "pp_interleave_num": 2, "offset": grid}  # type: ignore[dict-item]
    parallel = {"pipeline_stage": 8, "micro_batch_num": 32, "model_parallel": 8, "data_parallel": 4}
    path = write(sizes, use_legacy=False, parallel_config={**parallel, "expert_parallel": 32, "use_seq_parallel": True})
    pretrain = read_pretrain(path)
    assert (pretrain.num_layers, pretrain.num_dense, pretrain.mtp_depth, pretrain.num_last_mtp) == (61, 3, 0, 1)
    assert sum(map(sum, read_layout(pretrain).layers)) == 61
    memory = size_memory(pretrain)
    problem = build_pipeline_problem(pretrain, Ratios(0.5, 2.0, 1.5, 0.25), memory, "default")
    (head,) = (block for block in problem.chain if not block.layer)
    assert head.forward_ms == 1.5 + 1.0  # and the module's layer
    assert memory.stage_static_bytes[2] > memory.stage_static_bytes[1] + memory.expert.static_bytes


def test_sizes_come_from_the_config_json_that_the_yaml_names(write: Write, tmp_path: Path) -> None:
    (tmp_path / "Qwen3-32B").mkdir()
    (tmp_path / "Qwen3-32B" / "config.json").write_text(json.dumps(QWEN3_32B))
    path = write({"offset": 0}, use_legacy=False, pretrained_model_dir="Qwen3-32B")
    assert billions(read_pretrain(path)) == 32.762
    smaller = read_pretrain(write({"num_hidden_layers": 16}, use_legacy=False, pretrained_model_dir="Qwen3-32B"))
    assert smaller.num_layers == 16
    (note,) = smaller.notes
    assert "num_hidden_layers 16 (there 64)" in note


def test_a_config_json_that_is_not_there_is_named_and_may_be_given(write: Write, tmp_path: Path) -> None:
    path = write({}, use_legacy=False, pretrained_model_dir="/path/to/Qwen3-32B")
    with pytest.raises(JobError, match=r'"/path/to/Qwen3-32B".*--model_config'):
        read_pretrain(path)
    (tmp_path / "own.json").write_text(json.dumps(QWEN3_32B))
    assert billions(read_pretrain(path, tmp_path / "own.json")) == 32.762
    with pytest.raises(JobError, match=r"model_type is missing.*--model_config"):
        read_pretrain(write({}, use_legacy=False))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            {"model_type": "deepseek_v3", "hidden_size": 7168},
            ["pretrain.yaml", "own.json", '"deepseek_v3"', '"qwen3"', "hidden_size 7168 and 5120"],
        ),
        (
            {"type": "LlamaConfig", "hidden_size": 4096, "num_layers": 32, "num_heads": 32, "vocab_size": 32000},
            ["pretrain.yaml", "own.json", "num_layers is 32", "num_hidden_layers 64"],
        ),
    ],
)
def test_a_config_json_of_another_model_is_refused(
    write: Write, tmp_path: Path, model: dict[str, Any], words: list[str]
) -> None:
    (tmp_path / "own.json").write_text(json.dumps(QWEN3_32B))
    with pytest.raises(JobError) as caught:
        read_pretrain(write(model, use_legacy="type" in model), tmp_path / "own.json")
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"type": "MllamaConfig"}, ["MllamaConfig", "cross_attention_layers"]),
        ({"type": "QwenVLConfig"}, ["QwenVLConfig", "a vision model"]),
        ({"type": "WhisperConfig"}, ["cross attention"]),
        ({"model_type": "deepseek_v4"}, ["hyper connections"]),
        ({"model_type": "qwen3_mo"}, ['did you mean "qwen3_moe"?']),
        ({"model_type": "deepseek_v3", "experimental_attention_variant": "dsa"}, ["indexer"]),
        ({"model_type": "qwen3_moe", "moe_layer_freq": 2}, ["moe_layer_freq is 2", "scattered"]),
        ({"type": "TelechatConfig", "num_layers": 24, "layers_group": 4}, ["layers_group is 4"]),
        ({"type": "LlamaConfig", "num_layers": 4, "num_heads": 4, "hidden_size": "8"}, ['hidden_size is "8"']),
        ({"type": "LlamaConfig", "num_layers": 4, "hidden_size": 8, "num_heads": 4, "n_kv_heads": 3}, ["n_kv_heads"]),
    ],
)
def test_what_is_not_planned_is_refused_by_name(write: Write, model: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(JobError) as caught:
        build_job(read_pretrain(write(model, use_legacy="type" in model)))
    for word in words:
        assert word in str(caught.value)


def test_experts_under_tensor_parallel_need_no_sequence_parallel_here(write: Write) -> None:
    sizes = {"type": "LlamaConfig", "hidden_size": 4096, "num_layers": 32, "num_heads": 32, "vocab_size": 32000}
    path = write(
        sizes,
        moe_config={"expert_num": 8, "num_experts_chosen": 2},
        parallel_config={"pipeline_stage": 2, "micro_batch_num": 4, "model_parallel": 8},
    )
    assert size_memory(read_pretrain(path)).expert.static_bytes > 0


@pytest.mark.parametrize(("name", "groups"), [("ChatGLM2Config", 8), ("LlamaConfig", None)])
def test_ranks_beyond_the_groups_of_keys_repeat_them_where_the_class_does(
    write: Write, name: str, groups: int | None
) -> None:
    sizes = {"hidden_size": 4096, "num_layers": 28, "seq_length": 2048, "type": name}
    if groups:
        sizes |= {"num_attention_heads": 32, "padded_vocab_size": 65024, "ffn_hidden_size": 13696}
    else:
        sizes |= {"num_heads": 32, "n_kv_heads": 2, "vocab_size": 65024}
    path = write(sizes, parallel_config={"pipeline_stage": 2, "micro_batch_num": 4, "model_parallel": 8})
    if groups:
        assert build_job(read_pretrain(path)).model.text.layers.num_kv_groups == groups
        assert size_memory(read_pretrain(path)).expert.static_bytes > 0
    else:
        with pytest.raises(JobError, match="key and value groups"):
            size_memory(read_pretrain(path))


TEMPLATE = """# experimental trainer
model_config: {model_type: qwen3, num_hidden_layers: 9, vocab_size: 1024, hidden_size: 512}
training_args: {micro_batch_size: 2, global_batch_size: 64}
distribute_parallel_config:
  tensor_model_parallel_size: 4 # ranks
  pipeline_model_parallel_size: 4
  pipeline_parallel_config:
    pipeline_stage_offset: [0, 0, 0, 1] # layers
  optimizer_parallel_config: {enable_parallel_optimizer: true}
context: {max_device_memory: 58GB}
recompute_config: {recompute: true}
"""


def test_a_yaml_of_the_experimental_trainer_is_read_and_written(tmp_path: Path) -> None:
    path = tmp_path / "template.yaml"
    path.write_text(TEMPLATE)
    pretrain = read_pretrain(path)
    assert (pretrain.dp, pretrain.tp, pretrain.pp, pretrain.mbs, pretrain.num_microbatches) == (1, 4, 4, 2, 32)
    assert pretrain.optimizer_parallel
    assert "data_parallel_size" in pretrain.notes[0]
    written = format_layout(pretrain, Layout(((3, 2, 2, 2),), ((3, 1, 0, 0),)))
    expected = TEMPLATE.replace("[0, 0, 0, 1]", "[1, 0, 0, 0]").replace("recompute: true", "recompute: [3, 1, 0, 0]")
    assert written == expected
    path.write_text(format_divided(pretrain, replace(pretrain, dp=2, pp=2, mbs=1), Layout(((5, 4),), ((0, 0),))))
    again = read_pretrain(path)
    assert (again.dp, again.pp, again.mbs, again.num_microbatches, again.global_batch_size) == (2, 2, 1, 32, 64)
    assert read_layout(again).layers == ((5, 4),)
    path.write_text(TEMPLATE.replace("global_batch_size: 64", "global_batch_size: 63"))
    with pytest.raises(JobError, match="global_batch_size is 63"):
        read_pretrain(path)


def test_pieces_of_sequences_are_micro_batches_with_whole_keys_and_values(write: Write) -> None:
    """Of one layer and 4,096 tokens: 8 groups of 128 numbers over TP 2, keys and values, two bytes each."""
    sizes = {
        "type": "LlamaConfig",
        "hidden_size": 4096,
        "num_layers": 8,
        "num_heads": 32,
        "n_kv_heads": 8,
        "vocab_size": 32000,
        "use_flash_attention": True,
    }
    problems = []
    for splits in (1, 4):
        scheduler = {"pipeline_scheduler": "seqpipe", "pipeline_interleave": True}
        parallel = {"pipeline_stage": 2, "micro_batch_num": 6, "model_parallel": 2, "seq_split_num": splits}
        path = write(sizes, parallel_config=parallel, parallel={"pipeline_config": scheduler})
        pretrain = read_pretrain(path)
        problems.append(build_pipeline_problem(pretrain, Ratios(1, 2, 1, 1), size_memory(pretrain), "default"))
    whole, split = problems
    assert (whole.schedule, whole.num_microbatches) == ("1f1b", 6)
    assert (split.schedule, split.num_microbatches) == ("seq_1f1b_4", 24)
    (layer, head), (piece, last) = whole.chain, split.chain
    assert (piece.forward_ms, piece.backward_ms, last.forward_ms) == (0.25, 0.5, 0.25)
    assert head.forward_ms == 1.0
    kept = 4096 * 4 * 128 * 2 * 2
    assert piece.static_bytes == layer.static_bytes + 2 * kept
    assert piece.activation_bytes == pytest.approx((layer.activation_bytes - kept) / 4 + kept)
    assert layer.recompute is not None
    assert piece.recompute is None  # a second forward would add to the caches again
    assert "seq_split_num is 4" in " ".join(pretrain.notes)
    with pytest.raises(JobError, match="seq_split_num is 4; divisions are searched"):
        build_job(pretrain, 64)
    wrong = write(sizes, parallel_config={"pipeline_stage": 2, "micro_batch_num": 6, "seq_split_num": 3})
    with pytest.raises(JobError, match="with seq_split_num 3"):
        read_pretrain(wrong)


def test_what_is_trained_in_part_and_what_divides_itself_is_told(write: Write) -> None:
    sizes = {"type": "LlamaConfig", "num_layers": 4, "pet_config": {"pet_type": "lora"}}
    pretrain = read_pretrain(write(sizes, parallel={"parallel_mode": 2}))
    assert any("parallel_mode is 2" in note for note in division_notes(pretrain))
    assert any('pet_config ("lora")' in note for note in pretrain.notes)
