"""A job whose model is a config.json that no reader knows: traced once, planned, and planned again without torch."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from mm_autoparallel.errors import JobError
from mm_autoparallel.integrations.huggingface import generic as huggingface_generic
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.readers.job_file import read_job

CONFIG = {
    "model_type": "stablelm",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 160,
}


def write_job(folder: Path, model: str = "config.json", **changes: Any) -> Path:
    if model == "config.json":
        (folder / "config.json").write_text(json.dumps(CONFIG))
    job = {
        "model": model,
        "cluster": {"device": "h100-80g", "num_nodes": 1, "devices_per_node": 4},
        "workload": {"global_batch_size": 8, "seq_length": 64},
        "search": {"mbs": [1]},
    }
    (folder / "job.json").write_text(json.dumps(job | changes))
    return folder / "job.json"


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("generic")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        return read_job(write_job(folder))


def test_a_job_is_traced_in_a_process_of_its_own_and_planned_without_torch(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mm_autoparallel.model.costs.cost_model import CostModel
    from mm_autoparallel.model.job.strategy import Strategy
    from mm_autoparallel.model.job.strategy_law import unlawful_reason

    assert job.model.num_layers == 4
    assert job.workload.implementation == "transformers"
    strategy = Strategy(pp=2, tp=1, dp=2, mbs=1)
    costs = CostModel(job).look_up(strategy)
    assert all(cost.memory_source == "traced" for cost in costs)
    assert costs[1].forward_ms > 0
    assert costs[0].parameter_count == 160 * 64
    reason = unlawful_reason(job.model, job.cluster, job.workload, Strategy(pp=2, tp=2, dp=1, mbs=1))
    assert reason is not None
    assert "TP 2 divides layers" in reason

    # the folder of traces and the model's file beside it are all that planning needs
    (traces,) = job.profiles
    model = tmp_path / "model.json"
    model.write_text((traces.parent / "model.json").read_text())
    (tmp_path / "model").mkdir()
    for file in traces.iterdir():
        (tmp_path / "model" / file.name).write_bytes(file.read_bytes())
    monkeypatch.setattr(huggingface_generic, "_run", None)
    again = read_job(write_job(tmp_path, "model.json"))
    assert again.sha256 == job.sha256
    assert CostModel(again).look_up(strategy) == costs


def test_the_second_time_nothing_is_run(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(job.path.parent / "cache"))
    monkeypatch.setattr(huggingface_generic, "_run", None)
    assert read_job(job.path).sha256 == job.sha256


def test_where_transformers_is_missing_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = importlib.util.find_spec
    monkeypatch.setattr(huggingface_generic, "find_spec", lambda name: None if name == "transformers" else plain(name))
    with pytest.raises(JobError, match=r"transformers is not installed here.*mm-autoparallel\[torch\].*trace JOB"):
        read_job(write_job(tmp_path))


def test_where_torch_is_missing_the_part_is_named_that_no_reader_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_generic, "find_spec", lambda _: None)
    path = write_job(tmp_path)
    document = {"model_type": "llava", "text_config": {"model_type": "gemma2"}}
    (tmp_path / "config.json").write_text(json.dumps(document))
    with pytest.raises(
        JobError, match=r"text_config.model_type is 'gemma2', which no reader .* them are llama, mistral"
    ):
        read_job(path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"workload": {"global_batch_size": 8, "seq_length": 64, "implementation": "megatron"}},
            "workload.implementation is megatron; leave it out",
        ),
        ({"search": {"modes": ["activation"]}}, "search.modes names activation"),
    ],
)
def test_what_traces_of_whole_layers_do_not_tell_is_refused(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(JobError, match=words):
        read_job(write_job(tmp_path, **changes))


def test_what_could_not_be_run_is_refused_with_its_reason_and_told_else(job: Job, tmp_path: Path) -> None:
    remark = "its images cannot be run: ValueError: too small"
    document = json.loads((job.profiles[0].parent / "model.json").read_text()) | {"remarks": [remark]}
    (tmp_path / "model.json").write_text(json.dumps(document))
    sizes = {"global_batch_size": 8, "seq_length": 64}
    assert f"stablelm-config: {remark}" in read_job(write_job(tmp_path, "model.json", workload=sizes)).warnings
    with pytest.raises(JobError, match=f"image_tokens_per_sample is 16, and of stablelm-config {remark}; leave it out"):
        read_job(write_job(tmp_path, "model.json", workload=sizes | {"image_tokens_per_sample": 16}))


@pytest.mark.slow
def test_a_class_that_cannot_be_built_is_refused_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = write_job(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"model_type": "stablelmm"}))
    with pytest.raises(JobError, match=r"config.json: model_type is 'stablelmm'.*did you mean .stablelm.\?"):
        read_job(path)


@pytest.mark.parametrize(
    ("part", "sizes", "reason"),
    [
        pytest.param(
            "text_config",
            {"hidden_size": 0, "head_dim": 16},
            r"config.json: sizes of \w+: hidden_size is 0; it must be at least 1",
            id="no model has",
        ),
        pytest.param(
            "vision_config",
            {"image_size": -3},
            r"apart failed: RuntimeError: [^\n^]*negative dimension -3",
            id="torch refuses",
        ),
    ],
)
def test_sizes_that_no_model_has_are_refused_in_one_paragraph_without_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, sizes: dict[str, int], reason: str
) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = write_job(tmp_path)
    text = {key: value for key, value in CONFIG.items() if key != "model_type"} | {"model_type": "llama"}
    tower = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    parts: dict[str, dict[str, Any]] = {
        "text_config": text,
        "vision_config": tower | {"image_size": 32, "patch_size": 8},
    }
    parts[part] |= sizes
    config = {"model_type": "smolvlm", "image_token_id": 159, "scale_factor": 2, "pad_token_id": 2}
    (tmp_path / "config.json").write_text(json.dumps(config | parts))
    with pytest.raises(JobError, match=reason):
        read_job(path)
