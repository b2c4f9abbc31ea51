"""Parameters that several parts of a model share, in the code of `export --to torch`: on every stage that holds one its
gradient and its weight are those of one process."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from forked_ranks import ForkedRanks

from mm_autoparallel.api.exported import export_plan
from mm_autoparallel.api.jobs import read_job
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.planner.plan import Plan

TRAIN = Path(__file__).with_name("train_shared.py")


def _plan(text: tuple[int, ...], **sizes: Any) -> Plan:
    """A plan of 4 layers over 8 samples."""
    strategy = Strategy(**{"pp": len(text), "tp": 1, "dp": 1, "mbs": 1, "zero": 0, "sequence_parallel": False} | sizes)
    return Plan(strategy, {"text": text}, {"text": (1,) * len(text)}, 8)


CHUNKS = {"pp": 2, "vpp": 2, "schedule": "interleaved_1f1b", "mbs": 2}
V_SHAPED = """0F0,0F1,0F2,3F0,3I0,3W0,3F1,0F3,3I1,3W1,0B0,3F2,3I2,3W2,0B1,3F3,3I3,0B2,0B3,3W3
1F0,2F0,1F1,2F1,1F2,2F2,2I0,2W0,1B0,1F3,2I1,2F3,1I1,2W1,1W1,2B2,1B2,2B3,1B3
"""
"""Embedding and head are on one rank, each layer that shares a scale on another."""
TWO = {
    "stages": _plan((1, 3)),
    "made": _plan((1, 3)),
    "chunks": _plan((1, 1, 1, 1), **CHUNKS),
    "v": _plan((1, 1, 1, 1), **CHUNKS),
    "replicas": _plan((4,), dp=2, zero=1),
    "sharded": _plan((4,), dp=2, zero=3),
    "sharded-made": _plan((4,), dp=2, zero=3),
}
FOUR = {
    "stages-replicas": _plan((2, 2), dp=2, mbs=2),
    "stages-zero-1": _plan((1, 3), dp=2, zero=1, rank_order="tp-cp-ep-pp-dp"),
    "stages-sharded": _plan((2, 2), dp=2, zero=3),
    "stages-sharded-made": _plan((1, 3), dp=2, zero=3),
    "four-stages": _plan((1, 1, 1, 1), mbs=2),
    "stages-tp": _plan((1, 3), tp=2),
    "copies": _plan((4,), dp=4, zero=3, shard=2),
}
REFUSED = {
    "stages-divided": (
        _plan((1, 3), tp=2),
        r"text\.before\[0\]\.table = text\.after\[0\]\.table is one parameter, and was divided into copies that differ",
    ),
    "divided": (
        _plan((4,), tp=2, dp=2),
        r"text\.before\[0\]\.table = text\.after\[0\]\.table is one parameter, and was divided into copies",
    ),
    "chunks-sharded": (
        _plan((1, 1, 1, 1), **CHUNKS | {"mbs": 1}, dp=2, zero=3),
        r"text\.layers\[0\]\.scale = text\.layers\[2\]\.scale is one parameter of virtual stages \[0, 2\] of a rank",
    ),
}


def train(ranks: ForkedRanks, folder: Path, plans: dict[str, Plan], num_ranks: int) -> None:
    pytest.importorskip("torch")
    for name, plan in plans.items():
        export_plan(plan, None, "torch", out=folder / name)
        if name == "v":
            (folder / name / "schedule.csv").write_text(V_SHAPED)
    ranks.run(TRAIN, [str(folder / name) for name in plans], num_ranks, folder, [])


@pytest.mark.slow
@pytest.mark.parametrize(("plans", "num_ranks"), [(TWO, 2), (FOUR, 4)], ids=["two", "four"])
def test_copies_train_as_one_parameter(
    plans: dict[str, Plan], num_ranks: int, tmp_path: Path, forked_ranks: ForkedRanks
) -> None:
    train(forked_ranks, tmp_path, plans, num_ranks)
    assert not [*tmp_path.glob("*/refused.*")]


@pytest.mark.slow
def test_copies_that_cannot_are_refused_by_name(tmp_path: Path, forked_ranks: ForkedRanks) -> None:
    train(forked_ranks, tmp_path, {name: plan for name, (plan, _) in REFUSED.items()}, 4)
    for name, (_, told) in REFUSED.items():
        found = [path.read_text() for path in (tmp_path / name).glob("refused.*")]
        assert len(found) == 4
        assert all(re.match(told, each) for each in found)


@pytest.mark.parametrize(("tied", "pp"), [(True, 2), (False, 2), (True, 1)])
def test_export_tells_of_a_tied_head(tied: bool, pp: int, tmp_path: Path) -> None:
    config = {
        "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "vocab_size": 512,
        "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": tied,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    job = {
        "model": str(tmp_path / "config.json"),
        "cluster": {"num_nodes": 1, "devices_per_node": pp, "device": "h200-141g"},
        "workload": {"global_batch_size": 8, "seq_length": 64},
    }
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    plan = _plan((4 // pp,) * pp)
    exported = export_plan(plan, read_job(tmp_path / "job.yaml"), "torch", out=tmp_path / "out").exported
    assert any("the head shares the embedding's table" in note for note in exported.notes) == (tied and pp > 1)
