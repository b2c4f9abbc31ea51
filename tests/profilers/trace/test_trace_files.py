"""A list of configurations: a file for each, nothing twice, nothing stale; and code found by its name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tracing_jobs import DOCUMENTS, job_of  # noqa: E402

from mm_autoparallel.errors import JobError, ProfileError  # noqa: E402
from mm_autoparallel.model.job.workload import Workload  # noqa: E402
from mm_autoparallel.model.profiles.traced import read_trace  # noqa: E402
from mm_autoparallel.profilers.huggingface import make_subject  # noqa: E402
from mm_autoparallel.profilers.subject import Subject  # noqa: E402
from mm_autoparallel.profilers.trace.factory import find_maker  # noqa: E402
from mm_autoparallel.profilers.trace.run import Configuration, trace  # noqa: E402

DOCUMENT = DOCUMENTS["llama"]
JOB = job_of(DOCUMENT, 64)


def subject_for(workload: Workload) -> Subject:
    return make_subject(DOCUMENT, JOB.model, workload, Path("config.json"))


def run_trace(
    folder: Path, *workloads: Workload, make: Callable[[Workload], Subject] = subject_for, recompute: bool = True
) -> tuple[list[str], list[str]]:
    """(names of the files, what was told)."""
    told: list[str] = []
    configurations = [Configuration(1, 1, workload) for workload in workloads or (JOB.workload,)]
    paths = trace(make, JOB, configurations, folder, "mm-autoparallel trace", "a test", recompute, told.append)
    return [path.name for path in paths], told


def with_(**changes: Any) -> Workload:
    return JOB.workload.model_copy(update=changes)


def no_subject(_: Workload) -> Subject:
    raise AssertionError("nothing is to be traced")


def test_a_run_continues_where_another_one_ended(tmp_path: Path) -> None:
    assert run_trace(tmp_path) == (
        ["tp1-cp1-mbs1-seq64.json"],
        ["TP 1 MBS 1, 64 tokens, 2 bytes a weight, flash attention: 3 kinds of blocks"],
    )
    names, told = run_trace(tmp_path, JOB.workload, with_(seq_length=96))
    assert names == ["tp1-cp1-mbs1-seq64.json", "tp1-cp1-mbs1-seq96.json"]
    assert told[0].endswith("traced before")
    assert told[1].endswith("3 kinds of blocks")
    run_trace(tmp_path, JOB.workload, with_(seq_length=96), make=no_subject)


@pytest.mark.slow
def test_precisions_and_kernels_have_files_of_their_own(tmp_path: Path) -> None:
    names, _ = run_trace(tmp_path, JOB.workload, with_(weight_bytes=4.0), with_(attention="unfused"))
    assert len(set(names)) == len(list(tmp_path.glob("*.json"))) == 3
    flash, fp32, unfused = (read_trace(tmp_path / name).entries[0] for name in names)
    assert fp32.parameter_bytes == 2 * flash.parameter_bytes
    assert unfused.activation_bytes > flash.activation_bytes
    assert {one.dtype for one in fp32.operators if one.kind == "matrix_product"} == {"fp32"}
    assert any(one.name == "bmm" for one in unfused.operators)


@pytest.mark.slow
def test_what_was_traced_without_recompute_is_traced_again_for_it(tmp_path: Path) -> None:
    run_trace(tmp_path, recompute=False)
    run_trace(tmp_path, recompute=False, make=no_subject)
    assert read_trace(tmp_path / "tp1-cp1-mbs1-seq64.json").entries[0].recompute_transient_bytes is None
    assert run_trace(tmp_path)[1][0].endswith("3 kinds of blocks")
    assert read_trace(tmp_path / "tp1-cp1-mbs1-seq64.json").entries[0].recompute_transient_bytes
    run_trace(tmp_path, recompute=False, make=no_subject)


def test_another_release_makes_a_file_stale(tmp_path: Path) -> None:
    run_trace(tmp_path)
    path = tmp_path / "tp1-cp1-mbs1-seq64.json"
    now = str(torch.__version__)
    path.write_text(path.read_text(encoding="utf-8").replace(f'"torch":"{now}"', '"torch":"1.9.0"'), encoding="utf-8")
    with pytest.raises(
        ProfileError, match=r"seq64\.json: it was traced with torch 1\.9\.0, and this is torch .*remove"
    ):
        run_trace(tmp_path)


def test_another_implementation_is_told_apart(tmp_path: Path) -> None:
    run_trace(tmp_path)
    with pytest.raises(ProfileError, match="it is of a test, and this is mine:subject"):
        trace(no_subject, JOB, [Configuration(1, 1, JOB.workload)], tmp_path, "c", "mine:subject", True, lambda _: None)


class TestCodeByName:
    """`--model MODULE:NAME`."""

    @pytest.fixture(autouse=True)
    def module(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        lines = [
            "from mm_autoparallel.profilers.subject import Subject",
            "ready = Subject(None, None, None)",
            "def plain(): return ready",
            "def following(workload): return Subject(workload, None, None)",
            "def wrong(): return 3",
            "number = 3",
        ]
        (tmp_path / "named_code.py").write_text("\n".join(lines), encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path)

    @pytest.mark.parametrize(("name", "follows"), [("ready", False), ("plain", False), ("following", True)])
    def test_it_is_a_subject_or_gives_one(self, name: str, follows: bool) -> None:
        make, looks_at_workload = find_maker(f"named_code:{name}")
        made = make(JOB.workload)
        assert isinstance(made, Subject)
        assert looks_at_workload is follows
        assert made.build_model is (JOB.workload if follows else None)

    @pytest.mark.parametrize(
        ("name", "told"),
        [
            ("named_code", "give MODULE:NAME"),
            (":ready", "give MODULE:NAME"),
            ("no_such_module:ready", "there is no module no_such_module"),
            ("named_code:absent", "no function or Subject called absent; it has Subject, ready, plain"),
            ("named_code:number", "no function or Subject called number"),
        ],
    )
    def test_what_is_not_there_is_named(self, name: str, told: str) -> None:
        with pytest.raises(JobError, match=told):
            find_maker(name)

    def test_what_gives_something_else_is_named(self) -> None:
        make, _ = find_maker("named_code:wrong")
        with pytest.raises(JobError, match=r"wrong gave a int; it must give a .*Subject"):
            make(JOB.workload)


def test_the_current_folder_is_looked_in_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "code_beside_a_job.py").write_text("make = print", encoding="utf-8")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    find_maker("code_beside_a_job:make")
    assert sys.path.index(str(tmp_path)) == len(sys.path) - 1
