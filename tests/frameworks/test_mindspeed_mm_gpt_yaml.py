"""A model under mindspeed_mm/mcore: its one YAML to a job, a plan into it and back."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.integrations.catalog import find_launch
from mm_autoparallel.integrations.described import Given
from mm_autoparallel.integrations.mindspeed_mm.refusals import check_entry
from mm_autoparallel.integrations.mindspeed_mm.script_files import (
    describe_script,
    planned_files,
    read_script_plan,
    write_script_plan,
)
from mm_autoparallel.model.blocks.expand import expand
from mm_autoparallel.model.blocks.parameters import count_chain_parameters
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.model.job.overlaps import Overlaps
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.readers.job_file import parse_job
from mm_autoparallel.model.readers.model_file import read_model
from mm_autoparallel.planner.plan import Plan
from mm_autoparallel.planner.search.space import list_entries

FIXTURES = Path(__file__).parents[1] / "fixtures"
ENTRY = "mindspeed_mm/mcore/models/qwen3_5/pretrain_qwen3_5.py"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A launch script in a checkout's place, and its YAML beside it."""
    folder = tmp_path / "checkout"
    (folder / ENTRY).parent.mkdir(parents=True)
    (folder / ENTRY).touch()
    shutil.copy(FIXTURES / "mindspeed_mm_mcore" / "qwen3_5_35b.yaml", folder / "all.yaml")
    (folder / "train.sh").write_text(f"torchrun --nproc_per_node 16 --nnodes 1 {ENTRY} all.yaml\n")
    return folder / "train.sh"


def edit(script: Path, old: str, new: str) -> None:
    path = script.with_name("all.yaml")
    assert path.read_text().count(old) == 1
    path.write_text(path.read_text().replace(old, new))


def form_plan(recompute: int = 40, batch: int = 16, **sizes: Any) -> Plan:
    strategy = Strategy(**({"pp": 1, "tp": 2, "dp": 8, "mbs": 1, "ep": 8, "zero": 1} | sizes))
    return Plan(strategy, {"vision": (27,), "text": (40,)}, {"vision": (0,), "text": (recompute,)}, batch)


def test_it_is_the_model_of_the_published_config(script: Path) -> None:
    """Layer for layer what the config.json says, and so with as many parameters as its class (test_delta_models)."""
    described = describe_script(script, Given())
    published = read_model(FIXTURES / "huggingface" / "qwen3_5_35b_a3b.json")
    assert isinstance(described.model, Model)
    assert described.model.text.layers == published.text.layers
    assert described.model.encoders[0].projector == published.encoders[0].projector.model_copy(update={"freeze": True})
    assert count_chain_parameters(expand(described.model)) == count_chain_parameters(expand(published))


def test_the_job(script: Path) -> None:
    described = describe_script(script, Given())
    assert described.world_size == 16
    assert described.workload["image_tokens_per_sample"] == 262144 // 32**2
    assert (described.search["pp"], described.search["zero"]) == ((1,), (1,))
    assert any(words.startswith("PP above 1") for words in described.not_searched)
    assert isinstance(described.model, Model)
    cluster = {"num_nodes": 1, "devices_per_node": 16, "device": "ascend-910b-64g"}
    document: dict[str, Any] = {"model": described.model.model_dump(), "cluster": cluster}
    sections = {"workload": dict(described.workload), "search": dict(described.search)}
    entries = list_entries(parse_job(document | sections, Path("job")))
    assert {2, 1} >= {entry.strategy.tp for entry in entries if entry.reason is None} >= {2}


def test_the_plan_that_is_there(script: Path) -> None:
    assert read_script_plan(script, Given()) == form_plan()
    edit(script, "recompute_method: block", "recompute_method: uniform")
    edit(script, "recompute_num_layers: 40", "recompute_num_layers: 4")
    assert read_script_plan(script, Given()).recompute["text"] == (40,)
    edit(script, "recompute_granularity: full", "recompute_granularity: null")
    assert read_script_plan(script, Given(world_size=32)) == form_plan(0, dp=16)


def test_nothing_changes_under_the_plan_that_is_there(script: Path, tmp_path: Path) -> None:
    done = write_script_plan(form_plan(), script, tmp_path, Given(), False)
    assert done.files == planned_files(script, tmp_path, Given()) == (tmp_path / "all.yaml",)
    assert done.files[0].read_text() == script.with_name("all.yaml").read_text()
    assert "let it name" in done.approximations[0]


