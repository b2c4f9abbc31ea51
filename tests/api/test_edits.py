"""Edits of a plan, stage by stage."""

from __future__ import annotations

from pathlib import Path

import pytest

import mm_autoparallel as mmap
from mm_autoparallel.api.edits import Move, StageMode, edit_plan, format_plan


def chunked() -> tuple[mmap.Job, mmap.Plan]:
    """A plan of two stages with two chunks each."""
    layers = {"num_layers": 8, "hidden_size": 256, "ffn_size": 512, "num_heads": 4, "norm": "rms"}
    job = mmap.Job(
        {"name": "small", "text": {"vocab_size": 1000, "layers": layers}},
        {"device": "a100-80g", "num_nodes": 1, "devices_per_node": 2},
        {"global_batch_size": 8, "seq_length": 128},
        search={"pp": [2], "max_vpp": 2},
    )
    from mm_autoparallel.model.job.strategy import Strategy

    strategy = Strategy(pp=2, vpp=2, tp=1, dp=1, mbs=1, schedule="interleaved_1f1b")
    return job, mmap.Plan(strategy, {"text": (2, 2, 2, 2)}, {"text": (2, 0, 0, 1)}, 8)


@pytest.fixture
def even(best: mmap.PlanResult) -> mmap.Plan:
    """Two layers on each of four stages."""
    return best.plan.edited(layers={"text": [2, 2, 2, 2]}, recompute={"text": [0, 0, 0, 0]})


def test_layers_move_between_stages(job: mmap.Job, even: mmap.Plan) -> None:
    edited = edit_plan(job, even, moves=[Move(layers=1, from_stage=0, to_stage=3)])
    assert edited.layers["text"] == (1, 2, 2, 3)
    assert edit_plan(job, edited, moves=[Move(layers=1, from_stage=3, to_stage=0)]) == even


def test_layers_move_between_chunks() -> None:
    job, plan = chunked()
    edited = edit_plan(job, plan, moves=[Move(layers=1, from_stage=0, from_chunk=1, to_stage=1, to_chunk=0)])
    assert edited.layers["text"] == (2, 3, 1, 2)
    assert mmap.simulate(job, edited).step_ms > 0


def test_a_stage_recomputes_no_more_than_it_still_holds() -> None:
    job, plan = chunked()
    edited = edit_plan(job, plan, moves=[Move(layers=1, from_stage=0, to_stage=1)])
    assert edited.recompute["text"] == (1, 0, 0, 1)


def test_layers_of_a_stage_are_put_into_modes(job: mmap.Job, even: mmap.Plan) -> None:
    modes = [StageMode(stage=1, layers=1), StageMode(stage=2, mode="activation", layers=1)]
    edited = edit_plan(job, even, modes=modes)
    assert edited.recompute["text"][1] == 1
    assert edited.modes == {"text": {"activation": (0, 0, 1, 0)}}
    assert mmap.simulate(job, edited).step_ms > mmap.simulate(job, even).step_ms
    back = edit_plan(job, edited, modes=[StageMode(stage=2, mode="activation", layers=0)])
    assert back.modes == {}


def test_whole_lists_come_before_moves(job: mmap.Job, even: mmap.Plan) -> None:
    edited = edit_plan(
        job,
        even,
        layers={"text": [5, 1, 1, 1]},
        recompute={"text": [5, 1, 1, 1]},
        moves=[Move(layers=2, from_stage=0, to_stage=1)],
    )
    assert edited.layers["text"] == (3, 3, 1, 1)
    assert edited.recompute["text"] == (3, 1, 1, 1)


def test_what_is_written_is_read_back(job: mmap.Job, even: mmap.Plan, tmp_path: Path) -> None:
    edited = edit_plan(job, even, modes=[StageMode(stage=0, layers=1), StageMode(stage=0, mode="activation", layers=1)])
    path = tmp_path / "edited.json"
    path.write_text(format_plan(mmap.simulate(job, edited)))
    assert mmap.read_plan(path, job) == edited
    assert "lower_bound_ms" not in path.read_text()


@pytest.mark.parametrize(
    ("moves", "modes", "words"),
    [
        ([Move(layers=1, from_stage=0, to_stage=9)], [], "there is no stage 9: PP is 4"),
        ([Move(layers=1, from_stage=0, to_stage=1, to_chunk=1)], [], "there is no chunk 1: VPP is 1"),
        ([Move(layers=9, from_stage=0, to_stage=1)], [], "9 text layers cannot leave stage 0, which holds 2"),
        ([Move(part="txt", layers=1, from_stage=0, to_stage=1)], [], r"'txt' is no part .*did you mean \"text\""),
        ([Move(layers=2, from_stage=0, to_stage=1)], [], "no layer; every stage"),
        ([], [StageMode(stage=0, layers=9)], "recomputes 9 layers on stage 0, which holds 2"),
        ([], [StageMode(stage=0, layers=1), StageMode(stage=0, mode="activation", layers=2)], "and it holds 2"),
    ],
)
def test_what_does_not_fit_is_refused(
    job: mmap.Job, even: mmap.Plan, moves: list[Move], modes: list[StageMode], words: str
) -> None:
    with pytest.raises(mmap.PlanError, match=f"the edited plan: .*{words}"):
        edit_plan(job, even, moves=moves, modes=modes)
