"""Tinker's profile mode: a launch script's decoder as a folder of Tinker's, measured or traced."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tinker_folders import read_results

from mm_autoparallel.cli.main import main
from mm_autoparallel.errors import JobError
from mm_autoparallel.integrations.catalog import find_launch
from mm_autoparallel.integrations.described import Given
from mm_autoparallel.integrations.huggingface.written import write_config
from mm_autoparallel.integrations.tinker.profiles import INTER, Config, read_folder
from mm_autoparallel.integrations.tinker.written_profiles import (
    Named,
    format_folder,
    list_configs,
    strategy_of,
)
from mm_autoparallel.model.costs.stage import block_costs
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.model.readers.job_file import parse_job
from mm_autoparallel.units import MIB

SIZES = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 --swiglu --normalization RMSNorm "
    "--disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights --seq-length 16 "
    "--max-position-embeddings 16 --vocab-size 128 --make-vocab-size-divisible-by 1"
)
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --qk-layernorm"
TRAINING = (
    "--bf16 --micro-batch-size 1 --global-batch-size 16 --attention-dropout 0 --hidden-dropout 0 "
    "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1"
)
NAMED = Named("tiny", "1m", "test", "260101-000000", "analytic", {})


def write_script(folder: Path, sizes: str = SIZES) -> Path:
    path = folder / "pretrain.sh"
    path.write_text(f"#!/bin/bash\ntorchrun --nproc_per_node 8 pretrain_gpt.py {sizes} {TRAINING}\n")
    return path


def read_model(folder: Path, sizes: str) -> Model:
    path = write_script(folder, sizes)
    model = find_launch(path).describe(path, Given()).model
    assert isinstance(model, Model)
    return model


def make_job(folder: Path, sizes: str = SIZES, **workload: Any) -> Job:
    document = {
        "model": read_model(folder, sizes).model_dump(mode="json"),
        "cluster": {"num_nodes": 2, "devices_per_node": 8, "device": "ascend-910b-64g"},
        "workload": {"global_batch_size": 64, "seq_length": 16, **workload},
    }
    return parse_job(document, folder / "pretrain.sh")


# ------------------------------------------------------------------------------------------------------- the folder


def write_folder(folder: Path, job: Job, configs: tuple[Config, ...]) -> Path:
    for name, text in format_folder(job, configs, NAMED, is_between_known=True).items():
        (folder / name).write_text(text)
    return folder


def test_a_folder_has_the_costs_of_the_job(tmp_path: Path) -> None:
    """What Tinker's reader finds in it, to the last printed digit."""
    job = make_job(tmp_path)
    configs, told = list_configs(job, (1, 2), (0, 1), 2)
    assert {(one.tp, one.sp, one.ep, one.mbs) for one in configs} == {
        (tp, sp, 1, mbs) for tp, sp in ((1, 0), (2, 0), (2, 1)) for mbs in (1, 2)
    }
    assert not told
    found = read_folder(write_folder(tmp_path, job, configs))
    assert (found.seq_length, found.is_bf16, found.num_layers, found.model_size) == (16, True, 4, "1m")
    assert not found.notes
    for config in configs:
        costs, blocks = block_costs(job, strategy_of(job, config)), found.blocks[config]
        for name, block in (("text_pre", blocks.pre), ("text_layer", blocks.layer), ("text_post", blocks.head)):
            assert block.forward_us == pytest.approx(costs[name].forward_ms * 1000.0, abs=6e-4)
            assert block.activations_mib == pytest.approx(costs[name].activation_bytes / MIB, abs=6e-4)
        layer = costs["text_layer"]
        assert blocks.layer.backward_us == pytest.approx(
            (layer.backward_input_ms + layer.backward_weight_ms) * 1000.0, abs=6e-4
        )
        whole = (
            sum(block.weights_mib for block in (blocks.pre, blocks.norm, blocks.head)) + 4 * blocks.layer.weights_mib
        )
        counts = sum(costs[name].parameter_count * each for name, each in (("text_pre", 1), ("text_layer", 4)))
        assert whole == pytest.approx((counts + costs["text_post"].parameter_count) * 2.0 / MIB, abs=5e-3)


def test_the_16_bit_type_is_the_scripts(tmp_path: Path) -> None:
    texts = format_folder(make_job(tmp_path), (Config(),), replace(NAMED, is_fp16=True), is_between_known=False)
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    assert not read_folder(tmp_path).is_bf16


