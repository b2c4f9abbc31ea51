"""Megatron-Bridge: overrides, saved configurations and recipes, as published ones are written, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from drawn_decoder_plans import DENSE, make_job
from featured_plans import PLANS

from mm_autoparallel.api.exported import export_plan
from mm_autoparallel.api.imported import find_kind
from mm_autoparallel.errors import JobError, PlannerError
from mm_autoparallel.integrations.described import Given
from mm_autoparallel.integrations.megatron_bridge.config import read_fields
from mm_autoparallel.integrations.megatron_core.flags import SHARDINGS
from mm_autoparallel.planner.plan import Plan

COMMON = """
from megatron.bridge.training.config import ConfigContainer, TrainingConfig


def _pretrain_common() -> ConfigContainer:
    cfg = ConfigContainer(
        model=None,
        train=TrainingConfig(global_batch_size=32, micro_batch_size=2),
        ddp=DistributedDataParallelConfig(use_distributed_optimizer=True, data_parallel_sharding_strategy="no_shard"),
        mixed_precision="bf16_mixed",
    )
    return cfg
"""
RECIPES = """
from megatron.bridge.recipes.common import _peft_common, _pretrain_common
from megatron.bridge.training.config import ConfigContainer

LENGTH: int = 4096


def _split(cfg: ConfigContainer, stages: int = 2) -> None:
    cfg.model.pipeline_model_parallel_size = stages
    cfg.model.virtual_pipeline_model_parallel_size = 2


def small_pretrain_config() -> ConfigContainer:
    cfg = _pretrain_common()
    cfg.model = AutoBridge.from_hf_pretrained("small").to_megatron_provider(load_weights=False)
    cfg.model.tensor_model_parallel_size = 2
    cfg.model.sequence_parallel = True
    cfg.model.pipeline_model_parallel_layout = None
    cfg.model.seq_length = LENGTH * 2
    setattr(cfg.model, "expert_model_parallel_size", 1)
    _split(cfg, stages=4)
    if cfg.model.context_parallel_size > 1:
        cfg.model.cp_comm_type = "a2a"
    if cfg.model.seq_length > 4096:
        cfg.model.recompute_granularity = "full"
        cfg.model.recompute_method = "block"
        cfg.model.recompute_num_layers = 1
    return cfg


def large_pretrain_config() -> ConfigContainer:
    cfg = small_pretrain_config()
    cfg.train.global_batch_size = 64
    return cfg


def computed_pretrain_config() -> ConfigContainer:
    cfg = small_pretrain_config()
    cfg.train.micro_batch_size = choose(cfg.model)
    return cfg


def small_peft_config(peft_scheme: str = "lora") -> ConfigContainer:
    cfg = _peft_common()
    cfg.train.global_batch_size = 8
    cfg.train.micro_batch_size = 1
    peft_cfg = default_peft_config(peft_scheme)
    cfg.peft = peft_cfg
    if isinstance(peft_scheme, str):
        peft_cfg.dim = 8
    cfg.model.pipeline_model_parallel_layout = find_layout(1, 1)
    return cfg


def doubled_pretrain_config() -> ConfigContainer:
    cfg = small_pretrain_config()
    cfg.train.micro_batch_size *= 2
    return cfg


def paired_pretrain_config() -> ConfigContainer:
    cfg = small_pretrain_config()
    cfg.model.context_parallel_size, cfg.model.expert_model_parallel_size = 2, 1
    return cfg


def asked_pretrain_config(size: int) -> ConfigContainer:
    return _pretrain_common()
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The model's own file."""
    kept = {key: value for key, value in DENSE.items() if "dropout" not in key and key != "seq-length"}
    path = tmp_path / "model.json"
    path.write_text(json.dumps(kept | {"padded-vocab-size": 512}))
    return path


@pytest.fixture
def recipes(tmp_path: Path) -> Path:
    """A file of recipes, its base beside it."""
    (tmp_path / "common.py").write_text(COMMON)
    path = tmp_path / "recipes.py"
    path.write_text(RECIPES)
    return path


