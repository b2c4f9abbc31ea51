"""`explain` as a user runs it: on a plan alone, against others, and on what it refuses."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from mm_autoparallel.cli.main import main
from mm_autoparallel.model.job.job import SearchSpace

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def job(repository: Path) -> Path:
    return repository / "examples" / "qwen2vl_7b_h200" / "job.yaml"


@pytest.fixture
def plan(tmp_path: Path) -> Callable[[str, int, int], Path]:
    """Writes a plan of 64 devices with one stage, TP and MBS as given."""

    def write(name: str, tp: int, mbs: int) -> Path:
        document = {
            "parallel_config": {"PP": 1, "TP": tp, "DP": 64 // tp, "MBS": mbs},
            "layer_placement": {"vit_layer_placement": [32], "llm_layer_placement": [28]},
            "layer_recompute": {"vit_layer_recompute": [0], "llm_layer_recompute": [0]},
        }
        (tmp_path / name).write_text(json.dumps(document))
        return tmp_path / name

    return write


def test_plans_against_each_other(run_cli: Run, job: Path, plan: Callable[[str, int, int], Path]) -> None:
    first, second = plan("a.json", 1, 1), plan("b.json", 2, 1)
    done = run_cli("explain", job, "--config", first, "--config", second, "--why-not", "PP=2,TP=1,MBS=1", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["schema"] == "mm-autoparallel/explanation/1"
    assert [one["name"] for one in found["plans"]] == [str(first), str(second)]
    step_ms = found["plans"][0]["e2e_time"]
    layer = found["sources"][0]
    assert (layer["name"], layer["at"]["point"]["tp"], layer["time_source"]) == ("text_layer", 1, "analytic")
    low_ms, high_ms = layer["plans"][0]["step_ms_low"], layer["plans"][0]["step_ms_high"]
    assert low_ms < step_ms < high_ms
    assert layer["plans"][0]["elasticity"] == pytest.approx((high_ms - low_ms) / (0.1 * step_ms))
    assert layer["plans"][1]["elasticity"] == 0
    path = found["critical_path"]
    on_path_ms = sum(one["time_ms"] for one in path["stages"]) + path["transfers_ms"] + path["tail_ms"]
    assert on_path_ms == pytest.approx(step_ms)
    (rival,) = found["rivals"]
    assert rival["difference_ms"] == pytest.approx(found["plans"][1]["e2e_time"] - step_ms)
    assert f"`mm-autoparallel profile {job} --tp" in rival["settling"][0]["run"]
    assert found["why_not"]["asked"] == {"pp": 2, "tp": 1, "mbs": 1}
    assert found["why_not"]["plan"]["parallel_config"]["PP"] == 2


def test_a_person_reads_where_the_step_goes(run_cli: Run, job: Path, plan: Callable[[str, int, int], Path]) -> None:
    done = run_cli("explain", job, "--config", plan("a.json", 2, 1), "--top-k", "2", "--time-limit", "20")
    assert done.returncode == 0, done.stderr
    for words in (
        "the longest path",
        "memory does not hold it back",
        "what the step owes to",
        "text_layer",
        "number 1 of a search",
        "plan 2 is",
        "mm-autoparallel profile",
    ):
        assert words in done.stdout, words


def test_shares_that_bend_within_the_change_are_told(run_cli: Run, repository: Path, tmp_path: Path) -> None:
    """Two stages that take nearly as long: five per cent of one source make the other the longest."""
    path = tmp_path / "plan.json"
    document = {
        "parallel_config": {"PP": 2, "TP": 1, "DP": 8, "MBS": 1, "EP": 8},
        "layer_placement": {"llm_layer_placement": [15, 12]},
        "layer_recompute": {"llm_layer_recompute": [0, 0]},
    }
    path.write_text(json.dumps(document))
    done = run_cli("explain", repository / "examples" / "moonlight_16b" / "job.yaml", "--config", path)
    assert done.returncode == 0, done.stderr
    told = r"the shares of plan 1 add up to 9\d\.\d %: within 5\.0 % another path becomes the longest"
    assert re.search(told, done.stdout)


def test_what_it_refuses(run_cli: Run, repository: Path, job: Path, plan: Callable[[str, int, int], Path]) -> None:
    path = plan("a.json", 1, 1)
    done = run_cli("explain", job, "--config", path, "--why-not", "QP=4")
    assert (done.returncode, done.stdout) == (2, "")
    assert "'QP=4' names no size of a strategy" in done.stderr
    other = repository / "examples" / "moonlight_16b" / "job.yaml"
    done = run_cli("explain", other, "--config", path)
    assert done.returncode == 2
    assert f"plan {path}: parallel_config does not fit the job" in done.stderr
    assert run_cli("explain", job).returncode == 2


def test_the_variables_of_a_plan_are_listed(capsys: pytest.CaptureFixture[str], repository: Path) -> None:
    """Every field of a strategy and every limit of a search is one of them, or says how plans are chosen."""
    job = str(repository / "examples" / "moonlight_16b" / "job.yaml")
    assert main(["explain", job, "--space", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["variables"]
    by_place = {one["where"]: one for one in found}
    assert by_place["search.ep"] == {
        "name": "expert parallel size",
        "where": "search.ep",
        "values": "1, 2, 4, 8",
        "searched": True,
    }
    assert not by_place["search.zero"]["searched"]
    assert len(found) >= 30
    limits = {f"search.{name}" for name in SearchSpace.model_fields}
    how = {"failure_price", "fit_probability", "choice", "objective"}
    assert limits - set(by_place) == {f"search.{name}" for name in how}


@pytest.mark.parametrize(
    ("words", "told"),
    [((), "--config PLAN.json is missing"), (("--space", "--why-not", "PP=2"), "leave out --why-not")],
)
def test_what_does_not_go_together_is_said(
    words: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str], repository: Path
) -> None:
    job = str(repository / "examples" / "moonlight_16b" / "job.yaml")
    assert main(["explain", job, *words]) == 2
    assert told in capsys.readouterr().err
