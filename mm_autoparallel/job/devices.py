"""The device catalog: figures of public datasheets and logs, each with its source.

What is no public fact says `assumed`. A job names an entry or gives a mapping of its own, whole or `based_on` an entry.
"""

from __future__ import annotations

from mm_autoparallel.job.cluster import Device, Link
from mm_autoparallel.units import GIB

_CUDA_CONTEXT = "assumed: CUDA context 0.5 GiB"
_NCCL_COMMUNICATOR = "assumed: NCCL channels and their buffers 0.2 GiB a communicator"
_CUBLAS_WORKSPACE = (
    "PyTorch, aten/src/ATen/cuda/CublasHandlePool.cpp: :4096:2:16:8, 8.125 MiB, and 32 MiB from Hopper on"
)
_PCIE_4 = "PCIe 4.0 x16, one way: 16 GT/s x 16 lanes x 128/130"
_PCIE_5 = "PCIe 5.0 x16, one way: 32 GT/s x 16 lanes x 128/130"
_HOST_OF_HOPPER = (63e9, _PCIE_5, 76.8e9, "DGX H100 and H200: two Xeon 8480C of eight DDR5-4800 channels each")
_NODE_LATENCY = "latency assumed: 0.01 ms, a short NCCL or HCCL collective inside a node"
_NETWORK_LATENCY = "latency assumed: 0.02 ms, a short collective across one switch tier"


def _nvidia(
    name: str,
    memory_gib: float,
    memory_source: str,
    bf16_flops_per_s: float,
    memory_bytes_per_s: float,
    nvlink_bytes_per_s: float,
    network_bytes_per_s: float,
    datasheet: str,
    network: str,
    host: tuple[float, str, float, str],
    matrix_workspace_bytes: int = 32 * 2**20,
    *,
    matrix_units: int,
) -> Device:
    """host: its link and its memory, bytes per second of one device, each with its source."""
    host_link_bytes_per_s, host_link, host_memory_bytes_per_s, host_memory = host
    return Device(
        name=name,
        memory_bytes=int(memory_gib * GIB),
        bf16_flops_per_s=bf16_flops_per_s,
        memory_bytes_per_s=memory_bytes_per_s,
        context_bytes=GIB // 2,
        communicator_bytes=GIB // 5,
        matrix_workspace_bytes=matrix_workspace_bytes,
        node_link=Link(bandwidth_bytes_per_s=nvlink_bytes_per_s, latency_ms=0.01),
        network_link=Link(bandwidth_bytes_per_s=network_bytes_per_s, latency_ms=0.02),
        host_link_bytes_per_s=host_link_bytes_per_s,
        host_memory_bytes_per_s=host_memory_bytes_per_s,
        matrix_units=matrix_units,
        sources={
            "memory_bytes": f"{memory_gib} GiB, the total capacity PyTorch reports ({memory_source})",
            "bf16_flops_per_s": f"{datasheet}, dense",
            "memory_bytes_per_s": datasheet,
            "context_bytes": _CUDA_CONTEXT,
            "communicator_bytes": _NCCL_COMMUNICATOR,
            "matrix_workspace_bytes": _CUBLAS_WORKSPACE,
            "node_link": f"{datasheet}, NVLink, half of the two-way figure; {_NODE_LATENCY}",
            "network_link": f"{network}; {_NETWORK_LATENCY}",
            "host_link_bytes_per_s": host_link,
            "host_memory_bytes_per_s": f"{host_memory}, shared by eight devices",
            "matrix_units": f"{datasheet}: streaming multiprocessors",
        },
    )


_ASCEND_910B_64G = Device(
    name="ascend-910b-64g",
    memory_bytes=int(60.97 * GIB),
    bf16_flops_per_s=353.9e12,
    memory_bytes_per_s=1.6e12,
    context_bytes=GIB // 2,
    communicator_bytes=2 * 200 * 2**20,
    node_link=Link(bandwidth_bytes_per_s=196e9, latency_ms=0.01, pair_bandwidth_bytes_per_s=28e9),
    network_link=Link(bandwidth_bytes_per_s=25e9, latency_ms=0.02),
    host_link_bytes_per_s=31.5e9,
    host_memory_bytes_per_s=93.8e9,
    matrix_units=24,
    sources={
        "memory_bytes": "60.97 GiB, the total capacity torch_npu reports on 64 GB devices (out-of-memory messages "
        "in github vllm-project/vllm-ascend#19, zai-org/CogVideo#63)",
        "bf16_flops_per_s": "24 cores x 1.8 GHz (npu-smi of a 910B1, arthurchiao.art, GPU notes 2) x 16^3 "
        "multiply-adds per core and cycle (Liao et al., Ascend, HPCA 2021); github gameofdimension/limulidae measured "
        "328e12",
        "memory_bytes_per_s": "assumed: the 1.6 TB/s that the successor, a pair of such dies with 64 GB each, has per "
        "die (Zuo et al., Serving large language models on Huawei CloudMatrix384, arXiv:2506.12708)",
        "context_bytes": "assumed: CANN context and workspaces of its operators 0.5 GiB",
        "communicator_bytes": "two buffers of 200 MB (CANN environment variables: each communicator takes twice "
        "HCCL_BUFFSIZE, 200 MB by default)",
        "matrix_workspace_bytes": "assumed: none that stays; workspaces of operators are in context_bytes",
        "node_link": "HCCS, pairwise, 56 GB/s two-way to each of seven others, 392 GB/s in all (arthurchiao.art, GPU "
        "data sheets 2023), half of it one way; github gameofdimension/limulidae measured 19, 48 and 130 GB/s in "
        f"all-gathers of 2, 4 and 8; {_NODE_LATENCY}",
        "network_link": "one RoCE port of 200 Gb/s a device (hccn_tool in arthurchiao.art, GPU notes 2); latency: half "
        "of the 0.034 to 0.040 ms round trips of hccn_tool -ping there",
        "host_link_bytes_per_s": "assumed: PCIe 4.0 x16, one way, the fastest port of its host's Kunpeng 920",
        "matrix_units": "24 cores (npu-smi of a 910B1, arthurchiao.art, GPU notes 2)",
        "host_memory_bytes_per_s": "assumed: four Kunpeng 920 processors of eight DDR4-2933 channels, shared by eight "
        "devices",
    },
)

