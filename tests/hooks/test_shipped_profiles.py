"""Which profiles a pretrain script plans with: its own store's, else the shipped ones that hold all it needs."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

from mm_autoparallel.hooks import profiling
from mm_autoparallel.hooks.runs import Site
from mm_autoparallel.hooks.stored_device import is_shipped_device, stored_device
from mm_autoparallel.hooks.task import Division
from mm_autoparallel.model.job.cluster import Device
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.profiles import shipped
from mm_autoparallel.model.profiles.shipped import STORE
from mm_autoparallel.model.profiles.store import hash_model, read_profile
from mm_autoparallel.model.readers.job_file import parse_job

LAYERS = {"num_layers": 4, "hidden_size": 64, "ffn_size": 128, "num_heads": 4, "norm": "rms"}
MODEL = {"name": "toy", "text": {"vocab_size": 320, "layers": LAYERS}}
DIVISIONS = (Division(tp=1, mbs=1), Division(tp=2, mbs=1))


@pytest.fixture
def measured(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Job, Path]:
    """A job, and a shipped store that was measured for it on this machine: the real one under its model's name."""
    (folder,) = (repository / "subgraph_profiles/shipped").glob("cpu-*")
    (files,) = (path for path in folder.iterdir() if path.is_dir())
    profile = read_profile(next(files.glob("tp1-*")))
    assert profile.workload is not None
    device = Device.model_validate_json((folder / "device.json").read_text(encoding="utf-8"))
    workload = {"global_batch_size": 8, **profile.workload.model_dump(), "image_tokens_per_sample": 0}
    cluster = {"num_nodes": 1, "devices_per_node": 2, "device": device.model_dump(mode="json")}
    job = parse_job({"model": MODEL, "cluster": cluster, "workload": workload}, Path("job.json"))

    package = tmp_path / "package"
    store = package / "subgraph_profiles" / folder.name
    target = store / f"toy-{hash_model(job.model)[:8]}"
    target.mkdir(parents=True)
    for one in DIVISIONS:
        name = f"tp{one.tp}-cp1-mbs{one.mbs}-seq{profile.workload.seq_length}"
        found = next(files.glob(f"{name}-*"))
        shutil.copy(found, target / f"{name}-bytes4_4_8-flash.json")
    for name in ("device.json", "network.json"):
        shutil.copy(folder / name, store)
    monkeypatch.setattr(shipped, "_PACKAGE", package)
    monkeypatch.setattr("mm_autoparallel.profilers.device.software_versions", lambda: dict(profile.software))
    monkeypatch.chdir(tmp_path)
    return job, store


def site(**changed: object) -> Site:
    ranks = {"program": (), "processes_per_node": 2, "on_cpu": True, "root": STORE, "host": "", "rendezvous": None}
    return Site(**(ranks | changed))  # type: ignore[arg-type]


def test_the_shipped_profile_is_taken_where_it_holds_all(measured: tuple[Job, Path], tmp_path: Path) -> None:
    job, store = measured
    assert profiling.list_tasks(job, DIVISIONS, site()) != ()
    folder, network = profiling.shipped_paths(job, DIVISIONS, site())
    assert (folder.parent, network) == (store.relative_to(tmp_path), store.relative_to(tmp_path) / "network.json")


def test_what_the_own_store_has_stands_first(measured: tuple[Job, Path]) -> None:
    job, store = measured
    (shipped_folder,) = (path for path in store.iterdir() if path.is_dir())
    own = STORE / store.name / shipped_folder.name
    own.mkdir(parents=True)
    shutil.copy(next(shipped_folder.glob("tp1-*")), own)
    assert profiling.shipped_paths(job, DIVISIONS, site())[0] == own


@pytest.mark.parametrize("lack", ["a folder of one's own", "division", "network", "ranks", "versions", "memory"])
def test_else_it_is_measured(measured: tuple[Job, Path], monkeypatch: pytest.MonkeyPatch, lack: str) -> None:
    job, store = measured
    at, divisions = site(), DIVISIONS
    if lack == "a folder of one's own":
        at = site(root=Path("mine"))
    elif lack == "division":
        divisions = (*DIVISIONS, Division(tp=1, mbs=8))
    elif lack == "network":
        (store / "network.json").unlink()
    elif lack == "ranks":
        at = site(processes_per_node=8)
    elif lack == "versions":
        monkeypatch.setattr("mm_autoparallel.profilers.device.software_versions", lambda: {"torch": "1.0"})
    else:
        half = job.cluster.device.model_copy(update={"memory_bytes": job.cluster.device.memory_bytes // 2})
        job = replace(job, cluster=job.cluster.model_copy(update={"device": half}))
    assert profiling.shipped_paths(job, divisions, at) == ()


def test_the_device_at_hand_is_the_shipped_one_where_they_are_alike(
    measured: tuple[Job, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = measured[0].cluster.device
    near = device.model_copy(update={"memory_bytes": int(device.memory_bytes * 1.01)})
    monkeypatch.setattr("mm_autoparallel.profilers.device.identify_device", lambda: near)
    assert stored_device(Path("mine")) == near
    assert stored_device(STORE) == device
    assert json.loads((STORE / device.name / "device.json").read_text())["memory_bytes"] == device.memory_bytes
    assert is_shipped_device(device)
    assert not is_shipped_device(near)
