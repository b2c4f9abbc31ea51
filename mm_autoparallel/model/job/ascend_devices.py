"""Ascend devices of the catalog (model/job/devices.py), each figure with its source."""

from __future__ import annotations

from mm_autoparallel.model.job.cluster import UNKNOWN_SLOWDOWN, Device, Link
from mm_autoparallel.units import GIB

NODE_LATENCY = "latency assumed: 0.01 ms, a short NCCL or HCCL collective inside a node"
NETWORK_LATENCY = "latency assumed: 0.02 ms, a short collective across one switch tier"
_NO_LOW = {
    "fp8_flops_per_s": "none: its cores multiply in 16 bits and in INT8",
    "fp4_flops_per_s": "none: its cores multiply in 16 bits and in INT8",
    "clock_fraction": "assumed: none of it is lost, published steps ask for no less",
    "domain_devices": "assumed: as many as a node has",
    "slowdown_factors": UNKNOWN_SLOWDOWN,
}

ASCEND_910B_64G = Device(
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
        f"all-gathers of 2, 4 and 8; {NODE_LATENCY}",
        "network_link": "one RoCE port of 200 Gb/s a device (hccn_tool in arthurchiao.art, GPU notes 2); latency: half "
        "of the 0.034 to 0.040 ms round trips of hccn_tool -ping there",
        "host_link_bytes_per_s": "assumed: PCIe 4.0 x16, one way, the fastest port of its host's Kunpeng 920",
        "matrix_units": "24 cores (npu-smi of a 910B1, arthurchiao.art, GPU notes 2)",
        "host_memory_bytes_per_s": "assumed: four Kunpeng 920 processors of eight DDR4-2933 channels, shared by eight "
        "devices",
    }
    | _NO_LOW,
)

_CLOUDMATRIX = "Zuo et al., Serving large language models on Huawei CloudMatrix384, arXiv:2506.12708, section 3.3"
ASCEND_910C_64G = ASCEND_910B_64G.model_copy(
    update={
        "name": "ascend-910c-64g",
        "bf16_flops_per_s": 376e12,
        "node_link": Link(bandwidth_bytes_per_s=196e9, latency_ms=0.01),
        "sources": ASCEND_910B_64G.sources
        | {
            "memory_bytes": f"64 GB a die ({_CLOUDMATRIX}); the total torch_npu reports assumed: as 910B",
            "bf16_flops_per_s": f"{_CLOUDMATRIX}: one die of two, about 376 TFLOP/s dense in BF16 and FP16",
            "memory_bytes_per_s": f"{_CLOUDMATRIX}: 3.2 TB/s a package, half of it a die",
            "node_link": f"{_CLOUDMATRIX}: unified bus of 196 GB/s one way a die, through switches; {NODE_LATENCY}",
            "network_link": f"{_CLOUDMATRIX}: RDMA plane of 200 Gb/s a die; {NETWORK_LATENCY}",
            "matrix_units": f"{_CLOUDMATRIX}: 24 cube cores a die",
            "host_link_bytes_per_s": "assumed: that of 910B, PCIe 4.0 x16",
            "host_memory_bytes_per_s": "assumed: that of the hosts of 910B",
        },
    }
)
"""One die of an Atlas A3: a package has two, which frameworks see as two devices."""

ASCEND_910C_SUPERNODE = ASCEND_910C_64G.model_copy(
    update={
        "name": "ascend-910c-64g-supernode",
        "domain_devices": 768,
        "sources": ASCEND_910C_64G.sources
        | {"domain_devices": f"{_CLOUDMATRIX}: the unified bus joins 384 packages of two dies"},
    }
)
"""The same in a CloudMatrix384, whose unified bus goes beyond the node."""