_CLOUDMATRIX = "Zuo et al., Serving large language models on Huawei CloudMatrix384, arXiv:2506.12708, section 3.3"
_ASCEND_910C_64G = _ASCEND_910B_64G.model_copy(
    update={
        "name": "ascend-910c-64g",
        "bf16_flops_per_s": 376e12,
        "node_link": Link(bandwidth_bytes_per_s=196e9, latency_ms=0.01),
        "sources": _ASCEND_910B_64G.sources
        | {
            "memory_bytes": f"64 GB a die ({_CLOUDMATRIX}); the total torch_npu reports assumed: as 910B",
            "bf16_flops_per_s": f"{_CLOUDMATRIX}: one die of two, about 376 TFLOP/s dense in BF16 and FP16",
            "memory_bytes_per_s": f"{_CLOUDMATRIX}: 3.2 TB/s a package, half of it a die",
            "node_link": f"{_CLOUDMATRIX}: unified bus of 196 GB/s one way a die, through switches; {_NODE_LATENCY}",
            "network_link": f"{_CLOUDMATRIX}: RDMA plane of 200 Gb/s a die; {_NETWORK_LATENCY}",
            "matrix_units": f"{_CLOUDMATRIX}: 24 cube cores a die",
            "host_link_bytes_per_s": "assumed: that of 910B, PCIe 4.0 x16",
            "host_memory_bytes_per_s": "assumed: that of the hosts of 910B",
        },
    }
)
"""One die of an Atlas A3: a package has two, which frameworks see as two devices."""

DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        _ASCEND_910B_64G,
        _ASCEND_910C_64G,
        _nvidia(
            "a100-80g",
            79.25,
            "out-of-memory message in github levihsu/OOTDiffusion#235",
            312e12,
            2.039e12,
            300e9,
            25e9,
            "NVIDIA A100 80GB SXM datasheet",
            "DGX A100: eight 200 Gb/s ports for eight devices",
            (31.5e9, _PCIE_4, 51.2e9, "DGX A100: two EPYC 7742 of eight DDR4-3200 channels each"),
            matrix_workspace_bytes=2 * 4096 * 1024 + 8 * 16 * 1024,
            matrix_units=108,
        ),
        _nvidia(
            "h100-80g",
            79.18,
            "out-of-memory messages of H100 SXM in public logs, 79.1 to 79.2",
            989.4e12,
            3.35e12,
            450e9,
            50e9,
            "NVIDIA H100 SXM datasheet",
            "DGX H100: eight 400 Gb/s ports for eight devices",
            _HOST_OF_HOPPER,
            matrix_units=132,
        ),
        _nvidia(
            "a800-80g",
            79.25,
            "that of A100 80GB",
            312e12,
            2.039e12,
            200e9,
            25e9,
            "NVIDIA A800 80GB SXM: an A100 whose NVLink has 400 GB/s both ways",
            "assumed: as DGX A100, eight 200 Gb/s ports for eight devices",
            (31.5e9, _PCIE_4, 51.2e9, "as DGX A100: two EPYC 7742 of eight DDR4-3200 channels each"),
            matrix_workspace_bytes=2 * 4096 * 1024 + 8 * 16 * 1024,
            matrix_units=108,
        ),
        _nvidia(
            "h800-80g",
            79.18,
            "that of H100 SXM",
            989.4e12,
            3.35e12,
            200e9,
            50e9,
            "NVIDIA H800 SXM: an H100 whose NVLink has 400 GB/s both ways (DeepSeek-V3 technical report, "
            "arXiv:2412.19437, section 3.1; arXiv:2505.09343, section 4.1)",
            "eight 400 Gb/s ports for eight devices (arXiv:2505.09343, section 4.2)",
            _HOST_OF_HOPPER,
            matrix_units=132,
        ),
        _nvidia(
            "h20-96g",
            95.1,
            "assumed: 96 GB less what H100 SXM loses of its 80",
            148e12,
            4.0e12,
            450e9,
            50e9,
            "NVIDIA H20 as published by its sellers: 148 TFLOP/s in BF16, 96 GB HBM3 of 4.0 TB/s, NVLink of 900 GB/s "
            "both ways, 78 multiprocessors",
            "assumed: as DGX H100, eight 400 Gb/s ports for eight devices",
            _HOST_OF_HOPPER,
            matrix_units=78,
        ),
        _nvidia(
            "h200-141g",
            139.8,
            "out-of-memory messages of H200 in public logs; nvidia-smi: 143771 MiB",
            989.4e12,
            4.8e12,
            450e9,
            50e9,
            "NVIDIA H200 SXM datasheet",
            "DGX H200: eight 400 Gb/s ports for eight devices",
            _HOST_OF_HOPPER,
            matrix_units=132,
        ),
        _nvidia(
            "b200-192g",
            178.35,
            "out-of-memory messages of B200 in public logs",
            2250e12,
            8e12,
            900e9,
            50e9,
            "NVIDIA HGX B200 datasheet",
            "DGX B200: eight 400 Gb/s ports for eight devices",
            (63e9, _PCIE_5, 89.6e9, "DGX B200: two Xeon 8570 of eight DDR5-5600 channels each"),
            matrix_units=148,
        ),
    )
}
