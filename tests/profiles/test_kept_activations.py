"""Kept bytes against published closed forms and against lists written out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mm_autoparallel.model.blocks.chain import (
    Attention,
    AudioStem,
    Experts,
    FeedForward,
    OutputHead,
    PatchEmbedding,
    Projector,
    TokenEmbedding,
    TransformerLayer,
)
from mm_autoparallel.model.blocks.tokens import TokenCounts
from mm_autoparallel.model.operators.ends import list_operators
from mm_autoparallel.model.operators.operators import Share

S, B, H, A = 2048, 4, 6144, 64
"""Sequence, micro-batch, hidden size and heads of the 22B model of Korthikanti et al. 2022, table 3."""

GPT = TransformerLayer(H, "layer", Attention(A, A, H // A, qkv_bias=True), FeedForward(4 * H, gated=False, bias=True))
TOKENS = TokenCounts(S, S, S, num_spans=1)
NORM_STATISTICS = 2 * 8 * S * B
"""fp32 mean and 1/deviation of two norms, which the paper leaves out as small."""


def kept_bytes(layer: TransformerLayer, share: Share, trainable: bool = True) -> float:
    return list_operators(layer, TOKENS, share).kept_bytes(trainable)


class TestKorthikanti:
    """Korthikanti et al. 2022 (arXiv:2205.05198), to the byte: s·b·h·5·a·s/h is 5·a·s²·b."""

    SHARE = Share(mbs=B, fused_attention=False, hidden_dropout=True, attention_dropout=True)

    def test_without_parallelism_equation_1(self) -> None:
        assert kept_bytes(GPT, self.SHARE) - NORM_STATISTICS == S * B * (34 * H + 5 * A * S)

    @pytest.mark.parametrize("t", [2, 8])
    def test_tensor_parallel_equation_2(self, t: int) -> None:
        share = replace(self.SHARE, tp=t)
        assert kept_bytes(GPT, share) - NORM_STATISTICS == S * B * (10 * H + 24 * H / t + 5 * A * S / t)

    @pytest.mark.parametrize("t", [2, 8])
    def test_tensor_and_sequence_parallel_equation_4(self, t: int) -> None:
        share = replace(self.SHARE, tp=t, sequence_parallel=True)
        assert kept_bytes(GPT, share) - NORM_STATISTICS / t == S * B / t * (34 * H + 5 * A * S)

    @pytest.mark.parametrize("t", [1, 8])
    def test_selective_recompute_equation_6(self, t: int) -> None:
        share = replace(self.SHARE, tp=t, sequence_parallel=True, recompute_operators=("core_attn",))
        assert kept_bytes(GPT, share) - NORM_STATISTICS / t == 34 * S * B * H / t

    def test_flash_attention_keeps_its_statistics(self) -> None:
        share = replace(self.SHARE, tp=8, sequence_parallel=True, fused_attention=True)
        statistics = (NORM_STATISTICS + 4 * A * S * B) / 8
        assert kept_bytes(GPT, share) - statistics == 34 * S * B * H / 8

    def test_the_embeddings_mask_of_section_4_3(self) -> None:
        plain, dropped = (
            list_operators(TokenEmbedding(51200, H, S), TOKENS, Share(mbs=B, tp=8, sequence_parallel=True, **masks))
            for masks in ({}, {"hidden_dropout": True})
        )
        assert dropped.kept_bytes(trainable=True) - plain.kept_bytes(trainable=True) == S * B * H / 8

    @pytest.mark.parametrize(
        ("share", "divisor"), [(Share(mbs=B, tp=8), 1), (Share(mbs=B, tp=8, sequence_parallel=True), 8)]
    )
    def test_full_recompute_keeps_the_input(self, share: Share, divisor: int) -> None:
        assert list_operators(GPT, TOKENS, share).input_bytes == 2 * S * B * H / divisor


LLAMA = TransformerLayer(8192, "rms", Attention(64, 8, 128, qkv_bias=True), FeedForward(29568))
"""A layer of Qwen2-VL-72B."""


def test_grouped_queries_and_a_gate_by_hand() -> None:
    n, t, h, f = 8192, 2, 8192, 29568
    by_hand = (
        4 * (2 * n * h / t)  # inputs and outputs of two norms
        + 2 * 4 * n / t  # their 1/rms
        + 2 * n * (64 + 2 * 8) * 128 / t  # query, key, value
        + 2 * n * 64 * 128 / t  # attention output
        + 4 * n * 64 / t  # log-sum-exp
        + 2 * n * 2 * f / t  # gate and up
        + 2 * n * f / t  # their product
    )
    tokens = TokenCounts(n, n, n, num_spans=1)
    operators = list_operators(LLAMA, tokens, Share(tp=t, sequence_parallel=True))
    assert operators.kept_bytes(trainable=True) == by_hand
    frozen = by_hand - 2 * (2 * n * h / t) - 2 * n * f / t  # no inputs of query, feed-forward and second product
    assert operators.kept_bytes(trainable=False) == frozen
    assert operators.output_bytes == operators.input_bytes == 2 * n * h / t


def test_fewer_groups_than_ranks_are_repeated() -> None:
    def key_and_value_bytes(tp: int) -> float:
        operators = list_operators(LLAMA, TOKENS, Share(tp=tp))
        found = {saved.name: saved.size_bytes for saved in operators.saved}
        return found["query, key and value"] - found["attention output"]

    assert key_and_value_bytes(4) == key_and_value_bytes(8) * 2
    assert key_and_value_bytes(16) == key_and_value_bytes(8)


@pytest.mark.parametrize("layer", [GPT, LLAMA])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_context_parallel_divides_all_that_is_kept(layer: TransformerLayer, sequence_parallel: bool) -> None:
    whole = Share(mbs=2, tp=4, sequence_parallel=sequence_parallel)
    half = replace(whole, cp=2)
    assert kept_bytes(layer, half) == kept_bytes(layer, whole) / 2
    assert list_operators(layer, TOKENS, half).input_bytes == list_operators(layer, TOKENS, whole).input_bytes / 2


@pytest.mark.parametrize("mlp", [FeedForward(768), Experts(8, 2, FeedForward(768), shared=FeedForward(512))])
def test_more_tensor_parallel_never_keeps_more(mlp: FeedForward | Experts) -> None:
    layer = TransformerLayer(1024, "rms", Attention(16, 4, 64, qk_norm="head"), mlp, layer_scale=True)
    kept = [kept_bytes(layer, Share(tp=tp, sequence_parallel=tp > 1)) for tp in (1, 2, 4, 8)]
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == 4


def test_experts_keep_what_each_of_their_tokens_passes() -> None:
    h, f, experts, top_k = 2048, 768, 128, 8
    routed = TransformerLayer(h, "rms", Attention(32, 4, 128), Experts(experts, top_k, FeedForward(f)))
    dense = replace(routed, mlp=FeedForward(f))
    more = S * (top_k * 2 * h + (top_k - 1) * 2 * 3 * f + 4 * experts)
    assert kept_bytes(routed, Share()) - kept_bytes(dense, Share()) == more


def test_head_keeps_one_fp32_softmax_and_passes_bf16_logits() -> None:
    """6·m·V/t in all (m tokens): Megatron-LM's vocabulary-parallel cross-entropy."""
    vocab, t, m = 152064, 2, S * B
    operators = list_operators(OutputHead(vocab, H, "rms"), TOKENS, Share(mbs=B, tp=t, sequence_parallel=True))
    softmax = next(saved.size_bytes for saved in operators.saved if saved.name == "fp32 softmax")
    assert softmax == 4 * m * vocab / t
    gathered = 2 * m * H
    assert operators.working_bytes(trainable=True, has_backward=True) == 2 * m * vocab / t + gathered


