"""A studio on the example's job: its session alone, and its server."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from running_studio import Running, start_studio

from mm_autoparallel.studio import document as words
from mm_autoparallel.studio.actions import act as act_on
from mm_autoparallel.studio.session import Session

pytest.importorskip("starlette")


@pytest.fixture(scope="module")
def folder(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the example's job."""
    folder = tmp_path_factory.mktemp("studio")
    for path in (repository / "examples" / "qwen2vl_72b").iterdir():
        if path.is_file():
            shutil.copy(path, folder)
    shutil.copy(repository / "examples" / "megatron_core" / "train_8b.sh", folder / "train.sh")
    return folder


@pytest.fixture(scope="module")
def start(folder: Path) -> Iterator[Callable[..., Running]]:
    """Starts studios, in the folder if no other is given, and ends them."""
    started: list[Running] = []

    def begin(*arguments: str, where: Path = folder) -> Running:
        started.append(start_studio(where, *arguments))
        return started[-1]

    yield begin
    for running in started:
        running.process.kill()
        running.process.communicate()


@pytest.fixture
def session(folder: Path, tmp_path: Path) -> Session:
    """A session on the example's job, without a server."""
    shutil.copytree(folder, tmp_path / "here", ignore=shutil.ignore_patterns(".mm-*"))
    session = Session(tmp_path / "here")
    session.open_job(Path("job.yaml"), (session.folder / "job.yaml").read_text())
    return session


@pytest.fixture
def act(session: Session) -> Callable[..., words.Studio]:
    """Do something, and see the page."""

    def do(**action: Any) -> words.Studio:
        act_on(session, words.Do.model_validate({"revision": session.revision, "action": action}))
        return session.draw(None)[0]

    return do
