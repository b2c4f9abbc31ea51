"""Models that were downloaded from Hugging Face's hub are read by the names that they have there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import mm_autoparallel as mmap
from mm_autoparallel.confinement import confine, release
from mm_autoparallel.integrations.huggingface.hub_cache import find_config

WORKLOAD = {"global_batch_size": 8, "seq_length": 4096}


@pytest.fixture(params=["HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"])
def cache(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(request.param, str(tmp_path))
    return tmp_path / {"HF_HUB_CACHE": ".", "HF_HOME": "hub", "XDG_CACHE_HOME": "huggingface/hub"}[request.param]


@pytest.fixture
def downloaded(cache: Path, repository: Path) -> Path:
    """Two commits as huggingface_hub lays them: files are links to blobs."""
    folder = cache / "models--some-lab--Kimi-VL-Next.v2"
    for commit in ("0" * 40, "a" * 40):
        (folder / "snapshots" / commit).mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("a" * 40)
    (folder / "blobs").mkdir()
    shutil.copy(repository / "tests" / "fixtures" / "huggingface" / "kimi_vl_a3b.json", folder / "blobs" / "b1")
    config = folder / "snapshots" / ("a" * 40) / "config.json"
    config.symlink_to("../../blobs/b1")
    return config


def test_a_job_reads_it_by_its_name(downloaded: Path, repository: Path) -> None:
    job = mmap.Job("some-lab/Kimi-VL-Next.v2", "h100-80g", WORKLOAD)
    given = mmap.Job(repository / "tests" / "fixtures" / "huggingface" / "kimi_vl_a3b.json", "h100-80g", WORKLOAD)
    assert find_config("some-lab/Kimi-VL-Next.v2") == downloaded
    assert job.model.name == "kimi_vl-Kimi-VL-Next.v2"
    assert job.model.model_copy(update={"name": given.model.name}) == given.model


def test_what_is_in_the_catalog_is_that_of_the_catalog(downloaded: Path) -> None:
    downloaded.parents[2].rename(downloaded.parents[3] / "models--Qwen--Qwen2.5-VL-7B-Instruct")
    assert mmap.Job("Qwen/Qwen2.5-VL-7B-Instruct", "h100-80g", WORKLOAD).model.name == "qwen2.5-vl-7b"


@pytest.mark.parametrize("name", ["some-lab/Other", "Kimi-VL-Next.v2", "../some-lab/Kimi-VL-Next.v2", "a/..", ""])
def test_other_names_are_not_found(downloaded: Path, name: str) -> None:
    assert find_config(name) is None


def test_a_download_that_is_not_whole_is_none(downloaded: Path) -> None:
    downloaded.unlink()
    assert find_config("some-lab/Kimi-VL-Next.v2") is None
    with pytest.raises(mmap.JobError, match=r"no file is called 'some-lab/Kimi-VL-Next\.v2'.*config\.json"):
        mmap.Job("some-lab/Kimi-VL-Next.v2", "h100-80g", WORKLOAD)


def test_a_server_that_is_confined_looks_into_no_cache(downloaded: Path, tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    confine(tmp_path / "jobs")
    try:
        assert find_config("some-lab/Kimi-VL-Next.v2") is None
    finally:
        release()
