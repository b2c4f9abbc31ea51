"""Memory of MindFormers YAMLs from sizes: masks, gradients, the loss, what is held back, and all of it by cause."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mm_autoparallel.errors import JobError
from mm_autoparallel.integrations.mindformers.layout import read_layout
from mm_autoparallel.integrations.mindformers.memory_causes import MASKS, format_causes, list_stage_causes
from mm_autoparallel.integrations.mindformers.memory_figures import MemoryFigures
from mm_autoparallel.integrations.mindformers.memory_keys import batch_notes, division_notes
from mm_autoparallel.integrations.mindformers.model_job import build_job, strategy_of
from mm_autoparallel.integrations.mindformers.pipeline_problem import Ratios, build_pipeline_problem, placement_of
from mm_autoparallel.integrations.mindformers.pretrain_yaml import Pretrain, read_pretrain, recompute_config
from mm_autoparallel.integrations.mindformers.profile_table import ProfiledCandidate
from mm_autoparallel.integrations.mindformers.search.layouts import Solver
from mm_autoparallel.integrations.mindformers.search.ranking import rank_candidates
from mm_autoparallel.integrations.mindformers.search.sized_memory import (
    DEEPSEEK_RESERVE_BYTES,
    ENDS,
    GRADIENTS,
    OPTIMIZER,
    RESERVE,
    WEIGHTS,
    WORKING,
    size_memory,
)
from mm_autoparallel.model.blocks.chain import OutputHead
from mm_autoparallel.model.blocks.tokens import TokenCounts
from mm_autoparallel.model.operators.ends import list_operators
from mm_autoparallel.model.operators.operators import Share
from mm_autoparallel.pipeline.simulate.step import simulate
from mm_autoparallel.units import GIB, MIB

EXAMPLES = Path(__file__).parents[2] / "examples" / "mindformers"
FIXTURES = Path(__file__).parents[1] / "fixtures"
CASES: dict[str, Any] = json.loads((FIXTURES / "known_answers" / "taylor.json").read_text(encoding="utf-8"))["cases"]

LLAMA_7B = """
context: {max_device_memory: "58GB"}
parallel: {enable_parallel_optimizer: True}
parallel_config: {data_parallel: 8, model_parallel: 1, pipeline_stage: 1, micro_batch_num: 1}
runner_config: {batch_size: 1, gradient_accumulation_steps: 1}
recompute_config: {recompute: True}
model:
  model_config: {type: LlamaConfig, num_layers: 32, seq_length: 4096, hidden_size: 4096, num_heads: 32,
    vocab_size: 32000, compute_dtype: bfloat16, param_init_type: float32, use_flash_attention: True}
