"""What is shipped, made again by the command that it names: one configuration of every model, by night."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from mm_autoparallel.model.profiles.shipped import shipped_models
from mm_autoparallel.model.profiles.store import stale_software
from mm_autoparallel.model.profiles.traced import read_trace
from mm_autoparallel.profilers.device import software_versions


@pytest.mark.nightly
@pytest.mark.parametrize("model", shipped_models())
def test_it_is_made_again(model: str, repository: Path, tmp_path: Path) -> None:
    *_, path = sorted((repository / "subgraph_profiles/shipped/traced" / model).glob("*-mbs1-*.json"))
    shipped = read_trace(path)
    if stale_software(shipped.software, software_versions()):
        pytest.skip(f"shipped traces are of {shipped.software}")
    _, *words = shlex.split(shipped.command)
    narrowed = ["--tp", str(shipped.entries[0].tp), "--mbs", "1", "--out", str(tmp_path)]
    command = [sys.executable, "-m", "mm_autoparallel.cli.main", *words, *narrowed]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (again,) = tmp_path.glob(f"traced/{model}/*.json")
    assert again.name == path.name
    found = read_trace(again)
    assert found.entries == shipped.entries
