"""MindSpeed-LLM's launch scripts: its own flags read as Megatron-LM's, a plan written in its own, what no plan says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from featured_plans import PLANS

from mm_autoparallel.api.exported import export_plan
from mm_autoparallel.api.imported import find_kind, import_launch
from mm_autoparallel.api.linted import lint_files
from mm_autoparallel.errors import PlanError, PlannerError
from mm_autoparallel.integrations.described import Given
from mm_autoparallel.planner.plan import Plan

SCRIPT = """#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
NPUS_PER_NODE=8
NNODES=2
TP=2
PP=4

GPT_ARGS="
    --use-mcore-models \\
    --transformer-impl local \\
    --use-fused-rmsnorm \\
    --use-flash-attn \\
    --num-layers 24 \\
    --hidden-size 512 \\
    --ffn-hidden-size 1024 \\
    --num-attention-heads 8 \\
    --vocab-size 32000 \\
    --seq-length 1024 \\
    --tensor-model-parallel-size ${TP} \\
    --pipeline-model-parallel-size ${PP} \\
    --sequence-parallel \\
    --num-layer-list 5,7,7,5 \\
    --swap-attention \\
    --micro-batch-size 1 \\
    --global-batch-size 16 \\
    --hidden-dropout 0.0 \\
    --attention-dropout 0.0 \\
    --swiglu \\
    --disable-bias-linear \\
    --normalization RMSNorm \\
    --bf16
"

torchrun --nproc_per_node $NPUS_PER_NODE --nnodes $NNODES pretrain_gpt.py \\
    $GPT_ARGS \\
    --distributed-backend nccl \\
    | tee logs/train.log
"""
LAYERS = "--num-layer-list 5,7,7,5"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "pretrain_llm.sh"
    path.write_text(SCRIPT)
    return path


def read(path: Path) -> Plan:
    name, kind = find_kind(path, None)
    assert name == "mindspeed-llm"
    return kind.read_plan(path, Given())


def test_a_script_is_a_job_and_a_plan(script: Path) -> None:
    found = import_launch(script, device="ascend-910b-64g")
    plan = found.estimate.plan
    assert found.framework == "mindspeed-llm"
    assert (plan.strategy.pp, plan.strategy.tp, plan.strategy.dp, plan.layers["text"]) == (4, 2, 2, (5, 7, 7, 5))
    assert (found.job.workload.stack, found.job.workload.attention) == ("mindspeed", "flash")
    assert any(note.startswith("--swap-attention moves what attention keeps") for note in found.notes)


@pytest.mark.parametrize(
    ("new", "expected"),
    [
        ("--pipeline-num-transformer-layers [[1,5],[2,4],[3,3],[4,2]]", (1, 2, 3, 4, 5, 4, 3, 2)),
        ("--num-layers-per-virtual-pipeline-stage 3", (3,) * 8),
        ("--noop-layers 0,23", (5, 6, 6, 5)),
        ("--num-layers-per-virtual-pipeline-stage 3 --noop-layers 3,23", (3, 2, 3, 3, 3, 3, 3, 2)),
        ("--pipeline-model-parallel-layout 'Ettt|(t|)*2tL'", None),
    ],
)
def test_layers_are_where_its_flags_put_them(new: str, expected: tuple[int, ...] | None, script: Path) -> None:
    """Lists are by stage and then by chunk; layers that do nothing are no layers of the model."""
    script.write_text(SCRIPT.replace(LAYERS, new))
    if expected is None:
        with pytest.raises(PlanError, match="layers"):
            read(script)
    else:
        assert read(script).layers["text"] == expected


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        ("--context-parallel-size 2", "ring"),
        ("--context-parallel-size 2 --context-parallel-algo megatron_cp_algo", "ring"),
        ("--context-parallel-size 2 --context-parallel-algo kvallgather_cp_algo", "all_gather"),
        ("--context-parallel-size 2 --context-parallel-algo ulysses_cp_algo", "all_to_all"),
    ],
)
def test_context_parallel_algorithms(flags: str, kind: str, script: Path) -> None:
    script.write_text(SCRIPT.replace("--swap-attention", flags))
    found = import_launch(script, device="ascend-910b-64g")
    assert found.estimate.plan.strategy.context_kind(found.job.workload) == kind


def test_groups_fewer_than_ranks_that_deal_heads_are_repeated(script: Path) -> None:
    """The flag says what MindSpeed does without it; a rank's one group of four heads is then four."""
    ulysses = "--context-parallel-size 2 --context-parallel-algo ulysses_cp_algo"
    few = SCRIPT.replace("--vocab-size", "--group-query-attention --num-query-groups 2 --vocab-size")
    script.write_text(few.replace("--swap-attention", ulysses))
    plain = import_launch(script, device="ascend-910b-64g")
    assert plain.job.workload.known_facts.repeated_groups == "fewer"
    script.write_text(few.replace("--swap-attention", f"{ulysses} --kv-head-repeat-before-uly-alltoall"))
    told = import_launch(script, device="ascend-910b-64g")
    assert (told.job, told.estimate.step_ms) == (plain.job, plain.estimate.step_ms)
    assert any(note.startswith("--kv-head-repeat-before-uly-alltoall is on without it too") for note in told.notes)
    export_plan(told.estimate.plan, told.job, "mindspeed-llm", into=(script,))
    assert ulysses.split()[-1] in script.read_text()
    assert import_launch(script, device="ascend-910b-64g").estimate.plan == told.estimate.plan


