"""Code, schedule and decision of `export --to torch`: torch reads every schedule, and the code trains the example."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from drawn_decoder_plans import DENSE, draw_decoder_plan
from featured_plans import PLANS
from forked_ranks import ForkedRanks

from mm_autoparallel.api.exported import export_plan
from mm_autoparallel.api.imported import find_kind
from mm_autoparallel.errors import PlanError
from mm_autoparallel.integrations.described import Given
from mm_autoparallel.integrations.torch.schedule_csv import write_csv
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.pipeline.schedules.catalog import find_schedule
from mm_autoparallel.planner.plan import Plan

TRAIN = Path(__file__).with_name("train_planned.py")


# ----------------------------------------------------------------------------------------------------------- schedules


def drawn_schedules() -> list[Plan]:
    """Plans whose orders differ: all schedules, with remainders and fewer micro-batches than stages."""
    rng, plans = random.Random(5), []
    while len(plans) < 200:
        pp, vpp = rng.randint(2, 6), rng.randint(1, 3)
        names = ("1f1b", "gpipe") if vpp == 1 else ("interleaved_1f1b", "interleaved_1f1b_low_memory")
        strategy = Strategy(pp=pp, tp=1, dp=1, mbs=1, zero=0, vpp=vpp, schedule=rng.choice(names))
        counts = (1,) * (pp * vpp)
        plans.append(Plan(strategy, {"text": counts}, {"text": (0,) * len(counts)}, rng.randint(1, 13)))
    return plans


def test_torch_takes_every_schedule() -> None:
    """Its own checks and its own simulator of messages find nothing; what a rank computes is our order."""
    pytest.importorskip("torch")
    from torch.distributed.pipelining import schedules

    for plan in drawn_schedules():
        pp, vpp, count = plan.strategy.pp, plan.strategy.vpp, plan.num_microbatches
        rows = [row.split(",") for row in write_csv(plan).splitlines()]
        order = {rank: [schedules._Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)}
        schedules._validate_schedule(order, pp, pp * vpp, count)
        sent = schedules._add_send_recv(order, lambda stage, pp=pp: stage % pp, pp * vpp)
        schedules._simulate_comms_compute(sent, lambda stage, pp=pp: stage % pp, pp * vpp)
        for rank, actions in order.items():
            ours = find_schedule(plan.strategy.schedule, vpp).order(pp, vpp, count, rank).tolist()
            found = [
                (int(str(each.computation_type) == "B"), each.stage_index // pp, each.microbatch_index)
                for each in actions
            ]
            assert found == [tuple(each) for each in ours]
            assert {each.stage_index % pp for each in actions} == {rank}


# --------------------------------------------------------------------------------------------------------------- files


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.json"
    left_out = ("seq-length", "hidden-dropout", "attention-dropout")
    sizes = {key: value for key, value in DENSE.items() if key not in left_out}
    path.write_text(json.dumps(sizes | {"padded-vocab-size": 512}))
    return path


@pytest.mark.parametrize(
    ("name", "old", "new", "told"),
    [
        ("schedule.csv", "0F0", "0F1", "another order than interleaved_1f1b"),
        ("planned.json", '"VPP": 2', '"VPP": 3', "has 2 chunks, and VPP is 3"),
        ("planned.json", '[3, 4, 2, 5]', '[3, 4, 2, 6]', "places {'text': 25} layers"),
        ("planned.json", '"text"', '"texts"', "chain is"),
        ("planned.json", '"DP": 2', '"DP": 3', "no multiple of DP 3"),
    ],
)  # fmt: skip
def test_files_that_contradict_each_other_are_named(
    name: str, old: str, new: str, told: str, tmp_path: Path, model: Path
) -> None:
    out = tmp_path / "new"
    export_plan(PLANS["uneven_chunks"], None, "torch", out=out)
    path = out / "planned.json"
    _, kind = find_kind(path, None)
    assert kind.read_plan(path, Given(model)).layers == PLANS["uneven_chunks"].layers
    text = (out / name).read_text()
    assert old in text
    (out / name).write_text(text.replace(old, new, 1))
    with pytest.raises(PlanError, match=told):
        kind.read_plan(path, Given(model))


def test_a_decision_says_for_how_many_devices(tmp_path: Path) -> None:
    export_plan(PLANS["uneven_chunks"], None, "torch", out=tmp_path / "new")
    path = tmp_path / "new" / "planned.json"
    _, kind = find_kind(path, None)
    nodes, per_node = kind.find_devices(path)
    assert (nodes or 0) * (per_node or 0) == PLANS["uneven_chunks"].strategy.world_size
    document = json.loads(path.read_text())
    document["parallel_config"]["DP"] *= 3
    document["global_batch_size"] *= 3
    path.write_text(json.dumps(document))
    nodes, per_node = kind.find_devices(path)
    assert (nodes or 0) * (per_node or 0) == 3 * PLANS["uneven_chunks"].strategy.world_size
    assert (per_node or 0) <= 8


def test_zero_1_beside_tp_is_refused(tmp_path: Path) -> None:
    plan = PLANS["whole_sequences"]
    with pytest.raises(PlanError, match="ZeRO 1 beside TP 2"):
        export_plan(replace(plan, strategy=replace(plan.strategy, zero=1)), None, "torch", out=tmp_path / "new")


# ------------------------------------------------------------------------------------------------------------ training


def _plan(vision: tuple[int, ...], text: tuple[int, ...], recompute: tuple[int, ...] = (), **sizes: Any) -> Plan:
    """A plan of 4 vision and 6 text layers over 8 samples. recompute: of text layers."""
    strategy = Strategy(**{"pp": len(text), "tp": 1, "dp": 1, "mbs": 1, "zero": 0, "sequence_parallel": False} | sizes)
    again = {"vision": tuple(min(1, count) for count in vision), "text": recompute or (0,) * len(text)}
    return Plan(strategy, {"vision": vision, "text": text}, again, 8)


CASES = {
    "four-stages": _plan((3, 1, 0, 0), (0, 3, 2, 1), (0, 2, 0, 1)),
    "chunks": _plan((1, 3, 0, 0), (0, 1, 3, 2), (0, 1, 2, 0), pp=2, vpp=2, dp=2, schedule="interleaved_1f1b"),
    "low-memory": _plan((1, 3, 0, 0), (0, 1, 3, 2), pp=2, vpp=2, dp=2, schedule="interleaved_1f1b_low_memory"),
    "remainder": _plan(
        (1, 3, 0, 0, 0, 0, 0, 0), (0, 0, 1, 1, 1, 1, 1, 1), pp=4, vpp=2, mbs=4, schedule="interleaved_1f1b"
    ),
    "gpipe": _plan((4, 0), (2, 4), (1, 0), dp=2, zero=1, schedule="gpipe", rank_order="tp-cp-ep-pp-dp"),
    "sharded": _plan((3, 1), (0, 6), (0, 3), dp=2, zero=3),
    "gathered": _plan((4,), (6,), (2,), dp=4, zero=3, reshard=False, mbs=2),
    "copies": _plan((4,), (6,), (2,), dp=4, zero=3, shard=2),
    "replicas": _plan((4,), (6,), (2,), dp=4, zero=1),
    "divided": _plan((3, 1), (0, 6), (0, 2), tp=2),
    "divided-replicas": _plan((4,), (6,), (2,), tp=2, dp=2),
    "divided-sharded": _plan((4,), (6,), (2,), tp=2, dp=2, zero=3),
    "parted": _plan((1, 3, 0, 0), (0, 1, 3, 2), (0, 1, 2, 0), pp=2, vpp=2, dp=2, schedule="interleaved_1f1b"),
    "parted-sharded": _plan((1, 3, 0, 0), (0, 1, 3, 2), pp=2, vpp=2, dp=2, zero=3, schedule="interleaved_1f1b"),
}  # fmt: skip
"""Plans for four processes: both modalities over several stages, recompute by stage, lists that are no palindromes."""
PARTED = """0F0,0F1,0F2,3F0,3I0,3W0,3F1,0F3,3I1,3W1,0B0,3F2,3I2,3W2,0B1,3F3,3I3,0B2,0B3,3W3
1F0,2F0,1F1,2F1,1F2,2F2,2I0,2W0,1B0,1F3,2I1,2F3,1I1,2W1,1W1,2B2,1B2,2B3,1B3
"""
"""A V-shaped order with backwards in two parts."""
ORDERS = {"parted": PARTED, "parted-sharded": PARTED}
"""Orders in the place of those of plans."""
FEW = ("four-stages", "sharded", "parted")
OTHERS = tuple(name for name in CASES if name not in FEW)


def losses(folder: Path) -> list[float]:
    """The mean over replicas, step by step."""
    found = [json.loads(path.read_text()) for path in folder.glob("losses.*.json")]
    assert found
    return [sum(step) / len(found) for step in zip(*found, strict=True)]


def train(ranks: ForkedRanks, folder: Path, names: Sequence[str]) -> Path:
    """The losses of the plans called `names`, and of the whole model, below `folder`."""
    for needed in ("torch", "transformers", "skimage"):
        pytest.importorskip(needed)
    (folder / "whole").mkdir()
    for name in names:
        export_plan(CASES[name], None, "torch", out=folder / name)
        if name in ORDERS:
            (folder / name / "schedule.csv").write_text(ORDERS[name])
    ranks.run(TRAIN, [str(folder / "whole")], 1, folder, [])
    ranks.run(TRAIN, [str(folder / name) for name in names], 4, folder, [])
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, forked_ranks: ForkedRanks) -> Path:
    return train(forked_ranks, tmp_path_factory.mktemp("planned"), FEW)


@pytest.fixture(scope="module")
def trained_at_night(tmp_path_factory: pytest.TempPathFactory, forked_ranks: ForkedRanks) -> Path:
    return train(forked_ranks, tmp_path_factory.mktemp("planned"), OTHERS)


def check_losses(folder: Path, name: str) -> None:
    expected = losses(folder / "whole")
    assert len(set(expected)) == 3
    assert losses(folder / name) == pytest.approx(expected, rel=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW)
def test_exported_code_trains_with_the_loss_of_the_example(name: str, trained: Path) -> None:
    check_losses(trained, name)


@pytest.mark.nightly
@pytest.mark.parametrize("name", OTHERS)
def test_other_plans_train_with_that_loss_too(name: str, trained_at_night: Path) -> None:
    check_losses(trained_at_night, name)


def test_a_drawn_decoder_plan_is_written(tmp_path: Path) -> None:
    """Of decoders alone; where TP divides, drawn plans divide sequences too, which is refused."""
    rng, written = random.Random(3), 0
    for number in range(40):
        plan = draw_decoder_plan(DENSE, rng)
        try:
            result = export_plan(plan, None, "torch", out=tmp_path / str(number))
        except PlanError:
            continue
        written += 1
        assert {path.name for path in result.files} == {"planned.json", "schedule.csv", "planned_pipeline.py"}
    assert written > 3
