"""The device catalog: figures of public datasheets and logs, each with its source.

What is no public fact says `assumed`. A job names an entry or gives a mapping of its own, whole or `based_on` an entry.
"""

from __future__ import annotations

from dataclasses import dataclass

from mm_autoparallel.model.job.ascend_devices import (
    ASCEND_910B_64G,
    ASCEND_910C_64G,
    ASCEND_910C_SUPERNODE,
    NETWORK_LATENCY,
    NODE_LATENCY,
)
from mm_autoparallel.model.job.cluster import UNKNOWN_SLOWDOWN, Device, Link
from mm_autoparallel.units import GIB

_CUDA_CONTEXT = "assumed: CUDA context 0.5 GiB"
_NCCL_COMMUNICATOR = "assumed: NCCL channels and their buffers 0.2 GiB a communicator"
_CUBLAS_WORKSPACE = (
    "PyTorch, aten/src/ATen/cuda/CublasHandlePool.cpp: :4096:2:16:8, 8.125 MiB, and 32 MiB from Hopper on"
)
_PCIE_4 = "PCIe 4.0 x16, one way: 16 GT/s x 16 lanes x 128/130"
_PCIE_5 = "PCIe 5.0 x16, one way: 32 GT/s x 16 lanes x 128/130"
_HOST_OF_HOPPER = (63e9, _PCIE_5, 76.8e9, "DGX H100 and H200: two Xeon 8480C of eight DDR5-4800 channels each")
_GRACE = (
    225e9,
    "NVLink-C2C between Grace and two Blackwell devices, 900 GB/s both ways (NVIDIA GB200 NVL72 datasheet): half of it "
    "one way, shared by two",
    192e9,
    "assumed: LPDDR5X of one Grace processor, 384 GB/s, shared by two devices",
)


@dataclass(frozen=True)
class _Low:
    """Units for less than 16 bits, how many devices NVLink joins, and what `watts` leave of the clock (None: all)."""

    fp8_flops_per_s: float | None = None
    fp4_flops_per_s: float | None = None
    domain_devices: int | None = 8
    watts: int = 0
    clock_fraction: float | None = None

    def sources(self, datasheet: str) -> dict[str, str]:
        """Of each of these figures."""
        sustained = "assumed: none of it is lost, published steps ask for no less"
        if self.clock_fraction:
            sustained = (
                f"assumed: what steps that NVIDIA publishes sustain at {self.watts} W (Megatron-Bridge, docs/"
                "performance-summary.md: Llama 3 70B, DeepSeek-V3 and Qwen3 30B-A3B)"
            )
        joins = f"{datasheet}: devices that one NVLink network joins"
        return {
            "fp8_flops_per_s": f"{datasheet}, dense" if self.fp8_flops_per_s else f"none in the {datasheet}",
            "fp4_flops_per_s": f"{datasheet}, dense" if self.fp4_flops_per_s else f"none in the {datasheet}",
            "clock_fraction": sustained,
            "domain_devices": joins if self.domain_devices else "not known: boards of 4, 8 and 16 were built",
            "slowdown_factors": UNKNOWN_SLOWDOWN,
        }


@dataclass(frozen=True)
class _Memory:
    """What PyTorch reports of a device's memory, and where; and how fast it is read."""

    total_bytes: float
    source: str
    read_bytes_per_s: float


@dataclass(frozen=True)
class _Links:
    """One device's links, one way: NVLink, and the network, which `network` is the source of."""

    nvlink_bytes_per_s: float
    network_bytes_per_s: float
    network: str


def _nvidia(
    name: str,
    datasheet: str,
    bf16_flops_per_s: float,
    memory: _Memory,
    links: _Links,
    host: tuple[float, str, float, str],
    matrix_workspace_bytes: int = 32 * 2**20,
    *,
    matrix_units: int,
    low: _Low = _Low(domain_devices=None),
) -> Device:
    """host: its link and its memory, bytes per second of one device, each with its source."""
    host_link_bytes_per_s, host_link, host_memory_bytes_per_s, host_memory = host
    return Device(
        name=name,
        memory_bytes=int(memory.total_bytes),
        bf16_flops_per_s=bf16_flops_per_s,
        memory_bytes_per_s=memory.read_bytes_per_s,
        context_bytes=GIB // 2,
        communicator_bytes=GIB // 5,
        matrix_workspace_bytes=matrix_workspace_bytes,
        node_link=Link(bandwidth_bytes_per_s=links.nvlink_bytes_per_s, latency_ms=0.01),
        network_link=Link(bandwidth_bytes_per_s=links.network_bytes_per_s, latency_ms=0.02),
        host_link_bytes_per_s=host_link_bytes_per_s,
        host_memory_bytes_per_s=host_memory_bytes_per_s,
        matrix_units=matrix_units,
        fp8_flops_per_s=low.fp8_flops_per_s,
        fp4_flops_per_s=low.fp4_flops_per_s,
        clock_fraction=low.clock_fraction,
        domain_devices=low.domain_devices,
        sources={
            "memory_bytes": f"{memory.total_bytes / GIB} GiB, the total capacity PyTorch reports ({memory.source})",
            "bf16_flops_per_s": f"{datasheet}, dense",
            "memory_bytes_per_s": datasheet,
            "context_bytes": _CUDA_CONTEXT,
            "communicator_bytes": _NCCL_COMMUNICATOR,
            "matrix_workspace_bytes": _CUBLAS_WORKSPACE,
            "node_link": f"{datasheet}, NVLink, half of the two-way figure; {NODE_LATENCY}",
            "network_link": f"{links.network}; {NETWORK_LATENCY}",
            "host_link_bytes_per_s": host_link,
            "host_memory_bytes_per_s": f"{host_memory}, shared by eight devices",
            "matrix_units": f"{datasheet}: streaming multiprocessors",
        }
        | low.sources(datasheet),
    )


