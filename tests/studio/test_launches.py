"""Launch files in the studio: read as a job, checked, and written to; nothing outside the folder."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.studio import document as words
from mm_autoparallel.studio.launches import lint_file, list_exporters, list_launches
from mm_autoparallel.studio.session import Session

Act = Callable[..., words.Studio]


def test_a_launch_becomes_a_job_and_the_plan_that_it_runs_under(session: Session, act: Act) -> None:
    page = act(kind="import", file="train.sh", device="h100-80g")
    assert page.report is not None
    assert page.report.plans[0].strategy.startswith("PP 4, TP 2, DP 2, ")
    assert page.message.startswith("read train.sh as a launch of megatron-core")
    assert page.commands[-1] == "mm-autoparallel import train.sh --from megatron-core --device h100-80g"
    assert act(kind="undo").report != page.report
    with pytest.raises(JobError, match="lies outside the folder"):
        act(kind="import", file="../train.sh", device="h100-80g")
    with pytest.raises(JobError, match="is no file that starts a training"):
        act(kind="import", file="config.json", device="h100-80g")


def test_the_plan_is_written_as_files_and_into_a_launch(session: Session, act: Act) -> None:
    act(kind="import", file="train.sh", device="h100-80g")
    act(kind="move", modality="text", source=0, target=1, count=1)
    before = (session.folder / "train.sh").read_text()
    page = act(kind="export", framework="megatron-core")
    assert page.message.startswith(
        "wrote exported/megatron_args.txt, exported/launch.sh, exported/recompute_by_stage.sh for megatron"
    )
    assert "Ettttttt|ttttttttt|" in (session.folder / "exported" / "megatron_args.txt").read_text()
    assert os.access(session.folder / "exported" / "launch.sh", os.X_OK)
    act(kind="export", framework="megatron-core", into="train.sh", out="planned")
    assert "Ettttttt|ttttttttt|" in (session.folder / "planned" / "train.sh").read_text()
    assert (session.folder / "train.sh").read_text() == before
    act(kind="move", modality="text", source=0, target=1, count=1)
    with pytest.raises(JobError, match="is there already"):
        act(kind="export", framework="megatron-core")
    act(kind="export", framework="megatron-core", overwrite=True)
    for out in ("../else", ".hidden"):
        with pytest.raises(JobError):
            act(kind="export", framework="megatron-core", out=out)
    assert not (session.folder.parent / "else").exists()


def test_what_a_framework_cannot_run_is_refused(session: Session, act: Act) -> None:
    with pytest.raises(PlanError, match="vision layers"):
        act(kind="export", framework="megatron-core")
    assert not (session.folder / "exported").exists()


def test_a_launch_is_checked(session: Session) -> None:
    asked = words.LintLaunch(file="train.sh", device="h100-80g")
    found = lint_file(session, asked)
    assert [(one.rule, one.line) for one in found.findings] == [("needless-recompute", 49), ("stage-imbalance", 54)]
    with pytest.raises(JobError, match="lies outside the folder"):
        lint_file(session, asked.model_copy(update={"file": "/etc/passwd"}))


def test_what_can_be_chosen(session: Session) -> None:
    assert list_launches(session.folder, 100) == ("train.sh",)
    assert "megatron-core" in list_exporters()