def test_messages_take_what_the_network_takes(tmp_path: Path) -> None:
    """Tinker divides MiB by GB/s of its table: the figure is chosen so that the quotient is the time."""
    job = make_job(tmp_path)
    found = read_folder(write_folder(tmp_path, job, (Config(),)))
    intra = job.cluster.levels[0]
    longest_ms = 1024 / found.intra_gb_per_s[-1]
    wire_ms = 1024 * MIB / intra.group_bandwidth_bytes_per_s(2) * 1000.0
    assert wire_ms <= longest_ms < 2.5 * wire_ms
    assert [*found.intra_gb_per_s] == sorted(found.intra_gb_per_s)  # a start counts for less of a longer message


def test_experts_are_dealt_where_tinker_deals_them(tmp_path: Path) -> None:
    job = make_job(tmp_path, f"{SIZES} {EXPERTS}")
    configs, told = list_configs(job, (1, 2, 3), (0, 1), 1)
    assert {(one.tp, one.sp, one.ep) for one in configs} == {
        *((1, 0, ep) for ep in (1, 2, 4)),
        *((2, 1, ep) for ep in (1, 2, 4)),
    }
    assert any("TP 3" in line and "does not divide 8 devices" in line for line in told)
    found = read_folder(write_folder(tmp_path, job, configs))
    one, four = (found.blocks[Config(ep=ep)].layer.weights_mib for ep in (1, 4))
    assert four < one


def test_a_tied_table_is_at_both_ends(tmp_path: Path) -> None:
    tied = make_job(tmp_path, SIZES.replace("--untie-embeddings-and-output-weights", ""))
    found = read_folder(write_folder(tmp_path, tied, (Config(),))).blocks[Config()]
    assert found.head.weights_mib == pytest.approx(found.pre.weights_mib, abs=2e-3)


def test_layers_of_several_kinds_are_refused(tmp_path: Path) -> None:
    job = make_job(tmp_path, f"{SIZES} {EXPERTS} --moe-layer-freq ([0]*1+[1]*3)")
    with pytest.raises(JobError, match="decoders with alike layers"):
        list_configs(job, (1,), (0,), 1)


def test_names_that_make_no_row_are_refused() -> None:
    with pytest.raises(JobError, match="--model_name is 'a,b'"):
        replace(NAMED, model="a,b")
    assert NAMED.folder == "profiled-data-tiny-1m-260101-000000-test"


# ------------------------------------------------------------------------------------- a model of the script's sizes


@pytest.mark.parametrize(
    ("more", "model_type"),
    [
        ("", "llama"),
        ("--add-qkv-bias", "qwen2"),
        ("--qk-layernorm", "qwen3"),
        (EXPERTS, "qwen3_moe"),
        ("--num-experts 4 --moe-router-topk 2", "mixtral"),
        ("--group-query-attention --num-query-groups 2 --kv-channels 16", "llama"),
    ],
)
def test_a_script_is_built_as_the_class_of_its_sizes(more: str, model_type: str, tmp_path: Path) -> None:
    """`write_config` reads what it writes, and refuses where that is another model."""
    document = write_config(read_model(tmp_path, f"{SIZES} {more}"), tmp_path / "pretrain.sh", 16)
    assert document["model_type"] == model_type


def test_gpt_is_built_as_gpt2(tmp_path: Path) -> None:
    sizes = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16"
    document = write_config(read_model(tmp_path, f"{sizes} --vocab-size 128"), tmp_path / "pretrain.sh", 16)
    assert (document["model_type"], document["n_inner"], document["n_positions"]) == ("gpt2", 128, 16)


def test_sizes_that_no_class_has_are_named(tmp_path: Path) -> None:
    model = read_model(tmp_path, f"{SIZES} {EXPERTS} --moe-shared-expert-intermediate-size 32")
    with pytest.raises(JobError, match="nearest is qwen3_moe without experts"):
        write_config(model, tmp_path / "pretrain.sh", 16)


