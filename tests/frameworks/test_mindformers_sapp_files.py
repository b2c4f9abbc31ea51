"""Files of SAPP pipeline balance: what they say, the memory that measured stages give, and what is wrong with them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from mm_autoparallel.errors import JobError
from mm_autoparallel.integrations.mindformers.memory_decomposition import decompose_memory
from mm_autoparallel.integrations.mindformers.recompute_kinds import KindCounts
from mm_autoparallel.integrations.mindformers.sapp_init import MeasuredStage, SappInit, check_other_sapp, read_sapp_init
from mm_autoparallel.integrations.mindformers.sapp_layers import (
    build_balance_problem,
    format_layers,
    layers_from_init,
    read_sapp_layers,
)
from mm_autoparallel.units import MIB

# mindformers, toolkit/pipeline_balance/cfgs/init_demo.yaml; its memory as tests/st/test_pipeline_balance expects it
DEMO: dict[str, Any] = {
    "pipeline_config": {"pipeline_num": 16, "num_layer": 96, "offset": [-1, 1] * 8},
    "time_config": {"head": 90, "body": 90, "tail": 180},
    "recompute_config": {
        "recompute": False,
        "select_recompute": [1, 0, 0, 0, 1, 1, 2, 0, 0, 0, 1, 1, 2, 0, 0, 1],
        "select_comm_recompute": [1, 0, 0, 0, 0, 0, 0, 1, 1, 2, 1, 1, 2, 0, 0, 1],
    },
    "memory_usage": {
        "head_memory": 77698,
        "tail_memory": 21822,
        "body_memories": {
            "stage_id": [6, 9, 10, 11, 12, 13],
            "memories": [49732, 50435, 32341, 41228, 23134, 30998],
        },
    },
}


@pytest.fixture
def init(tmp_path: Path) -> Callable[..., Path]:
    """Writes DEMO with `path.to.key=value` changed."""

    def write(changes: dict[str, Any] | None = None) -> Path:
        document = json.loads(json.dumps(DEMO))
        for trail, value in (changes or {}).items():
            *parents, last = trail.split(".")
            section = document
            for key in parents:
                section = section[key]
            section[last] = value
        path = tmp_path / "init.yaml"
        path.write_text(yaml.safe_dump(document), encoding="utf-8")
        return path

    return write


def test_the_published_stages_decompose_as_published(init: Callable[..., Path]) -> None:
    memory = decompose_memory(read_sapp_init(init()))
    assert (int(memory.parameter_bytes / MIB), int(memory.constant_bytes / MIB)) == (2141, -1896)
    assert {kind: int(kept / MIB) for kind, kept in memory.activation_bytes.items()} == {
        "none": 852,
        "both": 511,
        "select": 767,
        "comm": 535,
    }
    # the published head and tail include the constant
    ends = (memory.head_bytes, memory.tail_bytes)
    assert [int((end + memory.constant_bytes) / MIB) for end in ends] == [4245, 1203]


def test_stages_without_offset_leave_the_constant_out() -> None:
    """The other published case: every stage has six layers, so a constant cannot be told from parameters."""

    def stage(number: int, full: int, comm: int, peak_mb: float) -> MeasuredStage:
        return MeasuredStage(0, number, 6, KindCounts(full, 0, 0, comm), peak_mb * MIB)

    stages = (
        *(stage(0, 1, 1, 80267), stage(1, 1, 0, 71519), stage(2, 1, 0, 67376)),
        *(stage(3, 2, 0, 52962), stage(9, 0, 2, 39373), stage(15, 1, 0, 16386)),
    )
    memory = decompose_memory(SappInit(Path("case"), 16, 96, 1.0, 1.0, 1.0, stages))
    found = (memory.parameter_bytes, memory.head_bytes, memory.tail_bytes)
    assert [round(value / MIB) for value in found] == [1562, 9785, 2869]
    assert {kind: int(kept / MIB) for kind, kept in memory.activation_bytes.items()} == {
        "none": 822,
        "recompute": 32,
        "comm": 498,
    }
    assert "besides its layers" in memory.notes[0]


def _advised(message: str, run: int) -> MeasuredStage:
    """The dry run that an error asks for."""
    found = re.search(r"a dry run with (\d+) layers on stage (\d+)", message)
    assert found, message
    counts = {kind: int(n) for n, kind in re.findall(r"(\d+) with recompute (\w+)", message)}
    kinds = KindCounts(
        counts.get("recompute", 0), counts.get("both", 0), counts.get("select", 0), counts.get("comm", 0)
    )
    return MeasuredStage(run, int(found[2]), int(found[1]), kinds, 0.0)


def _peak_bytes(stage: MeasuredStage, num_stages: int) -> float:
    """Of a model with 1000 MB of parameters a layer, 500 MB kept, 100 recomputed, 200 both, 400 select, 300 comm."""
    kinds = stage.kinds
    none = stage.num_layers - kinds.full - kinds.both - kinds.select - kinds.comm
    kept = 500 * none + 100 * kinds.full + 200 * kinds.both + 400 * kinds.select + 300 * kinds.comm
    return MIB * (1000 * stage.num_layers + (num_stages - stage.stage) * kept + 700)


def test_the_dry_run_that_is_asked_for_settles_the_system(init: Callable[..., Path]) -> None:
    known = read_sapp_init(init())
    stages = tuple(
        replace(stage, peak_bytes=_peak_bytes(stage, 16)) for stage in known.stages if stage.stage in (0, 6, 9, 15)
    )
    for run in (1, 2, 3):  # two stages and five unknowns without the constant
        with pytest.raises(JobError, match="open") as error:
            decompose_memory(replace(known, stages=stages))
        stage = _advised(str(error.value), run)
        stages += (replace(stage, peak_bytes=_peak_bytes(stage, 16)),)
    memory = decompose_memory(replace(known, stages=stages))
    assert memory.activation_bytes["both"] > 0


def test_negative_activations_are_refused_with_what_would_settle_them(init: Callable[..., Path]) -> None:
    memories = [49732, 10435, 32341, 41228, 23134, 30998]
    with pytest.raises(JobError, match=r"-\d+\.\d MB of activations, which cannot be; a dry run with \d layers on"):
        decompose_memory(read_sapp_init(init({"memory_usage.body_memories.memories": memories})))


def test_several_dry_runs_are_read(tmp_path: Path) -> None:
    """mindformers, toolkit/pipeline_balance/cfgs/init_demopp4.yaml."""
    path = tmp_path / "init.yaml"
    path.write_text(
        """
