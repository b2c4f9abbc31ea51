"""Flags of precision, dispatcher, graphs and overlap in MindSpeed-MM's files: read, refused by name, and written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.integrations.described import Given
from mm_autoparallel.integrations.megatron_core.flags import OF_OVERLAPS
from mm_autoparallel.integrations.mindspeed_mm.arguments import as_mapping, planned_arguments
from mm_autoparallel.integrations.mindspeed_mm.plan_files import write_plan
from mm_autoparallel.integrations.mindspeed_mm.script_files import describe_script
from mm_autoparallel.model.job.overlaps import Overlaps
from mm_autoparallel.planner.plan import Plan

GIVEN = Given(image_tokens=64)
EXPERTS = {"num_moe_experts": 8, "moe_router_topk": 2, "moe_intermediate_size": 32, "n_shared_experts": 1}


@pytest.fixture
def with_experts(model_json: Path, launch_script: Path) -> Path:
    """The tiny checkout's script, whose decoder has experts."""
    document = json.loads(model_json.read_text())
    document["text_decoder"] |= EXPERTS
    model_json.write_text(json.dumps(document))
    return launch_script


def add(script: Path, flags: str) -> None:
    script.write_text(script.read_text().replace("--bf16", f"--bf16 {flags}"))


def planned(plan: Plan, **choices: Any) -> Plan:
    return replace(plan, strategy=replace(plan.strategy, **choices))


def test_flags_as_a_mapping() -> None:
    words = ["--bf16", "--fp8-format", "e4m3", "--scope", "a", "b", "--cuda-graph-impl=none", "--bf16"]
    expected = {"--bf16": True, "--fp8-format": "e4m3", "--scope": "a", "--cuda-graph-impl": "none"}
    assert as_mapping(words) == expected


def test_fused_products_are_read_beside_sequence_parallelism(with_experts: Path) -> None:
    add(with_experts, "--use-ascend-mc2")
    assert describe_script(with_experts, GIVEN).workload["facts"] == {"dispatcher": "alltoall"}
    add(with_experts, "--sequence-parallel")
    facts = describe_script(with_experts, GIVEN).workload["facts"]
    assert facts == {"dispatcher": "alltoall", "tp_overlap": "mc2"}


def test_read_into_the_workload(with_experts: Path, model_json: Path) -> None:
    workload = describe_script(with_experts, GIVEN).workload
    assert workload["facts"] == {"dispatcher": "alltoall"}
    assert workload["overlap_all_to_all"] == "none"
    add(with_experts, "--moe-shared-expert-overlap --use-ascend-coc")
    described = describe_script(with_experts, GIVEN)
    assert described.workload["overlap_all_to_all"] == "shared_experts"
    assert any("--use-ascend-coc hides traffic that is counted in the open" in note for note in described.notes)
    document = json.loads(model_json.read_text())
    document["text_decoder"]["moe_token_dispatcher_type"] = "alltoall_seq"
    model_json.write_text(json.dumps(document))
    assert "facts" not in describe_script(with_experts, GIVEN).workload


def test_no_say_without_experts(launch_script: Path) -> None:
    assert not {"facts", "overlap_all_to_all"} & describe_script(launch_script, GIVEN).workload.keys()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--fp8-format e4m3 --fp8-recipe mxfp8", "ask for products in mxfp8"),
        ("--fp8-format hybrid", "ask for products in fp8_delayed"),
        ("--fp8-format hif8", "fp8_format is 'hif8'"),
        ("--fp8-format e4m3 --fp8-recipe mxfp8-32x32", "fp8_recipe is 'mxfp8-32x32', which is not represented"),
        ("--fp4-format e2m1", "ask for products in nvfp4"),
        ("--cuda-graph-impl local", "ask for CUDA graphs"),
        ("--moe-token-dispatcher-type flex --moe-enable-deepep", "the token dispatcher deepep, which is NVIDIA's"),
        ("--moe-fb-overlap --moe-shared-expert-overlap", "are both given"),
        ("--moe-fb-overlap", "the exchange of tokens beside other micro-batches (--moe-fb-overlap)"),
    ],
)
def test_what_is_refused_by_name(with_experts: Path, flags: str, words: str) -> None:
    add(with_experts, flags)
    with pytest.raises(JobError) as failure:
        describe_script(with_experts, GIVEN)
    assert words in str(failure.value)


