"""Latent attention, expert parallelism, selective recompute and prediction modules: against lists written by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mm_autoparallel.model.blocks.chain import (
    Attention,
    Experts,
    FeedForward,
    LatentAttention,
    OutputHead,
    PredictionModule,
    TransformerLayer,
)
from mm_autoparallel.model.blocks.parameters import count_expert_parameters, count_parameters
from mm_autoparallel.model.blocks.tokens import TokenCounts
from mm_autoparallel.model.job.workload import RecomputeOperator
from mm_autoparallel.model.operators.ends import list_operators
from mm_autoparallel.model.operators.operators import Operators, Share

N = 4096
TOKENS = TokenCounts(N, N, N, num_spans=1)
H, HEADS, Q_RANK, KV_RANK, NOPE, ROPE, VALUE = 7168, 128, 1536, 512, 128, 64, 128
LATENT = LatentAttention(HEADS, Q_RANK, KV_RANK, NOPE, ROPE, VALUE)
DENSE = TransformerLayer(H, "rms", LATENT, FeedForward(18432))
ROUTED = TransformerLayer(H, "rms", LATENT, Experts(256, 8, FeedForward(2048), shared=FeedForward(2048)))
"""Both kinds of layers of DeepSeek-V3 (arXiv:2412.19437, section 4.2)."""


def operators_of(layer: TransformerLayer, *recompute: RecomputeOperator, **division: int) -> Operators:
    share = Share(sequence_parallel=division.get("tp", 1) > 1, recompute_operators=recompute, **division)  # type: ignore[arg-type]
    return list_operators(layer, TOKENS, share)


def kept_bytes(layer: TransformerLayer, *recompute: RecomputeOperator, **division: int) -> float:
    return operators_of(layer, *recompute, **division).kept_bytes(trainable=True)


def product_flops(operators: Operators) -> float:
    return sum(product.flops for product in operators.products)


class TestLatentAttention:
    @pytest.mark.parametrize("t", [1, 4])
    def test_kept_by_hand(self, t: int) -> None:
        norms = 2 * (2 * 2 * H + 4)  # inputs, outputs and 1/rms of two
        compressed = (2 * 2 * Q_RANK + 4) + (2 * 2 * KV_RANK + 2 * ROPE + 4)  # before and after their norms
        heads = HEADS * (2 * (2 * (NOPE + ROPE) + VALUE) + 2 * VALUE + 4)  # query, key, value, output, statistics
        feed_forward = 2 * 3 * 18432
        assert kept_bytes(DENSE, tp=t) == N * (norms + compressed + heads + feed_forward) / t

    @pytest.mark.parametrize("q_rank", [0, Q_RANK])
    def test_every_weight_is_used_once_a_token(self, q_rank: int) -> None:
        layer = replace(DENSE, attention=replace(LATENT, q_lora_rank=q_rank))
        norms = 2 * H + q_rank + KV_RANK
        assert product_flops(operators_of(layer)) == 2 * N * (count_parameters(layer) - norms)

    def test_scores_have_the_querys_size_and_values_their_own(self) -> None:
        attention = operators_of(DENSE).attention
        assert attention is not None
        assert attention.forward_flops == N * N / 2 * HEADS * 2 * (NOPE + ROPE + VALUE)
        plain = TransformerLayer(H, "rms", Attention(HEADS, HEADS, 128), FeedForward(18432))
        same = replace(DENSE, attention=replace(LATENT, nope_dim=96, rope_dim=32))
        assert operators_of(same).attention == operators_of(plain).attention

    def test_tensor_parallelism_divides_all_but_what_compresses(self) -> None:
        whole, part = (count_parameters(DENSE, tp=t) for t in (1, 8))
        same = H * (Q_RANK + KV_RANK + ROPE) + Q_RANK + KV_RANK + 2 * H
        assert part == same + (whole - same) / 8

    def test_without_norms_of_the_compressed_vectors(self) -> None:
        bare = replace(DENSE, attention=replace(LATENT, norms=False))
        assert count_parameters(DENSE) - count_parameters(bare) == Q_RANK + KV_RANK
        assert kept_bytes(DENSE) - kept_bytes(bare) == N * (2 * (Q_RANK + KV_RANK) + 2 * 4)


class TestExpertParallelism:
    EXPERT = 3 * H * 2048

    @pytest.mark.parametrize(
        ("division", "whole_experts"), [({}, 256), ({"ep": 8}, 32), ({"tp": 4, "ep": 8, "etp": 1}, 32)]
    )
    def test_parameters_of_routed_experts(self, division: dict[str, int], whole_experts: int) -> None:
        assert count_expert_parameters(ROUTED, **division) == whole_experts * self.EXPERT
        rest = count_parameters(ROUTED, **division) - whole_experts * self.EXPERT
        assert rest == count_parameters(ROUTED, tp=division.get("tp", 1)) - 256 * self.EXPERT / division.get("tp", 1)

    def test_divided_experts(self) -> None:
        assert count_expert_parameters(ROUTED, tp=4, ep=8) == 32 * self.EXPERT / 4
        assert count_expert_parameters(DENSE, tp=4) == 0
        assert count_expert_parameters(PredictionModule(ROUTED, 129280), ep=8) == 32 * self.EXPERT

    @pytest.mark.parametrize(
        "division", [{"ep": 8}, {"tp": 4, "ep": 8}, {"tp": 4, "etp": 1}, {"tp": 4, "ep": 32, "etp": 1}]
    )
    def test_balanced_routing_leaves_every_rank_the_same_work(self, division: dict[str, int]) -> None:
        """Tokens that arrive times the part of an expert that is here: the same however experts are dealt."""
        here, alone = operators_of(ROUTED, **division), operators_of(ROUTED, tp=division.get("tp", 1))
        assert product_flops(here) == pytest.approx(product_flops(alone))
        inner = [saved for saved in here.saved if saved.name.startswith("first product's output")]
        assert inner[0].size_bytes == 2 * N * 8 * 2 * 2048 / division.get("tp", 1)

    def test_each_rank_sends_the_copies_of_its_own_tokens(self) -> None:
        assert operators_of(ROUTED).all_to_all_bytes == 0
        assert operators_of(ROUTED, ep=8).all_to_all_bytes == 2 * N * 8 * H
        assert operators_of(ROUTED, tp=4, ep=8).all_to_all_bytes == 2 * N * 8 * H / 4

    def test_what_tensor_parallel_ranks_exchange(self) -> None:
        """All tokens where every rank holds a slice of all experts, all that was sent of divided ones, else nothing."""
        assert operators_of(ROUTED, tp=4).exchanged_bytes == 2 * N * H
        assert operators_of(ROUTED, tp=4, ep=8).exchanged_bytes == 2 * N * 8 * H
        assert operators_of(ROUTED, tp=4, ep=8, etp=1).exchanged_bytes == 0

    def test_whole_experts_see_a_part_of_the_tokens(self) -> None:
        def permuted(**division: int) -> float:
            saved = operators_of(ROUTED, **division).saved
            return next(one.size_bytes for one in saved if one.name.startswith("permuted input"))

        assert permuted(tp=4, etp=1) == permuted(tp=4) / 4

    def test_a_gate_of_the_shared_expert(self) -> None:
        assert isinstance(ROUTED.mlp, Experts)
        gated = replace(ROUTED, mlp=replace(ROUTED.mlp, shared_gate=True))
        assert count_parameters(gated) - count_parameters(ROUTED) == H
        assert kept_bytes(gated) - kept_bytes(ROUTED) == 2 * N * H


ACTIVATION = 2 * N * 8 * 2048
SHARED = 2 * N * 3 * 2048
HEADS_BYTES = 2 * N * HEADS * (2 * (NOPE + ROPE) + VALUE)


class TestSelectiveRecompute:
    @pytest.mark.parametrize(
        ("layer", "operator", "freed"),
        [
            (DENSE, "core_attn", 4 * N * HEADS),
            (DENSE, "mla_up_proj", HEADS_BYTES + 2 * N * (Q_RANK + KV_RANK)),
            (DENSE, "layernorm", 2 * 2 * N * H),
            (DENSE, "mlp", 2 * N * 3 * 18432),
            (ROUTED, "mlp", 0),
            (ROUTED, "moe_act", ACTIVATION),
            (DENSE, "moe_act", 0),
            (ROUTED, "shared_experts", SHARED),
            (ROUTED, "moe", 3 * ACTIVATION + SHARED + 2 * N * 8 * H + 4 * N * 256),
        ],
    )
    def test_what_each_takes_away(self, layer: TransformerLayer, operator: RecomputeOperator, freed: int) -> None:
        assert kept_bytes(layer) - kept_bytes(layer, operator) == freed
        assert (operators_of(layer, operator).rerun is None) == (freed == 0)

    @pytest.mark.parametrize(
        ("layer", "operator", "freed"),
        [
            (DENSE, "layernorm", 2 * N * H),
            (ROUTED, "layernorm", 2 * 2 * N * H),
            (replace(DENSE, attention=Attention(HEADS, HEADS, 128)), "layernorm", 0),
            (DENSE, "mlp", 2 * N * 3 * 18432 + 2 * N * H),
        ],
    )
    def test_norms_that_are_part_of_a_product(
        self, layer: TransformerLayer, operator: RecomputeOperator, freed: int
    ) -> None:
        kept = [
            list_operators(layer, TOKENS, Share(fused_norms=True, recompute_operators=names)).kept_bytes(True)
            for names in ((), (operator,))
        ]
        assert kept[0] - kept[1] == freed

    def test_what_runs_once_more(self) -> None:
        def rerun(layer: TransformerLayer, *recompute: RecomputeOperator) -> Operators:
            found = operators_of(layer, *recompute).rerun
            assert found is not None
            return found

        assert rerun(DENSE, "core_attn").attention == operators_of(DENSE).attention
        assert product_flops(rerun(DENSE, "core_attn")) == 0
        up = Q_RANK * HEADS * (NOPE + ROPE) + KV_RANK * HEADS * (NOPE + VALUE)
        assert product_flops(rerun(DENSE, "mla_up_proj")) == 2 * N * up
        assert product_flops(rerun(DENSE, "mla_up_proj", "mlp")) == 2 * N * (up + 3 * H * 18432)
        assert rerun(ROUTED, "moe_act").products == ()
        experts = 256 * H + (8 + 1) * 3 * H * 2048
        assert product_flops(rerun(ROUTED, "moe")) == 2 * N * experts
        assert [stream.name for stream in rerun(DENSE, "layernorm").streams] == ["norm 1", "norm 2"]

    def test_experts_are_sent_their_tokens_once_more(self) -> None:
        sent = operators_of(ROUTED, "moe", ep=8)
        assert sent.rerun is not None
        assert sent.rerun.all_to_all_bytes == sent.all_to_all_bytes > 0

    def test_the_backward_holds_what_it_made_anew(self) -> None:
        plain, again = (operators_of(DENSE, *recompute).working_bytes(True, True) for recompute in ((), ("mlp",)))
        assert again - plain == 2 * N * 3 * 18432


def test_a_prediction_module_is_a_projection_a_layer_and_a_head() -> None:
    vocab = 129280
    module = PredictionModule(ROUTED, vocab)
    assert count_parameters(module) - count_parameters(ROUTED) == 2 * H * H + 3 * H
    found, head = (list_operators(part, TOKENS, Share()) for part in (module, OutputHead(vocab, H, "rms")))
    layer = operators_of(ROUTED)
    assert product_flops(found) == product_flops(layer) + product_flops(head) + 2 * N * 2 * H * H
    joining = 2 * (2 * N * H + 4 * N) + 2 * 2 * N * H
    assert found.kept_bytes(True) == layer.kept_bytes(True) + head.kept_bytes(True) + joining
    assert found.attention == layer.attention
