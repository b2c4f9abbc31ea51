"""`calibrate` as a user runs it: the file, the printed errors, a job that names it, and what it refuses."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from mm_autoparallel.model.profiles.calibration import read_calibration, shipped_calibrations

TABLES = Path(__file__).parents[2] / "examples" / "published_measurements"
TABLE = TABLES / "korthikanti2022.csv"

RunCli = Callable[..., subprocess.CompletedProcess[str]]


def test_it_fits_some_rows_and_scores_the_others(run_cli: RunCli, tmp_path: Path) -> None:
    found = run_cli(
        "calibrate", TABLE, "--device", "a100-80g", "--rows", "0,2", "--free", "matrix,memory", "--out", "mine.json"
    )
    assert found.returncode == 0, found.stderr
    calibration = read_calibration(tmp_path / "mine.json")
    assert (calibration.name, calibration.device, calibration.software) == ("mine", "a100-80g", "megatron-lm")
    assert [row.row for row in calibration.fitted] == [0, 2]
    assert {table: [*rows] for table, rows in calibration.held_out.items()} == {TABLE.name: list("134567")}
    assert calibration.sources["matrix_fraction"] == "calibrated on 2 rows"
    assert calibration.sources["node_fraction"] == "assumed"
    assert "mine.json" in found.stderr
    for words in ("fitted: 2 rows, mean", "held out: 6 rows, mean", "bias", "a step is expected at"):
        assert words in found.stdout


def test_rows_of_two_tables_together(run_cli: RunCli, tmp_path: Path) -> None:
    experts = f"{TABLES}/simumax_b200_experts.csv:5,6"
    found = run_cli(
        "calibrate", TABLES / "simumax_b200.csv", "--device", "b200-192g", "--rows", "0", "--also", experts,
        "--free", "matrix,grouped_matrix", "--out", "mine.json",
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    calibration = read_calibration(tmp_path / "mine.json")
    assert [(row.table, row.row) for row in calibration.fitted] == [
        ("simumax_b200.csv", 0),
        ("simumax_b200_experts.csv", 5),
        ("simumax_b200_experts.csv", 6),
    ]
    assert calibration.held_out.keys() == {"simumax_b200.csv", "simumax_b200_experts.csv"}
    figures = calibration.figures
    assert figures.grouped_matrix_fraction < 0.97 * figures.matrix_fraction
    assert "/" not in calibration.command


def test_its_document_is_its_file(run_cli: RunCli, tmp_path: Path) -> None:
    found = run_cli("calibrate", TABLE, "--device", "a100-80g", "--rows", "0,1", "--out", "mine.json", "--json")
    assert json.loads(found.stdout) == json.loads((tmp_path / "mine.json").read_text(encoding="utf-8"))


def test_validate_leaves_its_rows_out_whatever_table_they_stand_in(run_cli: RunCli, tmp_path: Path) -> None:
    run_cli("calibrate", TABLE, "--device", "a100-80g", "--rows", "0,2", "--out", "mine.json")
    lines = TABLE.read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "turned.csv").write_text("".join([lines[0], *reversed(lines[1:])]), encoding="utf-8")
    (table,) = json.loads(run_cli("validate", "turned.csv", "--calibration", "mine.json", "--json").stdout)["tables"]
    assert (table["calibrated_on"], table["time"]["rows"]) == (2, 6)
    assert [part["row"] for part in table["predictions"] if part["calibrated_on"]] == [5, 7]


def test_a_job_that_names_it_is_simulated_with_it(run_cli: RunCli, tmp_path: Path) -> None:
    run_cli(
        "calibrate", TABLE, "--device", "a100-80g", "--rows", "0", "--free", "matrix", "--out", "mine.json",
        "--set", "memory_fraction=0.3",
    )  # fmt: skip
    model = {"num_layers": 4, "hidden_size": 1024, "ffn_size": 4096, "num_heads": 16, "norm": "rms"}
    job = {
        "model": {"text": {"vocab_size": 32000, "layers": model}},
        "cluster": {"num_nodes": 1, "devices_per_node": 4, "device": "a100-80g"},
        "workload": {"global_batch_size": 8, "seq_length": 1024},
    }
    plan = {
        "parallel_config": {"PP": 2, "TP": 2, "DP": 1, "MBS": 1},
        "layer_placement": {"vit_layer_placement": [0, 0], "llm_layer_placement": [2, 2]},
        "layer_recompute": {"vit_layer_recompute": [0, 0], "llm_layer_recompute": [0, 0]},
    }
    (tmp_path / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    steps = []
    for calibration in (None, "mine.json"):
        document = job | ({"calibration": calibration} if calibration else {})
        (tmp_path / "job.json").write_text(json.dumps(document), encoding="utf-8")
        found = run_cli("simulate", "job.json", "--config", "plan.json", "--json")
        assert found.returncode == 0, found.stderr
        steps.append(json.loads(found.stdout))
    assert steps[1]["e2e_time"] > 1.5 * steps[0]["e2e_time"]
    assert steps[0]["calibration"].startswith("calibration a100-80g, megatron-lm")
    assert steps[1]["calibration"].startswith("calibration mine, megatron-lm")
    for step in steps:
        assert step["step_ms_low"] < step["e2e_time"] < step["step_ms_high"]
    text = run_cli("simulate", "job.json", "--config", "plan.json").stdout
    assert "expected between" in text
    assert "calibration mine" in text


_SOON_MADE = ("a100-80g", "a100-80g.internevo")
"""In seconds each; a change of operators that asks for new fits shows in them."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        name if name in _SOON_MADE else pytest.param(name, marks=pytest.mark.nightly)
        for name in sorted(shipped_calibrations())
    ],
)
def test_a_shipped_one_is_what_its_command_makes(run_cli: RunCli, tmp_path: Path, name: str) -> None:
    """Also where operators have changed since: then they need to be fitted again."""
    shipped = shipped_calibrations()[name]
    _, verb, table, *options = shlex.split(shipped.command)
    beside = [f"{TABLES}/{word}" if ".csv" in word else word for word in options]
    found = run_cli(verb, TABLES / table, *beside)
    assert found.returncode == 0, found.stderr
    again = read_calibration(tmp_path / f"{name}.json")
    for figure, value in shipped.figures:
        assert (getattr(again.figures, figure) or 0.0) == pytest.approx(value or 0.0, rel=0.03), figure
    assert again.sources == shipped.sources


