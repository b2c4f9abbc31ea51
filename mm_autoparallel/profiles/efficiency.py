"""What part of a device's peak figures each class of operator reaches, where nothing was measured.

One fraction per class: finer forms (by shape, by wave) bought nothing out of sample in a trial on published step times
and extrapolate worst. A figure is published (named in `source`) or `assumed`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Efficiency:
    """Parts of the peak: dense matrix products, flash attention forward and backward, memory-bound operators, links.

    statistics_bytes: what the attention kernel keeps per token and head for its backward besides query, key, value
    and output.
    """

    matrix_fraction: float
    attention_forward_fraction: float
    attention_backward_fraction: float
    memory_fraction: float
    network_fraction: float
    statistics_bytes: float
    source: str


_FLASH_ATTENTION_2 = (
    "attention: FlashAttention-2 (arXiv:2307.08691, section 4: up to 73 % forward and 63 % backward of an A100's peak; "
    "causal, head size 128, 8k tokens lie near 60 and 50 %)"
)
_FLASH_ATTENTION_3 = (
    "attention: FlashAttention-3 (arXiv:2407.08608, section 4: up to 75 % forward of an H100's peak, backward some "
    "550 of 989 TFLOP/s; taken with a margin of a fifth)"
)
_LOG_SUM_EXP = "statistics: one fp32 log-sum-exp per token and head"
_ASSUMED_REST = "matrix, memory and network fractions: assumed"

DEFAULT = Efficiency(0.70, 0.50, 0.40, 0.80, 0.80, 4.0, f"all fractions: assumed; {_LOG_SUM_EXP}")

_EFFICIENCIES: dict[str, Efficiency] = {
    "a100-80g": Efficiency(0.75, 0.60, 0.50, 0.80, 0.80, 4.0, f"{_FLASH_ATTENTION_2}; {_LOG_SUM_EXP}; {_ASSUMED_REST}"),
    "h100-80g": Efficiency(0.65, 0.60, 0.45, 0.80, 0.80, 4.0, f"{_FLASH_ATTENTION_3}; {_LOG_SUM_EXP}; {_ASSUMED_REST}"),
    "h200-141g": Efficiency(
        0.65, 0.60, 0.45, 0.80, 0.80, 4.0, f"{_FLASH_ATTENTION_3}; {_LOG_SUM_EXP}; {_ASSUMED_REST}"
    ),
    "ascend-910b-64g": Efficiency(
        0.70,
        0.50,
        0.40,
        0.80,
        0.80,
        64.0,
        "all fractions: assumed; statistics: softmax maximum and sum, fp32, eight equal columns each "
        "(MindSpore documentation of ring_attention_update: both float32 of shape (B, N, S, 8))",
    ),
}


def efficiency_of(device_name: str) -> Efficiency:
    """The table's row for a catalogued device, `DEFAULT` for any other."""
    return _EFFICIENCIES.get(device_name, DEFAULT)
