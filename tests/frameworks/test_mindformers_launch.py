"""A pretrain YAML by the verbs of every framework: imported, a plan written into it, what is refused."""

from __future__ import annotations

import difflib
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
from drawn_decoder_plans import DENSE, draw_decoder_plan
from featured_plans import PLANS

from mm_autoparallel.api.exported import export_plan, find_exporter
from mm_autoparallel.api.imported import find_kind, import_launch
from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.integrations.described import Given
from mm_autoparallel.planner.plan import Plan

EXAMPLES = Path(__file__).parents[2] / "examples" / "mindformers"
LLAMA, DEEPSEEK = EXAMPLES / "pretrain_llama3_70b.yaml", EXAMPLES / "pretrain_deepseek3.yaml"
DECIDED = re.compile(
    r"offset|recompute|data_parallel|model_parallel|pipeline_stage|expert_parallel|context_parallel|micro_batch_num|"
    r"batch_size|pp_interleave_num|pipeline_interleave|enable_parallel_optimizer|pipeline_config|dataset_strategy"
)


def read(path: Path) -> Plan:
    """The plan that the YAML at `path` runs."""
    return find_kind(path, None)[1].read_plan(path, Given())


def test_an_example_is_imported() -> None:
    result = import_launch(LLAMA, device="ascend-910b-64g")
    strategy = result.estimate.plan.strategy
    found = {name: getattr(strategy, name) for name in ("pp", "vpp", "tp", "dp", "mbs", "zero")}
    assert found == {"pp": 4, "vpp": 2, "tp": 8, "dp": 4, "mbs": 1, "zero": 1}
    assert result.framework == "mindformers"
    assert result.job.model.text.layers.num_layers == 80
    assert sum(result.estimate.plan.layers["text"]) == 80
    assert result.job.workload.stack == "mindformers"


def test_a_drawn_plan_comes_back(tmp_path: Path) -> None:
    """Layers and recompute of each chunk, sizes and batch; every other line of the file stays."""
    rng, written = random.Random(7), 0
    path, before = LLAMA, LLAMA.read_text()
    for number in range(60):
        plan = draw_decoder_plan(DENSE | {"num-layers": 80}, rng)
        out = tmp_path / str(number)
        try:
            export_plan(plan, None, "mindformers", into=(path,), out=out)
        except PlanError:
            continue
        written += 1
        after = (out / path.name).read_text()
        again = read(out / path.name)
        assert (again.layers, again.recompute) == (plan.layers, plan.recompute)
        assert again.global_batch_size == plan.global_batch_size
        for name in ("pp", "tp", "dp", "cp", "vpp", "mbs", "zero", "schedule"):
            assert getattr(again.strategy, name) == getattr(plan.strategy, name), name
        changed = [line for line in difflib.ndiff(before.splitlines(), after.splitlines()) if line[:2] in ("- ", "+ ")]
        assert all(DECIDED.search(line) or re.fullmatch(r"[-+] [\s\-\[\],\d]*", line) for line in changed), changed
    assert written > 10


def test_predicted_modules_stand_behind_the_last_layer(tmp_path: Path) -> None:
    """DeepseekV3Config's offset counts them, and a plan does not."""
    pipeline = replace(PLANS["pipeline"].strategy, pp=4, dp=2)
    plan = Plan(pipeline, {"text": (8, 7, 7, 7)}, {"text": (1, 0, 0, 7)}, 16)
    export_plan(plan, None, "mindformers", into=(DEEPSEEK,), out=tmp_path)
    text = (tmp_path / DEEPSEEK.name).read_text()
    assert re.search(r"offset: \[1, 0, 0, 1\]", text)
    again = read(tmp_path / DEEPSEEK.name)
    assert (again.layers, again.recompute) == (plan.layers, plan.recompute)


def test_every_feature_is_accounted_for(tmp_path: Path) -> None:
    exporter, _ = find_exporter("mindformers", None)
    text = LLAMA.read_text().replace("num_layers: 80", "num_layers: 24")
    path = tmp_path / "pretrain.yaml"
    path.write_text(text)
    for feature, featured in PLANS.items():
        plan = replace(featured, strategy=replace(featured.strategy, sequence_parallel=feature != "whole_sequences"))
        refused = exporter.handling(feature) == "refused"
        if feature in ("experts", "whole_experts", "pieces"):  # the YAML has none
            continue
        try:
            export_plan(plan, None, "mindformers", into=(path,), out=tmp_path / feature)
        except PlanError:
            assert refused, feature
        else:
            assert not refused, feature


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("batch_size: 1", "batch_size: 1\n  gradient_accumulation_steps: 4", ["gradient_accumulation_steps is 4"]),
        ("use_seq_parallel: True", "use_seq_parallel: True\n  context_parallel: 2\n  context_parallel_algo: hybrid_cp",
         ["context_parallel_algo", "colossalai_cp"]),
        ("num_layers: 80", "num_layers: 79", ["offset", "79"]),
    ],
)  # fmt: skip
def test_what_no_plan_says_is_named(old: str, new: str, words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "pretrain.yaml"
    path.write_text(LLAMA.read_text().replace(old, new))
    with pytest.raises((JobError, PlanError)) as failure:
        read(path)
    assert all(word in str(failure.value) for word in words)


def test_another_model_s_plan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="80 decoder layers, and the plan places 24"):
        export_plan(PLANS["pipeline"], None, "mindformers", into=(LLAMA,), out=tmp_path)
