"""What the software decides of kept bytes and working sets: the loss, weight gradients, experts, dealt heads."""

from __future__ import annotations

from typing import Any

import pytest

from mm_autoparallel.model.blocks.chain import Attention, Experts, FeedForward, OutputHead, TransformerLayer
from mm_autoparallel.model.blocks.tokens import TokenCounts
from mm_autoparallel.model.operators.ends import list_operators
from mm_autoparallel.model.operators.operators import Operators, Share

S, B, H, V = 1024, 2, 512, 50304
N = S * B
LOGITS = N * V


def head(**share: Any) -> Operators:
    return list_operators(OutputHead(V, H, "rms"), TokenCounts(S, S, S, 1), Share(mbs=B, **share))


def kept_and_at_work(shared_gradients: bool = True, **share: Any) -> float:
    """The most that the head holds in its backward."""
    operators = head(**share)
    return operators.kept_bytes(True) + operators.working_bytes(True, True, shared_gradients)


NORM = 2 * 2 * N * H + 4 * N
"""Input and output of the final norm, and its fp32 1/rms."""


def test_unfused_holds_six_bytes_a_logit() -> None:
    """bf16 logits beside the fp32 softmax, and again bf16 gradients beside the fp32 ones."""
    assert kept_and_at_work() == NORM + 6 * LOGITS


def test_fused_holds_two_and_the_gradient_of_the_input() -> None:
    assert kept_and_at_work(cross_entropy="fused") == NORM + 2 * LOGITS + 2 * N * H


def test_transformers_holds_twelve() -> None:
    """The log-softmax and two fp32 gradients: 4 + 4 + 4."""
    assert kept_and_at_work(cross_entropy="transformers") == NORM + 12 * LOGITS


def test_a_divided_loss_of_transformers_holds_ten() -> None:
    """The softmax, an fp32 gradient and the bf16 one that is made of it: 4 + 4 + 2."""
    assert kept_and_at_work(cross_entropy="transformers", tp=2) == NORM + 10 * LOGITS / 2


def test_a_gradient_of_the_table_passes_unless_one_stands_for_all() -> None:
    more = kept_and_at_work(shared_gradients=False, cross_entropy="fused") - kept_and_at_work(cross_entropy="fused")
    assert more == 2 * H * V


def test_a_loss_in_pieces_holds_the_logits_of_one() -> None:
    """Of a piece 12 bytes a logit and the gradient of the table, which is summed beside the one that is kept."""
    piece, table = B * 256, 2 * H * V
    kept = NORM - 2 * N * H + 2 * N * H + table  # the gradient of the matrix's input in the place of the input
    operators = head(cross_entropy="transformers", loss_chunk_tokens=256)
    assert operators.kept_bytes(True) == kept
    assert operators.working_bytes(True, True) == 12 * piece * V + table
    assert operators.working_bytes(False, True) == 12 * piece * V
    assert operators.products == head(cross_entropy="transformers").products
    whole = head(cross_entropy="transformers", loss_chunk_tokens=10 * S)
    assert whole.working_bytes(False, True) == 12 * LOGITS


@pytest.mark.parametrize("tp", [2, 8])
def test_sequence_parallel_gathers_the_input_and_scatters_its_gradient(tp: int) -> None:
    found = kept_and_at_work(cross_entropy="fused", tp=tp, sequence_parallel=True)
    assert found == NORM / tp + 2 * LOGITS / tp + 2 * N * H + 2 * N * H + 2 * N * H / tp


@pytest.mark.parametrize(("cross_entropy", "kept"), [("unfused", 4), ("fused", 2), ("transformers", 4)])
def test_what_is_kept_for_the_backward(cross_entropy: str, kept: int) -> None:
    assert head(cross_entropy=cross_entropy).kept_bytes(True) == NORM + kept * LOGITS


def test_a_fused_loss_moves_fewer_bytes() -> None:
    def moved_bytes(cross_entropy: str) -> float:
        return sum(s.forward_bytes + s.backward_bytes for s in head(cross_entropy=cross_entropy).streams)

    assert moved_bytes("fused") < moved_bytes("unfused") < moved_bytes("transformers")


TOKENS = TokenCounts(S, S, S, 1)
ATTENTION = Attention(8, 8, 64)


def kept_by(mlp: FeedForward | Experts, **share: Any) -> float:
    return list_operators(TransformerLayer(H, "rms", ATTENTION, mlp), TOKENS, Share(mbs=B, **share)).kept_bytes(True)


def test_experts_without_a_gate_keep_their_activation_twice() -> None:
    """Before and after the router's weight; a gated activation takes the weight in (Megatron-LM, moe/experts.py)."""
    routed, width = 2 * N, 1024
    plain, gated = (Experts(8, 2, FeedForward(width, gated=gated)) for gated in (False, True))
    assert kept_by(gated) - kept_by(plain) == 0  # two first matrices, or one and the unweighted activation
    assert kept_by(plain) - kept_by(plain, recompute_operators=("moe_act",)) == 2 * 2 * routed * width


def test_dealt_heads_leave_the_output_in_two_layouts() -> None:
    dense = FeedForward(2048)
    assert kept_by(dense, cp=2, exchanged_heads=True) - kept_by(dense, cp=2) == 2 * N / 2 * H


@pytest.mark.parametrize("trainable", [True, False])
def test_weight_gradients_pass_one_at_a_time_unless_shared(trainable: bool) -> None:
    """With few tokens the first matrix's gradient is the largest of what passes."""
    few = TokenCounts(8, 8, 8, 1)
    operators = list_operators(TransformerLayer(H, "rms", ATTENTION, FeedForward(2048)), few, Share())
    alone, shared = (operators.working_bytes(trainable, True, each) for each in (False, True))
    first_bytes = 2 * H * 2 * 2048
    assert shared < 0.1 * first_bytes
    assert (0.9 * first_bytes < alone < 1.1 * first_bytes) == trainable
