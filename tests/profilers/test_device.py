"""The devices at hand, and what is said of those that no catalog has."""

from __future__ import annotations

import os

import pytest

torch = pytest.importorskip("torch")

from mm_autoparallel.errors import ProfileError  # noqa: E402
from mm_autoparallel.model.job.devices import DEVICES  # noqa: E402
from mm_autoparallel.profilers import device  # noqa: E402
from mm_autoparallel.units import GIB  # noqa: E402

on_cpu = pytest.mark.skipif(device.find_device_type() != "cpu", reason="an accelerator is at hand")


@pytest.mark.parametrize(
    ("reported", "memory_gib", "name"),
    [
        ("NVIDIA H200", 139.8, "h200-141g"),
        ("NVIDIA H100 80GB HBM3", 79.2, "h100-80g"),
        ("NVIDIA A100-SXM4-80GB", 79.25, "a100-80g"),
        ("NVIDIA B200", 178.4, "b200-192g"),
        ("Ascend910B2", 60.97, "ascend-910b-64g"),
    ],
)
def test_known_names_are_catalog_entries(reported: str, memory_gib: float, name: str) -> None:
    assert device.device_of(reported, int(memory_gib * GIB)) == DEVICES[name]


@pytest.mark.parametrize(
    ("reported", "memory_gib", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", 39.4, "nvidia-a100-sxm4-40gb-39g"),
        ("Ascend910B4", 29.0, "ascend910b4-29g"),
        ("NVIDIA GeForce RTX 4090", 23.6, "nvidia-geforce-rtx-4090-24g"),
    ],
)
def test_other_names_get_assumed_figures_that_say_so(reported: str, memory_gib: float, name: str) -> None:
    found = device.device_of(reported, int(memory_gib * GIB))
    assert found.name == name
    assert found.memory_bytes == int(memory_gib * GIB)
    assert "assumed" in found.sources["bf16_flops_per_s"]
    assert "assumed" not in found.sources["memory_bytes"]


@on_cpu
def test_a_core_is_a_device() -> None:
    core = device.identify_device()
    assert core.name.startswith("cpu-")
    assert core == device.identify_device(), "a job's identity hangs on these figures"
    num_cores = len(os.sched_getaffinity(0))
    assert device.count_devices() == min(num_cores, device.MAX_CPU_DEVICES)
    assert core.memory_bytes * num_cores <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert set(core.sources) == {
        "memory_bytes",
        "bf16_flops_per_s",
        "memory_bytes_per_s",
        "context_bytes",
        "node_link",
        "network_link",
    }


@on_cpu
def test_a_claimed_core_runs_one_thread() -> None:
    before = torch.get_num_threads()
    try:
        assert device.claim_device(5) == torch.device("cpu")
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(device.find_device_type() == "cpu", reason="needs an accelerator")
def test_more_processes_than_devices_are_refused() -> None:
    with pytest.raises(ProfileError, match="at most one process a device"):
        device.claim_device(device.count_devices())


def test_every_type_has_a_backend() -> None:
    assert [device.device_backend(kind) for kind in ("cpu", "cuda", "npu")] == ["gloo", "nccl", "hccl"]


def test_versions_name_torch() -> None:
    assert device.software_versions()["torch"] == torch.__version__
