"""What is assumed of a device and a stack that nobody calibrated: figures by their names (figures.Figures), with
the source of those that are published.

Rates of matrix products, memory, links and hosts are round figures near what published steps ask for: those of four
stacks on A100, one on H100 and one on Ascend 910B (profiles/calibrations). Shapes, gaps and the number of ranks are
counted beside them.
"""

from __future__ import annotations


def _assumed(
    matrix: float,
    attention_forward: float,
    attention_backward: float,
    statistics_bytes: float,
    triton: float = 0.6,
    **more: float,
) -> dict[str, float]:
    return {
        "matrix_fraction": matrix,
        "grouped_matrix_fraction": matrix,
        "attention_forward_fraction": attention_forward,
        "attention_backward_fraction": attention_backward,
        "unfused_attention_fraction": matrix,
        "memory_fraction": 0.70,
        "node_fraction": 0.50,
        "network_fraction": 0.40,
        "node_latency_ms": 0.02,
        "shard_hidden_fraction": 0.76,
        "scale_ranks": 138,
        "waves": True,
        "edge_count": 20,
        "triton_attention_factor": triton,
        "layer_gap_ms": 0.13,
        "micro_batch_ms": 2.0,
        "step_ms": 100.0,
        "statistics_bytes": statistics_bytes,
    } | more


def _launches(text_ms: float, plain_ms: float, rotary_ms: float) -> dict[str, float]:
    """What a host takes for the forward of a layer: of the decoder (0: operators decide alone), of a tower without and
    with rotated queries and keys.
    """
    return {
        "layer_launch_ms": text_ms,
        "vision_launch_ms": plain_ms,
        "rotary_vision_launch_ms": rotary_ms,
        "tensor_launch_factor": 1.3,
    }


_AMPERE_HOST_FACTOR = 1.375
"""Of a host beside A100 that launches layers, over one beside H100 (Megatron-LM's functional tests: 5.5 and 4.0 ms for
forward and backward of a text layer)."""
_EXPERT_HOST_MS = 9.4
"""Of a host beside H100 that launches forward and backward of a layer with experts, without graphs and with none local;
half as much again with eight. Assumed, near published steps of Moonlight and Qwen3 30B-A3B; beside A100 as much more as
for other layers."""
_OF_HOPPER = _launches(0.0, 1.0, 1.0) | {"expert_host_ms": _EXPERT_HOST_MS}
_OF_AMPERE = _launches(0.0, _AMPERE_HOST_FACTOR, _AMPERE_HOST_FACTOR) | {
    "expert_host_ms": _AMPERE_HOST_FACTOR * _EXPERT_HOST_MS
}
_OF_910B, _OF_910C = _launches(1.33, 2.5, 4.0), _launches(0.8, 1.5, 2.4)
"""Ascend: published steps of MindSpeed-MM, Qwen2-VL (rotary) and InternVL2 (plain), 910C six tenths of 910B by one of
them. GPUs: what Megatron-LM's functional tests take for a text layer on H100, of which a third is the forward; three
quarters of it for a layer of a tower, the fewest operators."""

ASSUMED = _assumed(0.80, 0.55, 0.50, 4.0, **_OF_HOPPER)
_FLASH_ATTENTION_2 = (
    "FlashAttention-2 (arXiv:2307.08691, section 4: up to 73 % forward and 63 % backward of an A100's peak; causal, "
    "head size 128, 8k tokens lie near 60 and 50 %)"
)
_FLASH_ATTENTION_3 = (
    "FlashAttention-3 (arXiv:2407.08608, section 4: up to 75 % forward of an H100's peak, backward some 550 of 989 "
    "TFLOP/s; taken with a margin of a fifth)"
)
_LOG_SUM_EXP = {"statistics_bytes": "one fp32 log-sum-exp per token and head"}
_MAXIMUM_AND_SUM = {
    "statistics_bytes": "softmax maximum and sum, fp32, eight equal columns each (MindSpore documentation of "
    "ring_attention_update: both float32 of shape (B, N, S, 8))"
}


def _attention_source(source: str) -> dict[str, str]:
    return {"attention_forward_fraction": source, "attention_backward_fraction": source} | _LOG_SUM_EXP


