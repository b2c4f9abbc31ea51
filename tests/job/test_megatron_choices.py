"""Megatron-LM's arguments of experts' exchange, of graphs and of what hides traffic."""

from __future__ import annotations

from typing import Any

import pytest

from mm_autoparallel.model.readers.megatron_choices import MegatronChoices, read_megatron_choices


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, MegatronChoices()),
        ({"--moe-token-dispatcher-type": "alltoall"}, MegatronChoices("alltoall")),
        ({"--moe-token-dispatcher-type": "allgather"}, MegatronChoices()),
        ({"--moe-token-dispatcher-type": "flex", "--moe-enable-deepep": True}, MegatronChoices("deepep")),
        (
            {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep"},
            MegatronChoices("hybridep"),
        ),
        ({"--cuda-graph-impl": "none"}, MegatronChoices(graphs="none")),
        ({"--cuda-graph-impl": "transformer_engine", "--cuda-graph-scope": "attn"}, MegatronChoices(graphs="partial")),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": ["full_iteration"]}, MegatronChoices(graphs="full")),
        ({"--cuda-graph-impl": "full_iteration"}, MegatronChoices(graphs="full")),
        ({"--enable-cuda-graph": True}, MegatronChoices(graphs="partial")),
        ({"--moe-shared-expert-overlap": True}, MegatronChoices(overlap="shared_experts")),
        ({"--overlap-moe-expert-parallel-comm": True}, MegatronChoices(overlap="micro_batches")),
        ({"--moe-fb-overlap": True}, MegatronChoices(overlap="micro_batches")),
    ],
)
def test_choices(flags: dict[str, Any], expected: MegatronChoices) -> None:
    assert read_megatron_choices(flags) == expected


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"--moe-token-dispatcher-type": "other"}, "moe_token_dispatcher_type is other; known are alltoall, flex"),
        ({"--moe-enable-deepep": True}, "moe_enable_deepep goes with moe_token_dispatcher_type flex alone"),
        (
            {"--moe-token-dispatcher-type": "flex", "--moe-flex-dispatcher-backend": "ncclep"},
            "moe_flex_dispatcher_backend is ncclep",
        ),
        ({"--cuda-graph-impl": "all"}, "cuda_graph_impl is all; known are none, local"),
        ({"--moe-fb-overlap": True, "--moe-shared-expert-overlap": True}, "are both given"),
    ],
)
def test_what_is_not_understood(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_megatron_choices(flags)
