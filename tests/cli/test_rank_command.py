"""`rank`: candidates joined with what was profiled of them, each with its best pipeline, in order; no gaps filled."""

from __future__ import annotations

import csv
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]

EXAMPLE = Path(__file__).parents[2] / "examples" / "mindformers" / "pretrain_deepseek3.yaml"
HEADER = "dp,tp,pp,ep,dmratio,bfratio,re_grow_ration,hratio,moe_bw\n"
ROWS = ("4,4,8,16,0.7,1.6,0.25,1.5,3.0\n", "8,4,4,32,0.7,1.6,0.25,1.5,3.0\n", "4,8,4,16,0.7,1.6,0.25,1.5,2.0\n")


@pytest.fixture
def candidates(tmp_path: Path) -> Path:
    """Three candidates of 128 devices, of which the last does not fit, in the folder `yamls`."""
    folder = tmp_path / "yamls"
    folder.mkdir()
    for dp, tp, pp, ep in ((4, 4, 8, 16), (8, 4, 4, 32), (4, 8, 4, 16)):
        text = EXAMPLE.read_text(encoding="utf-8")
        for key, old, new in (
            ("data_parallel: &dp", 4, dp),
            ("model_parallel:", 4, tp),
            ("pipeline_stage:", 8, pp),
            ("expert_parallel:", 16, ep),
        ):
            assert f"  {key} {old}\n" in text
            text = text.replace(f"  {key} {old}\n", f"  {key} {new}\n", 1)
        (folder / f"DP{dp}_TP{tp}_PP{pp}_EP{ep}_pretrain.yaml").write_text(text, encoding="utf-8")
    (tmp_path / "profiles.csv").write_text(HEADER + "".join(ROWS))
    return tmp_path


def test_candidates_are_sorted_by_their_steps(run_cli: Run, candidates: Path) -> None:
    arguments = ("rank", "--yaml_path", "yamls", "--parser_result", "profiles.csv", "--gbs", "256", "--json")
    result = run_cli(*arguments)
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    first, second, last = document["candidates"]
    assert (first["dp"], second["dp"]) == (8, 4)
    assert first["cost"] < second["cost"]
    assert (last["tp"], last["status"], last["cost"]) == (8, "infeasible", None)
    assert "memory" in last["reason"]
    assert first["pp_interleave_num"] > 1
    for row in (first, second):
        assert row["status"] == "optimal"
        assert row["gap"] <= 1e-5
        assert len(row["offset"]) == row["pp_interleave_num"]
        assert sum(map(sum, row["offset"])) == 30 % (row["pp"] * row["pp_interleave_num"])
        assert row["peakMem"] <= 58 * 1024
    (table,) = (candidates / "pipeline_output").glob("test_result_??????????????.csv")
    assert document["table"] == str(table.relative_to(candidates))
    with table.open() as stream:
        read = list(csv.DictReader(stream))
    assert [row["dp"] for row in read] == ["8", "4", "4"]
    assert json.loads(read[0]["recompute"]) == first["recompute"]