pipeline_config: {pipeline_num: 4, num_layer: 62, offset: [[-3, 0, 3, 2], [-3, 0, 3, 2]]}
time_config: {head: 1, body: 1, tail: 2}
recompute_config:
  recompute: [false, false]
  select_recompute: [[1, 2, 2, 5], [1, 3, 6, 5]]
  select_comm_recompute: [false, false]
memory_usage:
  head_memory: 18799
  tail_memory: 16788
  body_memories: {stage_id: [[1, 2], [1]], memories: [[17546, 16887], [17794]]}
"""
    )
    init = read_sapp_init(path)
    assert [(s.run, s.stage, s.num_layers, s.kinds.select) for s in init.stages] == [
        (0, 1, 15, 2),
        (0, 2, 18, 2),
        (0, 0, 12, 1),
        (0, 3, 17, 5),
        (1, 1, 15, 3),
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pipeline_config.offset": [-1, 1]}, ["offset", "2 numbers", "16"]),
        ({"pipeline_config.offset": [-6] + [0] * 15}, ["offset", "0 layers to some stage"]),
        ({"recompute_config.select_recompute": [9] * 16}, ["select_recompute", "9", "layers"]),
        ({"recompute_config.recompute": [1, 2]}, ["recompute_config.recompute", "16 numbers"]),
        ({"memory_usage.body_memories.stage_id": [6, 9]}, ["body_memories", "as many"]),
        ({"memory_usage.body_memories.stage_id": [6, 9, 10, 11, 12, 15]}, ["stage_id", "15", "1 to 14"]),
        ({"memory_usage.body_memories.memories": [1, 2, 3, 4, 5, -6]}, ["memories", "-6"]),
        ({"memory_usage.body_memories.memories": [49732, 50435, 92341, 41228, 23134, 30998]}, ["stage"]),
        ({"time_config": {"head": 1, "body": 1}}, ["time_config.tail"]),
        ({"memory_usage.haed_memory": 1}, ["haed_memory", "head_memory"]),
    ],
)
def test_an_init_file_that_is_wrong_is_named(
    init: Callable[..., Path], changes: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(JobError) as error:
        decompose_memory(read_sapp_init(init(changes)))
    for word in ["init.yaml", *words]:
        assert word in str(error.value)


def test_an_offset_of_fewer_layers_is_told_and_taken(init: Callable[..., Path]) -> None:
    """As pipeline balance's own demo with four stages has it; the dry run held what it held."""
    path = init({"pipeline_config.offset": [-1, 1] * 7 + [-1, 0]})
    found = read_sapp_init(path)
    (note,) = found.notes
    assert "makes 95 layers of num_layer 96" in note
    assert (found.num_layers, found.stages[-1].num_layers) == (96, 6)