def read(path: Path, given: Given) -> Plan:
    """The plan that the file at `path` runs."""
    return find_kind(path, "megatron-bridge")[1].read_plan(path, given)


def test_a_recipe_is_followed(recipes: Path, model: Path) -> None:
    """Through its base, a function that is handed the configuration, and branches that are known."""
    given = Given(model, world_size=32, entry="large_pretrain_config", beside=(recipes.parent / "common.py",))
    plan = read(recipes, given)
    assert plan.global_batch_size == 64
    sizes = {"pp": 4, "tp": 2, "dp": 4, "vpp": 2, "mbs": 2, "zero": 1, "cp": 1}
    assert {name: getattr(plan.strategy, name) for name in sizes} == sizes
    assert plan.layers["text"] == (3,) * 8
    assert plan.recompute["text"] == (1,) * 8
    described = find_kind(recipes, None)[1].describe(recipes, given)
    assert described.workload["seq_length"] == 8192
    assert described.adapters is None


def test_adapters_of_a_recipe_are_the_job_s(recipes: Path, model: Path) -> None:
    given = Given(model, world_size=8, entry="small_peft_config", seq_length=256)
    described = find_kind(recipes, None)[1].describe(recipes, given)
    assert described.adapters == {"rank": 8, "targets": ["qkv", "proj", "fc1", "fc2"], "dropout": False}


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (None, ["7 functions", "--entry"]),
        ("smal_pretrain_config", ["did you mean", "small_pretrain_config"]),
        ("computed_pretrain_config", ["line ", "train.micro_batch_size is choose(cfg.model)", "overrides beside it"]),
        ("asked_pretrain_config", ["takes size"]),
        ("doubled_pretrain_config", ["train.micro_batch_size is 2 in", "change of several"]),
        ("paired_pretrain_config", ["_parallel_size is (2, 1) in"]),
    ],
)
def test_what_only_a_run_says_is_refused(entry: str | None, words: list[str], recipes: Path, model: Path) -> None:
    with pytest.raises(JobError) as failure:
        read(recipes, Given(model, world_size=32, entry=entry))
    assert all(word in str(failure.value) for word in words)


def test_overrides_beside_a_recipe_are_over_it(recipes: Path, model: Path, tmp_path: Path) -> None:
    beside = tmp_path / "overrides.txt"
    beside.write_text("# ours\ntrain.micro_batch_size=1\n++model.pipeline_model_parallel_layout='Et*6|t*6|t*6|t*6L'\n"
                      "~model.virtual_pipeline_model_parallel_size\nddp.use_distributed_optimizer=false\n")  # fmt: skip
    given = Given(model, world_size=32, entry="computed_pretrain_config", beside=(recipes.parent / "common.py", beside))
    plan = read(recipes, given)
    assert (plan.strategy.mbs, plan.strategy.vpp, plan.layers["text"]) == (1, 1, (6, 6, 6, 6))
    assert plan.strategy.zero == 0