ASSUMED_OF: dict[str, tuple[dict[str, float], dict[str, str]]] = {
    "a100-80g": (_assumed(0.80, 0.55, 0.50, 4.0, **_OF_AMPERE), _attention_source(_FLASH_ATTENTION_2)),
    "h100-80g": (_assumed(0.70, 0.60, 0.45, 4.0, 0.32, **_OF_HOPPER), _attention_source(_FLASH_ATTENTION_3)),
    "h200-141g": (_assumed(0.70, 0.60, 0.45, 4.0, 0.32, **_OF_HOPPER), _attention_source(_FLASH_ATTENTION_3)),
    "a800-80g": (_assumed(0.80, 0.55, 0.50, 4.0, **_OF_AMPERE), _attention_source(_FLASH_ATTENTION_2)),
    "h800-80g": (_assumed(0.70, 0.60, 0.45, 4.0, 0.32, **_OF_HOPPER), _attention_source(_FLASH_ATTENTION_3)),
    "ascend-910b-64g": (_assumed(0.80, 0.55, 0.50, 64.0, node_fraction=0.66, **_OF_910B), _MAXIMUM_AND_SUM),
    "ascend-910c-64g": (_assumed(0.80, 0.55, 0.50, 64.0, node_fraction=0.66, **_OF_910C), _MAXIMUM_AND_SUM),
    "ascend-910c-64g-supernode": (_assumed(0.80, 0.55, 0.50, 64.0, node_fraction=0.66, **_OF_910C), _MAXIMUM_AND_SUM),
}
"""Devices for which something is published: their figures, and where those came from that are not assumed."""


def _modern(
    forward: tuple[float, int], backward: tuple[float, int], launch_ms: float, tower_launch_ms: float = 1.0
) -> dict[str, float]:
    """forward, backward: the part of the peak that flash attention nears, and the keys at which it reaches half of it.
    launch_ms, tower_launch_ms: what a host takes for the forward of a layer without graphs, of a decoder and of a
    tower.
    """
    figures = _assumed(0.80, forward[0], backward[0], 4.0, **_launches(launch_ms, tower_launch_ms, tower_launch_ms))
    return figures | {
        "grouped_matrix_fraction": 0.824,
        "fp8_matrix_fraction": 0.79,
        "fp4_matrix_fraction": 0.64,
        "attention_forward_half_count": forward[1],
        "attention_backward_half_count": backward[1],
        "uneven_attention_factor": 0.9,
        "small_attention_factor": 0.72,
        "memory_fraction": 0.51,
        "node_fraction": 0.65,
        "network_fraction": 0.85,
        "exchange_node_fraction": 0.72,
        "exposed_exchange_fraction": 0.21,
        "expert_host_ms": _EXPERT_HOST_MS * launch_ms / _OF_HOST,
        "node_latency_ms": 0.008,
        "scale_ranks": 1000,
        "edge_count": 0,
        "edge_factor": 0.12,
        "layer_gap_ms": 0.0,
        "micro_batch_ms": 1.0,
        "step_ms": 50.0,
        "tensor_launch_factor": 1.0,
        "host_runs_ahead": True,
    }


_OF_HOST = 4.0 / 3
"""Of the 4 ms that forward and backward of a dense layer take a host without graphs (Megatron-LM's README, GPT 1.7B on
H100; SimuMax's table, 4.5 on B200) a third is the forward (assumed); newer hosts take 0.8 of it (assumed)."""
CORE_ON_AMPERE = {"layer_launch_ms": _AMPERE_HOST_FACTOR * _OF_HOST, "tensor_launch_factor": 1.0}
"""Of Megatron-Core's layers beside A100, whose figures are the older ones of all stacks: a host that is so much slower
than the one beside H100, and as there no slower for layers that ranks share."""
AMPERE = ("a100-80g", "a800-80g")
_GRACE_FACTOR = 2.75
"""Of a Grace processor's time to launch, over that of an x86 one: a linear layer of PyTorch takes 37.08 us beside GB200
and 13.48 us of a Xeon Platinum 8480C beside H100 (NVIDIA/TransformerEngine, issue 2053; 33.17 us beside GH200). That
whole layers differ as much is assumed."""
_ON_HOPPER = _modern((0.66, 900), (0.60, 1200), _OF_HOST)
_OF_BLACKWELL = (0.75, 1700), (0.60, 2200)
# twice the exponentials: 1.25 of Blackwell's forward, 1.125 of its backward
_OF_ULTRA = (0.9375, 1700), (0.675, 2200)
_BESIDE_X86 = 0.8 * _OF_HOST
_BESIDE_GRACE = _GRACE_FACTOR * _BESIDE_X86, _GRACE_FACTOR

