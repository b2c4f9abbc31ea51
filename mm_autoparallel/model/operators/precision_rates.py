"""What a device reaches of its peaks in each precision, by the shape of a product and the length of attention."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from mm_autoparallel.model.job.cluster import Device
from mm_autoparallel.model.job.precision import PRECISIONS, RECIPES, peak_flops_per_s, transposes

if TYPE_CHECKING:
    from mm_autoparallel.model.operators.operators import AttentionProduct
    from mm_autoparallel.model.profiles.figures import Figures

FP8_OVER_BF16, FP4_OVER_BF16 = 0.79 / 0.80, 0.64 / 0.80
"""The part of its own peak that a product in eight or four bits reaches over that of one in BF16, where nobody measured
it: about what NVIDIA's published steps of Llama 3 70B ask for (assumed)."""

_FP8_ATTENTION_FACTOR = 1.25
"""An attention core in FP8 over one in BF16: softmax stays what it is (assumed)."""
_SMALL_HEAD = 64


@dataclass(frozen=True)
class ProductRate:
    """Linear layers in one precision, beside those in BF16. rate_factor: operations a second over theirs. edge_count:
    as in Rates. quantised_bytes: read and written while one number is brought into the format.
    """

    rate_factor: float
    edge_count: float
    quantised_bytes: float


def product_rates(device: Device, figures: Figures) -> dict[str, ProductRate]:
    """Of each precision that `device` has units for."""
    found: dict[str, ProductRate] = {}
    for precision in PRECISIONS:
        peak = peak_flops_per_s(device, precision)
        if peak is not None:
            recipe, fraction = RECIPES[precision], _peak_fraction(figures, RECIPES[precision].peak)
            reached_flops_per_s = peak * fraction * recipe.rate_factor
            found[precision] = ProductRate(
                rate_factor=reached_flops_per_s / (device.bf16_flops_per_s * figures.matrix_fraction),
                edge_count=count_edges(device, figures, reached_flops_per_s),
                quantised_bytes=recipe.quantised_bytes + (recipe.transposed_bytes if transposes(device) else 0.0),
            )
    return found


def _peak_fraction(figures: Figures, peak: str) -> float:
    if peak == "fp8":
        return figures.fp8_matrix_fraction or min(1.0, FP8_OVER_BF16 * figures.matrix_fraction)
    if peak == "fp4":
        return figures.fp4_matrix_fraction or min(1.0, FP4_OVER_BF16 * figures.matrix_fraction)
    return figures.matrix_fraction


def count_edges(device: Device, figures: Figures, reached_flops_per_s: float) -> float:
    """Rows, columns and steps that the edges of a product cost: what it reads and writes, c = f · sustained operations
    per byte that memory reaches, grows against what it computes; or the calibration's count, where that has no f.
    """
    if not figures.edge_factor:
        return figures.edge_count
    memory_bytes_per_s = device.memory_bytes_per_s * figures.memory_fraction
    return figures.edge_factor * clock_of(device) * reached_flops_per_s / memory_bytes_per_s


def clock_of(device: Device) -> float:
    """What power leaves of the clock of all its peaks."""
    return device.clock_fraction or 1.0


@dataclass(frozen=True)
class AttentionRate:
    """How flash attention falls behind its best, forward and backward: at half of it where a query sees so many keys.

    uneven_factor: where queries and values differ in size. small_factor: of heads of 64 numbers and less.
    """

    half_counts: tuple[int, int] = (0, 0)
    uneven_factor: float = 1.0
    small_factor: float = 1.0

    def factor(self, attention: AttentionProduct, backward: bool) -> float:
        """Of the best rate, with the gain of a core in FP8."""
        half_count, length = self.half_counts[backward], attention.key_count
        factor = length / (length + half_count) if length else 1.0
        if attention.query_size != attention.value_size:
            factor *= self.uneven_factor
        elif 0 < attention.query_size <= _SMALL_HEAD:
            factor *= self.small_factor
        return factor * (_FP8_ATTENTION_FACTOR if attention.low else 1.0)


EVEN_ATTENTION = AttentionRate()

_FLASH_1_FACTOR = 0.6
"""FlashAttention 1 over 2, causal, head size 128 (arXiv:2307.08691, figures 5 and 6: 1.7 to 2 times slower)."""
_FLASH_2_FACTOR = 0.6
"""FlashAttention 2 over the kernels that fractions by length are of (arXiv:2407.08608, section 4: FlashAttention 3 is
1.5 to 2 times as fast forward on H100 and 1.5 to 1.75 times backward)."""


_SINGLE_FRACTION = 0.8
"""Of memory's bandwidth, what PyTorch's operators reach that read and write large tensors by themselves (assumed)."""


def single_factor(figures: Figures) -> float:
    """What such operators reach over what memory-bound ones are taken to: more under figures whose memory_fraction
    stands for what is not counted beside fused kernels too."""
    modern = figures.attention_forward_half_count > 0
    return max(1.0, _SINGLE_FRACTION / figures.memory_fraction) if modern else 1.0


def kernel_factors(figures: Figures) -> dict[str, float]:
    """Of an attention kernel that a stack names, its rate over that of the usual one of these figures."""
    flash_2 = _FLASH_2_FACTOR if figures.attention_forward_half_count else 1.0
    return {"flash-1": flash_2 * _FLASH_1_FACTOR, "flash-2": flash_2, "triton": figures.triton_attention_factor}


def attention_rate(figures: Figures) -> AttentionRate:
    """As the calibration has it."""
    return AttentionRate(
        (figures.attention_forward_half_count, figures.attention_backward_half_count),
        figures.uneven_attention_factor,
        figures.small_attention_factor,
    )


OPEN_TENSOR_FRACTION: Mapping[str, float] = {"user_buffers": 0.5, "asynchronous": 0.7}
"""What stays of tensor parallel traffic beside products that take it in pieces: TransformerEngine's user buffers, as
published steps of Llama 3 70B under Megatron-Bridge ask for; PyTorch's asynchronous tensor parallelism, as torchtitan's
published steps with it and without differ (torchtitan, benchmarks)."""

_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 1.08))
"""Rows and columns of a tile that one unit takes, and how much longer it works on as much (cuBLAS and CUTLASS on A100;
NVIDIA, Matrix multiplication background user's guide, wave quantization; the smaller tile's loss assumed)."""


@lru_cache(maxsize=65536)
def count_waves(row_count: float, column_count: float, num_units: int, num_products: int = 1) -> float:
    """What whole waves of tiles take of `row_count` x `column_count` results over what the results alone take; of
    num_products such, whose tiles run together.
    """
    if row_count <= 0 or column_count <= 0:
        return 1.0
    best = math.inf
    for rows, columns, slower in _TILES:
        num_tiles = num_products * math.ceil(row_count / rows) * math.ceil(column_count / columns)
        whole = math.ceil(num_tiles / num_units) * num_units * rows * columns
        best = min(best, slower * whole / (num_products * row_count * column_count))
    return best
