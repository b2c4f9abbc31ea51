"""What a pretrain YAML says is read, and what is wrong with one is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from edited import set_value

from mm_autoparallel.errors import JobError
from mm_autoparallel.integrations.mindformers.memory_figures import read_memory_figures
from mm_autoparallel.integrations.mindformers.model_job import build_job, strategy_of
from mm_autoparallel.integrations.mindformers.pipeline_problem import (
    Ratios,
    build_pipeline_problem,
    layout_of,
    placement_of,
)
from mm_autoparallel.integrations.mindformers.pretrain_yaml import Pretrain, read_pretrain
from mm_autoparallel.pipeline.problem import recomputed
from mm_autoparallel.units import GIB, MIB

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "tests" / "fixtures" / "mindformers"
EXAMPLES = ROOT / "examples" / "mindformers"
FIGURES = {
    "layer_mem012": 1000,
    "layer_mem": 2000,
    "act_mem0": 500,
    "act_mem": 600,
    "re_comp_mem0": 30,
    "re_comp_mem": 100,
}
STATICS = {"static_mem0": 5000, "static_mem": 2000, "lm_head_mem": 8000}
LIMITS = {"mem_lim_stage0": 50296, "mem_lim_others": 53296, "mem_lim_last": 47296}
RATIOS = Ratios(0.5, 2.0, 1.5, 0.25)


@pytest.fixture
def edited(tmp_path: Path) -> Callable[..., Path]:
    """A copy of 512_4k with keys changed, `path.to.key=value`; None takes the key away."""

    def edit(changes: dict[str, Any]) -> Path:
        document = yaml.safe_load((FIXTURES / "512_4k.yaml").read_text(encoding="utf-8"))
        for trail, value in changes.items():
            set_value(document, trail, ... if value is None else value)
        path = tmp_path / "edited.yaml"
        path.write_text(yaml.safe_dump(document), encoding="utf-8")
        return path

    return edit


@pytest.fixture
def memory(tmp_path: Path) -> Callable[..., Path]:
    def write(values: dict[str, Any]) -> Path:
        path = tmp_path / "memory.txt"
        path.write_text("# a dry run\n\n" + "".join(f"{name}={value}\n" for name, value in values.items()))
        return path

    return write


def test_parallel_sizes_and_layers_are_read() -> None:
    pretrain = read_pretrain(FIXTURES / "512_4k.yaml")
    assert (pretrain.dp, pretrain.tp, pretrain.pp, pretrain.ep, pretrain.vp) == (32, 4, 4, 128, 2)
    assert (pretrain.num_layers, pretrain.mtp_depth, pretrain.num_dense) == (62, 1, 3)
    assert (pretrain.num_microbatches, pretrain.mbs, pretrain.global_batch_size) == (120, 1, 3840)
    assert pretrain.sequence_parallel
    assert pretrain.optimizer_parallel
    assert pretrain.max_memory_bytes == 54 * GIB
    assert pretrain.base_layers == 7


def test_a_llama_has_one_kind_of_layer() -> None:
    pretrain = read_pretrain(EXAMPLES / "pretrain_llama3_70b.yaml")
    assert (pretrain.num_layers, pretrain.num_dense, pretrain.has_experts) == (80, 0, False)


def test_chunks_without_interleaving_are_pointed_out(edited: Callable[..., Path]) -> None:
    (note,) = read_pretrain(edited({"parallel.pipeline_config": None})).notes
    assert "pipeline_interleave" in note


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": None}, ["section `model` is missing"]),
        ({"parallel_config": None}, ["section `parallel_config` is missing"]),
        ({"model.model_config": None}, ["model.model_config"]),
        ({"model.model_config.num_layers": None}, ["num_layers"]),
        ({"model.model_config.num_layers": "61"}, ["num_layers", '"61"']),
        ({"model.model_config.type": "BloomConfig"}, ["BloomConfig", "LlamaConfig"]),
        ({"parallel_config.pipeline_stage": 0}, ["pipeline_stage"]),
        ({"parallel_config.micro_batch_num": None}, ["micro_batch_num"]),
        ({"parallel_config.seq_split_num": 2}, ["seq_split_num 2"]),
        ({"parallel.pipeline_config.pipeline_scheduler": "zero_bubble_v"}, ["zero_bubble_v"]),
        ({"moe_config.first_k_dense_replace": 62}, ["first_k_dense_replace is 62"]),
        ({"swap_config.swap": True}, ["swap_config.swap"]),
        ({"context.max_device_memory": "54"}, ["max_device_memory", '"54GB"']),
        ({"context.max_device_memory": "9" * 400 + "GB"}, ["max_device_memory", '"54GB"']),
    ],
)
def test_what_is_missing_or_wrong_is_named(
    edited: Callable[..., Path], changes: dict[str, Any], words: list[str]
) -> None:
    path = edited(changes)
    with pytest.raises(JobError) as caught:
        read_pretrain(path)
    for word in [str(path), *words]:
        assert word in str(caught.value)


def test_limits_are_the_device_memory_or_what_the_file_says(
    edited: Callable[..., Path], memory: Callable[..., Path]
) -> None:
    pretrain = read_pretrain(edited({}))
    figures = read_memory_figures(memory(FIGURES | STATICS), pretrain)
    assert figures.limit_bytes == (54 * GIB,) * 3
    assert figures.stage_static_bytes == (5000 * MIB, 2000 * MIB, 8000 * MIB)
    assert read_memory_figures(memory(FIGURES | STATICS | LIMITS), pretrain) == figures
    other = read_memory_figures(memory(FIGURES | STATICS | LIMITS | {"mem_lim_others": 1000}), pretrain)
    assert other.limit_bytes[1] == 3000 * MIB
    assert "not used" in other.notes[0]
    without = read_pretrain(edited({"context.max_device_memory": None}))
    with pytest.raises(JobError, match="max_device_memory"):
        read_memory_figures(memory(FIGURES | STATICS), without)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"layer_mem": 1}, "missing"),
        (FIGURES | STATICS | {"act_men": 3}, 'act_men is not known (did you mean "act_mem"?)'),
        (FIGURES | STATICS | {"act_mem": -1}, "act_mem is -1"),
        (FIGURES | STATICS | {"act_mem": "nan"}, "act_mem is"),
        (FIGURES | STATICS | {"act_mem": "much"}, 'line 6 is "act_mem=much"'),
        (FIGURES | STATICS | {"re_comp_mem": 700}, "re_comp_mem 700 is more than act_mem 600"),
        (FIGURES, "static_mem0, static_mem, lm_head_mem missing"),
    ],
)
def test_wrong_memory_figures_are_named(
    edited: Callable[..., Path], memory: Callable[..., Path], values: dict[str, Any], words: str
) -> None:
    with pytest.raises(JobError) as caught:
        read_memory_figures(memory(values), read_pretrain(edited({})))
    assert words in str(caught.value)


def test_times_and_bytes_of_the_problem(edited: Callable[..., Path], memory: Callable[..., Path]) -> None:
    pretrain = read_pretrain(edited({}))
    figures = read_memory_figures(memory(FIGURES | STATICS), pretrain)
    problem = build_pipeline_problem(pretrain, RATIOS, figures, "low_memory")
    dense, moe, head = problem.chain
    assert (dense.count, moe.count, head.count) == (3, 59, 1)
    assert (dense.forward_ms, dense.backward_ms) == (0.5, 1.0)
    assert (moe.forward_ms, moe.backward_ms, head.forward_ms, head.backward_ms) == (1.0, 2.0, 1.5, 3.0)
    assert dense.recompute is not None
    assert moe.recompute is not None
    assert (dense.recompute.extra_backward_ms, moe.recompute.extra_backward_ms) == (0.5, 0.25)
    assert problem.schedule == "interleaved_1f1b_low_memory"
    assert problem.stage_static_bytes == (5000 * MIB, 2000 * MIB, 2000 * MIB, 8000 * MIB)


def test_the_first_layers_of_a_chunk_recompute_whatever_they_are() -> None:
    pretrain = read_pretrain(FIXTURES / "768_4k_gp.yaml")
    from mm_autoparallel.integrations.mindformers.layout import read_layout

    problem = _problem(pretrain)
    layout = read_layout(pretrain)
    placement = placement_of(problem, layout)
    assert recomputed(problem, placement)[0][:2] == (3, 2)
    assert layout_of(problem, placement) == layout


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parallel_config.pipeline_stage": 1}, "for one pipeline stage"),
        ({"parallel_config.pipeline_stage": 32}, "64 chunks for 62 layers"),
        ({"parallel_config.micro_batch_num": 30}, "multiple of pipeline_stage 4"),
    ],
)
def test_pipelines_without_room_are_refused(
    edited: Callable[..., Path], memory: Callable[..., Path], changes: dict[str, Any], words: str
) -> None:
    pretrain = read_pretrain(edited(changes))
    with pytest.raises(JobError) as caught:
        build_pipeline_problem(pretrain, RATIOS, read_memory_figures(memory(FIGURES | STATICS), pretrain), "default")
    assert words in str(caught.value)


def test_the_job_of_a_deepseek_yaml_is_deepseek() -> None:
    pretrain = read_pretrain(FIXTURES / "512_4k.yaml")
    job, strategy = build_job(pretrain), strategy_of(pretrain)
    experts, latent = job.model.text.layers.experts, job.model.text.layers.latent
    assert experts is not None
    assert latent is not None
    assert (experts.num_experts, experts.top_k, experts.ffn_size, experts.shared_ffn_size) == (256, 8, 2048, 2048)
    assert experts.dense_layers == (0, 1, 2)
    assert latent.q_lora_rank == 1536
    assert (job.model.text.layers.num_layers, job.model.text.num_mtp) == (61, 1)
    assert (strategy.ep, strategy.etp, strategy.zero, strategy.vpp) == (128, 1, 1, 2)
    assert job.cluster.num_devices == 512
    # bf16 numbers to compute with; fp32 parameters, which optimizer parallel divides with the moments
    assert (job.workload.weight_bytes, job.workload.optimizer_bytes) == (2.0, 12.0)


def test_the_width_of_a_llama_feed_forward_follows_its_multiples(tmp_path: Path) -> None:
    """Llama 2 70B: 8192 wide, multiples of 4096, multiplier 1.3, gives 28672."""
    text = (EXAMPLES / "pretrain_llama3_70b.yaml").read_text(encoding="utf-8")
    path = tmp_path / "llama.yaml"
    path.write_text(text.replace("intermediate_size: 28672", "multiple_of: 4096\n    ffn_dim_multiplier: 1.3"))
    job = build_job(read_pretrain(path))
    assert job.model.text.layers.ffn_size == 28672


def _problem(pretrain: Pretrain) -> Any:
    from mm_autoparallel.integrations.mindformers.memory_figures import LayerMemory, MemoryFigures

    layer = LayerMemory(1.0, 1.0, 0.0)
    return build_pipeline_problem(
        pretrain, RATIOS, MemoryFigures(layer, layer, (0.0,) * 3, (1e12,) * 3, "test"), "default"
    )
