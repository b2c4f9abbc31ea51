"""What tensor parallel traffic adds to the products that take what it gathers, or give what it sums.

MindSpeed's MC2 (--use-ascend-mc2) cuts a product and its collective into pieces and runs the pieces as a pipeline, one
moving while another is computed (Ascend/MindSpeed, docs/features/mc2.md). It fuses what a product gathers before its
forward, what it scatters behind it, and what its gradient gathers (mindspeed/core/tensor_parallel/ascend_turbo/
mc2_linears_seq_parallel.py); the others run as they do without it. Under Megatron-Core's layers experts have none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mm_autoparallel.model.operators.operators import MatrixProduct, Share
from mm_autoparallel.model.operators.precision_rates import OPEN_TENSOR_FRACTION
from mm_autoparallel.model.profiles.collectives import exposed_ms
from mm_autoparallel.model.profiles.lanes import ASSUMED, Slowdown

if TYPE_CHECKING:
    from mm_autoparallel.model.operators.analytic import Rates

SLOWED_FACTOR = 1.05
"""How much longer a product takes that is cut into pieces while traffic passes through the same memory. Assumed; where
more is known of what both slow each other down by (Lanes.pieces), that comes on top."""


def open_ms(traffic_ms: float, share: Share, cover_ms: float = 0.0, hidden_fraction: float = 0.0) -> float:
    """What nothing hides of tensor parallel traffic: a fixed part where products take it in pieces."""
    if share.facts.tp_overlap in OPEN_TENSOR_FRACTION:
        return OPEN_TENSOR_FRACTION[share.facts.tp_overlap] * traffic_ms
    return share.unfused_fraction * exposed_ms(traffic_ms, cover_ms, hidden_fraction)


def added_ms(traffic_ms: float, product: MatrixProduct, product_ms: float, share: Share, rates: Rates) -> float:
    """What a collective of `traffic_ms`, latency included, adds to the product that takes or gives what it moves."""
    fused = share.facts.tp_overlap == "mc2" and product.num_weights == 1
    if not fused or not traffic_ms or not product_ms:
        return open_ms(traffic_ms, share)
    # the first piece waits for it, whatever is computed meanwhile
    start_ms = min(rates.tp_group.latency_ms, traffic_ms)
    return start_ms + pipelined_ms(product_ms, traffic_ms - start_ms, share.tp, rates.lanes.pieces) - product_ms


def pipelined_ms(product_ms: float, traffic_ms: float, num_pieces: int, slowdown: Slowdown = ASSUMED) -> float:
    """A product and its collective in `num_pieces` pieces each (assumed: what each rank has, as a ring brings it): both
    at once, and one piece of the shorter before or behind.
    """
    computed_ms = SLOWED_FACTOR * product_ms
    longer_ms, shorter_ms = max(traffic_ms, computed_ms), min(traffic_ms, computed_ms)
    return longer_ms + (slowdown.factor - 1.0) * shorter_ms + shorter_ms / num_pieces
