"""A module that predicts one token more, counted by hand: its projection, its own look-up, what it multiplies in."""

from __future__ import annotations

import pytest

from mm_autoparallel.model.blocks.chain import Attention, Block, FeedForward, PredictionModule, TransformerLayer
from mm_autoparallel.model.blocks.tokens import TokenCounts
from mm_autoparallel.model.costs.low_parameters import held_weight_bytes
from mm_autoparallel.model.job.devices import DEVICES
from mm_autoparallel.model.job.precision import Precision
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.model.operators.ends import list_operators
from mm_autoparallel.model.operators.operators import Operators, form_share

N, H, VOCAB = 4096, 1024, 32000
TOKENS = TokenCounts(N, N, N, num_spans=1)
LAYER = TransformerLayer(H, "rms", Attention(16, 4, 64), FeedForward(4096))
MODULE = PredictionModule(LAYER, VOCAB)


def operators_of(precision: Precision, tp: int = 1) -> Operators:
    workload = Workload(global_batch_size=8, seq_length=N, precision=precision)
    return list_operators(MODULE, TOKENS, form_share(Strategy(pp=1, tp=tp, dp=8, mbs=1), workload, 4.0))


def test_the_next_tokens_are_looked_up_once_more() -> None:
    """The table's gradient is written whole and added, and tensor parallel ranks sum what they found."""
    for tp in (1, 2):
        operators = operators_of("bf16", tp)
        streams = {stream.name: stream for stream in operators.streams}
        moved = 2 * N * H * 2
        assert (streams["look-up"].forward_bytes, streams["look-up"].backward_bytes) == (moved, moved)
        assert streams["look-up"].weight_bytes == 2 * 2 * VOCAB / tp * H
        assert streams["join"].forward_bytes == 4 * 2 * N * H / tp
        found = operators.products[0]
        assert (found.row_count, found.summed_bytes) == (0, 2 * N * H)


@pytest.mark.parametrize(
    ("precision", "inside", "held_bytes"),
    [("bf16", "bf16", 2.0), ("mxfp8", "mxfp8", 2 * 33 / 32), ("nvfp4", "bf16", 2.0)],
)
def test_it_multiplies_as_the_decoder_but_for_four_bits(
    precision: Precision, inside: Precision, held_bytes: float
) -> None:
    projection, *rest = operators_of(precision).products[1:]
    assert (projection.row_count, projection.input_count, projection.output_count) == (N, 2 * H, H)
    assert projection.precision == inside
    *layer, head = rest
    assert {product.precision for product in layer} == {inside}
    assert head.precision == "bf16"
    workload = Workload(global_batch_size=8, seq_length=N, precision=precision)
    block = Block("text_mtp", "text_mtp", "text", "post", MODULE, 1, True, True, pinned="last")
    strategy = Strategy(pp=1, tp=1, dp=8, mbs=1)
    assert held_weight_bytes(block, workload, strategy, DEVICES["gb300-288g"]) == held_bytes
