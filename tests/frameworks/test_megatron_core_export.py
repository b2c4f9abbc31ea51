"""Plans as Megatron-LM's flags: written, rounded or refused by name, read back, and patched into a person's script."""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawn_decoder_plans import DENSE, EXPERTS, draw_decoder_plan, make_job

from mm_autoparallel.api.exported import export_plan, find_exporter
from mm_autoparallel.cli.main import main
from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.integrations import framework as framework_of
from mm_autoparallel.integrations.accounting import Lost
from mm_autoparallel.integrations.described import Given
from mm_autoparallel.integrations.megatron_core import flags
from mm_autoparallel.integrations.megatron_core.decided import decide
from mm_autoparallel.integrations.megatron_core.launch import patch_launch, read_launch_plan
from mm_autoparallel.integrations.megatron_core.layers import parse_layout
from mm_autoparallel.integrations.megatron_core.passed import read_passed
from mm_autoparallel.integrations.megatron_core.read import check_read_back, read_plan
from mm_autoparallel.integrations.megatron_core.written import ARGUMENTS, BY_STAGE, LAUNCH, export_patch
from mm_autoparallel.integrations.shell_text import LaunchScript
from mm_autoparallel.model.job.overlaps import Overlaps
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.planner.plan import Plan

LAYERS = (3, 4, 2, 5, 1, 3, 4, 2)
"""Of two chunks on four stages, [chunk][stage] = [3, 4, 2, 5], [1, 3, 4, 2]."""

CHUNKED = Plan(Strategy(pp=4, tp=2, dp=2, mbs=1, vpp=2), {"text": LAYERS}, {"text": (1,) * 8}, 16)
PLAIN = Plan(Strategy(pp=4, tp=2, dp=2, mbs=1), {"text": (5, 7, 7, 5)}, {"text": (0,) * 4}, 16)

JOB = make_job(DENSE, CHUNKED, overlap_grad_reduce=False, overlap_param_gather=False)

SCRIPT = """#!/bin/bash
# --tensor-model-parallel-size 64
GPUS_PER_NODE=8
NNODES=2
WORLD_SIZE=$(($GPUS_PER_NODE*$NNODES))
TP=1   # a comment
MBS=4
ACCUMULATION=2
GBS=$(($MBS*$ACCUMULATION*$WORLD_SIZE/$TP/2))
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPT_ARGS="
    --num-layers 24 \\
    --hidden-size 256 \\
    --num-attention-heads 8 \\
    --seq-length 256 --max-position-embeddings 256 \\
    --tensor-model-parallel-size ${TP} \\
    --pipeline-model-parallel-size 2 \\
    --num-layers-per-virtual-pipeline-stage 6 \\
    --account-for-loss-in-pipeline-split \\
    --micro-batch-size ${MBS} \\
    --global-batch-size ${GBS} \\
    --recompute-activations \\
    --attention-backend auto # the usual
    --use-distributed-optimizer \\
    --bf16
"
OTHERS=(
    --vocab-size 511  --tokenizer-type NullTokenizer
    --recompute-modules core_attn mlp
    --lr 1e-4
)
torchrun --nnodes $NNODES --nproc_per_node $GPUS_PER_NODE pretrain_gpt.py $GPT_ARGS "${OTHERS[@]}" 2>&1 | tee log
"""


EVEN = SCRIPT.replace("    --num-layers-per-virtual-pipeline-stage 6 \\\n", "").replace(
    "    --account-for-loss-in-pipeline-split \\\n", ""
)
"""Two stages of twelve layers."""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.sh"
    path.write_text(SCRIPT)
    path.chmod(0o755)
    return path


def layout_of(plan: Plan, job: Any = None) -> str:
    words = decide(plan, job).values[flags.LAYOUT]
    assert words is not None
    return words[0]


# ------------------------------------------------------------------------------------------------------------- written


def test_a_layout_is_flat_by_chunks() -> None:
    assert layout_of(CHUNKED) == "Ettt|tttt|tt|ttttt|t|ttt|tttt|ttL"


