"""What a layer of MindFormers keeps less with selected operators: their tensors, no more and no less."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mm_autoparallel.model.blocks.chain import Experts, FeedForward, LatentAttention, TransformerLayer
from mm_autoparallel.model.blocks.tokens import TokenCounts
from mm_autoparallel.model.operators.layers import list_layer
from mm_autoparallel.model.operators.mindformers_recompute import frees_nothing
from mm_autoparallel.model.operators.operators import Operators, Share

MIB = 2**20
TOKENS = TokenCounts(4096, 4096, 4096, 1)
DENSE = TransformerLayer(7168, "rms", LatentAttention(128, 1536, 512, 128, 64, 128), FeedForward(18432))
MOE = replace(DENSE, mlp=Experts(256, 8, FeedForward(2048), FeedForward(2048)))
OWN = (r"feed_forward\.mul", r"feed_forward\.w1\.activation\.silu")
SHARE = Share(tp=4, sequence_parallel=True, graph=True, ep=8, etp=1)


def freed(layer: TransformerLayer, *patterns: str, exchanges: tuple[str, ...] = ()) -> float:
    """MiB."""
    plain, lighter = list_layer(layer, TOKENS, SHARE), run_again(layer, *patterns, exchanges=exchanges)
    return (plain.kept_bytes(trainable=True) - lighter.kept_bytes(trainable=True)) / MIB


def run_again(layer: TransformerLayer, *patterns: str, exchanges: tuple[str, ...] = ()) -> Operators:
    return list_layer(layer, TOKENS, replace(SHARE, rerun_patterns=patterns, exchange_patterns=exchanges))


@pytest.mark.parametrize(
    ("layer", "patterns", "mib"),
    [
        (DENSE, OWN, 2 * 4096 * 18432 / 4 * 2 / MIB),  # a product and the activated gate
        (MOE, OWN, 0.0),
        (MOE, (r"feed_forward\.routed_experts\.ffn\.mul",), 4096 / 4 * 8 * 2048 * 2 / MIB),
        (MOE, (r"feed_forward\.(shared|routed)_experts.*\.mul",), 4096 * 2048 / 4 * 2 / MIB),
        (DENSE, (r"feed_forward\.w1",), 4096 * 18432 / 4 * 2 / MIB),  # a cell keeps what it gives
        (DENSE, (r"feed_forward\.w3",), 0.0),
        (DENSE, ("ffn_norm",), 4096 / 4 * 7168 * 2 / MIB),  # the input in bf16, no more in fp32
        (DENSE, (r"ffn_norm\.rcast",), 4096 / 4 * 7168 * 2 / MIB),
        (DENSE, (r"attention\.flash_attention",), 0.0),
        (DENSE, (), 0.0),
    ],
)
def test_each_tensor_goes_with_its_operator(layer: TransformerLayer, patterns: tuple[str, ...], mib: float) -> None:
    assert freed(layer, *patterns) == pytest.approx(mib)


def test_exchanges_are_told_apart_from_operators() -> None:
    gathered = 4096 * 7168 * 2 / MIB
    assert freed(DENSE, exchanges=(r".*\.norm",)) == pytest.approx(gathered)
    assert freed(MOE, exchanges=(r".*\.norm",)) == 0.0
    assert freed(DENSE, r".*\.norm") == 0.0
    assert freed(DENSE, *OWN, exchanges=(r".*\.norm",)) == pytest.approx(freed(DENSE, *OWN) + gathered)


def test_what_runs_again_is_told() -> None:
    plain = list_layer(MOE, TOKENS, SHARE)
    cell = run_again(MOE, "feed_forward").rerun
    assert plain.rerun is None
    assert cell is not None
    assert len(cell.products) == 4  # the router, the experts' two and the shared expert's first
    assert set(cell.products) == set(plain.products[-5:-1])
    assert cell.all_to_all_bytes == plain.all_to_all_bytes
    attention = run_again(DENSE, "attention").rerun
    assert attention is not None
    assert attention.attention == plain.attention
    assert len(attention.products) == 4


def test_patterns_that_free_nothing_are_named() -> None:
    assert frees_nothing((*OWN, r"feed_forward\.w2\.reshape", "add"), [DENSE, MOE], gathered=False) == [
        r"feed_forward\.w2\.reshape",
        "add",
    ]
    assert frees_nothing((r".*\.norm",), [MOE], gathered=True) == [r".*\.norm"]