def test_layers_with_a_delta_rule_are_read_and_not_divided(script: Path) -> None:
    """Qwen3-Next's specification: every fourth layer attends in full."""
    delta = (
        "--spec mindspeed_llm.tasks.models.spec.qwen3_next_spec layer_spec --full-attention-interval 4 "
        "--linear-key-head-dim 64 --linear-num-key-heads 4 --linear-num-value-heads 8 --linear-value-head-dim 64"
    )
    script.write_text(SCRIPT.replace("--swap-attention", delta).replace("TP=2", "TP=1"))
    layers = import_launch(script, device="ascend-910b-64g").job.model.text.layers
    assert layers.delta
    assert layers.delta.full_layers == (3, 7, 11, 15, 19, 23)
    assert layers.output_gate
    script.write_text(SCRIPT.replace("--swap-attention", delta))
    with pytest.raises(PlannerError, match="layers with a delta rule run with 1 of each"):
        import_launch(script, device="ascend-910b-64g")


def test_experts_of_an_extended_group_are_whole(script: Path) -> None:
    """--moe-tp-extend-ep deals experts over TP x EP."""
    experts = "--num-experts 8 --expert-model-parallel-size 2 --moe-tp-extend-ep --moe-router-topk 2 --moe-grouped-gemm"
    script.write_text(SCRIPT.replace("--swap-attention", experts).replace(LAYERS, ""))
    strategy = read(script).strategy
    assert (strategy.ep, strategy.expert_tp) == (4, 1)


def test_a_plan_is_written_in_its_own_flags(script: Path) -> None:
    plan = replace(PLANS["uneven_chunks"], strategy=replace(PLANS["uneven_chunks"].strategy, tp=2))
    export_plan(plan, None, "mindspeed-llm", into=(script,))
    text = script.read_text()
    assert text.startswith("#!/bin/bash\nexport CUDA_DEVICE_MAX_CONNECTIONS=1\n")
    assert "--num-layer-list" not in text
    assert "--pipeline-model-parallel-layout Ettt|" in text.replace("'", "")
    assert "    --swap-attention \\\n" in text
    assert read(script).layers == plan.layers


def test_chunks_and_context_are_spelt_its_way(script: Path) -> None:
    plan = replace(PLANS["chunks"], strategy=replace(PLANS["chunks"].strategy, cp=2, cp_kind="all_gather"))
    export_plan(plan, None, "mindspeed-llm", into=(script,))
    text = script.read_text()
    assert "--num-layers-per-virtual-pipeline-stage 3" in text
    assert "--context-parallel-algo kvallgather_cp_algo" in text
    assert "--cp-comm-type" not in text
    assert read(script).strategy.vpp == 2


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (LAYERS, "--num-layer-list 5,7,7", "no number for each of 4 stages"),
        (LAYERS, "--num-layer-list 5,7,7,6", "layers"),
        (LAYERS, "--pipeline-num-transformer-layers [[1,5],[2,4]]", "leaves no layers to the stages"),
        (LAYERS, "--noop-layers 18,19,20,21,22,23", "virtual stage 3 of 4 without a layer; those"),
        (LAYERS, "--noop-layers 24", "names layer 24 of 24"),
        (LAYERS, "--noop-layers a", "numbers with commas between"),
        (LAYERS, "--spec mindspeed_llm.tasks.models.spec.mamba_spec layer_spec", "of another form"),
        (LAYERS, "--context-parallel-size 2 --context-parallel-algo hybrid_cp_algo", "needs --ulysses-degree-in-cp"),
    ],
)
def test_what_no_plan_says_is_named(old: str, new: str, told: str, script: Path) -> None:
    script.write_text(SCRIPT.replace(old, new))
    with pytest.raises(PlannerError, match=told):
        read(script)


def test_layers_that_do_nothing_are_not_written_over(script: Path) -> None:
    script.write_text(SCRIPT.replace(LAYERS, "--noop-layers 0,23"))
    with pytest.raises(PlanError, match="take it out and give --num-layers without them first"):
        export_plan(PLANS["pipeline"], None, "mindspeed-llm", into=(script,))
    assert script.read_text() == SCRIPT.replace(LAYERS, "--noop-layers 0,23")


