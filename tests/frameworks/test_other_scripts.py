"""Launch scripts as others write them: launchers in variables, queues' files, flags of old releases and of forks."""

from __future__ import annotations

from pathlib import Path

import pytest

from mm_autoparallel.api.imported import import_launch
from mm_autoparallel.api.linted import lint_files
from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.integrations.catalog import name_trainer

FLAGS = (
    "--num-layers 8 --hidden-size 256 --num-attention-heads 8 --seq-length 256 --max-position-embeddings 256 "
    "--micro-batch-size 1 --global-batch-size 16 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
    "--vocab-size 512 --bf16"
)
HANDED = """#!/bin/bash
#SBATCH --nodes=1
GPUS_PER_NODE=8
CMD=" \\
    /code/pretrain_gpt.py \\
    FLAGS"
export LAUNCHER="python -u -m torch.distributed.run --nproc_per_node $GPUS_PER_NODE --nnodes 1"
srun bash -c "$LAUNCHER --node_rank \\$SLURM_PROCID $CMD"
"""
BEHIND = """LAUNCHER="deepspeed --num_gpus 8"
SIZES="--nproc_per_node 8 --nnodes 1"
CMD="$LAUNCHER $SIZES pretrain_gpt.py FLAGS"
$CMD
"""


@pytest.mark.parametrize(("name", "text"), [("train.slurm", HANDED), ("train.sbatch", HANDED), ("train.sh", BEHIND)])
def test_launchers_stand_in_variables(name: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text.replace("FLAGS", FLAGS))
    found = import_launch(path, device="h100-80g")
    assert found.framework == "megatron-core"
    strategy = found.estimate.plan.strategy
    assert (strategy.pp, strategy.tp, strategy.dp) == (2, 2, 2)


def test_norms_are_spelt_in_small_letters_too(tmp_path: Path) -> None:
    path = tmp_path / "train.slurm"
    path.write_text(HANDED.replace("FLAGS", f"{FLAGS} --normalization rmsnorm"))
    assert import_launch(path, device="h100-80g").job.model.text.layers.norm == "rms"


@pytest.mark.parametrize(
    ("flag", "told"),
    [
        ("--deepspeed", "line 6: --deepspeed trains by DeepSpeed's engine, whose own configuration says ZeRO"),
        ("--checkpoint-activations --deepspeed", "line 6: --deepspeed trains by DeepSpeed's engine"),
        ("--moe-train-capacity-factor 1.0 --deepspeed", "line 6: --deepspeed trains by DeepSpeed's engine"),
        ("--activations-checkpoint-method uniform", "is of old releases of Megatron-LM; pass --recompute-granularity"),
    ],
)
def test_what_would_be_another_plan_is_refused(flag: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "train.slurm"
    path.write_text(HANDED.replace("FLAGS", f"{FLAGS} {flag}"))
    with pytest.raises(PlanError, match=told):
        import_launch(path, device="h100-80g")


def test_scripts_of_another_entry_are_looked_at_by_themselves(tmp_path: Path) -> None:
    """Where the framework is named; they are no files of the script before them."""
    paths = [tmp_path / "one.slurm", tmp_path / "other.sh"]
    for path, entry in zip(paths, ("pretrain_gpt.py", "pretrain_qwen.py"), strict=True):
        path.write_text(HANDED.replace("FLAGS", f"{FLAGS} --num-experts 3").replace("pretrain_gpt.py", entry))
    found = lint_files(paths, framework="megatron-core")
    assert list(found.files) == paths
    assert {one.path for one in found.findings} == {*paths}


def test_a_fork_s_own_entry_is_told_how_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(f"torchrun --nnodes 1 --nproc_per_node 8 pretrain_qwen.py {FLAGS}\n")
    with pytest.raises(JobError, match=r"where pretrain_qwen\.py trains a decoder as .* --from megatron-core reads it"):
        import_launch(path, device="h100-80g")
    assert import_launch(path, device="h100-80g", framework="megatron-core").estimate.plan.strategy.pp == 2
    path.write_text("torchrun --nnodes 1 --nproc_per_node 8 pretrain_t5.py --encoder-num-layers 12\n")
    with pytest.raises(JobError, match=r"line 1: it starts pretrain_t5\.py; decoders, and"):
        import_launch(path, device="h100-80g")


def test_words_of_the_caller_that_decide_flags_are_named(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    branch = 'PR=${9}\nTP=8\nif [ $PR = bf16 ]; then\n    TYPE="--bf16"\nfi\n'
    passed = FLAGS.replace("--bf16", "$TYPE")
    path.write_text(f"{branch}torchrun --nnodes 1 --nproc_per_node 8 pretrain_gpt.py {passed}\n")
    told = r"neither --bf16 nor --fp16 is passed, .* what its caller gives, \$9 \(first in line 3\), read as empty here"
    with pytest.raises(JobError, match=told):
        import_launch(path, device="h100-80g")
    path.write_text(path.read_text().replace("${9}", "bf16"))
    assert import_launch(path, device="h100-80g").estimate.plan.strategy.tp == 2


def test_flags_that_a_fork_added_are_named(tmp_path: Path) -> None:
    """Those of releases are not, with underscores or negated."""
    path = tmp_path / "train.slurm"
    tools = "git rev-parse --short HEAD\nX=$(date --utc)\nscancel --signal KILL\n"
    known = "--lr 1e-4 --use_distributed_optimizer --no-bias-swiglu-fusion --fim-rate 0.5"
    flags = f"{FLAGS} {known} --attention-head-type multiquery --use-alibi-mask"
    path.write_text(tools + HANDED.replace("FLAGS", flags))
    notes = import_launch(path, device="h100-80g", framework="megatron-core").notes
    (told,) = (note for note in notes if "no release" in note)
    assert told.startswith("--attention-head-type, --use-alibi-mask: no release of Megatron-LM")
    found = [one for one in lint_files([path], framework="megatron-core").findings if one.rule.key == "unknown-flag"]
    assert [one.message.split(" ")[0] for one in found] == ["--attention-head-type", "--use-alibi-mask"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "NPROC_PER_NODE=8 \\\nmegatron sft \\\n  --model Qwen/Qwen3-8B\n",
            r"line 2: it starts `megatron sft`, ms-swift's",
        ),
        ("# megatron pt\nswift  rlhf --rlhf_type dpo\n", r"line 2: it starts `swift rlhf`, ms-swift's command"),
        (
            'source "${SCRIPT_DIR}/models/glm4-9B.sh"\nray job submit -- python3 train.py ${MODEL_ARGS[@]}\n',
            r"line 1: it takes its model from \$\{SCRIPT_DIR\}/models/glm4-9B.sh, as slime's scripts do",
        ),
    ],
)
def test_trainers_that_are_not_read_are_called_by_name(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(text)
    with pytest.raises(JobError, match=told):
        import_launch(path, device="h100-80g")
    path.write_text("echo megatron-sft swift.sh\n")
    assert name_trainer(path) == ""
