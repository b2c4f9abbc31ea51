"""The result file: the published one is read as printed, every wrong edit is refused by name, writing is exact."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mm_autoparallel.errors import PlanError
from mm_autoparallel.model.job.cluster import Cluster
from mm_autoparallel.model.job.devices import DEVICES
from mm_autoparallel.model.job.hashing import hash_job
from mm_autoparallel.model.job.job import Job, SearchSpace
from mm_autoparallel.model.job.layers import Experts, Layers
from mm_autoparallel.model.job.model import Decoder, Encoder, MelFrames, Model, Patches, Projector
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.planner.plan import Figures, Plan, plan_document, read_plan, write_result

# MindSpeed-MM, docs of its auto_parallel_mm feature: the result for Qwen2-VL-72B, as printed.
REFERENCE = """{
    "parallel_config": {
        "PP": 8,
        "TP": 2,
        "DP": 4,
        "MBS": 1
    },
    "layer_placement": {
        "vit_layer_placement": [32, 0, 0, 0, 0, 0, 0, 0],
        "llm_layer_placement": [5, 11, 11, 11, 11, 11, 11, 9]
    },
    "layer_recompute": {
        "vit_layer_recompute": [0, 0, 0, 0, 0, 0, 0],
        "llm_layer_recompute": [0, 10, 9, 9, 9, 7, 4]
    },
    "e2e_time": 8992.0,
    "throughput": 761.58192090395477
}"""


def layers(num_layers: int) -> Layers:
    return Layers(
        num_layers=num_layers, hidden_size=64, ffn_size=256, num_heads=8, num_kv_groups=8, head_dim=8, norm="rms"
    )


PROJECTOR = Projector(layer_sizes=(64, 64))
VISION = Encoder(name="vision", stem=Patches(in_features=12), layers=layers(32), projector=PROJECTOR)
AUDIO = Encoder(name="audio", stem=MelFrames(num_mel_bins=16), layers=layers(8), projector=PROJECTOR)


def make_job(*encoders: Encoder, num_text_layers: int = 80) -> Job:
    """A job on 8 × 16 devices with a global batch of 512."""
    model = Model(name="small", encoders=encoders, text=Decoder(vocab_size=1024, layers=layers(num_text_layers)))
    cluster = Cluster(num_nodes=8, devices_per_node=16, device=DEVICES["ascend-910b-64g"])
    workload = Workload(global_batch_size=512, seq_length=8192)
    return Job(model, cluster, workload, (), SearchSpace(), Path("job.yaml"), hash_job(model, cluster, workload))


JOB = make_job(VISION)
Edit = Callable[[dict[str, Any]], object]


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., Plan]:
    """Reads the reference file with `edit` done to it."""

    def read_edited(edit: Edit = lambda document: None, job: Job = JOB) -> Plan:
        document = json.loads(REFERENCE)
        edit(document)
        path = tmp_path / "plan.json"
        path.write_text(json.dumps(document))
        return read_plan(path, job)

    return read_edited


def chunked(document: dict[str, Any]) -> None:
    """The reference file as an interleaved plan of 4 stages × 2 chunks."""
    document["parallel_config"].update(PP=4, VPP=2)
    document["layer_placement"] = {
        "vit_layer_placement": [[32, 0, 0, 0], [0, 0, 0, 0]],
        "llm_layer_placement": [[5, 11, 11, 11], [11, 11, 11, 9]],
    }
    document["layer_recompute"] = {
        "vit_layer_recompute": [[0, 0, 0], [0, 0, 0]],
        "llm_layer_recompute": [[0, 10, 9, 9], [9, 7, 4]],
    }


# -------------------------------------------------------------------------------------------------------- accepted


def test_expert_tensor_parallelism_is_written_where_it_is_stated(tmp_path: Path) -> None:
    document = json.loads(REFERENCE)
    document["parallel_config"] |= {"DP": 8, "EP": 4, "ETP": 1}
    document["layer_placement"]["vit_layer_placement"] = [0] * 8
    experts = Experts(num_experts=8, top_k=2, ffn_size=64)
    text = Decoder(vocab_size=1024, layers=layers(80).model_copy(update={"experts": experts}))
    model = Model(name="experts", text=text)
    job = dataclasses.replace(make_job(), model=model)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document))
    plan = read_plan(path, job)
    assert plan.strategy == Strategy(pp=8, tp=2, dp=8, mbs=1, ep=4, etp=1)
    assert plan_document(plan, FIGURES)["parallel_config"]["ETP"] == 1
    usual = dataclasses.replace(plan, strategy=dataclasses.replace(plan.strategy, etp=0))
    assert "ETP" not in plan_document(usual, FIGURES)["parallel_config"]


CHOSEN = [
    {},
    {"cp": 2, "dp": 2, "cp_kind": "all_to_all"},
    {"zero": 0},
    {"zero": 3},
    {"zero": 3, "reshard": False, "optimizer_offload": True},
    {"pp": 1, "dp": 32, "zero": 3, "shard": 8},
    {"precision": "fp8_rowwise"},
]


@pytest.mark.parametrize("changes", CHOSEN)
def test_every_choice_is_written_and_read(tmp_path: Path, changes: dict[str, Any]) -> None:
    cluster = Cluster(num_nodes=16, devices_per_node=8, device=DEVICES["h100-80g"])
    workload = Workload(global_batch_size=512, seq_length=8192, stack="transformers")
    job = dataclasses.replace(JOB, cluster=cluster, workload=workload)
    strategy = Strategy(**({"pp": 8, "tp": 2, "dp": 4, "mbs": 1} | changes))  # type: ignore[arg-type]
    counts = {"vision": (32, *(0,) * 7), "text": (10,) * 8} if strategy.pp == 8 else {"vision": (32,), "text": (80,)}
    plan = Plan(strategy, counts, dict.fromkeys(counts, (0,) * strategy.pp), 512)
    path = tmp_path / "plan.json"
    write_result(path, plan, dataclasses.replace(FIGURES, job_sha256=job.sha256))
    assert read_plan(path, job) == plan
    written = json.loads(path.read_text())["parallel_config"]
    extra = {key for key in written if key not in ("PP", "TP", "DP", "MBS", "CP", "EP", "VPP", "ZERO")}
    named = {name: name.upper() for name in ("cp_kind", "reshard", "optimizer_offload", "shard", "precision")}
    assert extra == {named[name] for name in changes if name in named}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"PRECISION": "fp9"}, 'parallel_config.PRECISION is "fp9"; bf16 or fp8_delayed or'),
        ({"PRECISION": "mxfp8"}, "precision mxfp8"),
        ({"RESHARD": 0}, "parallel_config.RESHARD is 0; true or false is expected"),
        ({"SHARD": True}, "parallel_config.SHARD is true; a whole number"),
        ({"SHARD": 4}, "shards of 4 ranks are torch FSDP2's hybrid sharding, and workload.stack is"),
        ({"OPTIMIZER_OFFLOAD": "yes"}, 'parallel_config.OPTIMIZER_OFFLOAD is "yes"; true or false is expected'),
        (
            {"CP_KIND": "ulysses"},
            'parallel_config.CP_KIND is "ulysses"; ring or all_to_all or all_gather or hierarchical is expected',
        ),
        ({"CP_KIND": "ring"}, "CP by ring divides attention among context parallel ranks, and CP is 1"),
        ({"RESHARD": False}, "weights are kept from forward to backward (reshard false) where ZeRO 3 gathers them"),
    ],
)
def test_a_choice_that_is_none_is_refused(read: Callable[..., Plan], config: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError) as caught:
        read(lambda document: document["parallel_config"].update(config))
    assert words in str(caught.value)


def test_a_rank_order_is_written_where_it_is_not_the_usual_one(read: Callable[..., Plan]) -> None:
    usual = read()
    assert "rank_order" not in plan_document(usual, FIGURES)
    nested = read(lambda d: d.update(rank_order="tp-cp-ep-pp-dp"))
    assert nested.strategy == dataclasses.replace(usual.strategy, rank_order="tp-cp-ep-pp-dp")
    assert plan_document(nested, FIGURES)["rank_order"] == "tp-cp-ep-pp-dp"


def test_the_reference_file_reads_exactly_as_printed(tmp_path: Path) -> None:
    path = tmp_path / "auto_parallel_search_optimal_config.json"
    path.write_text(REFERENCE)
    plan = read_plan(path, JOB)
    assert plan.strategy == Strategy(pp=8, tp=2, dp=4, mbs=1)
    assert plan.strategy.schedule == "1f1b"
    assert plan.layers == {"vision": (32, 0, 0, 0, 0, 0, 0, 0), "text": (5, 11, 11, 11, 11, 11, 11, 9)}
    assert plan.recompute == {"vision": (0,) * 8, "text": (0, 10, 9, 9, 9, 7, 4, 0)}
    assert plan.num_microbatches == 128
    assert plan.warnings == ("the plan uses 64 of the cluster's 128 devices and is simulated on that part alone",)


def test_recompute_may_name_the_last_stage(read: Callable[..., Plan]) -> None:
    plan = read(lambda d: d["layer_recompute"].update(llm_layer_recompute=[0, 10, 9, 9, 9, 7, 4, 9]))
    assert plan.recompute["text"][-1] == 9


def test_chunks_nest_and_flatten_in_the_order_data_flows(read: Callable[..., Plan]) -> None:
    plan = read(chunked)
    assert (plan.strategy.vpp, plan.strategy.schedule) == (2, "interleaved_1f1b")
    assert plan.layers["text"] == (5, 11, 11, 11, 11, 11, 11, 9)
    assert plan.recompute["text"] == (0, 10, 9, 9, 9, 7, 4, 0)
    assert plan.recompute["vision"] == (0,) * 8


def test_one_stage_may_end_vision_and_begin_text(read: Callable[..., Plan]) -> None:
    plan = read(
        lambda d: d.update(
            layer_placement={
                "vit_layer_placement": [20, 12, 0, 0, 0, 0, 0, 0],
                "llm_layer_placement": [0, 10, 11, 11, 12, 12, 12, 12],
            }
        )
    )
    assert plan.layers["vision"][:2] == (20, 12)


def test_keys_of_others_are_left_alone(read: Callable[..., Plan]) -> None:
    plan = read(lambda d: d.update(comment="tried by hand", num_microbatches=3, world_size="many", proven=False))
    assert plan.num_microbatches == 128


def test_a_job_without_vision_takes_zeros_or_nothing(read: Callable[..., Plan]) -> None:
    job = make_job()

    def zeros(document: dict[str, Any]) -> None:
        document["layer_placement"]["vit_layer_placement"] = [0] * 8

    def nothing(document: dict[str, Any]) -> None:
        del document["layer_placement"]["vit_layer_placement"]
        del document["layer_recompute"]["vit_layer_recompute"]

    assert read(zeros, job).layers == read(nothing, job).layers == {"text": (5, 11, 11, 11, 11, 11, 11, 9)}


def test_other_modalities_use_the_same_pattern(read: Callable[..., Plan]) -> None:
    def edit(document: dict[str, Any]) -> None:
        document["layer_placement"]["audio_layer_placement"] = [8, 0, 0, 0, 0, 0, 0, 0]
        document["layer_recompute"]["audio_layer_recompute"] = [0] * 7

    assert list(read(edit, make_job(VISION, AUDIO)).layers) == ["vision", "audio", "text"]


def test_warnings_say_what_has_changed(read: Callable[..., Plan]) -> None:
    whole = read(lambda d: d["parallel_config"].update(DP=8))
    assert whole.warnings == ()
    (batch,) = read(lambda d: (d["parallel_config"].update(DP=8), d.update(global_batch_size=256))).warnings
    assert "made for a global batch of 256; it is simulated with the job's 512" in batch
    (changed,) = read(lambda d: (d["parallel_config"].update(DP=8), d.update(job_sha256="0" * 64))).warnings
    assert "have changed since the plan was made" in changed


def test_what_is_not_read_is_told_where_it_was_meant_to_decide(read: Callable[..., Plan]) -> None:
    def misspell(document: dict[str, Any]) -> None:
        document["parallel_config"].update(DP=8, VP=2)
        document.update(layer_mode={}, note="free")

    assert read(misspell).warnings == (
        'parallel_config.VP is not known here and decides nothing (did you mean "VPP"?)',
        'layer_mode is not known here and decides nothing (did you mean "layer_modes"?)',
    )


# --------------------------------------------------------------------------------------------------------- refused

PLACEMENT, RECOMPUTE = "layer_placement", "layer_recompute"


def place(key: str, counts: Any) -> Edit:
    return lambda d: d[PLACEMENT].update({key: counts})


def recompute(key: str, counts: Any) -> Edit:
    return lambda d: d[RECOMPUTE].update({key: counts})


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        # sums and lengths
        (
            place("llm_layer_placement", [5, 11, 11, 11, 11, 11, 11, 10]),
            r"llm_layer_placement sums to 81; small has 80",
        ),
        (
            place("vit_layer_placement", [31, 0, 0, 0, 0, 0, 0, 0]),
            r"vit_layer_placement sums to 31; small has 32 vision",
        ),
        (place("llm_layer_placement", [5, 11, 11, 11, 11, 11, 20]), r"llm_layer_placement has 7 entries; PP is 8"),
        (recompute("llm_layer_recompute", [0] * 6), r"llm_layer_recompute has 6 entries; PP is 8, so it needs 8 or 7"),
        (recompute("llm_layer_recompute", [0] * 9), r"llm_layer_recompute has 9 entries"),
        (place("llm_layer_placement", []), r"llm_layer_placement has 0 entries"),
        # order
        (
            lambda d: d.update(
                layer_placement={
                    "vit_layer_placement": [16, 0, 16, 0, 0, 0, 0, 0],
                    "llm_layer_placement": [0, 16, 0, 16, 12, 12, 12, 12],
                }
            ),
            r"text layers on stage 1, before the vision layers of stage 2",
        ),
        (
            lambda d: d.update(
                layer_placement={
                    "vit_layer_placement": [0, 0, 0, 0, 0, 0, 0, 32],
                    "llm_layer_placement": [11, 11, 11, 11, 11, 11, 9, 5],
                }
            ),
            r"text layers on stage 0, before the vision layers of stage 7",
        ),
        (place("llm_layer_placement", [5, 11, 0, 22, 11, 11, 11, 9]), r"gives stage 2 no layer"),
        # types
        (place("llm_layer_placement", [5.0, 11, 11, 11, 11, 11, 11, 9]), r"llm_layer_placement, stage 0, is 5\.0"),
        (place("llm_layer_placement", ["5", 11, 11, 11, 11, 11, 11, 9]), r'stage 0, is "5"; a whole number'),
        (place("llm_layer_placement", [5, True, 11, 11, 11, 11, 11, 9]), r"stage 1, is true; a whole number"),
        (place("llm_layer_placement", [5, None, 11, 11, 11, 11, 11, 9]), r"stage 1, is nothing; a whole number"),
        (place("llm_layer_placement", "80"), r'llm_layer_placement is "80"; a list of 8 whole numbers'),
        (place("llm_layer_placement", [[5, 11, 11, 11, 11, 11, 11, 9]]), r"llm_layer_placement is nested"),
        (lambda d: d.update(layer_placement=[1]), r"layer_placement is a list of 1; a mapping"),
        (lambda d: d["parallel_config"].update(PP="8"), r'parallel_config\.PP is "8"; a whole number'),
        (lambda d: d["parallel_config"].update(TP=2.0), r"parallel_config\.TP is 2\.0"),
        (lambda d: d["parallel_config"].update(DP=True), r"parallel_config\.DP is true"),
        (lambda d: d.update(schedule=3), r"schedule is 3; the name of a schedule"),
        (lambda d: d.update(rank_order=3), r"rank_order is 3; one of tp-cp-ep-dp-pp, tp-cp-ep-pp-dp is expected"),
        (lambda d: d.update(rank_order="pp-tp"), r"rank order 'pp-tp' is not known; known are tp-cp-ep-dp-pp"),
        (lambda d: d.update(global_batch_size="512"), r'global_batch_size is "512"'),
        # sizes and divisors
        (lambda d: d["parallel_config"].update(PP=0), r"parallel_config\.PP is 0; it must be at least 1"),
        (lambda d: d["parallel_config"].update(MBS=-1), r"parallel_config\.MBS is -1"),
        (lambda d: d["parallel_config"].update(TP=3), r"parallel_config does not fit the job: .*TP 3"),
        (lambda d: d["parallel_config"].update(MBS=3), r"global_batch_size 512 is no multiple of DP 4 x MBS 3"),
        (lambda d: d["parallel_config"].update(DP=16), r"needs 256 devices, and the cluster has 128"),
        (lambda d: d.update(schedule="zigzag"), r"schedule 'zigzag' is not known"),
        # recompute
        (recompute("llm_layer_recompute", [0, 12, 9, 9, 9, 7, 4]), r"recomputes 12 layers on stage 1, which holds 11"),
        (recompute("llm_layer_recompute", [0, -1, 9, 9, 9, 7, 4]), r"stage 1, is -1; it must be at least 0"),
        (
            recompute("vit_layer_recompute", [0, 1, 0, 0, 0, 0, 0]),
            r"vit_layer_recompute recomputes 1 layers on stage 1",
        ),
        # missing and misspelt
        (lambda d: d.pop("parallel_config"), r"parallel_config is missing"),
        (lambda d: d[PLACEMENT].pop("llm_layer_placement"), r"layer_placement\.llm_layer_placement is missing"),
        (
            lambda d: d[RECOMPUTE].update(llm_layer_recompte=d[RECOMPUTE].pop("llm_layer_recompute")),
            r"llm_layer_recompute is missing; the key 'llm_layer_recompte' stands there",
        ),
        (place("audio_layer_placement", [1, 0, 0, 0, 0, 0, 0, 0]), r"audio_layer_placement holds layers.*no such part"),
    ],
)
def test_a_wrong_edit_is_refused_by_name(read: Callable[..., Plan], edit: Edit, message: str) -> None:
    with pytest.raises(PlanError, match=message) as raised:
        read(edit)
    assert "\n" not in str(raised.value)


MODES = "layer_modes"


@pytest.mark.parametrize(
    ("modes", "message"),
    [
        ({"swap": {"llm": [1] * 8}}, r"layer_modes\.swap is no mode; known are selective, activation, offload"),
        ({"ofload": {}}, r'layer_modes\.ofload is no mode \(did you mean "offload"\?\)'),
        ({"recompute": {"llm": [1] * 8}}, r"layer_modes\.recompute.*counted in layer_recompute"),
        ({"offload": [1] * 8}, r"layer_modes\.offload is a list of 8; a mapping of the model's parts is expected"),
        ({"offload": {"text": [1] * 8}}, r"layer_modes\.offload\.text is no part of small; its parts are vit, llm"),
        ({"offload": {"llm": [1] * 7}}, r"layer_modes\.offload\.llm has 7 entries; PP is 8, so it needs 8$"),
        ({"offload": {"llm": [-1] * 8}}, r"layer_modes\.offload\.llm, stage 0, is -1"),
        (
            {"offload": {"llm": [0, 1, 0, 0, 0, 0, 0, 0]}, "selective": {"llm": [0, 1, 0, 0, 0, 0, 0, 0]}},
            r"layer_recompute and layer_modes run 12 text layers of stage 1 in modes \(10 in recompute, 1 in offload, "
            r"1 in selective\), and it holds 11",
        ),
        ([], r"layer_modes is a list of 0; a mapping is expected"),
    ],
)
def test_wrong_modes_are_refused_by_name(read: Callable[..., Plan], modes: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message) as raised:
        read(lambda document: document.update({MODES: modes}))
    assert "\n" not in str(raised.value)


def test_a_mode_that_the_job_cannot_have_is_refused(read: Callable[..., Plan]) -> None:
    device = JOB.cluster.device.model_copy(update={"host_link_bytes_per_s": None})
    job = dataclasses.replace(JOB, cluster=JOB.cluster.model_copy(update={"device": device}))
    some = {"offload": {"llm": [1] + [0] * 7}}
    with pytest.raises(PlanError, match=r"layer_modes\.offload does not fit the job: .*host_link_bytes_per_s"):
        read(lambda document: document.update({MODES: some}), job)
    assert read(lambda document: document.update({MODES: {"offload": {"llm": [0] * 8}}}), job).modes == {}


def edit_chunks(key: str, counts: Any) -> Edit:
    def edit(document: dict[str, Any]) -> None:
        chunked(document)
        section = PLACEMENT if key.endswith("placement") else RECOMPUTE
        document[section][key] = counts

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            edit_chunks("llm_layer_placement", [5, 11, 11, 11, 11, 11, 11, 9]),
            r"must nest \[chunk\]\[stage\], 2 lists of 4",
        ),
        (edit_chunks("llm_layer_placement", [[5, 11, 11, 11]]), r"has 1 chunks, and VPP is 2"),
        (
            edit_chunks("llm_layer_placement", [[5, 11, 11, 11], [11, 11, 20]]),
            r"llm_layer_placement\[1\] has 3 entries",
        ),
        (
            edit_chunks("llm_layer_recompute", [[0, 0, 0, 0], [12, 0, 0]]),
            r"12 layers on stage 0, chunk 1, which holds 11",
        ),
        (edit_chunks("llm_layer_placement", [[5, 11, 11, 11], [0, 22, 11, 9]]), r"gives stage 0, chunk 1 no layer"),
    ],
)
def test_a_wrong_edit_of_chunks_names_stage_and_chunk(read: Callable[..., Plan], edit: Edit, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        read(edit)


@pytest.mark.parametrize("length", [0, 1, 40, 200, len(REFERENCE) - 1])
def test_a_truncated_file_is_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "plan.json"
    path.write_text(REFERENCE[:length])
    with pytest.raises(PlanError, match="no valid JSON"):
        read_plan(path, JOB)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (REFERENCE.replace('"TP": 2,', '"TP": 2, "TP": 4,').encode(), 'the key "TP" stands twice'),
        (REFERENCE.replace("8992.0", "NaN").encode(), "NaN; every number must be finite"),
        (bytes(range(256)), "binary"),
        (b"\x80\x81\x82", "no UTF-8 text"),
        (b" " * 20_000_000, "at most 10 MB"),
        (b"[]", "a mapping of keys to values is expected"),
    ],
    ids=["key twice", "NaN", "binary", "no UTF-8", "20 MB", "list"],
)
def test_what_is_no_plan_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(PlanError, match=message):
        read_plan(path, JOB)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="there is no such file"):
        read_plan(tmp_path / "plan.json", JOB)


# --------------------------------------------------------------------------------------------------------- written

PLAN = Plan(
    strategy=Strategy(pp=2, tp=2, dp=4, mbs=1),
    layers={"vision": (2, 0), "text": (1, 3)},
    recompute={"vision": (0, 0), "text": (1, 0)},
    global_batch_size=512,
)
FIGURES = Figures(
    step_ms=1000.5,
    throughput_tokens_per_s=262144.25,
    lower_bound_ms=1000.25,
    gap_fraction=0.00025,
    peak_memory_bytes=(1e9 + 0.5, 2e9),
    memory_limit_bytes=3e9 + 0.5,
    bubble_fraction=0.125,
    provenance={"times": "analytic"},
    job_sha256="ab" * 32,
)

WRITTEN = """{
  "parallel_config": {
    "PP": 2,
    "TP": 2,
    "DP": 4,
    "MBS": 1,
    "CP": 1,
    "EP": 1,
    "VPP": 1,
    "ZERO": 1
  },
  "layer_placement": {
    "vit_layer_placement": [2, 0],
    "llm_layer_placement": [1, 3]
  },
  "layer_recompute": {
    "vit_layer_recompute": [0, 0],
    "llm_layer_recompute": [1, 0]
  },
  "e2e_time": 1000.5,
  "throughput": 262144.25,
  "schema": "mm-autoparallel/plan/1",
  "schedule": "1f1b",
  "num_microbatches": 128,
  "global_batch_size": 512,
  "world_size": 16,
  "lower_bound_ms": 1000.25,
  "gap_fraction": 0.00025,
  "proven": true,
  "peak_memory_bytes": [1000000001, 2000000000],
  "memory_limit_bytes": 3000000000,
  "bubble_fraction": 0.125,
  "provenance": {
    "times": "analytic"
  },
  "job_sha256": "abababababababababababababababababababababababababababababababab"
}
"""


def test_the_written_file_is_this(tmp_path: Path) -> None:
    write_result(tmp_path / "plan.json", PLAN, FIGURES)
    assert (tmp_path / "plan.json").read_text() == WRITTEN


def test_what_is_written_reads_back(tmp_path: Path) -> None:
    write_result(tmp_path / "plan.json", PLAN, FIGURES)
    small_vision = VISION.model_copy(update={"layers": layers(2)})
    assert read_plan(tmp_path / "plan.json", make_job(small_vision, num_text_layers=4)) == PLAN


def test_chunks_are_written_a_line_each_and_read_back(tmp_path: Path, read: Callable[..., Plan]) -> None:
    plan = read(chunked)
    write_result(tmp_path / "vpp.json", plan, FIGURES)
    assert "[\n      [5, 11, 11, 11],\n      [11, 11, 11, 9]\n    ]" in (tmp_path / "vpp.json").read_text()
    assert read_plan(tmp_path / "vpp.json", JOB) == plan


def test_modes_are_written_where_a_layer_runs_in_them_and_read_back(tmp_path: Path, read: Callable[..., Plan]) -> None:
    modes = {"text": {"offload": (1, 0, 0, 2, 0, 0, 0, 0)}, "vision": {"selective": (32, 0, 0, 0, 0, 0, 0, 0)}}
    plan = dataclasses.replace(read(), modes=modes)
    assert plan.modes_used == ("recompute", "offload", "selective")
    write_result(tmp_path / "plan.json", plan, FIGURES)
    document = json.loads((tmp_path / "plan.json").read_text())
    assert document[MODES] == {
        "selective": {"vit": [32, 0, 0, 0, 0, 0, 0, 0]},
        "offload": {"llm": [1, 0, 0, 2, 0, 0, 0, 0]},
    }
    assert list(document)[2:4] == ["layer_recompute", MODES]
    assert read_plan(tmp_path / "plan.json", JOB) == plan
    chunks = dataclasses.replace(read(chunked), modes=modes)
    write_result(tmp_path / "vpp.json", chunks, FIGURES)
    assert json.loads((tmp_path / "vpp.json").read_text())[MODES]["offload"] == {"llm": [[1, 0, 0, 2], [0, 0, 0, 0]]}
    assert read_plan(tmp_path / "vpp.json", JOB) == chunks


def test_a_job_without_vision_writes_zeros(tmp_path: Path) -> None:
    plan = Plan(Strategy(pp=2, tp=1, dp=1, mbs=1), {"text": (3, 4)}, {"text": (0, 0)}, 8)
    write_result(tmp_path / "plan.json", plan, FIGURES)
    document = json.loads((tmp_path / "plan.json").read_text())
    assert document["layer_placement"] == {"vit_layer_placement": [0, 0], "llm_layer_placement": [3, 4]}
    assert document["layer_recompute"] == {"vit_layer_recompute": [0, 0], "llm_layer_recompute": [0, 0]}


def test_proven_means_a_tenth_of_a_percent() -> None:
    assert dataclasses.replace(FIGURES, gap_fraction=0.001).proven
    assert not dataclasses.replace(FIGURES, gap_fraction=0.00101).proven
