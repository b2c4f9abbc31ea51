"""preprocessor_config.json beside a config.json: tokens of images are read from it, and marked as read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mm_autoparallel.errors import JobError
from mm_autoparallel.integrations.huggingface.processor import ImageTokens, read_image_tokens
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.readers.job_file import read_job

CONFIG = {
    "model_type": "qwen2_vl",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 160,
    "vision_config": {"depth": 2, "embed_dim": 32, "num_heads": 4, "hidden_size": 64},
}
PROCESSOR = {"patch_size": 14, "merge_size": 2, "min_pixels": 4 * 784, "max_pixels": 100 * 784}


def job_with(folder: Path, processor: dict[str, Any], **workload: Any) -> Job:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    job = {
        "model": "config.json",
        "cluster": {"device": "h100-80g", "num_nodes": 1, "devices_per_node": 4},
        "workload": {"global_batch_size": 8, **({} if "samples" in workload else {"seq_length": 1024}), **workload},
    }
    (folder / "job.json").write_text(json.dumps(job))
    return read_job(folder / "job.json")


def read_from(job: Job) -> list[str]:
    return [warning for warning in job.warnings if "image_tokens_per_sample" in warning]


def test_images_without_tokens_are_the_largest_that_the_processor_makes(tmp_path: Path) -> None:
    job = job_with(tmp_path, PROCESSOR, images_per_sample=3)
    assert job.workload.image_tokens_per_sample == 300
    (said,) = read_from(job)
    assert "is read" in said
    assert "preprocessor_config.json makes 4 to 100 tokens of an image, and 3 of the largest make 300" in said


def test_newer_files_say_the_same_as_edges_of_a_size(tmp_path: Path) -> None:
    edges = {"shortest_edge": 4 * 784, "longest_edge": 100 * 784}
    job = job_with(tmp_path, {"patch_size": 14, "merge_size": 2, "size": edges}, images_per_sample=1)
    assert job.workload.image_tokens_per_sample == 100


def test_what_the_job_states_counts_and_is_held_against_the_file(tmp_path: Path) -> None:
    fits = job_with(tmp_path, PROCESSOR, images_per_sample=2, image_tokens_per_sample=200)
    assert fits.workload.image_tokens_per_sample == 200
    assert not read_from(fits)
    large = job_with(tmp_path, PROCESSOR, images_per_sample=2, image_tokens_per_sample=202)
    assert large.workload.image_tokens_per_sample == 202
    (said,) = read_from(large)
    assert "is 202 in 2 images, 101 each" in said


def test_a_job_without_images_stays_one(tmp_path: Path) -> None:
    job = job_with(tmp_path, PROCESSOR)
    assert job.workload.image_tokens_per_sample == 0
    assert job.sha256 == job_with(tmp_path, {"patch_size": "?"}).sha256


def test_too_many_for_the_sample_are_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="image_tokens_per_sample 1100 and audio_tokens_per_sample 0 make 1100"):
        job_with(tmp_path, PROCESSOR, images_per_sample=11)


def test_processors_of_one_size_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(json.dumps({"size": {"height": 336, "width": 336}, "patch_size": 14}))
    assert read_image_tokens(tmp_path / "p.json") is None
    assert read_image_tokens(tmp_path / "none.json") is None
    (tmp_path / "p.json").write_text(json.dumps(PROCESSOR))
    assert read_image_tokens(tmp_path / "p.json") == ImageTokens(tmp_path / "p.json", 4, 100, 4 * 784, 100 * 784)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"patch_size": "14"}, r"preprocessor_config.json: patch_size is .14.; a count of 1 or more"),
        ({"merge_size": 0}, "merge_size is 0; a count of 1 or more"),
        ({"max_pixels": 784}, "max_pixels is 784, which is less than min_pixels 3136"),
        ({"max_pixels": 100.5}, "max_pixels is 100.5; a count of 1 or more"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError, match=words):
        job_with(tmp_path, PROCESSOR | changes, images_per_sample=1)


def test_images_of_a_sample_file_are_made_as_large_as_the_processor_makes_them(tmp_path: Path) -> None:
    """Qwen2-VL's processor takes a tiny image up to its fewest pixels, and a large one down to its most."""
    (tmp_path / "samples.jsonl").write_text('{"image_sizes": [[28, 28], [3000, 2000]], "text_tokens": 500}\n' * 4)
    job = job_with(tmp_path, PROCESSOR, samples="samples.jsonl")
    assert job.samples is not None
    small, large = job.samples.sample(0).patches
    assert (small, large) == (4 * 4, 4 * 8 * 12)  # 4 tokens of 784 pixels at least, 96 of at most 100
    (said,) = [warning for warning in job.warnings if "makes images of" in warning]
    assert "makes images of 3,136 to 78,400 pixels" in said
    own = job_with(tmp_path, PROCESSOR, samples={"file": "samples.jsonl", "most_pixels": 50 * 784})
    assert own.samples is not None
    assert own.samples.sample(0).patches[0] == 4  # what the job says stands alone
