"""`mm-autoparallel operators`: imports, lists and exports, and a plan that stands on a base."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_qwen2vl import CLUSTER, CONFIG

from mm_autoparallel.cli.main import main
from mm_autoparallel.planner.plan import RESULT_FILE

FIXTURES = Path(__file__).parents[1] / "fixtures" / "auto_tuning"


def test_imported_listed_and_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, out = ["--base", str(tmp_path / "operators.sqlite")], tmp_path / "operators.json"
    files = [str(FIXTURES / name) for name in ("kernel_details_mstt_1.csv", "kernel_details_mstt_2.csv")]
    options = ["--device", "ascend-910b-64g", "--software", "cann=8.1.RC1"]
    assert main(["operators", "import", *files, *options, *base, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [(one["rows"], one["distinct"]) for one in document["imported"]] == [(591, 138), (29, 8)]
    assert main(["operators", "import", str(FIXTURES), *base]) == 0
    said = capsys.readouterr().err
    assert "does not name its device" in said
    assert "operator_history.db: 3 rows of 3 distinct operators" in said

    assert main(["operators", "list", "--kind", "MatMulV2", *base]) == 0
    listed = capsys.readouterr().out
    assert "ascend-910b-64g (cann 8.1.RC1): 1 times" in listed
    assert "406.500 us" in listed
    assert main(["operators", "export", "--out", str(out), *base]) == 0
    platforms = {one["device"]: one["operators"] for one in json.loads(out.read_text())["platforms"]}
    assert {device: len(rows) for device, rows in platforms.items()} == {
        "ascend-910b-64g": 144,
        "Ascend910B1": 3,
        "unknown": 144,
    }


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["import"], "needs what to import"),
        (["import", "nowhere.csv"], "there is no such file"),
        (["import", "nowhere.csv", "--software", "cann"], "NAME=VERSION is expected"),
        (["list", "--out", "x.json"], "--out belongs to `operators export`"),
        (["export", "nowhere.csv"], "PATH belongs to `operators import`"),
        (["list"], "there is no such file"),
        (["sort"], "invalid choice: 'sort'"),
    ],
)
def test_what_is_wrong_is_told(
    words: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["operators", *words]) == 2
    assert told in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "told"),
    [(["--coverage", "0.5"], "give --operators with it"), (["--operators"], "there are no traces of")],
)
def test_what_cannot_be_measured_is_told(
    options: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    write_job(tmp_path)
    assert main(["profile", "job.json", *options]) == 2
    assert told in capsys.readouterr().err


def write_job(folder: Path, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    workload = {"global_batch_size": 4, "seq_length": 32, "image_tokens_per_sample": 8, "weight_bytes": 4}
    search = {"cp": [1], "tp": [1], "mbs": [1]}
    job = {"model": "config.json", "cluster": CLUSTER, "workload": workload, "search": search}
    path = folder / "job.json"
    path.write_text(json.dumps(job | changes))
    return path


@pytest.mark.nightly
def test_traced_measured_once_and_planned_with(tmp_path: Path, run_cli: Callable) -> None:
    pytest.importorskip("transformers")
    job = write_job(tmp_path)
    traced = run_cli("trace", job)
    assert traced.returncode == 0, traced.stderr
    measure = ("profile", job, "--operators", "--device", "cpu")
    first = run_cli(*measure, timeout_s=400)
    assert first.returncode == 0, first.stderr
    assert "coverage 0.000" in first.stderr
    second = run_cli(*measure)
    assert "measured" not in second.stderr.replace("what is measured here", "")
    (device,) = (tmp_path / "subgraph_profiles").glob("*/device.json")
    profiles = [traced.stdout.strip(), first.stdout.strip()]
    write_job(tmp_path, cluster=CLUSTER | {"device": json.loads(device.read_text())}, profiles=profiles)
    planned = run_cli("plan", job)
    assert planned.returncode == 0, planned.stderr
    told = json.loads((tmp_path / RESULT_FILE).read_text())["provenance"]["operators"]
    assert Path(told["base"]) == tmp_path / "subgraph_profiles" / "operators.sqlite"
    assert told["coverage"] > 0.9
    assert told["hits"] > 100