"""

Write = Callable[..., Pretrain]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """The YAML above with some words in place of others."""

    def write(*changes: tuple[str, str], text: str = LLAMA_7B) -> Pretrain:
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / "llama.yaml"
        path.write_text(text, encoding="utf-8")
        return read_pretrain(path)

    return write


EIGHT_STAGES = (
    ("data_parallel: 8, model_parallel: 1, pipeline_stage: 1", "data_parallel: 1, pipeline_stage: 8"),
    ("micro_batch_num: 1", "micro_batch_num: 16"),
)
LONG = ("seq_length: 4096", "seq_length: 32768")


def test_llama_s_layers_share_one_mask_of_each_micro_batch(write: Write) -> None:
    """32,768 tokens: a GiB for each micro-batch in flight of a stage, of which the first has 8 and the last 1."""
    pretrain = write(*EIGHT_STAGES, LONG)
    memory = size_memory(pretrain)
    assert [kept / GIB for kept in memory.stage_kept_bytes] == [8, 7, 6, 5, 4, 3, 2, 1]
    compressed = write(*EIGHT_STAGES, LONG, ("use_flash", "use_attn_mask_compression: True, use_flash"))
    ring = write(*EIGHT_STAGES, LONG, ("use_flash", "use_ring_attention: True, use_flash"))
    for without in (compressed, ring):
        assert size_memory(without).stage_kept_bytes == ()
        assert size_memory(without).expert == memory.expert
    # the input alone stays of a layer that runs again
    assert memory.expert.recomputed_bytes == 2 * 32768 * 4096


def test_latent_attention_has_a_mask_in_each_layer(tmp_path: Path) -> None:
    text = (EXAMPLES / "pretrain_deepseek3.yaml").read_text(encoding="utf-8")
    (tmp_path / "plain.yaml").write_text(text)
    (tmp_path / "compressed.yaml").write_text(
        text.replace("    seq_length:", "    use_attn_mask_compression: True\n    seq_length:")
    )
    plain, compressed = (size_memory(read_pretrain(tmp_path / f"{name}.yaml")) for name in ("plain", "compressed"))
    assert plain.stage_kept_bytes == compressed.stage_kept_bytes == ()
    for figure in ("activation_bytes", "recomputed_bytes"):
        assert getattr(plain.expert, figure) - getattr(compressed.expert, figure) == pytest.approx(4096**2)


def test_experts_of_llama_run_again_whole(write: Write) -> None:
    """A recomputed layer keeps its input alone, and nothing is held back as for DeepSeek-V3."""
    experts = ("recompute_config:", "moe_config: {expert_num: 8, num_experts_chosen: 2}\nrecompute_config:")
    memory = size_memory(write(*EIGHT_STAGES, experts))
    assert memory.expert.recomputed_bytes == 2 * 4096 * 4096
    assert [causes[RESERVE] for causes in memory.stage_causes] == [0, 0, 0]


DIVIDED = (
    "data_parallel: 8, model_parallel: 1",
    "data_parallel: 2, model_parallel: 4, expert_parallel: 2",
)
LATENT = (
    ("LlamaConfig, num_layers: 32", "DeepseekV2Config, num_layers: 2, kv_lora_rank: 512, q_lora_rank: 1536"),
    ("num_heads: 32", "num_heads: 32, qk_rope_head_dim: 64, qk_nope_head_dim: 128, v_head_dim: 128"),
    ("vocab_size", "intermediate_size: 8192, vocab_size"),
    ("model:", "moe_config: {expert_num: 16, num_experts_chosen: 4, moe_intermediate_size: 1024}\nmodel:"),
    DIVIDED,
)


def test_exchanges_stay_where_sequences_are_divided(write: Write) -> None:
    """Of a recomputed layer of 4,096 tokens: its input and its mask, and under sequence parallel what was exchanged, of
    which MindFormers has another path without (moe.py, MoEV2).
    """
    whole, divided = (
        size_memory(write(*LATENT, ("micro_batch_num: 1", f"micro_batch_num: 1, use_seq_parallel: {flag}")))
        for flag in (False, True)
    )
    mask_bytes, input_bytes = 4096 * 4096, 2 * 4096 * 4096
    assert whole.expert.recomputed_bytes == input_bytes + mask_bytes
    assert divided.expert.recomputed_bytes == input_bytes / 4 + mask_bytes + 4 * input_bytes


def test_telechat_deals_whole_experts_to_tensor_parallel_ranks(write: Write) -> None:
    """Eight ranks hold two experts each, and tokens of their own go there; else four share each expert, and gather."""
    telechat = (
        ("type: LlamaConfig", "type: TelechatConfig"),
        DIVIDED,
        ("micro_batch_num: 1", "micro_batch_num: 1, use_seq_parallel: True"),
        ("model:", "moe_config: {expert_num: 16, num_experts_chosen: 4}\nmodel:"),
    )
    dealt = write(*telechat)
    assert (strategy_of(dealt).ep, strategy_of(dealt).expert_tp) == (8, 1)
    shared = write(*telechat, ("num_experts_chosen: 4", "num_experts_chosen: 4, ep_extend_tp: False"))
    assert (strategy_of(shared).ep, strategy_of(shared).expert_tp) == (2, 4)
    one, other = size_memory(dealt).expert, size_memory(shared).expert
    assert one.causes[WEIGHTS] == other.causes[WEIGHTS]
    # the input of the experts and their outputs, of four experts a token, by one rank in place of four
    tokens_bytes = 2 * 4096 * 4096 * 4
    assert other.activation_bytes - one.activation_bytes == 2 * (tokens_bytes - tokens_bytes / 4)


def gradients_of(memory: MemoryFigures) -> float:
    return memory.expert.causes[GRADIENTS]


def test_gradients_are_kept_as_they_are_needed(write: Write) -> None:
    """One stage without accumulation: fp32 shards of what each rank updates. Else all, in the type of parameters."""
    ffn_size = 11008
    count = 4 * 4096**2 + 3 * 4096 * ffn_size + 2 * 4096
    assert gradients_of(size_memory(write())) == pytest.approx(4 * count / 8)
    alone = write(("enable_parallel_optimizer: True", "enable_parallel_optimizer: False"))
    assert gradients_of(size_memory(alone)) == pytest.approx(4 * count)
    adding = ("gradient_accumulation_steps: 1", "gradient_accumulation_steps: 8")
    assert gradients_of(size_memory(write(adding))) == pytest.approx(4 * count)
    half = ("param_init_type: float32", "param_init_type: float16")
    assert gradients_of(size_memory(write(adding, half))) == pytest.approx(2 * count)
    assert gradients_of(size_memory(write(half))) == pytest.approx(4 * count / 8)
    assert gradients_of(size_memory(write(*EIGHT_STAGES))) == pytest.approx(4 * count)


def test_shards_are_as_large_as_the_yaml_says(write: Write) -> None:
    """optimizer_weight_shard_size shares states among so few ranks, gradient_accumulation_shard shares gradients."""

    def causes(**config: Any) -> dict[str, float]:
        text = ", ".join(f"{key}: {value}" for key, value in config.items())
        more = f"enable_parallel_optimizer: True, parallel_optimizer_config: {{{text}}}"
        stages = ("model_parallel: 1, pipeline_stage: 1", "model_parallel: 1, pipeline_stage: 2")
        return size_memory(write(stages, ("enable_parallel_optimizer: True", more))).expert.causes

    plain = causes()
    assert causes(optimizer_weight_shard_size=-1) == causes(optimizer_weight_shard_size=8) == plain
    assert causes(optimizer_weight_shard_size=2)[OPTIMIZER] == pytest.approx(4 * plain[OPTIMIZER])
    assert causes(gradient_accumulation_shard=False) == plain
    assert causes(gradient_accumulation_shard=True)[GRADIENTS] == pytest.approx(plain[GRADIENTS] / 8)


def test_experts_share_their_states_among_fewer_ranks() -> None:
    """4 data parallel ranks of 4 tensor parallel ones: experts, dealt to 16, have one owner, all else four."""
    pretrain = read_pretrain(EXAMPLES / "pretrain_deepseek3.yaml")
    plain, two = (
        size_memory(replace(pretrain, optimizer_shard_size=size)).expert.causes[OPTIMIZER] for size in (-1, 2)
    )
    (alone,) = {size_memory(replace(pretrain, optimizer_shard_size=1)).expert.causes[OPTIMIZER]}
    experts = 16 * 3 * 7168 * 2048 * 12  # of each rank, with its fp32 copy and both moments
    dense = alone - experts
    assert plain == pytest.approx(experts + dense / 4)
    assert two == pytest.approx(experts + dense / 2)


def test_adapters_train_alone(write: Write) -> None:
    """At most 2 · 8 / 4,096 of a layer trains; what is frozen has weights alone, in both types."""
    lora = ("use_flash", "pet_config: {pet_type: lora, lora_rank: 8}, use_flash")
    whole, frozen = size_memory(write()).expert.causes, size_memory(write(lora))
    fraction = 2 * 8 / 4096
    count = whole[WEIGHTS] / 2
    assert frozen.expert.causes[GRADIENTS] == pytest.approx(fraction * whole[GRADIENTS])
    assert frozen.expert.causes[OPTIMIZER] == pytest.approx(fraction * whole[OPTIMIZER])
    assert frozen.expert.causes[WEIGHTS] == pytest.approx((2 + 2 * fraction + 4) * count)
    assert any("adapters alone train" in note for note in frozen.notes)
    prefixes = ("use_flash", "pet_config: {pet_type: ptuning2, pre_seq_len: 64}, use_flash")
    tuned = size_memory(write(prefixes)).expert.causes
    assert tuned[OPTIMIZER] == pytest.approx(64 / 4096 * whole[OPTIMIZER])
    other = ("use_flash", "pet_config: {pet_type: adalora}, use_flash")
    unknown = size_memory(write(other))
    assert unknown.expert.causes == whole
    assert any("adapters of type adalora" in note and "as if all of it trained" in note for note in unknown.notes)


def test_the_loss_keeps_log_softmax_and_labels() -> None:
    tokens = TokenCounts(4096, 4096, 4096, 4096)
    head = OutputHead(32000, 4096, "rms")
    graph, plain = (
        sum(saved.size_bytes for saved in list_operators(head, tokens, Share(tp=4, graph=is_graph)).saved)
        for is_graph in (True, False)
    )
    assert graph - plain == pytest.approx(4 * 4096 * 32000 / 4)


def test_the_mistake_of_one_candidate_ends_no_ranking(tmp_path: Path) -> None:
    text = (EXAMPLES / "pretrain_deepseek3.yaml").read_text(encoding="utf-8")
    (tmp_path / "right.yaml").write_text(text)
    (tmp_path / "wrong.yaml").write_text(text.replace("    kv_lora_rank:", "    kv_rank:"))
    right, wrong = (read_pretrain(tmp_path / f"{name}.yaml") for name in ("right", "wrong"))
    yamls = {(4, 4, 8, 16): right, (2, 8, 8, 16): wrong}
    profiled = {candidate: ProfiledCandidate(Ratios(0.7, 1.6, 1.5, 0.25), 3.0) for candidate in yamls}
    solver = Solver(False, tmp_path / "model", 2.0)
    first, second = rank_candidates(yamls, profiled, 64, solver)
    assert first.candidate == (4, 4, 8, 16)
    assert first.layout is not None
    assert (second.status, second.layout) == ("infeasible", None)
    assert "kv_lora_rank is missing" in second.reason
    with pytest.raises(JobError, match="kv_lora_rank is missing"):
        rank_candidates({(2, 8, 8, 16): wrong}, profiled, 64, solver)


@pytest.mark.parametrize("name", CASES)
def test_what_is_held_back_covers_published_dry_runs(name: str) -> None:
    """Beside layers, stages of those runs hold what sizes tell and at most the reserve more, which is 5 GiB at most."""
    pretrain = read_pretrain(FIXTURES / "mindformers" / f"{name}.yaml")
    plain = {**recompute_config(pretrain), "select_recompute": False}
    memory = size_memory(replace(pretrain, document={**pretrain.document, "recompute_config": plain}))
    assert pretrain.max_memory_bytes
    known = [pretrain.max_memory_bytes / MIB - limit for limit in CASES[name]["limit_mb"]]
    for known_mb, with_reserve, reserve in zip(known, memory.stage_static_bytes, DEEPSEEK_RESERVE_BYTES, strict=True):
        assert (with_reserve - reserve) / MIB < known_mb < with_reserve / MIB


def test_the_reserve_is_what_is_asked_for(write: Write) -> None:
    dense, moe = write(*EIGHT_STAGES), read_pretrain(EXAMPLES / "pretrain_deepseek3.yaml")
    assert [causes[RESERVE] for causes in size_memory(dense).stage_causes] == [0, 0, 0]
    assert tuple(causes[RESERVE] for causes in size_memory(moe).stage_causes) == DEEPSEEK_RESERVE_BYTES
    for pretrain in (dense, moe):
        none, some = (size_memory(pretrain, reserve_bytes=held).stage_static_bytes for held in (0.0, 1.5 * GIB))
        assert [b - a for a, b in zip(none, some, strict=True)] == pytest.approx([1.5 * GIB] * 3)
    assert "nothing is held back" in size_memory(dense).notes[0]
    assert "4.5 GiB / 2.0 GiB / 3.0 GiB of the first / a middle / the last stage" in size_memory(moe).notes[0]


@pytest.mark.parametrize("stages", [(), EIGHT_STAGES])
def test_causes_add_up_to_peaks(write: Write, stages: tuple[tuple[str, str], ...]) -> None:
    pretrain = write(*stages, LONG)
    memory = size_memory(pretrain)
    problem = build_pipeline_problem(pretrain, Ratios(1.0, 2.0, 1.0, 1.0), memory, "default")
    layout = read_layout(pretrain)
    peaks = simulate(problem, placement_of(problem, layout)).peak_memory_bytes
    causes = list_stage_causes(problem, memory, layout, peaks)
    assert [sum(of_stage.values()) for of_stage in causes] == pytest.approx(list(peaks))
    assert all(size >= 0 for of_stage in causes for size in of_stage.values())
    assert causes[0][MASKS] == pretrain.pp * GIB
    assert format_causes({"weights": 2 * GIB, "less": 1.0, "kept": 3.26 * GIB}) == "kept 3.3, weights 2.0 GiB"


def test_gradients_come_when_the_loss_has_gone(write: Write) -> None:
    """One stage, every layer recomputed: the loss of many words needs little beside what gradients take later."""
    words = ("vocab_size: 32000", "vocab_size: 128000")
    memory = size_memory(write(words))
    first, middle, last = memory.stage_causes
    assert first[WORKING] == middle[WORKING]
    logits_bytes = 4096 * 128000 * 8
    gradients = 32 * memory.expert.causes[GRADIENTS] + first[GRADIENTS] + last[GRADIENTS]
    expected = 2 * logits_bytes - gradients  # kept and worked with, less what comes after
    assert last[WORKING] == pytest.approx(max(first[WORKING], expected), rel=0.05)
    adding = size_memory(write(words, ("gradient_accumulation_steps: 1", "gradient_accumulation_steps: 2")))
    assert adding.stage_causes[2][ENDS] > logits_bytes


def test_a_yaml_that_mindspore_divides_by_itself(write: Write) -> None:
    automatic = ("parallel: {", "parallel: {parallel_mode: 2, ")
    (note,) = division_notes(write(automatic))
    assert "divides layers by itself" in note
    assert division_notes(write()) == []
    unknown = write(automatic, ("data_parallel: 8, model_parallel: 1, ", ""))
    with pytest.raises(JobError, match="neither data_parallel nor model_parallel"):
        build_job(unknown)


def test_another_batch_is_told(write: Write) -> None:
    assert batch_notes(write(), 8) == []
    (note,) = batch_notes(write(), 1024)
    assert "--gbs 1024 takes the place of the YAML's own global batch of 8 (--gbs 8 keeps it)" in note
