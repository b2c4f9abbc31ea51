"""`validate` as a user runs it: its document, its text, its refusals, with the published tables."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TABLES = Path(__file__).parents[2] / "examples" / "published_measurements"

RunCli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def tables() -> list[Path]:
    """All published tables but the one that has more rows than the others together."""
    return sorted(set(TABLES.glob("*.csv")) - {TABLES / "vtrain_single.csv"})


@pytest.mark.nightly
def test_all_published_tables_as_one_document(run_cli: RunCli, tables: list[Path]) -> None:
    found = run_cli("validate", *tables, "--json")
    assert found.returncode == 0, found.stderr
    document: dict[str, Any] = json.loads(found.stdout)
    assert [table["file"] for table in document["tables"]] == [path.name for path in tables]
    for table in document["tables"]:
        assert len(table["predictions"]) + len(table["refused"]) == table["rows"]
        assert all(set(refusal) == {"row", "reason"} for refusal in table["refused"])
        for part in filter(None, (table["time"], table["memory"])):
            keys = {"rows", "mean_abs_pct", "bias_pct", "median_abs_pct", "p95_abs_pct", "worst", "pairs_ordered_pct"}
            assert keys <= set(part)
            assert set(part["worst"]) == {"row", "error_pct"}
            assert abs(part["bias_pct"]) <= part["mean_abs_pct"] <= abs(part["worst"]["error_pct"])
            assert part["median_abs_pct"] <= part["p95_abs_pct"] <= abs(part["worst"]["error_pct"])
        timed = [part for part in table["predictions"] if part["measured_ms"] is not None]
        left_out = [part for part in timed if part["calibrated_on"]]
        assert (table["time"]["rows"] if table["time"] else 0) == len(timed) - len(left_out)
        for part in table["predictions"]:
            keys = {"row", "measured_ms", "predicted_ms", "measured_bytes", "predicted_bytes", "calibration"}
            assert keys <= set(part)
            assert part["calibration"]
            assert part["source"]
            low_ms, high_ms = part["interval_ms"]
            assert low_ms <= part["predicted_ms"] <= high_ms
    outcomes = {table["file"]: table["oom"] for table in document["tables"]}
    assert outcomes["sc21.csv"] is None
    assert set(outcomes["megatron_bridge.csv"]) == {"right", "missed", "false"}
    assert outcomes["megatron_bridge.csv"]["missed"] == 0


def test_errors_of_the_document_are_those_of_its_rows(run_cli: RunCli) -> None:
    (table,) = json.loads(run_cli("validate", TABLES / "simumax_b200.csv", "--json").stdout)["tables"]
    errors = [part["predicted_bytes"] / part["measured_bytes"] - 1 for part in table["predictions"]]
    assert table["memory"]["bias_pct"] == pytest.approx(100 * sum(errors) / len(errors), abs=1e-3)
    worst = max(range(len(errors)), key=lambda index: abs(errors[index]))
    assert table["memory"]["worst"] == {"row": worst, "error_pct": pytest.approx(100 * errors[worst], abs=1e-3)}


def test_the_text_has_a_line_for_each_row_and_each_score(run_cli: RunCli, tmp_path: Path) -> None:
    header, *rows = (TABLES / "torchtitan.csv").read_text(encoding="utf-8").splitlines()
    few = [*rows[14:16], rows[0].replace("FSDP8", "PP8"), *rows[14:16]]
    (tmp_path / "few.csv").write_text("\n".join([header, *few]) + "\n", encoding="utf-8")
    found = run_cli("validate", TABLES / "megatron_bridge.csv", tmp_path / "few.csv")
    assert found.returncode == 0, found.stderr
    lines = found.stdout.splitlines()
    assert sum("Moonlight-16B, recompute" in line for line in lines) == 6
    refusals = [line.split(" refused: ") for line in lines if " refused: " in line]
    assert [refusals[0][0], refusals[0][1][:11]] == ["  rows 0 to 1, 3 to 4", "the row has"]
    assert "row 2" in " ".join(rows for rows, _ in refusals)
    scores = lines[lines.index(next(line for line in lines if line.startswith("predicted / measured - 1"))) :]
    assert any(line.startswith("megatron_bridge.csv") and "step time" in line for line in scores)
    assert any(line.startswith("few.csv") and "nothing scored" in line for line in scores)


def test_a_device_without_a_calibration_says_so(run_cli: RunCli, tmp_path: Path) -> None:
    text = (TABLES / "korthikanti2022.csv").read_text(encoding="utf-8")
    (tmp_path / "h200.csv").write_text(text.replace("A100-80GB (Selene)", "h200-141g"), encoding="utf-8")
    (table,) = json.loads(run_cli("validate", tmp_path / "h200.csv", "--json").stdout)["tables"]
    for part in table["predictions"]:
        assert part["calibration"] == "uncalibrated"
        low_ms, high_ms = part["interval_ms"]
        assert high_ms / low_ms > 1.4


def test_a_calibration_of_ones_own(run_cli: RunCli, repository: Path, package: Path, tmp_path: Path) -> None:
    shipped = package / "model" / "profiles" / "calibrations" / "a100-80g.json"
    document = json.loads(shipped.read_text(encoding="utf-8"))
    document["name"] = "mine"
    document["figures"]["matrix_fraction"] /= 2
    (tmp_path / "mine.json").write_text(json.dumps(document), encoding="utf-8")
    tables = (TABLES / "korthikanti2022.csv", TABLES / "simumax_b200.csv")
    before = json.loads(run_cli("validate", *tables, "--json").stdout)["tables"]
    after = json.loads(run_cli("validate", *tables, "--calibration", tmp_path / "mine.json", "--json").stdout)["tables"]
    for old, new in zip(before[0]["predictions"], after[0]["predictions"], strict=True):
        assert new["calibration"] == "mine"
        assert new["predicted_ms"] > 1.2 * old["predicted_ms"]
    assert before[1] == after[1]  # of another device


def test_a_malformed_table_is_reported_and_the_others_go_on(run_cli: RunCli, tmp_path: Path) -> None:
    text = (TABLES / "sc21.csv").read_text(encoding="utf-8")
    (tmp_path / "bad.csv").write_text(text.replace(",3.696,", ",soon,"), encoding="utf-8")
    (tmp_path / "other.csv").write_text("speed\n1\n", encoding="utf-8")
    found = run_cli("validate", tmp_path / "bad.csv", TABLES / "sc21.csv", tmp_path / "other.csv", "--json")
    assert found.returncode == 2
    bad, other = found.stderr.splitlines()
    assert f'table {tmp_path / "bad.csv"}: row 1 (line 3), column derived_iter_s: "soon" is no number' in bad
    assert "none of its columns" in other
    document = json.loads(found.stdout)
    assert [table["file"] for table in document["tables"]] == ["sc21.csv"]
    assert [(one["file"], one["reason"] in found.stderr) for one in document["unreadable"]] == [
        ("bad.csv", True),
        ("other.csv", True),
    ]


def test_choices_come_first_and_rows_only_where_they_are_few(run_cli: RunCli) -> None:
    few = run_cli("validate", TABLES / "sc21.csv").stdout.splitlines()
    assert few[0] == "nothing to choose between: no job here ran in four layouts or more"
    many = run_cli("validate", TABLES / "vtrain.csv", TABLES / "sc21.csv").stdout.splitlines()
    assert many[0].startswith("regret: ")
    assert [line.split()[1] for line in many[2:4]] == ["uncalibrated", "calibrated"]
    assert [line.split()[2] for line in many[4:6]] == ["uncalibrated", "calibrated"]
    assert all(line.startswith("all tables") for line in many[4:6])
    assert not [line for line in many if "GPT 39.1B TP2 DP32 PP8 MBS2" in line]
    assert any("outliers aside" in line for line in many)
    all_rows = run_cli("validate", TABLES / "vtrain.csv", "--rows").stdout.splitlines()
    assert any("GPT 39.1B TP2 DP32 PP8 MBS2" in line for line in all_rows)
    assert any("what is picked" in line for line in all_rows)


def test_every_row_is_scored_by_assumed_figures_too(run_cli: RunCli) -> None:
    document = json.loads(run_cli("validate", TABLES / "vtrain.csv", "--json").stdout)
    (table,) = document["tables"]
    assert (table["uncalibrated"]["rows"], table["calibrated"]["rows"]) == (73, 54)
    assert table["uncalibrated"]["time"]["mean_abs_pct"] != table["calibrated"]["time"]["mean_abs_pct"]
    assert table["calibrated"]["time"]["mean_abs_pct"] == table["time"]["mean_abs_pct"]
    errors = [part["uncalibrated_ms"] / part["measured_ms"] - 1 for part in table["predictions"]]
    bias = table["uncalibrated"]["time"]["bias_pct"]
    assert bias == pytest.approx(100 * sum(errors) / len(errors), abs=1e-3)
    by_size = table["uncalibrated"]["bias_by"]["parameters"]
    assert {size: part["rows"] for size, part in by_size.items()} == {"3 to 10 B": 26, "30 to 100 B": 47}
    # sizes of TP and vocabularies padded for them are one choice: two models, two decisions
    for kind in ("uncalibrated", "calibrated"):
        assert table[kind]["decisions"]["groups"] == document["decisions"][kind]["groups"] == 2
        assert table[kind]["interval"]["covered_pct"] > 80


def test_a_table_that_is_not_there(run_cli: RunCli) -> None:
    found = run_cli("validate", "none.csv")
    assert (found.returncode, found.stdout) == (2, "")
    assert "table none.csv: there is no such file" in found.stderr