_HOPPER = _Low(1978.9e12)


def _amd(
    name: str,
    memory_gb: int,
    bf16_flops_per_s: float,
    low_flops_per_s: tuple[float, float | None],
    memory_bytes_per_s: float,
    pair_bytes_per_s: float,
    matrix_units: int,
) -> Device:
    """low_flops_per_s: in eight and in four bits. pair_bytes_per_s: of the link to each of seven others, one way."""
    datasheet = f"AMD Instinct {name.split('-')[0].upper()} datasheet, as others quote it"
    fp8_flops_per_s, fp4_flops_per_s = low_flops_per_s
    return Device(
        name=name,
        memory_bytes=int((memory_gb - 0.5) * GIB),
        bf16_flops_per_s=bf16_flops_per_s,
        memory_bytes_per_s=memory_bytes_per_s,
        context_bytes=GIB // 2,
        communicator_bytes=GIB // 5,
        matrix_workspace_bytes=32 * 2**20,
        node_link=Link(
            bandwidth_bytes_per_s=7 * pair_bytes_per_s, latency_ms=0.01, pair_bandwidth_bytes_per_s=pair_bytes_per_s
        ),
        network_link=Link(bandwidth_bytes_per_s=50e9, latency_ms=0.02),
        host_link_bytes_per_s=63e9,
        host_memory_bytes_per_s=76.8e9,
        matrix_units=matrix_units,
        fp8_flops_per_s=fp8_flops_per_s,
        fp4_flops_per_s=fp4_flops_per_s,
        domain_devices=8,
        sources={
            "memory_bytes": f"{datasheet}: {memory_gb} GiB; half a GiB less assumed",
            "bf16_flops_per_s": f"{datasheet}, dense",
            "memory_bytes_per_s": datasheet,
            "context_bytes": "assumed: HIP context 0.5 GiB, as CUDA's",
            "communicator_bytes": "assumed: RCCL as NCCL, 0.2 GiB a communicator",
            "matrix_workspace_bytes": "assumed: hipBLASLt as cuBLAS, 32 MiB",
            "node_link": f"{datasheet}, seven links of Infinity Fabric, half of the two-way figure; {NODE_LATENCY}",
            "network_link": f"assumed: eight 400 Gb/s ports for eight devices; {NETWORK_LATENCY}",
            "host_link_bytes_per_s": _PCIE_5,
            "host_memory_bytes_per_s": "assumed: that of the hosts of H100",
            "matrix_units": f"{datasheet}: compute units",
            "fp8_flops_per_s": f"{datasheet}, dense",
            "domain_devices": f"{datasheet}: a platform of eight joins each with each",
            "fp4_flops_per_s": f"{datasheet}, dense (MXFP4)" if fp4_flops_per_s else f"none in the {datasheet}",
            "clock_fraction": "assumed: none of it is lost; nobody fitted it",
            "slowdown_factors": UNKNOWN_SLOWDOWN,
        },
    )


DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        ASCEND_910B_64G,
        ASCEND_910C_64G,
        ASCEND_910C_SUPERNODE,
        _nvidia(
            "a100-80g",
            "NVIDIA A100 80GB SXM datasheet",
            312e12,
            _Memory(79.25 * GIB, "out-of-memory message in github levihsu/OOTDiffusion#235", 2.039e12),
            _Links(300e9, 25e9, "DGX A100: eight 200 Gb/s ports for eight devices"),
            (31.5e9, _PCIE_4, 51.2e9, "DGX A100: two EPYC 7742 of eight DDR4-3200 channels each"),
            matrix_units=108,
            matrix_workspace_bytes=2 * 4096 * 1024 + 8 * 16 * 1024,
        ),
        _nvidia(
            "h100-80g",
            "NVIDIA H100 SXM datasheet",
            989.4e12,
            _Memory(79.18 * GIB, "out-of-memory messages of H100 SXM in public logs, 79.1 to 79.2", 3.35e12),
            _Links(450e9, 50e9, "DGX H100: eight 400 Gb/s ports for eight devices"),
            _HOST_OF_HOPPER,
            matrix_units=132,
            low=_HOPPER,
        ),
        _nvidia(
            "a800-80g",
            "NVIDIA A800 80GB SXM: an A100 whose NVLink has 400 GB/s both ways",
            312e12,
            _Memory(79.25 * GIB, "that of A100 80GB", 2.039e12),
            _Links(200e9, 25e9, "assumed: as DGX A100, eight 200 Gb/s ports for eight devices"),
            (31.5e9, _PCIE_4, 51.2e9, "as DGX A100: two EPYC 7742 of eight DDR4-3200 channels each"),
            matrix_units=108,
            matrix_workspace_bytes=2 * 4096 * 1024 + 8 * 16 * 1024,
        ),
        _nvidia(
            "h800-80g",
            "NVIDIA H800 SXM: an H100 whose NVLink has 400 GB/s both ways (DeepSeek-V3 technical report, "
            "arXiv:2412.19437, section 3.1; arXiv:2505.09343, section 4.1)",
            989.4e12,
            _Memory(79.18 * GIB, "that of H100 SXM", 3.35e12),
            _Links(200e9, 50e9, "eight 400 Gb/s ports for eight devices (arXiv:2505.09343, section 4.2)"),
            _HOST_OF_HOPPER,
            matrix_units=132,
            low=_HOPPER,
        ),
        _nvidia(
            "h20-96g",
            "NVIDIA H20 as published by its sellers: 148 TFLOP/s in BF16, 96 GB HBM3 of 4.0 TB/s, NVLink of 900 GB/s "
            "both ways, 78 multiprocessors",
            148e12,
            _Memory(95.1 * GIB, "assumed: 96 GB less what H100 SXM loses of its 80", 4.0e12),
            _Links(450e9, 50e9, "assumed: as DGX H100, eight 400 Gb/s ports for eight devices"),
            _HOST_OF_HOPPER,
            matrix_units=78,
            low=_Low(296e12),
        ),
        _nvidia(
            "h200-141g",
            "NVIDIA H200 SXM datasheet",
            989.4e12,
            _Memory(139.8 * GIB, "out-of-memory messages of H200 in public logs; nvidia-smi: 143771 MiB", 4.8e12),
            _Links(450e9, 50e9, "DGX H200: eight 400 Gb/s ports for eight devices"),
            _HOST_OF_HOPPER,
            matrix_units=132,
            low=_HOPPER,
        ),
        _nvidia(
            "b200-192g",
            "NVIDIA HGX B200 datasheet",
            2250e12,
            _Memory(178.35 * GIB, "out-of-memory messages of B200 in public logs", 8e12),
            _Links(900e9, 50e9, "DGX B200: eight 400 Gb/s ports for eight devices"),
            (63e9, _PCIE_5, 89.6e9, "DGX B200: two Xeon 8570 of eight DDR5-5600 channels each"),
            matrix_units=148,
            low=_Low(4500e12, 9000e12, watts=1000, clock_fraction=0.70),
        ),
        _nvidia(
            "h100-96g-500w",
            "NVIDIA H100 SXM datasheet, with 96 GB of HBM2e and 500 W as torchtitan's benchmarks describe theirs",
            989.4e12,
            _Memory(95.1 * GIB, "assumed: 96 GB less what H100 SXM loses of its 80", 2.4e12),
            _Links(450e9, 50e9, "assumed: as DGX H100, eight 400 Gb/s ports for eight devices"),
            _HOST_OF_HOPPER,
            matrix_units=132,
            low=_Low(1978.9e12, watts=500, clock_fraction=0.77),
        ),
        _nvidia(
            "b300-288g",
            "NVIDIA HGX B300 datasheet, as others quote it",
            2250e12,
            _Memory(267.7 * GIB, "assumed: 288 GB less what B200 loses of its 192", 8e12),
            _Links(900e9, 100e9, "DGX B300: eight 800 Gb/s ports for eight devices"),
            (63e9, _PCIE_5, 89.6e9, "assumed: as DGX B200"),
            matrix_units=148,
            low=_Low(4500e12, 13500e12, watts=1100, clock_fraction=0.80),
        ),
        _nvidia(
            "gb200-192g",
            "NVIDIA GB200 NVL72 datasheet, as others quote it",
            2500e12,
            _Memory(178.35 * GIB, "assumed: that of B200", 8e12),
            _Links(900e9, 50e9, "NVIDIA GB200 NVL72: a 400 Gb/s port a device"),
            _GRACE,
            matrix_units=148,
            low=_Low(5000e12, 10000e12, 72, watts=1200, clock_fraction=0.78),
        ),
        _nvidia(
            "gb300-288g",
            "NVIDIA GB300 NVL72 datasheet, as others quote it",
            2500e12,
            _Memory(267.7 * GIB, "assumed: 288 GB less what B200 loses of its 192", 8e12),
            _Links(900e9, 100e9, "NVIDIA GB300 NVL72: an 800 Gb/s port a device"),
            _GRACE,
            matrix_units=148,
            low=_Low(5000e12, 15000e12, 72, watts=1400, clock_fraction=0.97),
        ),
        _amd("mi300x-192g", 192, 1307.4e12, (2614.9e12, None), 5.3e12, 64e9, 304),
        _amd("mi355x-288g", 288, 2516.6e12, (5033.2e12, 10066.3e12), 8e12, 76.8e9, 256),
    )
}