# ---------------------------------------------------------------------------------------------------------- the verb


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("-m", "profile"), "needs --pretrain_script_path, or profile.pretrain_script_path"),
        (("-m", "all", "-sh", "pretrain.sh"), "needs --global_batch_size, or search.global_batch_size"),
        (("-m", "profile", "-sh", "nowhere.sh"), "nowhere.sh"),
        (("-m", "profile", "-sh", "pretrain.sh", "-tp", "1,x"), "--prof_tp is '1,x'"),
        (("-m", "profile", "-sh", "pretrain.sh", "-sp", "0,2"), "--prof_sp is '0,2'"),
        (("-m", "profile", "-sh", "pretrain.sh", "--max_npu", "0"), "--max_npu is 0"),
        (("-m", "profile", "-sh", "pretrain.sh", "--traced"), "--traced needs --device NAME"),
        (("-m", "profile", "-sh", "pretrain.sh", "--device", "h100-80g"), "give --traced with it"),
        (("-m", "profile", "-sh", "pretrain.sh", "--traced", "--device", "h100-80"), 'no such device .*"h100-80g"'),
        (("-m", "profile", "-sh", "pretrain.sh", "-name", "a/b"), "--model_name is 'a/b'"),
        (("-m", "search", "-profiled", "x", "-gbs", "8", "--traced"), "--traced goes with --mode profile or all"),
    ],
)
def test_what_cannot_be_measured_is_said(
    words: tuple[str, ...],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_script(tmp_path)
    assert main(["tinker", *words]) == 2
    assert re.search(told, capsys.readouterr().err.replace("\n", " "))
    assert [path.name for path in tmp_path.iterdir()] == ["pretrain.sh"]


def test_a_script_is_traced_searched_and_written(tmp_path: Path, run_cli: Callable[..., Any]) -> None:
    """From a launch script to ten of them, without a device."""
    pytest.importorskip("transformers")
    script = write_script(tmp_path)
    words = ("tinker", "-m", "all", "-sh", script, "-name", "tiny", "-tp", "1", "--max_mbs", "1", "-gbs", "16")
    words += ("--traced", "--device", "ascend-910b-64g", "-nodes", "1", "--model", "tinker")
    first = run_cli(*words)
    assert first.returncode == 0, first.stderr
    (folder,) = (tmp_path / "profiled_data").iterdir()
    assert json.loads(next(folder.glob("VERSION*")).read_text())["source"] == "traced"
    assert (folder / INTER).exists()
    (results,) = (tmp_path / "results").iterdir()
    rows = read_results(results / "results.csv")
    assert {row.sizes[:4] for row in rows} == {(1, 0, 1, 1)}
    assert len(list((results / "configs").iterdir())) == min(10, len(rows))


@pytest.mark.nightly
def test_what_was_traced_is_not_traced_again(tmp_path: Path, run_cli: Callable[..., Any]) -> None:
    """Nor does it depend on what else is in the store."""
    pytest.importorskip("transformers")
    words = ("tinker", "-m", "profile", "-sh", write_script(tmp_path), "--max_mbs", "1", "--json")
    words += ("--traced", "--device", "ascend-910b-64g")
    found = [run_cli(*words, "-tp", "1", "-i", "first"), run_cli(*words, "-tp", "1,2", "-i", "second")]
    assert [one.returncode for one in found] == [0, 0], found[1].stderr
    assert "TP 1 MBS 1, 16 tokens, 2 bytes a weight, flash attention: traced before" in found[1].stderr
    first, second = (read_folder(tmp_path / json.loads(one.stdout)["folder"]) for one in found)
    assert len(second.blocks) == 3
    assert second.blocks[Config()] == first.blocks[Config()]


@pytest.mark.nightly
def test_a_measurement_that_is_killed_goes_on(tmp_path: Path, run_cli: Callable[..., Any], repository: Path) -> None:
    """Nothing half-written stays, and what was measured is not measured again."""
    pytest.importorskip("transformers")
    script = write_script(tmp_path)
    words = ["tinker", "-m", "profile", "-sh", str(script), "-name", "tiny", "-tp", "1", "--max_mbs", "2"]
    code = "import sys; from mm_autoparallel.cli.main import main; sys.exit(main())"
    environment = {**os.environ, "PYTHONPATH": str(repository)}
    killed = subprocess.Popen([sys.executable, "-c", code, *words], cwd=tmp_path, env=environment)
    store = tmp_path / "subgraph_profiles"
    ends_s = time.monotonic() + 600
    while not (measured := list(store.glob("cpu-*/*/tp1-*.json"))) and time.monotonic() < ends_s:
        assert killed.poll() is None
        time.sleep(0.05)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert not (tmp_path / "profiled_data").exists()
    before = {path: path.read_bytes() for path in measured}
    second = run_cli(*words, timeout_s=600)
    assert second.returncode == 0, second.stderr
    assert {path: path.read_bytes() for path in before} == before
    found = read_folder(tmp_path / second.stdout.strip())
    assert {*found.blocks} == {Config(mbs=1), Config(mbs=2)}
    third = run_cli(*words)
    assert "everything was measured before" in third.stderr
