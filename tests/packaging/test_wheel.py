"""The wheel holds all that the package needs, and plans where no checkout is."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import zipfile
from pathlib import Path

import pytest

_SPEC = importlib.util.spec_from_file_location("wheel", Path(__file__).with_name("wheel.py"))
assert _SPEC
assert _SPEC.loader
wheel = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(wheel)

pytest.importorskip("hatchling", reason="the build backend comes with the extra `test`")

LAYERS = {"num_layers": 4, "hidden_size": 256, "ffn_size": 512, "num_heads": 4, "norm": "rms"}
JOB = {
    "model": {"name": "small", "text": {"vocab_size": 1000, "layers": LAYERS}},
    "cluster": {"device": "h100-80g", "num_nodes": 1, "devices_per_node": 2},
    "workload": {"global_batch_size": 4, "seq_length": 128},
}


@pytest.mark.slow
def test_the_wheel_plans_outside_the_checkout(tmp_path: Path, repository: Path) -> None:
    built = wheel.build_wheel(tmp_path)
    with zipfile.ZipFile(built) as archive:
        inside = {name for name in archive.namelist() if name.startswith("mm_autoparallel/")}
        entry_points = archive.read(next(n for n in archive.namelist() if n.endswith("entry_points.txt"))).decode()
    tracked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "mm_autoparallel", "subgraph_profiles/shipped"],
        cwd=repository,
        check=True,
        capture_output=True,
        text=True,
    )
    there = {name for name in tracked.stdout.splitlines() if (repository / name).is_file()}
    assert inside == {name.replace("subgraph_profiles/shipped", "mm_autoparallel/subgraph_profiles") for name in there}
    assert {"mm_autoparallel/py.typed", "mm_autoparallel/model/profiles/calibrations/b200-192g.json"} <= inside
    assert "mm-autoparallel = mm_autoparallel.cli.main:start" in entry_points
    assert "mindspeed-mm = mm_autoparallel.integrations.mindspeed_mm.framework:FRAMEWORK" in entry_points

    python = wheel.install(built, tmp_path / "environment")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "job.json").write_text(json.dumps(JOB))

    def run(*command: str | Path) -> str:
        # compiling the kernels of another installation takes a minute; interpreted they plan a job this small as well
        surroundings = wheel.environment() | {"NUMBA_DISABLE_JIT": "1"}
        done = subprocess.run(command, cwd=outside, env=surroundings, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = run(python, "-c", "import mm_autoparallel; print(mm_autoparallel.__file__)")
    assert Path(where.strip()).is_relative_to(tmp_path / "environment")
    found = json.loads(run(python.with_name("mm-autoparallel"), "plan", "job.json", "--json"))
    assert found["e2e_time"] > 0
    assert (outside / "auto_parallel_search_optimal_config.json").exists()
