"""Precision of matrix products: what each recipe multiplies in, moves, keeps and gathers.

Low are the products of QKV, attention's output, feed-forwards, experts, shared experts and latent projections, in all
three of their passes. The attention core, routers, embeddings, heads, losses and what belongs to adapters stay in BF16
(TransformerEngine's linear modules under its autocast; Megatron-LM, core/fp8_utils.py). Names are those of Megatron's
--fp8-recipe: `fp8_delayed` scales by the largest numbers of earlier steps, `fp8_current` each tensor by its own,
`fp8_blockwise` 1 x 128 and 128 x 128 blocks by theirs (DeepSeek-V3, arXiv:2412.19437, section 3.3), `mxfp8` 1 x 32
blocks (OCP Microscaling Formats 1.0), `nvfp4` 1 x 16 blocks of four bits (arXiv:2509.25149). `fp8_rowwise` is
torchao's. Where nothing is cited a figure is assumed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, get_args

from mm_autoparallel.model.job.traced_model import TracedModel

if TYPE_CHECKING:
    from mm_autoparallel.model.job.cluster import Cluster, Device
    from mm_autoparallel.model.job.model import Model
    from mm_autoparallel.model.job.strategy import Strategy
    from mm_autoparallel.model.job.workload import Workload

Precision = Literal["bf16", "fp8_delayed", "fp8_current", "fp8_blockwise", "fp8_rowwise", "mxfp8", "nvfp4"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)

_BF16_BYTES = 2.0
_PER_DIRECTION = 2
"""A weight, or an input, is multiplied along its rows in one pass and along its columns in another."""


@dataclass(frozen=True)
class Recipe:
    """What one precision means. Bytes are of one number, block scales included.

    peak: whose peak of the device its products reach a part of. rate_factor: its products over those of fp8_current,
    or, with four bits, over those of nvfp4. element_bytes: of a number in the low format; block_bytes: what scales add.
    quantised_bytes: read and written while one number is brought into the format; transposed_bytes: more where the
    device multiplies along rows alone. gathered_bytes: what tensor parallel ranks gather of inputs and gradients.
    keeps_weights: whether weights stay BF16, and are gathered so, beside their copies.
    both_ways: whether numbers that are scaled along rows need a second copy along columns on every device (one scale a
    tensor serves both). keeps_copies: whether copies of weights stay from one micro-batch to the next.
    """

    peak: Literal["bf16", "fp8", "fp4"] = "bf16"
    rate_factor: float = 1.0
    element_bytes: float = _BF16_BYTES
    block_bytes: float = 0.0
    quantised_bytes: float = 0.0
    transposed_bytes: float = 0.0
    gathered_bytes: float = _BF16_BYTES
    keeps_weights: bool = True
    both_ways: bool = False
    keeps_copies: bool = True

    @property
    def kept_bytes(self) -> float:
        """Of an input that a product keeps for the gradient of its weight: one copy, along the other direction."""
        return self.element_bytes + self.block_bytes

    def copies_bytes(self, device: Device) -> float:
        """Of the low copies of a weight that a device holds from one micro-batch to the next."""
        if self.peak == "bf16" or not self.keeps_copies:
            return 0.0
        num_copies = _PER_DIRECTION if self.both_ways or transposes(device) else 1
        return num_copies * self.kept_bytes


RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "bf16": Recipe(),
        # read once, written once: its scale is there before
        "fp8_delayed": Recipe("fp8", 1.0, 1.0, 0.0, 3.0, 1.0, 1.0, keeps_weights=False),
        # read for the largest number, read once more and written; Hopper writes a transposed copy too
        "fp8_current": Recipe("fp8", 1.0, 1.0, 0.0, 5.0, 1.0, 1.0, keeps_weights=False),
        "fp8_blockwise": Recipe("fp8", 0.8, 1.0, 4 / 128, 4.1, 0.0, 1.0, keeps_weights=False, both_ways=True),
        "fp8_rowwise": Recipe("fp8", 0.8, 1.0, 0.0, 8.0, both_ways=True, keeps_copies=False),
        # read once, written along rows and along columns; 0.93: pairs of Llama 3 70B runs under both recipes
        "mxfp8": Recipe("fp8", 0.93, 1.0, 1 / 32, 4.1, 0.0, 1.0, keeps_weights=False, both_ways=True),
        # largest number, Hadamard transform of what weight gradients take, stochastic rounding
        "nvfp4": Recipe("fp4", 1.0, 0.5, 1 / 16, 7.0, 0.0, 0.5, both_ways=True),
    }
)
"""Factors of rates, and bytes of quantisation but those of fp8_delayed, agree with steps that NVIDIA publishes for
Llama 3 70B, DeepSeek-V3 and Qwen3 30B-A3B (Megatron-Bridge, docs/performance-summary.md); fp8_blockwise and fp8_rowwise
have no row of their own there."""

_RUNS: Mapping[str, tuple[Precision, ...]] = MappingProxyType(
    {
        "megatron-te": ("bf16", "fp8_delayed", "fp8_current", "fp8_blockwise", "mxfp8", "nvfp4"),
        "transformers": ("bf16", "fp8_current", "fp8_rowwise", "mxfp8"),
    }
)
"""Stack → what its products run in: TransformerEngine's recipes, and torchao's (torchao/float8, prototype/mx_formats);
all others BF16 alone."""


def of_prediction(precision: Precision) -> Precision:
    """What modules that predict one token more multiply in beside a decoder of `precision`: recipes of four bits leave

    them in BF16 (Megatron-LM, core/transformer/multi_token_prediction.py, which takes up FP8 alone).
    """
    return "bf16" if RECIPES[precision].peak == "fp4" else precision


def transposes(device: Device) -> bool:
    """Whether its FP8 units multiply along rows alone, so that a transposed copy is made: Hopper's do, the devices that
    have FP4 units too do not."""
    return device.fp4_flops_per_s is None


def peak_flops_per_s(device: Device, precision: str) -> float | None:
    """Its dense peak in that precision; None where it has no such units. Those that scale blocks of 32 numbers by
    themselves came with those of four bits (NVIDIA Blackwell, AMD's MI350 series)."""
    if precision == "mxfp8" and device.fp4_flops_per_s is None:
        return None
    peaks = {"bf16": device.bf16_flops_per_s, "fp8": device.fp8_flops_per_s, "fp4": device.fp4_flops_per_s}
    return peaks[RECIPES[precision].peak]


def precision_reason(precision: str, device: Device, stack: str, implementation: str = "megatron") -> str | None:
    """Why `device` under `stack` cannot run products in `precision`; None where it can."""
    if precision not in RECIPES:
        return f"precision {precision} is not understood; known are {', '.join(PRECISIONS)}"
    if precision == "bf16":
        return None
    if peak_flops_per_s(device, precision) is None:
        peak, able = RECIPES[precision].peak, [name for name in PRECISIONS if peak_flops_per_s(device, name)]
        lacks = f"multiplies in {peak.upper()}, and device {device.name} has no {peak}_flops_per_s"
        if peak == "fp8" and device.fp8_flops_per_s:
            lacks = f"scales blocks of 32 numbers, and device {device.name}, without fp4_flops_per_s, has no such units"
        return f"precision {precision} {lacks}; it runs {', '.join(able)}"
    known = _RUNS.get(stack, ("bf16",))
    if precision not in known:
        return f"precision {precision} is none that workload.stack {stack} runs; it runs {', '.join(known)}"
    if implementation == "transformers":
        return f"precision {precision} is of Megatron's layers, and workload.implementation is {implementation}"
    return None


def precision_reasons(model: Model, cluster: Cluster, workload: Workload, strategy: Strategy) -> Iterator[str]:
    """Every device must have units of that precision, and the stack products of it."""
    for precision in dict.fromkeys(strategy.precision_of(workload, modality) for modality in ("text", "towers")):
        for device in {kind.device.name: kind.device for kind in cluster.kinds}.values():
            reason = precision_reason(precision, device, workload.stack, workload.implementation)
            if reason:
                yield reason
        if precision != "bf16" and isinstance(model, TracedModel):
            yield f"precision {precision} has other operators than the traces that {model.name} is known from"