def test_a_step_is_as_long_as_its_layers(run_cli: Run, candidates: Path) -> None:
    """Twice the time of a layer, twice the step; the place that a candidate takes follows."""
    (candidates / "profiles.csv").write_text(HEADER + ROWS[0] + ROWS[1].replace(",3.0", ",6.5") + ROWS[2])
    result = run_cli("rank", "--yaml_path", "yamls", "--parser_result", "profiles.csv", "--gbs", "256", "--json")
    assert [row["dp"] for row in json.loads(result.stdout)["candidates"]] == [4, 8, 4]


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (HEADER + ROWS[0] + ROWS[1], ["no profile of DP4_TP8_PP4_EP16"]),
        (HEADER + "".join(ROWS) + "2,2,2,2,1,1,1,1,1\n", ["DP2_TP2_PP2_EP2", "no YAML"]),
        (HEADER + "".join(ROWS) + ROWS[0], ["line 5", "DP4_TP4_PP8_EP16 a second time"]),
        (HEADER + ROWS[0].replace("0.7", "-0.7"), ["line 2", "dmratio"]),
        (HEADER + ROWS[0].replace("3.0", ""), ["line 2", "moe_bw"]),
        (HEADER + ROWS[0].replace("3.0", "1.7976931348623157e308"), ["line 2", "moe_bw", "from 1e-09 to 1e+09"]),
        (HEADER + ROWS[0].replace("4,4,", "4,4.5,", 1), ["line 2", "column tp"]),
        (HEADER + "1,2\n", ["(line 2) has 2 cells and the header has 9 columns"]),
        (HEADER.replace("hratio", "h_ratio") + ROWS[0], ["h_ratio", "hratio"]),
        (HEADER, ["no rows"]),
        ("", ["empty"]),
    ],
)
def test_a_table_with_gaps_or_mistakes_is_refused(run_cli: Run, candidates: Path, table: str, words: list[str]) -> None:
    (candidates / "profiles.csv").write_text(table)
    result = run_cli("rank", "--yaml_path", "yamls", "--parser_result", "profiles.csv", "--gbs", "256")
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    for word in words:
        assert word in result.stderr
    assert not (candidates / "pipeline_output").exists()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--gbs", "100"], ["data_parallel", "100"]),
        (["--nd_path", "nowhere.csv"], ["nowhere.csv"]),
        (["--yaml_path", "nowhere"], ["nowhere", "no YAML files"]),
        (["--mindformers_dir", "nowhere"], ["nowhere"]),
        (["--solver_name", "SCIP"], ["SCIP", "HIGHS"]),
    ],
)
def test_wrong_options_are_named(run_cli: Run, candidates: Path, more: list[str], words: list[str]) -> None:
    result = run_cli("rank", "--yaml_path", "yamls", "--parser_result", "profiles.csv", "--gbs", "256", *more)
    assert result.returncode == 2
    for word in words:
        assert word in result.stderr


def test_candidates_are_those_of_the_search(run_cli: Run, candidates: Path) -> None:
    (candidates / "nd.csv").write_text("dp,tp,pp,ep,peakMem\n4,4,8,16,50000\n8,4,4,32,50000\n")
    arguments = (
        "rank",
        "--yaml_path",
        "yamls",
        "--parser_result",
        "profiles.csv",
        "--gbs",
        "256",
        "--nd_path",
        "nd.csv",
    )
    result = run_cli(*arguments)
    assert result.returncode == 2
    assert "DP4_TP8_PP4_EP16 is not in the candidate table" in result.stderr
    # of all that the search lists some are profiled
    (candidates / "nd.csv").write_text("dp,tp,pp,ep,peakMem\n4,4,8,16,1\n8,4,4,32,1\n4,8,4,16,1\n1,1,1,1,1\n")
    assert run_cli(*arguments).returncode == 0


def test_profile_data_is_read_where_there_is_no_table(run_cli: Run, candidates: Path) -> None:
    result = run_cli("rank", "--yaml_path", "yamls", "--gbs", "256")
    assert result.returncode == 2
    assert "profile_data: there is no such folder" in result.stderr
    (candidates / "profile_data" / "DP4_TP4_PP8_EP16").mkdir(parents=True)
    result = run_cli("rank", "--yaml_path", "yamls", "--gbs", "256")
    assert result.returncode == 2
    assert "DP4_TP4_PP8_EP16: the YAML that was profiled is not there" in result.stderr


@pytest.mark.nightly
def test_highs_ranks_as_well(run_cli: Run, candidates: Path) -> None:
    for path in (candidates / "yamls").glob("DP4_*.yaml"):
        path.unlink()
    (candidates / "profiles.csv").write_text(HEADER + ROWS[1])
    arguments = ("rank", "--yaml_path", "yamls", "--parser_result", "profiles.csv", "--gbs", "64", "--json")
    (ours,) = json.loads(run_cli(*arguments).stdout)["candidates"]
    result = run_cli(*arguments, "--solver_name", "HIGHS", "--time-limit", "2")
    assert result.returncode == 0, result.stderr
    (theirs,) = json.loads(result.stdout)["candidates"]
    assert theirs["cost"] == pytest.approx(ours["cost"], rel=1e-3)
    assert list((candidates / "pipeline_output").glob("DP8_TP4_PP4_EP32_VP*.mps"))


def test_nothing_that_fits_is_no_success(run_cli: Run, candidates: Path) -> None:
    for path in (candidates / "yamls").glob("*.yaml"):
        path.write_text(path.read_text().replace('"58GB"', '"20GB"'))
    result = run_cli("rank", "--yaml_path", "yamls", "--parser_result", "profiles.csv", "--gbs", "256")
    assert result.returncode == 3
    assert result.stdout.count("infeasible") == 3
