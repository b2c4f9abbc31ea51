"""The law of context parallelism: kinds of each framework, and what dealing heads asks of the sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mm_autoparallel.errors import JobError
from mm_autoparallel.measurements.models import find_model
from mm_autoparallel.model.job.cluster import Cluster
from mm_autoparallel.model.job.context_law import repeats_groups
from mm_autoparallel.model.job.devices import DEVICES
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.job.strategy_law import unlawful_reason
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.model.readers.job_file import parse_job
from mm_autoparallel.planner.search.space import list_entries

TORCH = {"stack": "transformers"}
FEWER: dict[str, Any] = {"stack": "mindspeed", "facts": {"repeated_groups": "fewer"}}
CLUSTER = Cluster(num_nodes=4, devices_per_node=8, device=DEVICES["h100-80g"])


def job(workload: dict[str, Any], search: dict[str, Any] | None = None, model: str = "llama3-8b") -> Job:
    return parse_job(
        {
            "model": find_model(model),
            "cluster": {"num_nodes": 4, "devices_per_node": 8, "device": "h100-80g"},
            "workload": {"global_batch_size": 32, "seq_length": 65536} | workload,
            "search": search or {},
        },
        Path("job.yaml"),
    )


def reason(cp: int, kind: str, tp: int = 1, **workload: Any) -> str | None:
    read = job(workload | {"context_parallel": kind})
    return unlawful_reason(
        read.model,
        CLUSTER,
        read.workload,
        Strategy(pp=1, tp=tp, dp=1, mbs=1, cp=cp, cp_kind=kind),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("cp", "kind", "tp", "workload", "words"),
    [
        (16, "hierarchical", 1, {}, None),  # eight deal heads in a node, two nodes pass on
        (16, "hierarchical", 2, {}, None),  # four ranks of a node, eight key and value groups over TP 2
        (16, "hierarchical", 1, {"dealing_ranks": 4}, None),
        (32, "hierarchical", 1, {"dealing_ranks": 16}, "CP 32 by hierarchical deals whole heads, and TP 1 x 16 of"),
        (8, "hierarchical", 1, {}, "CP 8 by hierarchical deals heads among fewer ranks than all"),
        (
            4,
            "hierarchical",
            8,
            {},
            "CP 4 by hierarchical deals heads among near ranks, and of a group that",
        ),
        (16, "hierarchical", 1, {"dealing_ranks": 3}, "CP 16 by hierarchical needs as many dealing ranks as"),
        (
            16,
            "all_to_all",
            1,
            {},
            "CP 16 by all_to_all deals whole heads, and TP 1 x CP 16 does not divide the key and",
        ),
        (16, "all_gather", 1, {}, None),
        (16, "all_gather", 1, {"seq_length": 16 * 1001}, "seq_length 16016 is no multiple of 32, two pieces"),
        (16, "all_gather", 1, {"stack": "transformers"}, None),
        (
            16,
            "hierarchical",
            1,
            {"stack": "transformers"},
            "CP by hierarchical is none that workload.stack",
        ),
        (
            16,
            "all_gather",
            1,
            {"stack": "mindspeed-mm"},
            "CP by all_gather is none that workload.stack mindspeed-mm runs; it",
        ),
        (16, "all_gather", 1, {"stack": "mindspeed"}, None),
        (16, "ring", 1, {"stack": "mindspeed"}, None),
        (16, "all_to_all", 1, FEWER, None),  # 8 groups are repeated for 32 heads
        (4, "all_to_all", 4, FEWER, None),  # two groups of each of four ranks, fewer than CP 4
        (32, "hierarchical", 1, FEWER | {"dealing_ranks": 16}, None),
        (
            3,
            "all_to_all",
            1,
            {"stack": "mindspeed", "seq_length": 49152, "facts": {"repeated_groups": "always"}},
            "CP 3 by all_to_all deals whole heads, and TP 1 x CP 3 does not divide the attention heads",
        ),
        (16, "all_to_all", 1, {"facts": {"repeated_groups": "always"}}, None),
        (16, "all_to_all", 1, {"stack": "mindspeed"}, "CP 16 by all_to_all"),
    ],
)
def test_what_each_kind_asks_for(cp: int, kind: str, tp: int, workload: dict[str, Any], words: str | None) -> None:
    found = reason(cp, kind, tp, **workload)
    assert found is None if words is None else str(found).startswith(words)


def test_a_search_offers_each_kind_where_it_is_lawful() -> None:
    kinds = ["ring", "all_gather", "all_to_all", "hierarchical"]
    search = {"cp": [4, 16], "cp_kind": kinds, "pp": [1], "tp": [1], "mbs": [1], "max_vpp": 1}
    entries = list_entries(job({}, search))
    lawful = {(entry.strategy.cp, entry.strategy.cp_kind) for entry in entries if not entry.reason}
    assert lawful == {
        (4, "ring"),
        (4, "all_gather"),
        (4, "all_to_all"),
        (16, "ring"),
        (16, "all_gather"),
        (16, "hierarchical"),
    }


def test_ranks_that_deal_heads_are_those_of_a_node_unless_the_workload_says() -> None:
    strategy = Strategy(pp=1, tp=2, dp=1, mbs=1, cp=16, cp_kind="hierarchical")
    workload = Workload(global_batch_size=32, seq_length=65536)
    assert strategy.dealing_ranks(workload, 8) == 4
    assert strategy.dealing_ranks(workload.model_copy(update={"dealing_ranks": 2}), 8) == 2
    assert strategy.dealing_ranks(workload, 64) == 16


@pytest.mark.parametrize(("kind", "expected"), [("never", False), ("fewer", False), ("always", True)])
def test_groups_that_cannot_be_dealt_evenly_are_repeated_only_always(kind: str, expected: bool) -> None:
    """Of eight groups, six ranks would each deal one and a third, which fewer ranks than groups do not repeat."""
    assert repeats_groups(kind, 8, 6) is expected  # type: ignore[arg-type]
    assert repeats_groups(kind, 4, 6) is (kind != "never")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "workload", "words"),
    [
        ("qwen3-30b-a3b", {"recompute_operators": ["second_products"]} | TORCH, "those of text have experts; leave it"),
        (
            "deepseek-v2-lite",
            {"selective_operators": ["second_products"]} | TORCH,
            "have experts and latent attention;",
        ),
        ("llama3-8b", {"recompute_operators": ["second_products"]}, "and workload.stack is megatron-te; leave it out"),
        (
            "llama3-8b",
            {"recompute_operators": ["second_products"], "attention": "unfused"} | TORCH,
            "second_products keeps what flash attention gives, and workload.attention is unfused; leave it out",
        ),
        ("llama3-8b", {"dealing_ranks": 4}, "workload.dealing_ranks is 4, a choice of hierarchical"),
        ("llama3-8b", {"recompute_operators": ["second_products", "mlp"]}, "stands for a whole layer, beside mlp"),
    ],
)
def test_what_no_strategy_could_meet_is_said_at_once(model: str, workload: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError, match=words):
        job(workload, model=model)