class TestSwitches:
    """Choices that MindSpeed has a switch for, where Megatron-LM has none or another."""

    @pytest.mark.parametrize(
        ("feature", "flag"),
        [
            ("fused_products", "--use-ascend-mc2"),
            ("swap_attention", "--swap-attention"),
            ("activation", "--recompute-activation-function"),
        ],
    )
    def test_they_are_written(self, feature: str, flag: str, tmp_path: Path) -> None:
        texts = export_plan(PLANS[feature], None, "mindspeed-llm", out=tmp_path).exported.texts
        assert all(flag in text for text in texts.values())
        plain = export_plan(PLANS["tensor"], None, "mindspeed-llm", out=tmp_path / "plain").exported.texts
        assert not any(flag in text for text in plain.values())

    def test_an_exchange_beside_the_shared_expert(self, tmp_path: Path) -> None:
        chosen = replace(PLANS["experts"].strategy, overlap_all_to_all="shared_experts")
        plan = replace(PLANS["experts"], strategy=chosen)
        (text, *_) = export_plan(plan, None, "mindspeed-llm", out=tmp_path).exported.texts.values()
        for flag in ("--moe-alltoall-overlap-comm", "--moe-permutation-async-comm", "--moe-grouped-gemm"):
            assert flag in text
        assert "--moe-token-dispatcher-type alltoall" in text
        divided = replace(plan, strategy=replace(chosen, tp=2))
        with pytest.raises(PlanError, match=r"with TP 2, beside which MindSpeed asks for --moe-tp-extend-ep"):
            export_plan(divided, None, "mindspeed-llm", out=tmp_path)
        beside = replace(plan, strategy=replace(chosen, overlap_all_to_all="micro_batches"))
        with pytest.raises(PlanError, match="which needs --job to be looked at"):
            export_plan(beside, None, "mindspeed-llm", out=tmp_path)

    def test_fused_products_are_read_as_a_fact_of_the_run(self, script: Path) -> None:
        def overlap() -> str:
            return import_launch(script, device="ascend-910b-64g").job.workload.known_facts.tp_overlap

        assert overlap() == ""
        script.write_text(script.read_text().replace("--swiglu", "--swiglu --use-ascend-mc2"))
        assert overlap() == "mc2"


TUNES = SCRIPT.replace("pretrain_gpt.py", "posttrain_gpt.py").replace("--swap-attention", "--stage sft --finetune")
LORA = "--lora-r 8 --lora-alpha 16 --lora-fusion --lora-target-modules linear_qkv linear_proj linear_fc1 linear_fc2"


class TestInstructions:
    """Scripts of posttrain_gpt.py."""

    def test_all_weights_train_as_before(self, script: Path) -> None:
        script.write_text(TUNES.replace("--finetune", "--finetune --no-pad-to-seq-lengths"))
        found = import_launch(script, device="ascend-910b-64g")
        assert found.framework == "mindspeed-llm"
        assert found.job.model.adapters is None
        assert found.keeps_less == ("--no-pad-to-seq-lengths",)
        assert any(note.startswith("--no-pad-to-seq-lengths pads samples to the longest") for note in found.notes)

    def test_adapters_alone_train(self, script: Path, tmp_path: Path) -> None:
        """A plan of such a job goes into the script, and into no other."""
        script.write_text(TUNES.replace("--finetune", f"--finetune {LORA}"))
        found = import_launch(script, device="ascend-910b-64g")
        adapters = found.job.model.adapters
        assert adapters is not None
        assert (adapters.rank, set(adapters.targets)) == (8, {"qkv", "proj", "fc1", "fc2"})
        plan = replace(found.estimate.plan, recompute={"text": (1, 2, 2, 1)})
        export_plan(plan, found.job, "mindspeed-llm", into=(script,), out=tmp_path / "out")
        text = (tmp_path / "out" / script.name).read_text()
        assert LORA in text
        assert "--recompute-num-layers 2" in text
        with pytest.raises(PlanError, match="its model has adapters, and what it is written for trains whole weights"):
            export_plan(plan, found.job, "mindspeed-llm", out=tmp_path / "new")
        script.write_text(TUNES)
        whole = import_launch(script, device="ascend-910b-64g")
        script.write_text(TUNES.replace("--finetune", f"--finetune {LORA}"))
        with pytest.raises(PlanError, match="and the script that it goes into trains adapters"):
            export_plan(whole.estimate.plan, whole.job, "mindspeed-llm", into=(script,))

    @pytest.mark.parametrize(
        ("new", "told"),
        [
            ("--stage dpo", "--stage dpo trains on preferences"),
            ("--stage sft --lora-target-modules linear_qkv gate", "--lora-target-modules names gate; known are"),
            (f"--stage sft {LORA} --lora-modules-to-save head", "--lora-modules-to-save trains further weights whole"),
        ],
    )
    def test_others_are_refused_by_name(self, new: str, told: str, script: Path) -> None:
        script.write_text(TUNES.replace("--stage sft", new))
        with pytest.raises(PlanError, match=told):
            import_launch(script, device="ascend-910b-64g")


def test_memory_that_is_not_simulated_is_no_error(script: Path) -> None:
    """Beside a flag that keeps less than is simulated, a peak above the limit may fit."""
    large = SCRIPT.replace("--hidden-size 512", "--hidden-size 16384").replace("--ffn-hidden-size 1024", "")
    found = []
    for flag in ("--swap-attention", "--bf16"):
        script.write_text(large.replace("--swap-attention", flag))
        result = lint_files([script], device="ascend-910b-64g")
        found.append({one.rule.key for one in result.findings if "memory" in one.rule.key})
    assert found == [{"memory-unsure"}, {"out-of-memory"}]
