"""What GPT, BERT, ViT and DiT do beside a Llama: added positions, dropout, transformed heads, modulation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mm_autoparallel.model.blocks.chain import (
    Attention,
    Block,
    FeedForward,
    ImageHead,
    OutputHead,
    PatchEmbedding,
    Structure,
    TokenEmbedding,
    TransformerLayer,
)
from mm_autoparallel.model.blocks.parameters import count_parameters
from mm_autoparallel.model.blocks.tokens import TokenCounts
from mm_autoparallel.model.job.cluster import Cluster
from mm_autoparallel.model.job.devices import DEVICES
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.operators.analytic import estimate_block, rates_of
from mm_autoparallel.model.operators.ends import list_operators
from mm_autoparallel.model.operators.operators import Operators, Share
from mm_autoparallel.model.profiles.calibration import assume_calibration
from mm_autoparallel.model.profiles.cost import BlockCost

N, H, B = 256, 1152, 2
TOKENS = TokenCounts(N, N, N, num_spans=1)
MLP = FeedForward(4 * H, gated=False, bias=True)
GPT = TransformerLayer(H, "layer", Attention(16, 16, 72, qkv_bias=True, output_bias=True, rotary=False), MLP)


def kept_bytes(structure: Structure, share: Share = Share(mbs=B), tokens: TokenCounts = TOKENS) -> float:  # noqa: B008
    return list_operators(structure, tokens, share).kept_bytes(trainable=True)


def named(operators: Operators, word: str) -> tuple[float, float]:
    """Bytes moved in forward and backward by the streams whose name has `word`."""
    found = [stream for stream in operators.streams if word in stream.name]
    return sum(s.forward_bytes for s in found), sum(s.backward_bytes for s in found)


def estimate(share: Share) -> BlockCost:
    cluster = Cluster(num_nodes=1, devices_per_node=8, device=DEVICES["a100-80g"])
    rates = rates_of(cluster, assume_calibration("any"), Strategy(pp=1, tp=share.tp, dp=1, mbs=share.mbs))
    return estimate_block(Block("b", "b", "text", "layer", GPT), TOKENS, share, rates, gradient_bytes=4.0)


def test_no_rotation_where_positions_are_learned() -> None:
    turned = replace(GPT, attention=Attention(16, 16, 72))
    assert named(list_operators(GPT, TOKENS, Share()), "rotary") == (0, 0)
    assert named(list_operators(turned, TOKENS, Share()), "rotary") == (2 * 2 * N * 2 * H, 2 * 2 * N * 2 * H)


def test_positions_and_token_types_are_added_and_whole_on_every_rank() -> None:
    plain, added = TokenEmbedding(51200, H), TokenEmbedding(51200, H, num_positions=1024, num_types=2)
    assert count_parameters(added, tp=8) - count_parameters(plain, tp=8) == 1026 * H
    assert kept_bytes(added) == kept_bytes(plain)
    assert named(list_operators(added, TOKENS, Share()), "added") == (2 * 2 * 2 * N * H, 0)


@pytest.mark.parametrize("t", [1, 8])
def test_masks_of_one_byte(t: int) -> None:
    """Two of the hidden size; of the scores one, and what is left of them after it."""
    share = Share(mbs=B, tp=t, sequence_parallel=t > 1, fused_attention=False)
    dropped = replace(share, hidden_dropout=True, attention_dropout=True)
    scores = 16 * N * N * B
    assert kept_bytes(GPT, dropped) - kept_bytes(GPT, share) == (2 * B * N * H + 3 * scores) / t
    forward, backward = named(list_operators(GPT, TOKENS, dropped), "dropout of the scores")
    assert forward == backward == 5 * scores / t


def test_flash_attention_drops_within_its_kernel() -> None:
    share = Share(mbs=B)
    assert kept_bytes(GPT, replace(share, attention_dropout=True)) == kept_bytes(GPT, share)


@pytest.mark.parametrize("fused", [True, False])
def test_selective_recompute_adds_attention_to_the_backward(fused: bool) -> None:
    share = Share(mbs=B, fused_attention=fused)
    plain, again = estimate(share), estimate(replace(share, recompute_operators=("core_attn",)))
    added_ms = again.backward_input_ms - plain.backward_input_ms
    assert 0 < added_ms < plain.forward_ms
    assert (again.forward_ms, again.backward_weight_ms) == (plain.forward_ms, plain.backward_weight_ms)
    assert again.recompute_ms == pytest.approx(again.forward_ms - added_ms)  # recomputed whole, nothing runs thrice
    assert plain.recompute_ms is None


def test_berts_head_keeps_what_its_square_matrix_and_norm_need() -> None:
    plain, masked = (OutputHead(30592, H, "layer", masked=masked) for masked in (False, True))
    assert kept_bytes(masked) - kept_bytes(plain) == B * N * (3 * 2 * H + 8)
    products = list_operators(masked, TOKENS, Share()).products
    assert products[0].flops == 2 * N * H * H
    assert products[1:] == list_operators(plain, TOKENS, Share()).products


def test_modulation_keeps_what_it_multiplies() -> None:
    modulated = replace(GPT, modulated=True)
    assert kept_bytes(modulated) - kept_bytes(GPT) == B * 4 * 2 * N * H
    assert count_parameters(modulated) - count_parameters(GPT) == 6 * (H + 1) * H - 2 * 2 * H
    condition = list_operators(modulated, TOKENS, Share(mbs=B)).products[0]
    assert condition.flops == 2 * B * H * 6 * H


def test_heads_of_images() -> None:
    """A class reads one token a sample, a denoiser's output every token."""
    pooled, every = ImageHead(1000, H, "layer"), ImageHead(32, H, "layer", pooled=False, modulated=True)
    norm = B * N * (2 * H + 8)
    assert kept_bytes(pooled) == norm + B * (2 * H + 4 * 1000)
    assert kept_bytes(every) == norm + B * N * (2 * H + 2 * H + 4 * 32)
    flops = [
        sum(product.flops for product in list_operators(head, TOKENS, Share(mbs=B)).products)
        for head in (pooled, every)
    ]
    assert flops == [2 * B * H * 1000, 2 * B * H * 2 * H + 2 * B * N * H * 32]


def test_labels_and_time_steps_make_the_condition() -> None:
    stem = PatchEmbedding(16, H, bias=True, num_labels=1001)
    assert count_parameters(stem) == 16 * H + H + 1001 * H + (256 + 1) * H + (H + 1) * H
    assert len(list_operators(stem, TOKENS, Share()).products) == 3
