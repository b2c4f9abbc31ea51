"""A language model's training as the flags of a Megatron-style script describe it, and those flags under a plan."""

from __future__ import annotations

import shlex
from typing import Any, cast

import pytest

from mm_autoparallel.errors import PlannerError
from mm_autoparallel.hooks.language import LanguageTraining
from mm_autoparallel.hooks.pretraining import build_job
from mm_autoparallel.integrations.auto_tuning.space import Network, laws_of, list_configurations
from mm_autoparallel.integrations.megatron_core.flags import set_flags
from mm_autoparallel.model.job.devices import DEVICES
from mm_autoparallel.planner.search.space import list_entries

GPT = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 256 --global-batch-size 16 "
    "--make-vocab-size-divisible-by 1 --attention-dropout 0 --hidden-dropout 0 --untie-embeddings-and-output-weights"
)


def training(line: str, **parts: Any) -> LanguageTraining:
    return LanguageTraining(subject=cast("Any", None), words=tuple(shlex.split(line)), **parts)


def test_model_and_workload_are_the_flags() -> None:
    described = training(f"{GPT} --micro_batch_size 4 --auto-tuning --auto-tuning-ranks 64 --swiglu").describe(64)
    model, workload = cast("Any", described.model), cast("Any", described.workload)
    assert (model.text.layers.num_layers, model.text.layers.gated, model.text.vocab_size) == (8, True, 256)
    assert (workload["global_batch_size"], workload["seq_length"]) == (16, 32)
    assert not workload["sequence_parallel"]
    assert described.search == {"max_vpp": 4, "cp": None, "mbs": [1, 2, 4], "zero": [0, 1]}


def test_fp32_is_measured_and_so_is_planned() -> None:
    sizes = ("weight_bytes", "gradient_bytes", "optimizer_bytes")
    plain, half = (cast("Any", training(f"{GPT} {more}").describe(8).workload) for more in ("", "--bf16"))
    assert [plain[name] for name in sizes] == [4, 4, 8]
    assert not {*sizes} & half.keys()


def test_what_the_script_does_otherwise_counts() -> None:
    parts = {"workload": {"gradient_bytes": 2.0}, "search": {"cp": [1]}}
    described = training(f"{GPT} --bf16 --sequence-parallel --num-experts 8 --disable-bias-linear", **parts).describe(4)
    workload = cast("Any", described.workload)
    assert workload["sequence_parallel"]
    assert workload["gradient_bytes"] == 2.0
    assert (described.search["cp"], described.search["ep"]) == ([1], [1, 2, 4])


@pytest.mark.parametrize(
    ("more", "framework"),
    [("", "megatron-core"), ("--use-fused-rmsnorm", "mindspeed-llm"), ("--bf16", "megatron-core")],
)
def test_plans_are_written_for_whose_flags_they_are(more: str, framework: str) -> None:
    assert training(f"{GPT} {more}").framework == framework


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (GPT.replace("--num-layers 8", ""), "does not pass --num-layers"),
        (f"{GPT} --position-embedding-type rope".replace("--seq-length 32", ""), "does not pass --seq-length"),
        (f"{GPT} --tp-2d", "--tp-2d divides matrices along two axes"),
        (f"{GPT} --use-torch-fsdp2", "--use-torch-fsdp2 shards with torch FSDP2"),
        (GPT.replace("--vocab-size 256", ""), "say it with --vocab-size N"),
    ],
)
def test_what_is_missing_or_not_planned_is_named(line: str, named: str) -> None:
    with pytest.raises(PlannerError, match=named):
        training(line).describe(8)


def test_a_malformed_number_is_named() -> None:
    with pytest.raises(PlannerError, match='--global-batch-size is "many"'):
        training(GPT.replace("--global-batch-size 16", "--global-batch-size many")).describe(8)


LLAMA = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --seq-length 8192 "
    "--vocab-size 32000 --global-batch-size 32 --micro-batch-size 1 --swiglu --normalization RMSNorm "
    "--disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights "
    "--sequence-parallel --bf16 --attention-dropout 0 --hidden-dropout 0 --use-fused-rmsnorm"
)


def test_its_space_holds_all_that_upstream_tries() -> None:
    pretraining = training(LLAMA).describe(16)
    job = build_job(pretraining, 2, 8, DEVICES["ascend-910b-64g"])
    ours = {
        (one.tp, one.cp, one.pp, one.dp, one.ep, one.vpp, one.mbs, one.zero): entry.reason
        for entry in list_entries(job)
        for one in [entry.strategy]
    }
    theirs = list(list_configurations(Network(32, 8192, 32), 16, laws_of("Ascend910B1")))
    reasons = []
    for one in theirs:
        chunks = one.chunk_layers or 32 // one.pp
        zero = one.zero if one.dp * one.cp > 1 else 1
        reasons.append(ours[(*one.sizes, one.ep, 32 // one.pp // chunks, one.mbs, zero)])
    refused = {reason for reason in reasons if reason}
    assert reasons.count(None) > len(theirs) / 2
    assert all("micro-batches" in reason or "does not divide" in reason for reason in refused), refused


def test_flags_of_a_plan_take_the_place_of_the_scripts() -> None:
    words = "pretrain_gpt.py --bf16 --micro_batch_size 4 --use-distributed-optimizer --cp-comm-type a2a p2p --lr=1"
    values = {
        "--micro-batch-size": ("1",),
        "--use-distributed-optimizer": None,
        "--cp-comm-type": None,
        "--lr": None,
        "--sequence-parallel": (),
    }
    expected = "pretrain_gpt.py --bf16 --micro-batch-size 1 --sequence-parallel"
    assert set_flags(words.split(), values) == tuple(expected.split())
