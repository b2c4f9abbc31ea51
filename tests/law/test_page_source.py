"""What is built of a report's page is what its source in studio/web gives."""

from __future__ import annotations

import runpy
import subprocess
from pathlib import Path

import pytest


def test_the_schema_is_that_of_the_models(repository: Path) -> None:
    written = runpy.run_path(str(repository / "studio" / "web" / "schema.py"))
    assert (repository / "studio" / "web" / "report.schema.json").read_text() == written["render"](), (
        "run `python studio/web/schema.py`, and `npm run types` in studio/web"
    )


@pytest.mark.slow
def test_the_built_page_is_that_of_the_source(web: Path, repository: Path, tmp_path: Path) -> None:
    built = tmp_path / "web"
    done = subprocess.run(
        ["npx", "vite", "build", "--outDir", str(built)], cwd=web, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    shipped = repository / "mm_autoparallel" / "reports" / "page" / "web"
    assert {path.name for path in built.iterdir()} == {path.name for path in shipped.iterdir() if path.suffix}
    for path in built.iterdir():
        assert path.read_bytes() == (shipped / path.name).read_bytes(), (
            f"run `npm run build` in studio/web: {path.name}"
        )


@pytest.mark.slow
def test_the_browser_s_types_are_those_of_the_schema(web: Path) -> None:
    done = subprocess.run(
        ["npx", "json2ts", "--input", "report.schema.json", "--unreachableDefinitions=false"],
        cwd=web,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == (web / "src" / "report.d.ts").read_text(encoding="utf-8"), "run `npm run types` in studio/web"
