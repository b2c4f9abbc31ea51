"""The studio's page as a person works on it: in Chromium, driven by studio/web/test, against a fake of its server.

Needs node, what `npm ci` installs in studio/web, and Chromium (on Debian: `apt-get install chromium`).
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

MAIN_ROADS = "a boundary is dragged|modes are stepped|of two pages|names are text"


@pytest.fixture(scope="module")
def recordings(web: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recordings")
    runpy.run_path(str(web / "test" / "record.py"))["record"](folder)
    return folder


@pytest.mark.parametrize("names", [MAIN_ROADS, pytest.param(".", marks=pytest.mark.nightly)])
def test_in_chromium(web: Path, recordings: Path, names: str) -> None:
    """names: of the tests to run, a regular expression. SCREENSHOTS: see studio.test.mjs."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if not chromium:
        pytest.skip("needs Chromium (on Debian: apt-get install chromium)")
    done = subprocess.run(
        ["node", "--test", "--test-name-pattern", names, "test/studio.test.mjs"],
        cwd=web,
        env={**os.environ, "RECORDINGS": str(recordings), "CHROMIUM": chromium},
        capture_output=True,
        text=True,
        timeout=300,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"pass [1-9]", done.stdout)