@pytest.mark.parametrize(
    ("counts", "vpp", "passed"),
    [
        ((6, 6, 6, 6), 1, {}),
        ((3,) * 8, 2, {flags.CHUNKS: ("2",)}),
        ((3, 7, 7, 7), 1, {flags.FIRST: ("3",)}),
        ((7, 7, 7, 3), 1, {flags.LAST: ("3",)}),
        ((5, 7, 7, 5), 1, {flags.FIRST: ("5",), flags.LAST: ("5",)}),
        ((5, 6, 8, 5), 1, {flags.LAYOUT: ("Ettttt|tttttt|tttttttt|tttttL",)}),
    ],
)
def test_layers_take_the_simplest_flags(counts: tuple[int, ...], vpp: int, passed: dict[str, Any]) -> None:
    plan = replace(CHUNKED, strategy=replace(CHUNKED.strategy, vpp=vpp, schedule=""), layers={"text": counts})
    values = decide(replace(plan, recompute={"text": (0,) * len(counts)}), None).values
    told = (flags.CHUNKS, flags.LAYERS_PER_CHUNK, flags.LAYOUT, flags.FIRST, flags.LAST, flags.COUNTS_LOSS)
    assert {flag: values[flag] for flag in told} == dict.fromkeys(told) | passed


def test_layers_of_multi_token_prediction_stand_before_the_loss() -> None:
    job = make_job(DENSE | {"mtp-num-layers": 2}, CHUNKED)
    assert layout_of(CHUNKED, job).endswith("|ttmmL")


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("Ettt|(tt|)*29,m|L", ((3, *(2,) * 29, 0, 0), 1)),
        ("E|t*3|tL", ((0, 3, 1), 0)),
        ("Et|(t*2|)*2tL", ((1, 2, 2, 1), 0)),
    ],
)
def test_layouts_are_read_with_products_and_commas(text: str, counts: tuple[tuple[int, ...], int]) -> None:
    assert parse_layout(text, "here") == counts


@pytest.mark.parametrize("text", ["tt|ttL", "Ett|tx", "Ett|mt|L", "E(tt|*3L", "EL|tL", f"Et*{10**4}(t*9999|)*9999L"])
def test_what_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="pipeline-model-parallel-layout"):
        parse_layout(text, "here")


