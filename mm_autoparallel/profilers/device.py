"""The devices at hand: which type, how many, and the catalog's figures for them.

A figure that no catalog has is assumed and not measured: the figures of a device are part of a job's identity
(`hash_job`), so they must be the same in every run. What matters of a device comes from its profile.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
from pathlib import Path
from typing import Literal

import torch

from mm_autoparallel.errors import ProfileError
from mm_autoparallel.model.job.cluster import Device, Link
from mm_autoparallel.model.job.devices import DEVICES
from mm_autoparallel.model.profiles.operators.platform import Platform
from mm_autoparallel.profilers.npu import load_npu, npu_memory_bytes, npu_name
from mm_autoparallel.profilers.torch_releases import accelerator_type, device_module
from mm_autoparallel.units import GIB

DeviceType = Literal["cpu", "cuda", "npu"]

_BACKENDS: dict[DeviceType, str] = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}

MAX_CPU_DEVICES = 8
"""Assumed: cores of one machine that a profile run takes as devices."""

_CATALOG_NAMES: tuple[tuple[str, str, float], ...] = (
    (r"H200", "h200-141g", 130),
    (r"H100 80GB HBM3", "h100-80g", 75),
    (r"A100-SXM\d?-80GB", "a100-80g", 75),
    (r"B200", "b200-192g", 170),
    (r"Ascend\s?910B", "ascend-910b-64g", 58),
)
"""A pattern of the name that the driver reports, the catalog's entry, and the least GiB such a device has."""

_ASSUMED = "assumed: not in the catalog; give the figures in a job file for costs that are not measured"


def find_device_type() -> DeviceType:
    """`npu` or `cuda` where PyTorch has such an accelerator at hand, else `cpu`."""
    load_npu()
    found = accelerator_type()
    if found == "cuda":
        return "cuda"
    return "npu" if found == "npu" else "cpu"


def device_backend(device_type: DeviceType) -> str:
    """The backend of torch.distributed that joins devices of this type."""
    return _BACKENDS[device_type]


def count_devices() -> int:
    """Accelerators at hand; on CPU, where a device is a core, usable cores, at most MAX_CPU_DEVICES."""
    device_type = find_device_type()
    if device_type != "cpu":
        return int(device_module(device_type).device_count())
    return min(_usable_cores(), MAX_CPU_DEVICES)


def claim_device(local_rank: int) -> torch.device:
    """The device of the process `local_rank` of this machine, made the current one.

    On CPU the process gets one thread, and an allocator that keeps what is freed. Raises ProfileError where the machine
    has fewer accelerators.
    """
    device_type = find_device_type()
    if device_type == "cpu":
        torch.set_num_threads(1)
        keep_freed_memory()
        return torch.device("cpu")
    devices = device_module(device_type)
    if local_rank >= devices.device_count():
        raise ProfileError(
            f"process {local_rank} of this machine finds no device: there are {devices.device_count()} of "
            f"type {device_type}; start at most one process a device (--nproc-per-node)"
        )
    devices.set_device(local_rank)
    return torch.device(device_type, local_rank)


def keep_freed_memory() -> bool:
    """Makes this process keep memory that tensors on CPU give back, as allocators of accelerators do.

    By default glibc returns large blocks to the system and takes them anew page by page, which costs as much time as
    some layers and depends on what else is allocated. False where the C library cannot be told (no mallopt).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # M_MMAP_MAX = -4: no block gets pages of its own; M_TRIM_THRESHOLD = -1: nothing is given back (mallopt(3))
    return bool(mallopt(-4, 0)) and bool(mallopt(-1, -1))


def software_versions() -> dict[str, str]:
    """What times depend on besides the device: PyTorch, its accelerator's runtime, transformers where it is used."""
    versions = {"torch": str(torch.__version__)}
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    for name in ("transformers", "torch_npu"):
        if name in sys.modules:
            versions[name] = str(sys.modules[name].__version__)
    return versions


def platform_at_hand(device_name: str) -> Platform:
    """What operators are timed on in this process: the device, what of the software runs them, and how."""
    software = {name: version for name, version in software_versions().items() if name != "transformers"}
    return Platform(device_name, software, torch.are_deterministic_algorithms_enabled())


def identify_device() -> Device:
    """The device at hand: the catalog's entry where its name is known, else assumed figures that say so."""
    device_type = find_device_type()
    if device_type == "cpu":
        return _describe_core()
    index = device_module(device_type).current_device()
    if device_type == "npu":
        return device_of(npu_name(index), npu_memory_bytes(index))
    properties = torch.cuda.get_device_properties(index)
    return device_of(properties.name, properties.total_memory)


def device_of(reported_name: str, memory_bytes: int) -> Device:
    """The accelerator that its driver calls `reported_name`; figures are the catalog's or assumed."""
    for pattern, name, least_gib in _CATALOG_NAMES:
        if re.search(pattern, reported_name) and memory_bytes >= least_gib * GIB:
            return DEVICES[name]
    base = DEVICES["a100-80g"]
    sources = dict.fromkeys(base.sources, f"{_ASSUMED}; taken from {base.name}")
    return base.model_copy(
        update={
            "name": f"{_slug(reported_name)}-{round(memory_bytes / GIB)}g",
            "memory_bytes": memory_bytes,
            "sources": sources | {"memory_bytes": "reported by PyTorch"},
        }
    )


def _describe_core() -> Device:
    num_cores = _usable_cores()
    return Device(
        name=f"cpu-{_slug(_processor_name())}",
        memory_bytes=_machine_memory_bytes() // num_cores,
        bf16_flops_per_s=64e9,
        memory_bytes_per_s=10e9,
        context_bytes=GIB // 2,
        node_link=Link(bandwidth_bytes_per_s=1e9, latency_ms=0.2),
        network_link=Link(bandwidth_bytes_per_s=0.1e9, latency_ms=0.5),
        sources={
            "memory_bytes": f"memory of the machine over its {num_cores} cores",
            "bf16_flops_per_s": "assumed: one core at 2 GHz with 32 fp32 operations a cycle",
            "memory_bytes_per_s": "assumed: one core's part",
            "context_bytes": "assumed: interpreter, PyTorch and communication buffers of one process",
            "node_link": "assumed: gloo between two processes of one machine",
            "network_link": "assumed: gloo over 1 Gb/s Ethernet",
        },
    )


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1]
    return platform.processor() or platform.machine() or "unknown"


def _machine_memory_bytes() -> int:
    """Physical memory, or what the control group of a container allows where that is less."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")
    allowed = limit.read_text(encoding="utf-8").strip() if limit.exists() else "max"
    return min(physical, int(allowed)) if allowed.isdigit() else physical


def _slug(name: str) -> str:
    """`Intel(R) Xeon(R) Processor` → `intel-xeon-processor`."""
    words = re.sub(r"\((?:R|TM|r|tm)\)", " ", name)
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-") or "unknown"