def test_a_saved_configuration_has_its_model(tmp_path: Path) -> None:
    """As a run writes it: enumerations as members, sections with targets."""
    document: dict[str, Any] = {
        "_target_": "megatron.bridge.training.config.ConfigContainer",
        "model": {
            "_target_": "megatron.bridge.models.llama.llama_provider.LlamaModelProvider",
            "num_layers": 8,
            "hidden_size": 512,
            "ffn_hidden_size": 1024,
            "num_attention_heads": 8,
            "num_query_groups": 4,
            "gated_linear_unit": True,
            "add_bias_linear": False,
            "share_embeddings_and_output_weights": False,
            "position_embedding_type": "rope",
            "normalization": "RMSNorm",
            "vocab_size": 32000,
            "should_pad_vocab": True,
            "seq_length": 1024,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "attention_backend": {"_target_": "megatron.core.enums.AttnBackend", "_call_": True, "_args_": [3]},
            "pipeline_model_parallel_size": 2,
            "pipeline_model_parallel_layout": [["embedding", *["decoder"] * 3], [*["decoder"] * 5, "loss"]],
            "recompute_granularity": "selective",
            "recompute_modules": ["core_attn"],
        },
        "train": {"micro_batch_size": 1, "global_batch_size": 8},
        "ddp": {"use_distributed_optimizer": True, "grad_reduce_in_fp32": True},
        "mixed_precision": {"bf16": True, "fp16": False, "fp8": "hybrid", "fp8_recipe": "blockwise"},
    }
    path = tmp_path / "run_config.yaml"
    path.write_text(yaml.safe_dump(document))
    given = Given(world_size=4)
    plan = read(path, given)
    assert plan.layers["text"] == (3, 5)
    described = find_kind(path, None)[1].describe(path, given)
    assert not isinstance(described.model, Path)
    assert described.model.text.layers.num_kv_groups == 4
    assert described.workload["precision"] == "fp8_blockwise"
    assert described.workload["attention"] == "unfused"
    assert described.workload["recompute_operators"] == ["core_attn"]


@pytest.mark.parametrize("name", ["uneven_chunks", "zero_3", "zero_1", "recompute_number", "hierarchical"])
def test_both_files_say_the_same(name: str, tmp_path: Path, model: Path) -> None:
    plan = PLANS[name]
    job = make_job(DENSE, plan, **({"dealing_ranks": 2} if name == "hierarchical" else {}))
    run = export_plan(plan, job, "megatron-bridge", out=tmp_path / "out").exported.plan
    given = Given(model, world_size=run.strategy.world_size, seq_length=256)
    found = [read(tmp_path / "out" / file, given) for file in ("planned.yaml", "overrides.txt")]
    assert found[0] == found[1]
    assert (found[0].layers, found[0].recompute) == (run.layers, run.recompute)
    fields = read_fields(tmp_path / "out" / "planned.yaml", given)
    if run.strategy.zero == 3:
        assert fields["ddp.data_parallel_sharding_strategy"] == SHARDINGS[3]
        assert fields["dist.use_megatron_fsdp"] is fields["ddp.use_megatron_fsdp"] is True
    assert fields["model.virtual_pipeline_model_parallel_size"] == (run.strategy.vpp if run.strategy.vpp > 1 else None)