REFUSED = {
    "rows that are no numbers": (["--rows", "0,two"], "--rows is '0,two', and 'two' is no row"),
    "a row that is not there": (["--rows", "99"], "--rows names row 99, which has no step time of a100-80g"),
    "another device": (
        ["--device", "b200-192g"],
        "no row with a step time is of b200-192g; the devices there are: a100",
    ),
    "a device twice": (["--device", "a100-80g,a100-80g"], "--device is 'a100-80g,a100-80g'; a name is expected, or"),
    "several, of which none has a row": (
        ["--device", "b200-192g,h100-80g"],
        "no row with a step time is of b200-192g, h100-80g; the devices there are: a100",
    ),
    "another stack": (["--software", "nemo"], "--software is 'nemo', and the rows are of megatron-lm"),
    "no figure": (["--free", "matrx"], "'matrx' cannot be fitted (did you mean \"matrix\"?)"),
    "no value": (["--set", "memory_fraction"], "'memory_fraction' is no FIGURE=VALUE (no `=`)"),
    "no second table": (["--also", "0,1"], "--also is '0,1', and `TABLE.csv:0,3` is expected"),
    "a name that is none": (["--name", "n" * 201], "the name has 201 letters; 1 to 200 are expected"),
    "no base": (["--base", "nothing.json"], "--base is 'nothing.json', which is neither a shipped calibration nor"),
}


@pytest.mark.parametrize("what", sorted(REFUSED))
def test_what_is_wrong_is_said_in_a_paragraph(run_cli: RunCli, tmp_path: Path, what: str) -> None:
    options, words = REFUSED[what]
    found = run_cli("calibrate", TABLE, "--device", "a100-80g", "--rows", "0", "--out", "mine.json", *options)
    assert (found.returncode, found.stdout) == (2, "")
    assert words in found.stderr
    assert found.stderr.count("\n") == 1
    assert not (tmp_path / "mine.json").exists()


def test_a_malformed_table_names_row_and_column(run_cli: RunCli, tmp_path: Path) -> None:
    text = TABLE.read_text(encoding="utf-8")
    (tmp_path / "bad.csv").write_text(text.replace(",s,1.1,", ",fortnights,1.1,"), encoding="utf-8")
    found = run_cli("calibrate", "bad.csv", "--device", "a100-80g", "--out", "mine.json")
    assert (found.returncode, found.stdout) == (2, "")
    assert "row 1 (line 3), column unit" in found.stderr
