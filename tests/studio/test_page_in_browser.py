"""The studio's page as a person works on it: in Chromium, driven by studio/web/test, against a fake
of its server and its own.

Needs node, what `npm ci` installs in studio/web, and Chromium (on Debian: `apt-get install chromium`).
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from running_studio import Running

from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.planner.edits import set_mode
from mm_autoparallel.planner.evaluate import evaluate
from mm_autoparallel.planner.first_plan import first_plan
from mm_autoparallel.planner.plan import format_document, plan_document
from mm_autoparallel.studio.moments import FOLDER
from mm_autoparallel.studio.session import Session

pytestmark = pytest.mark.slow

MAIN_ROADS = (
    "a boundary is dragged|modes are stepped|of two pages|names are text|a launch script is checked|without a job"
)


@pytest.fixture(scope="module")
def recordings(web: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recordings")
    runpy.run_path(str(web / "test" / "record.py"))["record"](folder)
    return folder


@pytest.fixture
def chromium(web: Path) -> str:
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if not found:
        pytest.skip("needs Chromium (on Debian: apt-get install chromium)")
    return found


def drive(web: Path, names: str, **variables: str) -> None:
    """Run the tests of the page whose names match. variables: see studio.test.mjs."""
    done = subprocess.run(
        ["node", "--test", "--test-name-pattern", names, "test/studio.test.mjs"],
        cwd=web,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=600,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"pass [1-9]", done.stdout)


@pytest.mark.nightly
def test_in_chromium(web: Path, chromium: str, recordings: Path) -> None:
    drive(web, ".", CHROMIUM=chromium, RECORDINGS=str(recordings))


@pytest.mark.parametrize("names", [MAIN_ROADS, pytest.param(".", marks=pytest.mark.nightly)])
def test_with_its_own_server(
    web: Path, chromium: str, session: Session, start: Callable[..., Running], tmp_path: Path, names: str
) -> None:
    """72B on eight stages, one of which recomputes."""
    job = session.play(session.present().source).job
    plan = set_mode(job, first_plan(job, Strategy(pp=8, tp=8, dp=2, mbs=1)), "text", 1, "recompute", 3)
    figures = evaluate(job, plan).figures(lower_bound_ms=0.0)
    (tmp_path / "plan.json").write_text(format_document(plan_document(plan, figures)))
    shutil.rmtree(session.folder / FOLDER)
    running = start("job.yaml", "--config", str(tmp_path / "plan.json"), where=session.folder)
    drive(web, names, CHROMIUM=chromium, STUDIO=f"{running.base}/?token={running.token}")
    assert running.end() == 0