def test_frozen_ends_keep_no_inputs_of_weights() -> None:
    tokens = TokenCounts(input_tokens=4096, layer_tokens=4096, output_tokens=1024, num_spans=4)
    patches = list_operators(PatchEmbedding(1176, 1280), tokens, Share())
    assert patches.kept_bytes(trainable=True) == 2 * 4096 * 1176
    assert patches.kept_bytes(trainable=False) == 0
    table = list_operators(TokenEmbedding(152064, 8192), tokens, Share())
    assert table.kept_bytes(trainable=True) == 8 * 4096
    assert table.kept_bytes(trainable=False) == 0
    projector = Projector("layer", 1280, 4, (5120, 5120, 8192))
    kept = list_operators(projector, tokens, Share(tp=2, sequence_parallel=True))
    norm_input = (2 * 4096 * 1280 + 8 * 4096) / 2
    assert kept.kept_bytes(trainable=False) == norm_input + 2 * 1024 * 5120 / 2
    assert kept.kept_bytes(trainable=True) == norm_input + 2 * 4096 * 1280 / 2 + 2 * (2 * 1024 * 5120 / 2)
    assert kept.output_bytes == 2 * 1024 * 8192 / 2


def test_a_projector_that_is_a_norm_and_no_more() -> None:
    tokens = TokenCounts(4096, 4096, 1024, num_spans=1)
    norm = list_operators(Projector("layer", 1280, 1, ()), tokens, Share())
    assert not norm.products
    assert norm.kept_bytes(trainable=True) == 2 * 4096 * 1280 + 8 * 4096
    assert norm.output_bytes == 2 * 4096 * 1280


