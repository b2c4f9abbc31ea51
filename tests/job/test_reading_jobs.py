"""Jobs: examples are read, wrong ones refused in one paragraph that names file, key, value and what would be right."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from edited import set_value

from mm_autoparallel.errors import JobError
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.readers.job_file import read_job

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*/job.yaml"))
MODEL = ROOT / "tests" / "fixtures" / "mindspeed_mm_models" / "qwen2vl_7b.json"
JOB: dict[str, Any] = {
    "model": "model.json",
    "cluster": {"num_nodes": 2, "devices_per_node": 8, "device": "a100-80g"},
    "workload": {"global_batch_size": 64, "seq_length": 4096, "image_tokens_per_sample": 1024},
}


def changed(**changes: Any) -> dict[str, Any]:
    """The job with values at dotted keys (written with `__`) replaced, or removed where they are `...`."""
    job = copy.deepcopy(JOB)
    for key, value in changes.items():
        set_value(job, key.replace("__", "."), value)
    return job


def read(folder: Path, job: dict[str, Any]) -> Job:
    shutil.copy(MODEL, folder / "model.json")
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return read_job(path)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.parent.name)
def test_every_example_is_read(path: Path) -> None:
    job = read_job(path)
    assert job.warnings == ()
    assert len(job.sha256) == 64
    assert job.cluster.levels[-1].num_devices == job.cluster.num_devices


def test_the_example_of_the_reference_text() -> None:
    job = read_job(ROOT / "examples" / "qwen2vl_72b" / "job.yaml")
    assert (job.cluster.num_nodes, job.cluster.devices_per_node) == (8, 16)
    assert [modality.layers.num_layers for modality in job.model.modalities] == [32, 80]
    assert job.workload.seq_length == 8192
    assert job.model.encoders[0].freeze


def test_a_job_is_read_with_its_defaults(tmp_path: Path) -> None:
    job = read(tmp_path, changed(profiles=["profiles/a"]))
    assert job.profiles == (tmp_path / "profiles" / "a",)
    assert job.search.pp is None
    assert (job.search.max_vpp, job.search.zero, job.search.schedule) == (1, (1,), None)
    assert (job.workload.weight_bytes, job.workload.gradient_bytes, job.workload.optimizer_bytes) == (2, 4, 12)
    assert job.cluster.memory_fraction == 0.95


def test_json_jobs_and_inline_models_of_all_forms(tmp_path: Path) -> None:
    import json

    by_name = read(tmp_path, JOB)
    path = tmp_path / "job.json"
    path.write_text(json.dumps(changed(model=json.loads(MODEL.read_text()))))
    inline = read_job(path)
    own = changed(model=inline.model.model_dump(mode="json"))
    huggingface = json.loads((MODEL.parents[1] / "huggingface" / "qwen2_vl_7b.json").read_text())
    assert inline.sha256 == by_name.sha256 == read(tmp_path, own).sha256
    freeze = {"vision_projector": True}
    assert read(tmp_path, changed(model=huggingface, freeze=freeze)).sha256 == by_name.sha256


@pytest.mark.parametrize(
    "changes",
    [
        {"workload__seq_length": 8192},
        {"cluster__num_nodes": 4},
        {"cluster__device": "h100-80g"},
        {"cluster__memory_fraction": 0.9},
        {"freeze": {"vision": False}},
    ],
)
def test_the_hash_follows_every_figure(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert read(tmp_path, changed(**changes)).sha256 != read(tmp_path, JOB).sha256


@pytest.mark.parametrize("changes", [{"search__pp": [1, 2]}, {"profiles": ["a"]}])
def test_the_hash_ignores_what_is_only_asked_for(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert read(tmp_path, changed(**changes)).sha256 == read(tmp_path, JOB).sha256


def test_a_device_based_on_the_catalog(tmp_path: Path) -> None:
    device = {"based_on": "a100-80g", "memory_bytes": 40e9}
    job = read(tmp_path, changed(cluster__device=device))
    plain = read(tmp_path, JOB).cluster.device
    assert job.cluster.device.memory_bytes == 40_000_000_000
    assert job.cluster.device.bf16_flops_per_s == plain.bf16_flops_per_s
    assert job.cluster.device.sources["memory_bytes"] == "job file"
    assert job.cluster.device.sources["node_link"] == plain.sources["node_link"]


def test_a_device_of_ones_own(tmp_path: Path) -> None:
    link = {"bandwidth_bytes_per_s": 1e11, "latency_ms": 0.01}
    device = {
        "name": "own",
        "memory_bytes": 32e9,
        "bf16_flops_per_s": 1e14,
        "memory_bytes_per_s": 1e12,
        "context_bytes": 0,
        "node_link": link,
        "network_link": link,
    }
    assert read(tmp_path, changed(cluster__device=device)).cluster.device.name == "own"


def test_media_without_tokens_are_warned_about(tmp_path: Path) -> None:
    (warning,) = read(tmp_path, changed(workload__image_tokens_per_sample=...)).warnings
    assert "image_tokens_per_sample is 0" in warning


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cluster": ...}, "cluster is missing; a mapping is expected"),
        ({"cluster__num_nodes": "2"}, 'cluster.num_nodes is "2"; a whole number is expected'),
        ({"cluster__num_nodes": 2.5}, "cluster.num_nodes is 2.5; a whole number is expected"),
        ({"cluster__num_nodes": True}, "cluster.num_nodes is true; a whole number is expected"),
        ({"cluster__num_nodes": -1}, "cluster.num_nodes is -1; it must be at least 1"),
        ({"cluster__num_nodes": 10**18}, "cluster.num_nodes is 1000000000000000000; it must be at most"),
        (
            {"cluster__device": "a100-80gb"},
            'cluster.device is "a100-80gb", which is not in the catalog (did you mean "a100-80g"?); known are asc',
        ),
        ({"cluster__device": {"based_on": "v100"}}, 'cluster.device.based_on is "v100", which is not in the catalog'),
        ({"cluster__device": ["a100-80g"]}, "cluster.device is a list of 1; a mapping is expected"),
        ({"cluster__memory_fraction": 1.5}, "cluster.memory_fraction is 1.5; it must be at most 1"),
        (
            {"cluster__device": {"based_on": "a100-80g", "memory_byte": 1}},
            'cluster.device.memory_byte is not a key known here (did you mean "memory_bytes"?)',
        ),
        (
            {"cluster__levels": [{"name": "node", "num_devices": 8}]},
            "cluster.levels[0].bandwidth_bytes_per_s is missing; a number is expected",
        ),
        (
            {"cluster__levels": [{"name": "n", "num_devices": 8, "bandwidth_bytes_per_s": 1e9, "latency_ms": 0}]},
            "cluster: the outermost level n spans 8 devices and the cluster has 2 x 8; its num_devices must be 16",
        ),
        ({"worklod": {}}, 'worklod is not a key known here (did you mean "workload"?)'),
        (
            {"workload__sequence_length": 1},
            'workload.sequence_length is not a key known here (did you mean "seq_length"?)',
        ),
        ({"workload__global_batch_size": ...}, "workload.global_batch_size is missing; a whole number is expected"),
        (
            {"workload__image_tokens_per_sample": 5000},
            "workload: image_tokens_per_sample 5000 and audio_tokens_per_sample 0 make 5000, and seq_length",
        ),
        (
            {"workload__recompute_operators": ["mlp", "moe_act"], "workload__implementation": "transformers"},
            "recompute_operators names mlp, moe_act, and transformers recomputes whole layers alone",
        ),
        ({"workload__recompute_operators": ["attention"]}, 'workload.recompute_operators[0] is "attention"; one of'),
        ({"workload__images_per_sample": 2000}, "images_per_sample 2000 is more than image_tokens_per_sample 1024"),
        (
            {"workload__audio_tokens_per_sample": 100},
            "workload.audio_tokens_per_sample is 100, and the model has no encoder of audios",
        ),
        (
            {"workload__micro_batch_scale": {"vison": [1.0]}},
            'workload.micro_batch_scale.vison names no modality of the model (did you mean "vision"?)',
        ),
        ({"workload__micro_batch_scale": {"vision": [0]}}, "micro_batch_scale.vision[0] is 0; it must be above 0"),
        ({"workload__micro_batch_scale": {"vision": []}}, "workload.micro_batch_scale.vision is empty"),
        ({"workload__attention": "flsh"}, "workload.attention is \"flsh\"; one of 'flash' or 'unfused' is expected"),
        ({"search__pp": 4}, "search.pp is 4; a list is expected"),
        ({"search__pp": []}, "search.pp is empty"),
        ({"search__tp": [0]}, "search.tp[0] is 0; it must be at least 1"),
        ({"search__zero": [4]}, "search.zero: ZeRO 4 is not understood; known are 0, 1, 2, 3"),
        ({"search__schedule": "1f1bb"}, "search.schedule: '1f1bb' is no schedule (did you mean \"1f1b\"?)"),
        ({"search__max_vp": 2}, 'search.max_vp is not a key known here (did you mean "max_vpp"?)'),
        ({"freeze": {"vision": "yes"}}, 'freeze.vision is "yes"; true or false is expected'),
        ({"freeze": {"vison": True}}, 'freeze: vison is no part of the model (did you mean "vision"?)'),
        ({"profiles": "a"}, 'profiles is "a"; a list is expected'),
        ({"model": "other.json"}, 'model names "other.json", and there is no file'),
        ({"model": "a" * 300}, "and there is no file"),
        ({"model": {"text": {"vocab_size": 10**400}}}, "model.text.vocab_size is"),
        ({"workload__weight_bytes": 1e-320}, "workload.weight_bytes is 1e-320; a number from 0.001 to 1e+06"),
        ({"cluster__slow_devices": [{"rank": 0, "time_factor": 1e100}]}, "time_factor is 1e+100; it must be at most"),
        ({"model": 3}, "model is 3; a mapping or a text is expected"),
        ({"model": {}}, "model is no model that is understood"),
        ({"model": {"text": {"vocab_size": 10}}}, "model.text.layers is missing; a mapping is expected"),
        ({"model": {"text_decoder": {"num_layers": 2}}}, "model.text_decoder.vocab_size is missing"),
        ({"model": {"model_type": "qwen2_vl", "hidden_size": 0}}, "model.hidden_size is 0; a whole number, at least 1"),
        ({"model": {"model_type": "qwen2_v"}}, 'model.model_type is "qwen2_v"; one of qwen2_vl'),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError) as caught:
        read(tmp_path, changed(**changes))
    message = str(caught.value)
    assert message.startswith(f"job file {tmp_path / 'job.yaml'}: ")
    assert words in message
    assert "\n" not in message
    assert message.count("job file") == 1


def test_a_model_file_that_is_wrong_is_named_itself(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB))
    (tmp_path / "model.json").write_text('{"text_decoder": 3}')
    with pytest.raises(JobError, match=r"^model file .*model\.json: text_decoder is 3"):
        read_job(tmp_path / "job.yaml")
