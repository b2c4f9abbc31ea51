"""What a stage holds once and what lies outside the allocator, cause by cause."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mm_autoparallel.model.blocks.chain import (
    Attention,
    Block,
    Experts,
    FeedForward,
    OutputHead,
    Structure,
    TokenEmbedding,
    TransformerLayer,
)
from mm_autoparallel.model.blocks.tokens import TokenCounts
from mm_autoparallel.model.costs.held_once import count_communicators, list_held_once
from mm_autoparallel.model.job.devices import DEVICES
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.model.operators.operators import form_share
from mm_autoparallel.units import GIB, MIB

S, H, A = 1024, 512, 8
DENSE = TransformerLayer(H, "rms", Attention(A, 2, 64), FeedForward(2048))
MOE = TransformerLayer(H, "rms", Attention(A, 2, 64), Experts(8, 2, FeedForward(320)))
HEAD, TABLE = OutputHead(32000, H, "rms"), TokenEmbedding(32000, H)
TOKENS = TokenCounts(S, S, S, num_spans=1)

PYTORCHS, ENGINES, OF_EXPERTS = "PyTorch's workspaces", "TransformerEngine's workspace", "workspaces of experts"


def held(structure: Structure, device: str = "a100-80g", tp: int = 1, **changed: Any) -> dict[str, float]:
    workload = Workload(**({"global_batch_size": 8, "seq_length": S} | changed))
    share = form_share(Strategy(pp=1, tp=tp, dp=1, mbs=4), workload, 4.0)
    block = Block("b", "b", "text", "layer" if isinstance(structure, TransformerLayer) else "post", structure)
    return dict(list_held_once(block, TOKENS, share, workload, DEVICES[device]))


class TestWorkspaces:
    @pytest.mark.parametrize(
        ("device", "deterministic", "each_bytes"),
        [
            ("a100-80g", False, 8.125 * MIB),
            ("a100-80g", True, 32 * MIB),
            ("h100-80g", False, 32 * MIB),
            ("b200-192g", True, 32 * MIB),
        ],
    )
    def test_pytorch_has_one_for_forward_and_one_for_backward(
        self, device: str, deterministic: bool, each_bytes: float
    ) -> None:
        assert held(HEAD, device, deterministic=deterministic)[PYTORCHS] == 2 * each_bytes

    @pytest.mark.parametrize(("device", "size_bytes"), [("a100-80g", 4 * MIB), ("h100-80g", 32 * MIB + 1024)])
    def test_transformer_engine_has_one(self, device: str, size_bytes: float) -> None:
        found = held(DENSE, device)
        assert found[ENGINES] == size_bytes
        assert PYTORCHS not in found
        assert ENGINES not in held(DENSE, device, stack="megatron-local")
        assert PYTORCHS in held(DENSE, device, stack="megatron-local")

    def test_scores_and_routers_are_pytorchs(self) -> None:
        assert PYTORCHS in held(DENSE, attention="unfused")
        found = held(MOE)
        assert found[PYTORCHS] == 2 * 8.125 * MIB
        assert found[f"TransformerEngine's {OF_EXPERTS}"] == 4 * 4 * MIB

    def test_a_forward_alone_has_one(self) -> None:
        workload = Workload(global_batch_size=8, seq_length=S)
        share = form_share(Strategy(pp=1, tp=1, dp=1, mbs=1), workload, 4.0)
        frozen = Block("b", "b", "text", "post", HEAD, trainable=False, propagates_gradient=False)
        assert dict(list_held_once(frozen, TOKENS, share, workload, DEVICES["a100-80g"]))[PYTORCHS] == 8.125 * MIB

    def test_elsewhere_they_are_part_of_the_context(self) -> None:
        assert not {PYTORCHS, ENGINES} & held(DENSE, "ascend-910b-64g").keys()

    def test_a_modality_without_tokens_runs_nothing(self) -> None:
        workload = Workload(global_batch_size=8, seq_length=S)
        share = form_share(Strategy(pp=1, tp=1, dp=1, mbs=1), workload, 4.0)
        block = Block("b", "b", "vision", "layer", DENSE)
        assert list_held_once(block, TokenCounts(0, 0, 0, 1), share, workload, DEVICES["a100-80g"]) == ()


class TestDummyGradients:
    def gradients(self, structure: Structure, tp: int = 1, **changed: Any) -> list[float]:
        found = held(structure, tp=tp, **({"gradient_fusion": True} | changed))
        return sorted(size for name, size in found.items() if name.startswith("dummy"))

    @pytest.mark.parametrize("tp", [1, 2])
    def test_one_of_each_shape(self, tp: int) -> None:
        """query, key and value; attention output; both matrices of the feed-forward, the first of them gated."""
        counts = [H * (A + 4) * 64, A * 64 * H, H * 2 * 2048, 2048 * H]
        assert self.gradients(DENSE, tp) == sorted(2 * count / tp for count in counts)

    def test_experts_of_one_shape_share_and_the_router_has_none(self) -> None:
        counts = [H * (A + 4) * 64, A * 64 * H, H * 2 * 320, 320 * H]
        assert self.gradients(MOE) == sorted(2 * count for count in counts)

    def test_the_head_has_one_and_the_table_none(self) -> None:
        assert self.gradients(HEAD) == [2 * 32000 * H]
        assert self.gradients(TABLE) == []

    def test_only_where_gradients_are_fused_by_transformer_engine(self) -> None:
        assert self.gradients(DENSE, gradient_fusion=False) == []
        assert self.gradients(DENSE, stack="megatron-local") == []


@pytest.mark.parametrize("tp", [1, 4])
def test_megatrons_own_attention_keeps_one_score_matrix(tp: int) -> None:
    local = {"stack": "megatron-local", "attention": "unfused"}
    assert held(DENSE, tp=tp, **local)["score buffer"] == 2 * 4 * A / tp * S * S
    assert "score buffer" not in held(DENSE, attention="unfused")
    assert "score buffer" not in held(DENSE, stack="megatron-local")


@pytest.mark.parametrize(("attention", "mask_bytes"), [("flash", 0), ("unfused", 4 * S * S)])
def test_the_batch_lies_where_tokens_are_looked_up_and_lost(attention: str, mask_bytes: int) -> None:
    for structure in (TABLE, HEAD):
        assert held(structure, attention=attention)["micro-batch"] == 4 * S * 28 + mask_bytes
    assert "micro-batch" not in held(DENSE, attention=attention)


@pytest.mark.parametrize(
    ("sizes", "tied", "num_communicators"),
    [
        ({}, False, 0),
        ({"dp": 8}, False, 2),
        ({"tp": 8}, False, 3),
        ({"pp": 4, "tp": 2, "dp": 2}, False, 5),
        ({"pp": 4, "tp": 2, "dp": 2}, True, 6),
        ({"tp": 2, "dp": 4, "cp": 2, "ep": 4, "etp": 1}, False, 7),
    ],
)
def test_a_communicator_for_each_group_that_is_one(sizes: dict[str, Any], tied: bool, num_communicators: int) -> None:
    strategy = replace(Strategy(pp=1, tp=1, dp=1, mbs=1), **sizes)
    assert count_communicators(strategy, tied) == num_communicators


def test_an_ascend_device_keeps_what_it_kept() -> None:
    """Five communicators of twice 200 MB and half a GiB, as of a plan with TP, PP and DP."""
    device = DEVICES["ascend-910b-64g"]
    five = count_communicators(Strategy(pp=2, tp=8, dp=8, mbs=1), tied=False)
    assert device.context_bytes + five * device.communicator_bytes == pytest.approx(2.5 * GIB, rel=0.03)