def test_audio_stem_keeps_frames_before_the_stride_and_tokens_after() -> None:
    tokens = TokenCounts(input_tokens=3000, layer_tokens=1500, output_tokens=750, num_spans=1)
    stem = list_operators(AudioStem(128, 1280), tokens, Share())
    assert stem.kept_bytes(trainable=True) == 2 * (3000 * 128 + 2 * 3000 * 1280 + 1500 * 1280)
    assert stem.kept_bytes(trainable=False) == 2 * (3000 * 1280 + 1500 * 1280)
    assert stem.output_bytes == 2 * 1500 * 1280


class TestWorkingSets:
    def test_of_a_dense_layer_by_hand(self) -> None:
        """The backward's first moments: the feed-forward's gradients while everything else is still kept."""
        n, t, h, f = 8192, 2, 8192, 29568
        gathered, boundary = 2 * n * h, 2 * n * h / t
        activation, inner = 2 * n * f / t, 2 * n * 2 * f / t
        first_weight, second_weight = 2 * h * 2 * f / t, 2 * h * f / t
        moments = [
            activation + second_weight,
            inner,  # the activation was kept for the second weight and is freed by now
            2 * n * h + first_weight - activation,
        ]
        tokens = TokenCounts(n, n, n, num_spans=1)
        operators = list_operators(LLAMA, tokens, Share(tp=t, sequence_parallel=True))
        expected = max(moments) + boundary + gathered
        assert operators.working_bytes(trainable=True, has_backward=True) == expected
        frozen = activation + inner + boundary + gathered
        assert operators.working_bytes(trainable=False, has_backward=True) == frozen

    def test_without_a_backward_both_inner_tensors_pass(self) -> None:
        n, h, f = 8192, 8192, 29568
        operators = list_operators(LLAMA, TokenCounts(n, n, n, num_spans=1), Share())
        assert operators.working_bytes(trainable=False, has_backward=False) == 2 * 2 * n * h + 2 * n * 3 * f

    def test_score_matrices_pass_where_attention_is_not_fused(self) -> None:
        operators = list_operators(GPT, TOKENS, Share(mbs=B, tp=8, fused_attention=False))
        gradients = 2 * 2 * A / 8 * S * S * B
        assert operators.working_bytes(trainable=True, has_backward=True) == gradients + 2 * S * B * H

    def test_a_table_that_trains_has_a_gradient_as_large_as_itself(self) -> None:
        operators = list_operators(TokenEmbedding(152064, 8192), TOKENS, Share(tp=4))
        trains, frozen = (operators.working_bytes(trainable, has_backward=True) for trainable in (True, False))
        assert trains - frozen == 2 * 152064 * 8192 / 4