def test_written(with_experts: Path, model_json: Path, tiny_plan: Plan, tmp_path: Path) -> None:
    """What the plan chose is passed in the end, what it chose against is not, and what it says nothing of stays."""
    text = with_experts.read_text().replace(
        "--moe-token-dispatcher-type alltoall", "--moe-token-dispatcher-type allgather"
    )
    with_experts.write_text(text)
    chosen = planned(
        tiny_plan, dispatcher="alltoall", overlap_all_to_all="shared_experts", graphs="none", precision="bf16"
    )
    done = write_plan(chosen, model_json, with_experts, tmp_path / "a")
    written = done.files[1].read_text()
    assert "--moe-token-dispatcher-type alltoall \\" in written
    assert "--moe-shared-expert-overlap" in written
    with_experts.write_text(written)
    done = write_plan(planned(tiny_plan, overlap_all_to_all="none"), model_json, with_experts, tmp_path / "b")
    assert "--moe-shared-expert-overlap" not in done.files[1].read_text()
    assert "--moe-token-dispatcher-type alltoall \\" in done.files[1].read_text()
    bare = text.replace("    --moe-token-dispatcher-type allgather \\\n", "")
    with_experts.write_text(bare)
    done = write_plan(planned(tiny_plan, dispatcher="alltoall"), model_json, with_experts, tmp_path / "c")
    assert "--pipeline-model-parallel-size ${PP}" in done.files[1].read_text()
    assert "--moe-token-dispatcher-type alltoall" in done.files[1].read_text()


def test_overlaps_are_switched_as_a_plan_chooses(
    launch_script: Path, model_json: Path, tiny_plan: Plan, tmp_path: Path
) -> None:
    """Those it chooses, in a script and on a command line; others stay."""
    add(launch_script, "--overlap-grad-reduce --overlap-param-gather")
    for overlaps, passed in (
        (Overlaps(), {"--overlap-grad-reduce", "--overlap-param-gather"}),
        (Overlaps(True, False), {"--overlap-grad-reduce"}),
        (Overlaps(False, False, False), {"--no-overlap-p2p-communication"}),
        (Overlaps(True, True, True), {"--overlap-grad-reduce", "--overlap-param-gather"}),
    ):
        chosen = planned(tiny_plan, overlaps=overlaps)
        written = write_plan(chosen, model_json, launch_script, tmp_path / "out", overwrite=True).files[1]
        words = written.read_text().split()
        assert {word for word in words if word.startswith(("--overlap", "--no-overlap"))} == passed
        launch_script.write_text(written.read_text())
        found = planned_arguments(["--overlap-param-gather"], chosen, Path("model.json"), False)
        stays = set() if overlaps.chosen else {"--overlap-param-gather"}
        assert {*found} & {*OF_OVERLAPS.values()} == (passed if overlaps.chosen else stays)
        told = describe_script(written, GIVEN).workload
        assert (told.get("overlap_p2p", True), told["overlap_grad_reduce"]) == (
            "--no-overlap-p2p-communication" not in passed,
            "--overlap-grad-reduce" in passed,
        )


def test_on_a_command_line(tiny_plan: Plan) -> None:
    words = ["--moe-shared-expert-overlap", "--moe-token-dispatcher-type", "allgather"]
    chosen = planned(tiny_plan, dispatcher="alltoall", overlap_all_to_all="none")
    found = as_mapping(planned_arguments(words, chosen, Path("model.json"), False))
    assert found["--moe-token-dispatcher-type"] == "alltoall"
    assert "--moe-shared-expert-overlap" not in found
    assert (
        as_mapping(planned_arguments(words, tiny_plan, Path("model.json"), False)).items() >= as_mapping(words).items()
    )


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"dispatcher": "deepep"}, "it chooses dispatcher deepep"),
        ({"graphs": "partial"}, "it chooses graphs partial"),
        ({"overlap_all_to_all": "micro_batches"}, "it chooses overlap_all_to_all micro_batches"),
        ({"precision": "mxfp8"}, "it chooses precision mxfp8, and a launch script says that by --fp8-format"),
    ],
)
def test_what_cannot_be_written(
    with_experts: Path, model_json: Path, tiny_plan: Plan, tmp_path: Path, choices: dict[str, Any], words: str
) -> None:
    with pytest.raises(PlanError) as failure:
        write_plan(planned(tiny_plan, **choices), model_json, with_experts, tmp_path)
    assert words in str(failure.value)


def test_a_model_json_that_says_otherwise(
    with_experts: Path, model_json: Path, tiny_plan: Plan, tmp_path: Path
) -> None:
    document = json.loads(model_json.read_text())
    document["text_decoder"]["moe_token_dispatcher_type"] = "alltoall_seq"
    model_json.write_text(json.dumps(document))
    with pytest.raises(PlanError, match=r"text_decoder\.moe_token_dispatcher_type of the model file is alltoall_seq"):
        write_plan(planned(tiny_plan, dispatcher="alltoall"), model_json, with_experts, tmp_path)
