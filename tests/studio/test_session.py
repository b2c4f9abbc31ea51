"""What actions make of a plan and a job, and that nothing of it is lost."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

import mm_autoparallel as mmap
from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.planner.search.planner import search
from mm_autoparallel.studio import document as words
from mm_autoparallel.studio.actions import act as act_on
from mm_autoparallel.studio.bounds import find_bound
from mm_autoparallel.studio.session import Session, Stale

Act = Callable[..., words.Studio]


def stage(page: words.Studio, number: int, modality: str = "text") -> tuple[int, ...]:
    assert page.report is not None
    return page.report.plans[0].stages[number].layers[modality]


def test_a_move_is_simulated_as_the_plan_that_it_makes(session: Session, act: Act) -> None:
    before = session.draw(None)[0]
    page = act(kind="move", modality="text", source=0, target=1, count=2)
    assert stage(page, 0)[0] == stage(before, 0)[0] - 2
    assert stage(page, 1)[0] == stage(before, 1)[0] + 2
    plan = session.plan_of(session.present())
    job = mmap.read_job(session.folder / "job.yaml")
    assert page.report is not None
    assert page.report.plans[0].step_ms == mmap.simulate(job, plan).step_ms
    assert page.message.startswith("2 text layers from stage 0 to 1: step ")
    assert page.undo == "2 text layers from stage 0 to 1"
    assert page.commands[-1].endswith("--config plan-0.json --move text:0:1:2 --out plan-1.json")


def test_layers_keep_their_modes_when_they_move(session: Session, act: Act) -> None:
    held = stage(session.draw(None)[0], 0)[0]
    act(kind="mode", modality="text", stage=0, mode="recompute", count=held - 1)
    act(kind="mode", modality="text", stage=1, mode="recompute", count=0)
    act(kind="move", modality="text", source=0, target=1, count=3)
    plan = session.plan_of(session.present())
    assert plan.recompute["text"][:2] == (held - 3, 2)


def test_undo_redo_and_what_is_done_in_between(session: Session, act: Act) -> None:
    first = act(kind="move", modality="text", source=0, target=1, count=1)
    act(kind="move", modality="text", source=0, target=1, count=1)
    page = act(kind="undo")
    assert page.report is not None
    assert first.report is not None
    assert page.report.plans[0].step_ms == first.report.plans[0].step_ms
    assert page.redo == "1 text layer from stage 0 to 1"
    assert act(kind="redo").redo is None
    act(kind="undo")
    assert act(kind="mode", modality="text", stage=0, mode="recompute", count=1).redo is None
    with pytest.raises(JobError, match="nothing to redo"):
        act(kind="redo")


def test_all_is_there_again_after_a_restart(session: Session, act: Act) -> None:
    act(kind="pin", name="before")
    page = act(kind="move", modality="text", source=0, target=1, count=1)
    again = Session(session.folder).draw(None)[0]
    assert again.model_copy(update={"message": page.message, "change": page.change}) == page


def test_a_second_page_cannot_act_on_what_it_has_not_seen(session: Session) -> None:
    asked = words.Do.model_validate({"revision": session.revision, "action": {"kind": "pin", "name": "a"}})
    act_on(session, asked)
    with pytest.raises(Stale):
        act_on(session, asked)


def test_sizes_take_the_nearest_lawful_strategy(session: Session, act: Act) -> None:
    page = act(kind="sizes", sizes={"TP": 4, "PP": 4})
    assert page.report is not None
    sizes = page.report.plans[0].sizes
    assert (sizes["TP"], sizes["PP"], sizes["MBS"]) == (4, 4, 1)
    with pytest.raises(JobError, match="128 is no multiple of 7"):
        act(kind="sizes", sizes={"PP": 7})
    with pytest.raises(JobError, match="XP is no size"):
        act(kind="sizes", sizes={"XP": 7})
    with pytest.raises(JobError, match="PP is True; a whole number"):
        act(kind="sizes", sizes={"PP": True})


def test_the_job_otherwise_and_back(session: Session, act: Act) -> None:
    given = session.draw(None)[0]
    page = act(kind="knobs", values={"cluster.device.network_link.bandwidth_bytes_per_s": 1e9})
    assert page.report is not None
    assert given.report is not None
    assert page.report.plans[0].step_ms > given.report.plans[0].step_ms
    slow = mmap.read_job(session.folder / "job.yaml", {"cluster.device.network_link.bandwidth_bytes_per_s": 1e9})
    plan = session.plan_of(session.present())
    assert page.report.plans[0].step_ms == mmap.simulate(slow, plan).step_ms
    page = act(kind="knobs", values={"cluster.num_nodes": 4})
    assert page.report is not None
    assert page.report.job.facts[0].startswith("4 nodes, 64 devices")
    assert "did not fit" in page.message
    values = {"cluster.num_nodes": None, "cluster.device.network_link.bandwidth_bytes_per_s": None}
    page = act(kind="knobs", values=values)
    assert {knob.key: knob.value for knob in page.knobs} == {knob.key: knob.given for knob in page.knobs}
    assert "--set" not in page.commands[-1]
    with pytest.raises(JobError, match=r"cluster\.num_node"):
        act(kind="knobs", values={"cluster.num_node": 4})


def test_another_cluster_keeps_the_sizes_that_it_can(session: Session, act: Act) -> None:
    act(kind="sizes", sizes={"PP": 16, "TP": 8})
    page = act(kind="knobs", values={"cluster.num_nodes": 2})
    assert page.report is not None
    assert page.report.plans[0].sizes["TP"] == 8
    assert "did not fit" in page.message
    assert page.undo == "cluster.num_nodes 2"


def test_a_job_from_the_catalog(session: Session, act: Act) -> None:
    page = act(kind="job", model="qwen2-7b", device="h100-80g", num_nodes=1, global_batch_size=64, seq_length=4096)
    assert page.report is not None
    assert page.report.job.facts[0] == "1 nodes, 8 devices: h100-80g"
    assert page.report.plans[0].fits
    assert not list(session.folder.glob("job2.yaml")), "it is only written when a person saves it"
    with pytest.raises(JobError, match="outside the folder"):
        act(kind="job", model="../x.json", device="h100-80g", num_nodes=1, global_batch_size=64, seq_length=4096)
    with pytest.raises(JobError, match="h100-80"):
        act(kind="job", model="qwen2-7b", device="h100", num_nodes=1, global_batch_size=64, seq_length=4096)


def test_pins_stand_beside_the_plan_each_on_its_own_job(session: Session, act: Act) -> None:
    hostile = "<script>alert(1)</script>\u202e" + "x" * 100
    before = act(kind="pin", name=hostile)
    page = act(kind="knobs", values={"cluster.num_nodes": 4})
    assert page.report is not None
    assert before.report is not None
    assert [plan.name for plan in page.report.plans] == ["now", hostile]
    assert page.report.plans[1].step_ms == before.report.plans[0].step_ms
    with pytest.raises(JobError, match="pinned already"):
        act(kind="pin", name=hostile)
    page = act(kind="take", name=hostile)
    assert page.report is not None
    assert page.report.plans[0].step_ms == before.report.plans[0].step_ms
    assert act(kind="unpin", name=hostile).pins == ()


def one_by_one(count: int) -> str:
    return " ".join(f"{m}F0 {m}B0" for m in range(count))


def test_an_order_is_simulated_and_one_that_waits_for_ever_explained(session: Session, act: Act) -> None:
    with pytest.raises(PlanError, match="no order of single actions"):
        act(kind="order", stage=0, words="0F0 0B0")
    act(kind="sizes", sizes={"PP": 2, "TP": 8, "VPP": 1})
    plan = session.plan_of(session.present())
    count = plan.num_microbatches
    strategy = replace(plan.strategy, schedule="free")
    orders = (one_by_one(count),) * 2
    session.add("one by one", "", session.present().source, replace(plan, strategy=strategy, orders=orders))
    before = session.draw(None)[0]
    assert before.orders == orders
    with pytest.raises(PlanError, match="stage 0 waits with 0B0 for 0B0 of stage 1, stage 1 waits with 1F0 for 1F0"):
        act(kind="order", stage=1, words="0F0 1F0 0B0 1B0" + one_by_one(count)[len(one_by_one(2)) :])
    assert session.draw(None)[0] == before
    ahead = "0F0 1F0 0B0 " + " ".join(f"{m}F0 {m - 1}B0" for m in range(2, count)) + f" {count - 1}B0"
    page = act(kind="order", stage=0, words=ahead)
    assert page.report is not None
    assert before.report is not None
    assert page.orders == (ahead, orders[1])
    assert page.report.plans[0].step_ms < before.report.plans[0].step_ms
    assert page.commands[-1].endswith(f"--order '0:{ahead}' --out plan-3.json")
    for told, wrong in (("has 0F0 twice", ahead + " 0F0"), ("has no", "0F0 0B0"), ("is not an action", "0X0")):
        with pytest.raises(PlanError, match=told):
            act(kind="order", stage=0, words=wrong)
    with pytest.raises(PlanError, match="no stage 2"):
        act(kind="order", stage=2, words=ahead)


@pytest.mark.parametrize(
    "action",
    [
        {"kind": "move", "modality": "text", "source": 0, "target": 1, "count": 99},
        {"kind": "move", "modality": "text", "source": 0, "target": 99, "count": 1},
        {"kind": "move", "modality": "audio", "source": 0, "target": 1, "count": 1},
        {"kind": "mode", "modality": "text", "stage": 0, "mode": "recompute", "count": 99},
        {"kind": "mode", "modality": "text", "stage": 0, "mode": "no-such", "count": 1},
    ],
)
def test_what_cannot_be_done_leaves_all_as_it_was(session: Session, act: Act, action: dict[str, object]) -> None:
    before = session.draw(None)[0]
    with pytest.raises((PlanError, JobError)):
        act(**action)
    assert session.draw(None)[0] == before


@pytest.mark.parametrize(
    "action",
    [
        {"kind": "pin", "name": ""},
        {"kind": "pin", "name": "x" * 201},
        {"kind": "move", "modality": "text", "source": -1, "target": 1, "count": 1},
        {"kind": "knobs", "values": {"cluster.num_nodes": float("nan")}},
        {"kind": "sizes", "sizes": {}},
        {"kind": "undo", "more": 1},
    ],
)
def test_actions_are_read_strictly(action: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        words.Do.model_validate({"revision": 0, "action": action})


def test_bounds_hold_for_the_job_that_was_searched(tmp_path: Path) -> None:
    session = Session(tmp_path)
    act_on(
        session,
        words.Do.model_validate(
            {
                "revision": 0,
                "action": {
                    "kind": "job",
                    "model": "qwen2-7b",
                    "device": "h100-80g",
                    "num_nodes": 1,
                    "global_batch_size": 32,
                    "seq_length": 2048,
                },
            }
        ),
    )
    source = session.present().source
    job = session.play(source).job
    found = search(job, time_limit_s=60.0)
    known = session.known(source).with_space(found)
    session.learn(source, known)
    best = find_bound(job, known, found.estimates[0])
    assert best.proven
    assert best.gap_fraction == pytest.approx(found.gap_fraction, abs=1e-9)
    session.add("found", "", source, found.plan)
    layers = found.plan.layers["text"]
    if len(layers) == 1:
        count, change = layers[0], "recompute"
        action = {"kind": "mode", "modality": "text", "stage": 0, "mode": change, "count": count}
    else:
        action = {"kind": "move", "modality": "text", "source": 0, "target": 1, "count": 1}
    act_on(session, words.Do.model_validate({"revision": session.revision, "action": action}))
    page = session.draw(None)[0]
    assert page.bound is not None
    assert not page.bound.proven
    assert page.bound.gap_fraction is not None
    assert page.bound.gap_fraction > 0.001
    assert page.bound.strategy_gap_fraction is not None
    act_on(session, words.Do.model_validate({"revision": session.revision, "action": {"kind": "undo"}}))
    again = Session(tmp_path).draw(None)[0].bound
    assert again is not None
    assert again.proven
    act_on(
        session,
        words.Do.model_validate(
            {"revision": session.revision, "action": {"kind": "knobs", "values": {"workload.seq_length": 4096}}}
        ),
    )
    other = session.draw(None)[0].bound
    assert other is not None
    assert other.gap_fraction is None
    assert "has not been searched" in other.words


def test_each_of_two_encoders_has_sizes_of_its_own(tmp_path: Path, repository: Path) -> None:
    here = tmp_path / "omni"
    shutil.copytree(repository / "examples" / "qwen25_omni_7b", here)
    session = Session(here)
    text = (here / "job.yaml").read_text() + "  layouts: all\n  tp: [1, 2]\n  cp: [1]\n"
    session.open_job(Path("job.yaml"), text)

    def act(sizes: dict[str, int | str]) -> dict[str, words.SizeChoices]:
        action = {"kind": "sizes", "sizes": sizes}
        act_on(session, words.Do.model_validate({"revision": session.revision, "action": action}))
        return {size.name: size for size in session.draw(None)[0].sizes}

    sizes = act({"PP": 2, "TP": 1, "vision.LAYOUT": "chain", "audio.LAYOUT": "chain"})
    assert {name for name in sizes if "." in name} == {"vision.LAYOUT", "audio.LAYOUT"}
    assert sizes["vision.LAYOUT"].value == "chain"
    assert sizes["audio.LAYOUT"].choices == ("chain", "phases", "bubbles", "prefetch")
    act({"vision.LAYOUT": "prefetch"})
    sizes = act({"audio.LAYOUT": "phases"})
    assert (sizes["vision.LAYOUT"].value, sizes["audio.LAYOUT"].value) == ("prefetch", "phases")
    page = session.draw(None)[0]
    assert page.commands[-1].endswith("--sizes audio.LAYOUT=phases --out plan-3.json")
    assert page.report is not None
    layout = page.report.plans[0].layout
    assert layout is not None
    assert [one.encoder.name for one in (layout, *layout.others)] == ["vision", "audio"]
    sizes = act({"vision.MBS": 8})
    assert sizes["vision.MBS"].value == 8
    assert sizes["audio.LAYOUT"].value == "phases"
    with pytest.raises(JobError, match=r"vision.EP is no size of an encoder vision; known are LAYOUT, PP, TP"):
        act({"vision.EP": 2})
    with pytest.raises(JobError, match=r"no encoder sight; its encoders are vision, audio"):
        act({"sight.TP": 2})