MODERN: dict[str, dict[str, float]] = {
    **dict.fromkeys(("h100-80g", "h200-141g", "h800-80g", "h20-96g", "h100-96g-500w"), _ON_HOPPER),
    "b200-192g": _modern(*_OF_BLACKWELL, _BESIDE_X86),
    "gb200-192g": _modern(*_OF_BLACKWELL, *_BESIDE_GRACE),
    "b300-288g": _modern(*_OF_ULTRA, _BESIDE_X86),
    "gb300-288g": _modern(*_OF_ULTRA, *_BESIDE_GRACE),
    **dict.fromkeys(("mi300x-192g", "mi355x-288g"), _ON_HOPPER),
}
"""Figures under a power limit, of products in low precision too, and of attention by its length. Clocks are the
device's. Assumed: near what steps ask for that NVIDIA publishes for Llama 3 70B, DeepSeek-V3 and Qwen3 30B-A3B
(Megatron-Bridge, docs/performance-summary.md), with TransformerEngine and cuDNN; AMD's as Hopper's."""

DEVICES_WITH_ROWS = frozenset(
    (
        *("a100-80g", "h100-80g", "h100-96g-500w", "h200-141g", "b200-192g", "b300-288g", "gb200-192g", "gb300-288g"),
        *("ascend-910b-64g", "ascend-910c-64g"),
    )
)
"""Devices of which published steps were looked at."""

ONLY_MODERN = tuple(name for name in MODERN if name not in ASSUMED_OF)
"""Devices without older figures; the others keep those for jobs in BF16 alone, under other stacks than the next."""
MODERN_SOFTWARE = ("megatron-bridge", "torchtitan", "megatron-core")
"""Stacks whose steps are predicted by these figures on any device; first that whose published steps they were set
near."""

OF_OVERLAPPING_STACKS = {"network_fraction": 0.8, "step_ms": 20.0}
"""Assumed: bytes are counted as they are sent, and Megatron-LM's published steps, whose traffic hides behind compute,
contradict none of it. Two stacks that send in the open were fitted to 0.36 and 0.39. Steps of stacks that overlap have
less beside their operators."""

TENSOR_SHARDS = (
    {"shard_gigabyte_ms": 2.0},
    {
        "shard_gigabyte_ms": "assumed, near what 45 published steps of DeepSpeed 0.6.2's ZeRO 3 on A100 ask for (its "
        "blog of July 2022 on Azure, figures 5 and 6)"
    },
)
TENSOR_NETWORK_FRACTION = 0.94
"""Of what a network states, whatever the number of ranks: six throughputs of DeepSpeed's ZeRO 3 on 384 V100 in nodes of
16 with 1 to 8 ports of 100 Gb/s (its blog of June 2023 on ZeRO++, figures 6 to 8) are 0 to 19 % off with it and the 2
ms for each 1e9 bytes of A100, whose prior is wide (measurements/fit.py). A law that falls with the ranks as reductions
do elsewhere (scale_ranks of 138) contradicts both blogs."""
RING_HOP_MS = (0.0034, 0.0096)
"""From rank to rank of a ring, past NVLink and past the network, beside the bytes (NCCL, src/graph/tuning.cc, hwLat:
ring, simple protocol). It counts where many small collectives follow each other."""

PLAIN_FRACTIONS = (0.70, 0.50, 0.40)
PLAIN_OF = {"a100-80g": (0.75, 0.60, 0.50), "h100-80g": (0.65, 0.60, 0.45), "h200-141g": (0.65, 0.60, 0.45)}
"""Of matrix products, and attention forward and backward, of the peak; sources as in ASSUMED_OF."""
SHAPED = (
    "node_latency_ms",
    "hidden_fraction",
    "shard_hidden_fraction",
    "scale_ranks",
    "waves",
    "edge_count",
    "triton_attention_factor",
    "layer_launch_ms",
    "vision_launch_ms",
    "rotary_vision_launch_ms",
    "tensor_launch_factor",
    "layer_gap_ms",
    "micro_batch_ms",
    "step_ms",
)
"""Figures of shapes, gaps and ranks."""