@pytest.mark.parametrize(
    "plan",
    [
        form_plan(7, batch=32, ep=4, mbs=2, dp=8),
        form_plan(0, tp=1, dp=16, batch=64, ep=16),
        form_plan(3, zero=0),
        replace(form_plan(3), strategy=Strategy(pp=1, tp=2, dp=8, mbs=1, ep=1, zero=1, sequence_parallel=False)),
    ],
)
def test_only_what_the_plan_decides_changes(script: Path, tmp_path: Path, plan: Plan) -> None:
    """In the arguments and in the decoder's section alike, through their anchors."""
    before = script.with_name("all.yaml").read_text()
    write_script_plan(plan, script, tmp_path, Given(), False)
    written = (tmp_path / "all.yaml").read_text()
    document, expected = yaml.safe_load(written), yaml.safe_load(before)
    strategy = plan.strategy
    for place in (expected["gpt_args"], expected["model"]["text_decoder"]):
        place["tensor_model_parallel_size"] = strategy.tp
        place["expert_model_parallel_size"] = strategy.ep
        place["sequence_parallel"] = strategy.tp > 1 and strategy.sequence_parallel
    expected["gpt_args"] |= {"micro_batch_size": strategy.mbs, "global_batch_size": plan.global_batch_size}
    expected["gpt_args"]["use_distributed_optimizer"] = strategy.zero > 0
    expected["model"]["text_decoder"]["recompute_num_layers"] = plan.recompute["text"][0]
    assert document == expected
    assert "# both configurations" in written
    assert script.with_name("all.yaml").read_text() == before
    shutil.copy(tmp_path / "all.yaml", script.with_name("all.yaml"))
    assert read_script_plan(script, Given()) == plan


def test_choices_stand_in_both_configurations(script: Path, tmp_path: Path) -> None:
    """Of the arguments and of the decoder's section, and not where the plan says nothing of them."""
    chosen = form_plan(dispatcher="alltoall", overlap_all_to_all="shared_experts", graphs="none", precision="bf16")
    write_script_plan(chosen, script, tmp_path, Given(), False)
    document = yaml.safe_load((tmp_path / "all.yaml").read_text())
    for place in (document["gpt_args"], document["model"]["text_decoder"]):
        assert place["moe_token_dispatcher_type"] == "alltoall"
        assert place["moe_shared_expert_overlap"] is True
    for reduces in (True, False):
        chosen = form_plan(overlaps=Overlaps(reduces, False))
        write_script_plan(chosen, script, tmp_path, Given(), True)
        arguments = yaml.safe_load((tmp_path / "all.yaml").read_text())["gpt_args"]
        assert (arguments["overlap_grad_reduce"], arguments["overlap_param_gather"]) == (reduces, False)
    with pytest.raises(PlanError, match="it chooses precision mxfp8"):
        write_script_plan(form_plan(precision="mxfp8"), script, tmp_path, Given(), True)


def test_recompute_where_nothing_recomputed(script: Path, tmp_path: Path) -> None:
    edit(script, "    recompute_num_layers: 40\n    recompute_granularity: full\n    recompute_method: block\n", "")
    write_script_plan(form_plan(5), script, tmp_path, Given(), False)
    decoder = yaml.safe_load((tmp_path / "all.yaml").read_text())["model"]["text_decoder"]
    found = [decoder[f"recompute_{key}"] for key in ("num_layers", "granularity", "method")]
    assert found == [5, "full", "block"]


def test_what_is_refused(script: Path, tmp_path: Path) -> None:
    piped = Strategy(pp=2, tp=2, dp=4, mbs=1, ep=4, zero=1)
    plan = Plan(piped, {"vision": (27, 0), "text": (20, 20)}, {"vision": (0, 0), "text": (0, 0)}, 16)
    with pytest.raises(PlanError, match="plan with PP 1"):
        write_script_plan(plan, script, tmp_path, Given(), False)
    (tmp_path / "all.yaml").write_text("kept: true\n")
    with pytest.raises(JobError, match="is there already"):
        write_script_plan(form_plan(1), script, tmp_path, Given(), False)
    assert (tmp_path / "all.yaml").read_text() == "kept: true\n"
    with pytest.raises(JobError, match=r"trains layers that are not profiled \(`mm-autoparallel plan --script`"):
        check_entry(ENTRY)
    script.write_text(script.read_text().replace("qwen3_5", "other"))
    with pytest.raises(JobError, match=r"which trains another model than Qwen3\.5"):
        find_launch(script).describe(script, Given())


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("num_layers: 40\n    linear", "num_layers: many\n    linear", 'text_decoder.num_layers is "many"'),
        ("    num_moe_experts: 256\n", "", "num_moe_experts is nothing; a number of experts is expected"),
        ("    moe_ffn_hidden_size: 512\n", "", "moe_ffn_hidden_size is missing"),
        ("linear_num_value_heads: 32", "linear_num_value_heads: 24", "24 is no multiple of num_key_heads 16"),
        ("      patch_size: 16\n", "      patch_size: 16\n      add_qkv_bias: false\n", "add_qkv_bias is false"),
    ],
)
def test_files_with_mistakes(script: Path, old: str, new: str, reason: str) -> None:
    edit(script, old, new)
    with pytest.raises(JobError) as failure:
        describe_script(script, Given())
    assert reason in str(failure.value)