def test_only_decided_fields_of_a_person_s_file_change(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "conf.yaml"
    text = (
        "# ours\nmodel:\n  seq_length: 256   # short\n  tensor_model_parallel_size: 8\n  recompute_granularity: full\n"
        "  recompute_method: uniform\n  recompute_num_layers: 1\ntrain:\n  train_iters: 20\n  global_batch_size: 8\n"
        "  micro_batch_size: 8 # of a rank\noptimizer:\n  lr: 0.00025\n"
    )
    path.write_text(text)
    plan = replace(PLANS["uneven_stages"], global_batch_size=32)
    export_plan(plan, make_job(DENSE, plan), "megatron-bridge", into=(path,), out=tmp_path / "out")
    written = (tmp_path / "out" / "conf.yaml").read_text()
    kept = [line for line in text.splitlines() if "recompute" not in line and "size" not in line]
    assert all(line in written for line in kept)
    assert "  micro_batch_size: 1 # of a rank" in written
    again = read(tmp_path / "out" / "conf.yaml", Given(model, world_size=plan.strategy.world_size))
    assert again.layers == plan.layers
    assert again.recompute == plan.recompute


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.yaml", "model: {context_parallel_size: 2, recompute_modulse: [a]}", ["did you mean", "recompute_modules"]),
        ("a.yaml", "model: {tensor_model_parallel_size: 2}\ntrian: {}", ["trian is no section", "train"]),
        ("a.yaml", "model: {tensor_model_parallel_size: 2}\nddp: {use_distributed_optimizer: yess}", ["true or false"]),
        ("a.yaml", "model: {tensor_model_parallel_size: two}", ["--tensor-model-parallel-size", "whole number"]),
        ("a.yaml", "model: {pipeline_model_parallel_layout: [[decoder, encoder]]}", ["lists of embedding, decoder"]),
        ("a.yaml", "model: {tensor_model_parallel_size: 1}\nmixed_precision: fp6", ["fp6", "bf16_mixed"]),
        ("a.txt", "model.tensor_model_parallel_size=2\nnothing", ["line 2", "section.field=value"]),
        ("a.txt", "model.tensor_model_parallel_size=2\nours.a=1", ["line 2", "in no section"]),
    ],
)  # fmt: skip
def test_what_is_malformed_is_named(name: str, text: str, words: list[str], tmp_path: Path, model: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(PlannerError) as failure:
        read(path, Given(model, world_size=8, seq_length=256))
    assert all(word in str(failure.value) for word in words)


def test_a_recipe_is_not_written_into(recipes: Path, tmp_path: Path) -> None:
    plan = PLANS["pipeline"]
    with pytest.raises(JobError, match="YAML of overrides"):
        export_plan(plan, make_job(DENSE, plan), "megatron-bridge", into=(recipes,), out=tmp_path / "out")


SCRIPT = """#!/bin/bash
# train.global_batch_size=7 is what it was
NAME=small
TP=${TP:-4}
GLOBAL_BATCH_SIZE=16
torchrun --nproc_per_node=8 --nnodes=4 scripts/training/run_recipe.py \\
    --recipe ${NAME}_pretrain_config \\
    --micro_batch_size 1 \\
    train.global_batch_size=$GLOBAL_BATCH_SIZE \\
    model.tensor_model_parallel_size=$TP \\
    checkpoint.save=$WHERE/results \\
    ddp.use_distributed_optimizer=False
"""


def test_a_launch_script_is_over_the_recipe_that_it_starts(recipes: Path, model: Path, tmp_path: Path) -> None:
    """Also where the recipe's file has another name for it."""
    script, common = tmp_path / "train.sh", recipes.parent / "common.py"
    script.write_text(SCRIPT)
    found, kind = find_kind(script, None)
    assert found == "megatron-bridge"
    assert kind.find_devices(script) == (4, 8)
    plan = kind.read_plan(script, Given(model, world_size=32, beside=(recipes, common)))
    sizes = {"pp": 4, "tp": 4, "dp": 2, "vpp": 2, "mbs": 1, "zero": 0}
    assert {name: getattr(plan.strategy, name) for name in sizes} == sizes
    assert plan.global_batch_size == 16
    other = tmp_path / "names.py"
    other.write_text("from recipes import small_pretrain_config as tiny_pretrain_config\n")
    script.write_text(SCRIPT.replace("NAME=small", "NAME=tiny"))
    assert kind.read_plan(script, Given(model, world_size=32, beside=(other, recipes, common))) == plan


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("TP=${TP:-4}", "for TP in 1 2; do :; done", ["line 10", "$TP", "overrides beside it"]),
        ("NAME=small", "NAME=other", ["other_pretrain_config", "none of the files beside it"]),
        ("NAME=small", "read NAME", ["--entry"]),
        ("train.global_batch_size=$", "train.micro_batch_size=2 train.global_batch_size=$", ["line 9", "line 8"]),
        ("    --recipe ${NAME}_pretrain_config \\\n", "", ["0 recipes", "--recipe"]),
        ("=False", "=maybe", ["maybe", "true or false"]),
    ],
)  # fmt: skip
def test_what_a_launch_script_leaves_open_is_named(
    old: str, new: str, words: list[str], recipes: Path, model: Path, tmp_path: Path
) -> None:
    script = tmp_path / "train.sh"
    assert old in SCRIPT
    script.write_text(SCRIPT.replace(old, new))
    given = Given(model, world_size=32, beside=(recipes, recipes.parent / "common.py"))
    with pytest.raises(PlannerError) as failure:
        find_kind(script, "megatron-bridge")[1].read_plan(script, given)
    assert all(word in str(failure.value) for word in words), str(failure.value)