@pytest.mark.parametrize("sizes", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_what_is_written_comes_back(sizes: dict[str, Any], tmp_path: Path) -> None:
    """80 drawn plans each; cells of layouts are held against [chunk][stage] without our own reader."""
    rng = random.Random(7)
    by_layout = 0
    for _ in range(80):
        plan = draw_decoder_plan(sizes, rng)
        job = make_job(sizes, plan)
        decided = decide(plan, job)
        lines = [f"'{word}'" if "|" in word else word for word in " ".join(flags.list_passed(decided.values)).split()]
        text = f"torchrun pretrain_gpt.py {' '.join(lines)}\n"
        check_read_back(read_passed(LaunchScript(tmp_path, text), None), decided.plan, job)
        strategy, layout = plan.strategy, decided.values[flags.LAYOUT]
        if layout is not None:
            by_layout += 1
            cells = layout[0].split("|")
            for chunk in range(strategy.vpp):
                for stage in range(strategy.pp):
                    index = chunk * strategy.pp + stage
                    assert cells[index].count("t") == plan.layers["text"][index]
        for rounded, meant, held in zip(
            decided.plan.recompute["text"], plan.recompute["text"], plan.layers["text"], strict=True
        ):
            assert meant <= rounded <= held
    assert by_layout > 10


def test_recompute_is_rounded_up_and_said() -> None:
    plan = replace(CHUNKED, recompute={"text": (1, 2, 0, 0, 1, 3, 0, 0)})
    decided = decide(plan, None)
    assert decided.values[flags.RECOMPUTED] == ("3",)
    assert decided.plan.recompute["text"] == (3, 3, 2, 3, 1, 3, 3, 2)
    (told,) = decided.approximations
    assert "recomputes 20 layers in place of 7" in told


def test_selective_layers_are_rounded_up_to_all() -> None:
    nothing = {"text": (0,) * 8}
    plan = replace(CHUNKED, recompute=nothing, modes={"text": {"selective": (1, *(0,) * 7)}})
    job = make_job(DENSE, plan, selective_operators=["core_attn", "layernorm"])
    decided = decide(plan, job)
    assert decided.values[flags.MODULES] == ("core_attn", "layernorm")
    assert decided.plan.modes["text"]["selective"] == LAYERS
    assert "1 of 24 layers" in decided.approximations[0]


def test_a_job_of_another_framework_is_said() -> None:
    (told,) = decide(PLAIN, make_job(DENSE, PLAIN, stack="mindspeed")).unchecked
    assert told.startswith("workload.stack is mindspeed, so what is predicted is of that framework's code")
    assert not decide(PLAIN, make_job(DENSE, PLAIN)).unchecked


def test_read_back_finds_what_is_lost(tmp_path: Path) -> None:
    text = f"torchrun pretrain_gpt.py {' '.join(flags.list_passed(decide(PLAIN, None).values))}\n"
    check_read_back(read_passed(LaunchScript(tmp_path, text), None), PLAIN, None)
    for old, new, lost in (
        ("--decoder-last-pipeline-num-layers 5", "--decoder-last-pipeline-num-layers 3 ", "layers"),
        ("--use-distributed-optimizer", "", "zero"),
        ("--sequence-parallel", "", "sequence_parallel"),
        ("--micro-batch-size 1", "--micro-batch-size 2", "mbs"),
    ):
        with pytest.raises((Lost, PlanError), match=lost):
            check_read_back(read_passed(LaunchScript(tmp_path, text.replace(old, new)), None), PLAIN, None)


# ------------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"schedule": "gpipe"}, "its schedule is gpipe"),
        ({"zero": 2}, "ZeRO 2 with PP 4"),
        ({"zero": 3, "pp": 1, "reshard": False}, "RESHARD false"),
        ({"zero": 3, "pp": 1, "shard": 2}, "shards of 2 ranks"),
        ({"zero": 0, "optimizer_offload": True}, "distributed optimizer"),
        ({"graphs": "full"}, "CUDA graphs"),
        ({"precision": "fp8_delayed"}, "fp8_delayed"),
        ({"cp": 2, "cp_kind": "hierarchical"}, "hierarchical"),
        ({"ep": 2, "sequence_parallel": False}, "without sequence parallelism"),
    ],
)
def test_choices_that_cannot_run_are_refused_by_name(changes: dict[str, Any], told: str) -> None:
    strategy = replace(PLAIN.strategy, **changes)
    layers = {"text": (24 // strategy.pp,) * strategy.pp}
    with pytest.raises(PlanError, match=told):
        decide(Plan(strategy, layers, {"text": (0,) * strategy.pp}, 16), None)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"layers": {"vision": (0, 8, 0, 0), "text": (5, 7, 7, 5)}}, "8 vision layers on stage 1"),
        ({"layers": {"text": (0, 12, 7, 5)}}, "stage 0 holds no decoder layer"),
        ({"modes": {"text": {"activation": (0, 2, 0, 0)}}}, "2 layers of stage 1 in the mode activation"),
        ({"modes": {"text": {"offload": (0, 0, 3, 0)}}}, "3 layers of stage 2 in the mode offload"),
        ({"modes": {"text": {"selective": (4, 7, 7, 5)}}, "recompute": {"text": (1, 0, 0, 0)}}, "one --recompute-gran"),
    ],
)
def test_layers_that_cannot_run_so_are_refused_by_name(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(PlanError, match=told):
        decide(replace(PLAIN, **changes), None)


def test_chunks_need_whole_groups_of_micro_batches() -> None:
    with pytest.raises(PlanError, match="VPP 2 with 6 micro-batches on PP 4"):
        decide(replace(CHUNKED, global_batch_size=12), None)


def test_operators_that_have_no_name_there_are_refused() -> None:
    job = make_job(DENSE, PLAIN, recompute_operators=["mlp_act"])
    with pytest.raises(PlanError, match="mlp_act once more"):
        decide(PLAIN, job)


def test_what_operators_demand_and_forbid() -> None:
    shared = EXPERTS | {"moe-shared-expert-intermediate-size": 512}
    job = make_job(shared, PLAIN, recompute_operators=["moe_act"])
    assert decide(PLAIN, job).values[flags.GROUPED] == ()
    job = make_job(shared, PLAIN, recompute_operators=["shared_experts"], overlap_all_to_all="shared_experts")
    with pytest.raises(PlanError, match="--moe-shared-expert-overlap forbids"):
        decide(PLAIN, job)


def test_unknown_frameworks_and_versions_are_refused() -> None:
    with pytest.raises(JobError, match='did you mean "megatron-core"'):
        find_exporter("megatron-cor")
    with pytest.raises(JobError, match="no framework that plans are written for"):
        find_exporter("huggingface")
    with pytest.raises(JobError, match=r"--target-version 0\.12: known of megatron-core are 0\.16"):
        find_exporter("megatron-core", "0.12")


# ------------------------------------------------------------------------------------------------------------- patched


def test_a_script_keeps_all_that_is_not_decided(script: Path) -> None:
    patched, _, _ = patch_launch(script, CHUNKED, JOB)
    expected = SCRIPT.replace("TP=1   #", "TP=2   #").replace("MBS=4", "MBS=1")
    expected = expected.replace("    --num-layers-per-virtual-pipeline-stage 6 \\\n", "")
    expected = expected.replace("    --account-for-loss-in-pipeline-split \\\n", "")
    expected = expected.replace("    --recompute-activations \\\n", "")
    expected = expected.replace("    --recompute-modules core_attn mlp\n", "")
    added = (
        " --pipeline-model-parallel-layout Ettt|tttt|tt|ttttt|t|ttt|tttt|ttL --recompute-granularity full"
        " --recompute-method block --recompute-num-layers 1 --sequence-parallel"
    )
    expected = expected.replace("parallel-size 2 \\", f"parallel-size 4{added} \\")
    assert patched.text.replace("GBS=16", "GBS=$(($MBS*$ACCUMULATION*$WORLD_SIZE/$TP/2))") == expected
    assert subprocess.run(["bash", "-n"], input=patched.text, text=True, check=False).returncode == 0


def test_what_bash_hands_on_is_the_plan(script: Path, tmp_path: Path) -> None:
    """The patched script is run with a stand-in for torchrun; a layout in an array is quoted, in a string it is not."""
    (tmp_path / "torchrun").write_text('#!/bin/bash\nprintf "%s\\n" "$@" > words\n')
    (tmp_path / "torchrun").chmod(0o755)
    in_array = SCRIPT.replace('GPT_ARGS="', "GPT_ARGS=(").replace('--bf16\n"', "--bf16\n)").replace(" \\\n", "\n")
    for text in (SCRIPT, in_array.replace("$GPT_ARGS", '"${GPT_ARGS[@]}"')):
        script.write_text(text.replace("# the usual", "").replace("auto \n", "auto \\\n") if text is SCRIPT else text)
        script.write_text(patch_launch(script, CHUNKED, JOB)[0].text)
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
        subprocess.run(["bash", str(script)], cwd=tmp_path, env=environment, check=True, capture_output=True)
        words = (tmp_path / "words").read_text().split("\n")
        assert words[words.index(flags.LAYOUT) + 1] == "Ettt|tttt|tt|ttttt|t|ttt|tttt|ttL"
        assert words[words.index(flags.GLOBAL_BATCH) + 1] == "16"
        assert words[words.index(flags.TENSOR) + 1] == "2"
        assert flags.LAYERS_PER_CHUNK not in words


def test_a_plan_in_a_script_comes_back(script: Path) -> None:
    script.write_text(patch_launch(script, CHUNKED, JOB)[0].text)
    again = read_plan(read_passed(LaunchScript(script, script.read_text()), 16), 16, 24)
    assert (again.layers, again.recompute) == (CHUNKED.layers, CHUNKED.recompute)
    assert again.strategy == replace(CHUNKED.strategy, overlap_all_to_all="none")
    assert patch_launch(script, CHUNKED, JOB)[0].text == script.read_text()


def test_user_buffers_are_passed_where_a_plan_has_them(script: Path) -> None:
    chosen = replace(CHUNKED, strategy=replace(CHUNKED.strategy, tp_overlap="user_buffers"))
    text = patch_launch(script, chosen, JOB)[0].text
    assert f"{flags.SEQUENCE_PARALLEL} {flags.USER_BUFFERS}" in text
    script.write_text(text)
    again = read_plan(read_passed(LaunchScript(script, text), 16), 16, 24)
    assert again.strategy.tp_overlap == "user_buffers"
    assert flags.USER_BUFFERS not in patch_launch(script, CHUNKED, JOB)[0].text


def test_overlaps_are_switched_as_a_plan_chooses(script: Path) -> None:
    """Over what the job's workload has, and without a job over what the script has."""
    for overlaps, passed in (
        (Overlaps(True, True, False), {flags.OVERLAP_REDUCE, flags.OVERLAP_GATHER, flags.NO_P2P_OVERLAP}),
        (Overlaps(True, False, True), {flags.OVERLAP_REDUCE}),
        (Overlaps(False, False), set()),
    ):
        chosen = replace(CHUNKED, strategy=replace(CHUNKED.strategy, overlaps=overlaps))
        for job in (JOB, None):
            text = patch_launch(script, chosen, job)[0].text
            found = read_passed(LaunchScript(script, text), 16)
            assert {flag for flag in flags.OF_OVERLAPS.values() if found.has(flag)} == passed
            script.write_text(text)  # the next one takes out what this one added
            other = replace(CHUNKED.strategy, overlaps=Overlaps(not overlaps.overlap_grad_reduce))
            with pytest.raises(Lost, match=flags.OVERLAP_REDUCE):
                check_read_back(found, replace(chosen, strategy=other), job)


EXPERTS_SCRIPT = """torchrun --nnodes 2 --nproc_per_node 8 pretrain_gpt.py \\
    --num-layers 24 --num-experts 8 --expert-model-parallel-size 4 --sequence-parallel \\
    --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep \\
    --recompute-granularity selective --recompute-modules moe_act layernorm \\
    --micro-batch-size 1 --global-batch-size 16 --use-distributed-optimizer
"""


def test_choices_of_the_workload_stay_without_a_job(script: Path) -> None:
    """Dispatcher, operators that run once more, and flags without a meaning here are the script's own."""
    script.write_text(EXPERTS_SCRIPT)
    plan = Plan(Strategy(pp=1, tp=1, dp=16, mbs=1, ep=4), {"text": (24,)}, {"text": (0,)}, 16)
    patched, _, _ = patch_launch(script, plan, None)
    expected = EXPERTS_SCRIPT.replace("batch-size 1 ", "batch-size 1 --expert-tensor-parallel-size 1 ", 1)
    assert patched.text == expected
    with pytest.raises(PlanError, match="moe_act, layernorm once more, and the plan recomputes whole layers"):
        patch_launch(script, replace(plan, recompute={"text": (3,)}), None)
    chosen = replace(plan, strategy=replace(plan.strategy, dispatcher="alltoall"))
    assert "hybridep" not in patch_launch(script, chosen, None)[0].text
    dispatcher = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep"
    script.write_text(EXPERTS_SCRIPT.replace(dispatcher, ""))
    assert "--moe-token-dispatcher-type alltoall" in patch_launch(script, plan, None)[0].text


def test_a_script_of_another_model_is_refused(script: Path) -> None:
    script.write_text(SCRIPT.replace("--num-layers 24", "--num-layers 32"))
    with pytest.raises(PlanError, match="--num-layers is 32, and the plan places 24"):
        patch_launch(script, CHUNKED, None)


def test_a_script_without_flags_is_refused(script: Path) -> None:
    script.write_text("torchrun pretrain_gpt.py $ARGS\n")
    with pytest.raises(JobError, match="beside which a plan is written"):
        patch_launch(script, CHUNKED, None)


def test_a_script_that_changes_meanwhile_stays(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter, version = find_exporter("megatron-core")

    def patch(plan: Plan, target: framework_of.Target, paths: Sequence[Path]) -> framework_of.Exported:
        exported = export_patch(plan, target, paths)
        paths[0].write_text("somebody else's\n")
        return exported

    monkeypatch.setattr(
        "mm_autoparallel.api.exported.find_exporter", lambda *_: (replace(exporter, patch=patch), version)
    )
    with pytest.raises(JobError, match="was changed while the plan was written"):
        export_plan(CHUNKED, JOB, "megatron-core", into=(script,))
    assert script.read_text() == "somebody else's\n"


# ----------------------------------------------------------------------------------------------------------- the verbs


IMPORT = ("--from", "megatron-core", "--device", "h100-80g")


def put_plan(path: Path, **more: Any) -> Path:
    document: dict[str, Any] = {
        "parallel_config": {"PP": 4, "TP": 2, "DP": 2, "MBS": 1, "VPP": 2},
        "layer_placement": {"llm_layer_placement": [[3, 4, 2, 5], [1, 3, 4, 2]]},
        "layer_recompute": {"llm_layer_recompute": [[1, 2, 0, 0], [1, 3, 0, 0]]},
        "global_batch_size": 16,
        "e2e_time": 12.5,
        "peak_memory_bytes": [2**30],
    }
    path.write_text(json.dumps(document | more))
    return path


def test_new_files_are_written_and_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = put_plan(tmp_path / "plan.json")
    job = tmp_path / "job.json"
    of_runs = ("seq-length", "hidden-dropout", "attention-dropout")
    model = {key: value for key, value in DENSE.items() if key not in of_runs}
    job.write_text(
        json.dumps(
            {
                "model": model | {"padded-vocab-size": 512},
                "cluster": {"num_nodes": 2, "devices_per_node": 8, "device": "h100-80g"},
                "workload": {"global_batch_size": 16, "seq_length": 256},
            }
        )
    )
    out = tmp_path / "out"
    arguments = ["export", str(plan), "--to", "megatron-core", "--job", str(job), "--out", str(out)]
    assert main([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "mm-autoparallel/export/1"
    assert document["files"] == [str(out / name) for name in (ARGUMENTS, LAUNCH, BY_STAGE)]
    assert "recomputes 20 layers in place of 7" in document["approximations"][0]
    by_themselves, the_plan = document["predicted"]
    assert by_themselves.startswith("Predicted of these files by themselves: ")
    assert the_plan.startswith("Predicted of the plan itself: ")
    header = (out / LAUNCH).read_text().splitlines()
    assert header[0] == "#!/bin/bash"
    assert f"# {by_themselves}" in header
    assert "--recompute-num-layers 3" in (out / ARGUMENTS).read_text().splitlines()
    assert subprocess.run(["bash", "-n", str(out / LAUNCH)], check=False).returncode == 0
    (tmp_path / "model.json").write_text(json.dumps(model | {"padded-vocab-size": 512}))
    again = tmp_path / "again"
    imported = ["import", str(out / LAUNCH), *IMPORT, "--model", str(tmp_path / "model.json"), "--out", str(again)]
    assert main(imported) == 0
    written = json.loads((again / "plan.json").read_text())
    assert written["layer_placement"]["llm_layer_placement"] == [[3, 4, 2, 5], [1, 3, 4, 2]]
    assert written["layer_recompute"]["llm_layer_recompute"] == [[3, 3, 2, 3], [1, 3, 3, 2]]
    (out / LAUNCH).write_text("mine")
    assert main(arguments) == 2
    assert (out / LAUNCH).read_text() == "mine"


def test_a_plan_is_exported_without_its_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = put_plan(tmp_path / "plan.json", layer_recompute={"llm_layer_recompute": [[0] * 4, [0] * 4]})
    assert main(["export", str(plan), "--to", "megatron-core", "--out", str(tmp_path / "out"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["predicted"] == ["As the plan's file has it: 12.50 ms a step, highest peak 1.00 GiB"]
    assert "without --job" in document["not_checked"][0]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"global_batch_size": 15}, "no multiple of DP 2 x MBS 1"),
        ({"parallel_config": {"PP": 4, "TP": 2, "DP": 2, "MBS": 1, "VPP": 2, "EP": 8}}, "EP 8 x ETP 2 does not divide"),
        ({"layer_placement": {"llm_layer_placement": [3, 4]}}, "nest"),
        ({"layer_recompute": {"llm_layer_recompute": [[9, 0, 0, 0], [0] * 4]}}, "stage 0"),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(
    more: dict[str, Any], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], told_on_terminal: None
) -> None:
    plan = put_plan(tmp_path / "plan.json", **more)
    assert main(["export", str(plan), "--to", "megatron-core", "--out", str(tmp_path / "out")]) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_script_is_a_job_and_a_plan(script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text(EVEN)
    out = tmp_path / "out"
    assert main(["import", str(script), *IMPORT, "--out", str(out)]) == 0
    assert "PP 2, TP 1, DP 8" in capsys.readouterr().out
    assert main(["simulate", str(out / "job.yaml"), "--config", str(out / "plan.json"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    plan = json.loads((out / "plan.json").read_text())
    assert found["e2e_time"] == plan["e2e_time"]
    assert plan["layer_placement"]["llm_layer_placement"] == [12, 12]
    assert main(["import", str(script), *IMPORT, "--out", str(out)]) == 2  # never over what is there


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("--seq-length 256", "--seq-length $LENGTH", "line 15 gives --seq-length the value"),
        ("--micro-batch-size ${MBS}", "--micro-batch-size 3", "no multiple of DP 8 x MBS 3"),
        ("--bf16", "", "neither --bf16 nor --fp16"),
        ("--recompute-activations", "--use-torch-fsdp2", "--use-torch-fsdp2 shards with torch FSDP2"),
        ("--bf16", "--bf16 --use-fused-rmsnorm", "--use-fused-rmsnorm is MindSpeed's"),
        ("--recompute-activations", "--noop-layers 3", "--noop-layers is MindSpeed's"),
        ("--num-layers 24", "--num-layers 25", "cannot be"),
        ("core_attn mlp", "core_attn thing", "--recompute-modules names thing"),
        ("--vocab-size 511", "", "say it with --vocab-size N"),
    ],
)
def test_what_is_wrong_with_a_script_is_named(
    old: str, new: str, told: str, script: Path, capsys: pytest.CaptureFixture[str], told_on_terminal: None
) -> None:
    assert old in EVEN
    script.write_text(EVEN.replace(old, new))
    assert main(["import", str(script), *IMPORT, "--out", str(script.parent / "out")]) == 2
    assert told in capsys.readouterr().err
    assert not (script.parent / "out").exists()


def test_words_behind_a_comment_are_no_values() -> None:
    script = LaunchScript(Path("x.sh"), "A=(\n  --attention-backend auto # flash or fused\n  --lr 1\n)\n")
    assert dict(script.flags()) == {"--attention-backend": ["auto"], "--lr": ["1"]}


def test_a_functional_test_is_read_like_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    launch = tmp_path / "model_config.yaml"
    sizes = "".join(f"  --{flag}: {json.dumps(value)}\n" for flag, value in DENSE.items())
    launch.write_text(
        f"MODEL_ARGS:\n{sizes}  --bf16: true\n  --no-such: false\n  --micro-batch-size: 2\n  --global-batch-size: 8\n"
        "  --pipeline-model-parallel-size: 2\n  --pipeline-model-parallel-layout: Et*5\\\\|t*8\\\\|t*4\\\\|t*7L\n"
        '  --prompts: it\'s "free" text\n  --micro-batch-size: 1\n  --expert-tensor-parallel-size: 2\n'
    )  # of what stands twice the last holds, and nothing is divided where no experts are
    out = tmp_path / "out"
    assert main(["import", str(launch), "--world-size", "4", "--device", "h100-80g", "--out", str(out)]) == 2
    arguments = [
        "import",
        str(launch),
        *IMPORT,
        "--world-size",
        "4",
        "--vocab-size",
        "512",
        "--out",
        str(out),
        "--json",
    ]
    assert main(arguments) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["framework"] == "megatron-core"
    assert document["plan"]["layer_placement"]["llm_layer_placement"] == [[5, 8], [4, 7]]
    assert document["plan"]["parallel_config"]["MBS"] == 1
    with pytest.raises(JobError, match="this is a YAML"):
        patch_launch(launch, CHUNKED, None)


def test_the_example_is_planned_as_a_script(repository: Path) -> None:
    path = repository / "examples" / "megatron_core" / "train_8b.sh"
    own = read_launch_plan(path, Given())
    assert own.layers == {"text": (8, 8, 8, 8)} == own.recompute
    assert (own.strategy.pp, own.strategy.tp, own.strategy.dp, own.strategy.zero) == (4, 2, 2, 1)
    assert patch_launch(path, own, None)[0].text.splitlines()[46:49] == [
        "    --recompute-granularity full",
        "    --recompute-method block",
        "    --recompute-num-layers 8",
    ]


@pytest.mark.parametrize(
    ("flags_given", "told"),
    [
        (["--images", "2"], "samples have no images"),
        (["--vocab-size", "5"], "it passes --vocab-size itself"),
        (["--world-size", "12"], "no whole number of nodes of 8"),
        (["--from", "megatron-cor"], 'did you mean "megatron-core"'),
    ],
)
def test_what_goes_with_no_script_is_refused(
    flags_given: list[str], told: str, script: Path, capsys: pytest.CaptureFixture[str], told_on_terminal: None
) -> None:
    script.write_text(EVEN)
    out = script.parent / "out"
    assert main(["import", str(script), *IMPORT, *flags_given, "--out", str(out)]) == 2
    assert told in capsys.readouterr().err
    assert not out.exists()


def test_a_variable_with_its_own_default_is_followed() -> None:
    script = LaunchScript(Path("x.sh"), 'KIND=${KIND:-"optim_grads"}\ntorchrun a.py --kind $KIND --n ${N:-3}\n')
    passed = read_passed(script, None)
    assert (passed.text("--kind"), passed.number("--n")) == ("optim_grads", 3)


@pytest.mark.parametrize("order", ["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"])
@pytest.mark.parametrize("vpp", [1, 2])
def test_each_rank_recomputes_its_stage_s_number(order: Any, vpp: int, tmp_path: Path) -> None:
    """The script beside a launch, run as every rank; the stage of a rank by Megatron-LM's order of groups."""
    strategy = Strategy(pp=4, tp=2, dp=2, mbs=1, vpp=vpp, zero=1, rank_order=order)
    counts = (3, 1, 0, 2) if vpp == 1 else (3, 1, 0, 2, 0, 2, 0, 1)
    plan = Plan(strategy, {"text": (6,) * 4 if vpp == 1 else (3,) * 8}, {"text": counts}, 16)
    result = export_plan(plan, None, "megatron-core", out=tmp_path)
    assert result.exported.approximations
    script = tmp_path / BY_STAGE
    assert os.access(script, os.X_OK)
    expected = [max(counts[stage::4]) for stage in range(4)]
    shape = (4, 2, 2) if order.endswith("dp-pp") else (2, 4, 2)
    stages = np.indices(shape)[0 if order.endswith("dp-pp") else 1].ravel()
    for rank, stage in enumerate(stages):
        words = ["bash", str(script), "echo", "--recompute-num-layers", "3"]
        done = subprocess.run(words, env=os.environ | {"RANK": str(rank)}, capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["--recompute-num-layers", "3", "--recompute-num-layers", str(expected[stage])]


def test_one_number_needs_no_script(tmp_path: Path) -> None:
    plan = Plan(Strategy(pp=2, tp=1, dp=2, mbs=1, zero=1), {"text": (12, 12)}, {"text": (2, 2)}, 16)
    result = export_plan(plan, None, "megatron-core", out=tmp_path)
    assert {path.name for path in result.files} == {"launch.sh", "megatron_args.txt"}