@pytest.mark.parametrize("profiling", [{}, {"profiling_config": {"micro_batch_num": 8, "folder_path": "/none"}}])
def test_without_times_layers_alone_are_balanced(init: Callable[..., Path], profiling: dict[str, Any]) -> None:
    """mem.yaml, mem_pp4.yaml, mem_lstsq.yaml and init_demo.yaml come so."""
    document = yaml.safe_load(init().read_text(encoding="utf-8")) | profiling
    del document["time_config"]
    path = init()
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    found = read_sapp_init(path)
    assert (found.head_ms, found.body_ms, found.tail_ms) == (0.0, 1.0, 0.0)
    (note,) = found.notes
    assert "there is no time_config" in note
    assert ("profiling_config" in note) == bool(profiling)


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"profiling_config": {}, "training_config": {}, "time_config": {}}, ["automatic run", "training_config_path"]),
        (
            {"manual1": {"offset": [0, 0], "recompute": False, "interleave_num": 1}},
            ["lists to compare with", "manual1"],
        ),
    ],
)
def test_other_files_of_pipeline_balance_are_known(document: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(JobError) as error:
        check_other_sapp(document, Path("other.yaml"))
    for word in ["other.yaml", *words]:
        assert word in str(error.value)
    check_other_sapp(DEMO, Path("init.yaml"))
    check_other_sapp({"model": {"model_config": {}}, "parallel_config": {}}, Path("pretrain.yaml"))


def test_the_layer_file_of_an_init_file_is_read_back(init: Callable[..., Path], tmp_path: Path) -> None:
    found = read_sapp_init(init())
    memory = decompose_memory(found)
    path = tmp_path / "layers.json"
    path.write_text(format_layers(layers_from_init(found, memory)))
    head, body, tail = read_sapp_layers(path).chain
    assert (head.pinned, body.count, tail.pinned) == ("first", 96, "last")
    assert (body.forward_ms, body.backward_ms) == (pytest.approx(30), pytest.approx(60))
    assert [mode.name for mode in body.modes] == ["both", "select", "comm"]
    # the defaults of pipeline balance: 16.5, 4 and 12.5 % of the backward
    assert [mode.extra_backward_ms for mode in body.modes] == pytest.approx([9.9, 2.4, 7.5])
    assert body.modes[1].activation_bytes == pytest.approx(memory.activation_bytes["select"])
    assert head.static_bytes == pytest.approx(memory.head_bytes)


LAYERS: dict[str, Any] = {
    "name": "llama2_70b_prof",
    "pre_defined_layer": {"LlamaEmbedding": 0, "LlamaRMSNorm": -1},
    "layers_description": [
        {"name": "LlamaEmbedding", "type": "HEAD", "time": 4.5808, "nb_layer": 1, "memory_parameter": 1245.8},
        {
            "name": "LLamaDecodeLayer",
            "type": "BODY",
            "time": 1.31479,
            "nb_layer": 80,
            "memory_activation": 440.34,
            "memory_parameter": 1947.3,
            "memory_recompute": 16.24,
            "recompute_time ": 1.5,
        },
        {"name": "LlamaRMSNorm", "type": "TAIL", "time": 0.74015, "nb_layer": 1, "memory_parameter": 3127.6},
    ],
}


def test_times_of_a_layer_file_count_before_shares(tmp_path: Path) -> None:
    path = tmp_path / "layers.json"
    path.write_text(json.dumps(LAYERS))
    layers = read_sapp_layers(path)
    (recompute,) = layers.chain[1].modes
    assert recompute.extra_backward_ms == pytest.approx(1.5 - 1.31479 * 2 / 3)
    problem = build_balance_problem(layers, 8, 1, 32, 56000, "1f1b")
    assert problem.memory_limit_bytes == (56000 * MIB,) * 8
    with pytest.raises(JobError, match="96"):
        build_balance_problem(layers, 16, 6, 32, 56000, "interleaved_1f1b")
    with pytest.raises(JobError, match="multiples"):
        build_balance_problem(layers, 8, 2, 30, 56000, "interleaved_1f1b")


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda layers: layers[1].update(type="MIDDLE"), ["MIDDLE", "BODY"]),
        (lambda layers: layers.pop(1), ["BODY"]),
        (lambda layers: layers.reverse(), ["HEAD before"]),
        (lambda layers: layers[1].update(time=0), ["LLamaDecodeLayer", "time"]),
        (lambda layers: layers[1].update(memory_recompute=-1), ["memory_recompute", "-1"]),
        (lambda layers: layers.insert(2, {**layers[1], "memory_recompute": None}), ["memory_recompute", "not every"]),
    ],
)
def test_a_layer_file_that_is_wrong_is_named(
    tmp_path: Path, edit: Callable[[list[dict[str, Any]]], Any], words: list[str]
) -> None:
    document = json.loads(json.dumps(LAYERS))
    edit(document["layers_description"])
    path = tmp_path / "layers.json"
    path.write_text(json.dumps(document))
    with pytest.raises(JobError) as error:
        read_sapp_layers(path)
    for word in ["layers.json", *words]:
        assert word in str(error.value)
