"""`mm-autoparallel data stats`, and what commands tell of jobs whose samples differ."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_qwen2vl import CLUSTER, CONFIG

from mm_autoparallel.api import read_plan, report
from mm_autoparallel.api.jobs import read_job
from mm_autoparallel.cli.main import main

LINES = [{"patches": [64] * (number % 3), "text_tokens": 40 + 20 * number} for number in range(12)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job whose samples lie in a file beside it."""
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(CONFIG))
    Path("samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    workload = {"global_batch_size": 16, "samples": {"file": "samples.jsonl", "batches": 20}}
    job = {"model": "config.json", "cluster": CLUSTER, "workload": workload, "search": {"pp": [1, 2], "mbs": [1]}}
    Path("job.json").write_text(json.dumps(job))
    return tmp_path


def test_samples_are_counted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["data", "stats", "samples.jsonl", "--job", "job.json", "--out", "compact.jsonl"]
    assert main([*command, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["num_samples"], document["num_kept"]) == (12, 12)
    found = document["statistics"]
    assert {"tokens", "text_tokens", "images", "patches", "vision_ms", "text_ms"} <= found.keys()
    assert found["images"] == {
        "mean": 1.0, "p50": 1.0, "p95": 2.0, "p99": 2.0, "most": 2.0, "spread_fraction": pytest.approx((2 / 3) ** 0.5),
    }  # fmt: skip
    assert found["tokens"]["mean"] == pytest.approx(150 + 16)
    assert found["text_ms"]["spread_fraction"] == pytest.approx(found["tokens"]["spread_fraction"], rel=0.2)
    assert document["sample_cost"]["token_ms"][1] > 0.0
    assert main(command) == 2
    assert "compact.jsonl is there already and stays as it is" in capsys.readouterr().err
    (folder / "compact.jsonl").unlink()
    assert main(command) == 0
    assert "to deal them: SampleCost(image_ms=(" in capsys.readouterr().out.replace("\n", "")
    assert main(["data", "stats", "compact.jsonl"]) == 0
    assert "12 samples" in capsys.readouterr().out
    assert (folder / "compact.jsonl").read_text().count("\n") == 12


def test_a_wrong_line_ends_with_its_place(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "samples.jsonl").write_text('{"text_tokens": 4}\n{"text_tokens": "many"}\n')
    for command in (["data", "stats", "samples.jsonl"], ["plan", "job.json"]):
        assert main(command) == 2
        assert "samples.jsonl: line 2: its text_tokens is" in capsys.readouterr().err


def test_rules_of_the_job_hold_unless_an_option_says_otherwise(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "samples.jsonl").write_text(json.dumps({"width": 280, "height": 280, "text": "x" * 80}) + "\n")
    job = json.loads((folder / "job.json").read_text())
    job["workload"]["samples"] |= {"patch_size": 14, "most_pixels": 28 * 28 * 4, "characters_per_token": 2.0}
    (folder / "job.json").write_text(json.dumps(job))

    def count(*options: str) -> tuple[float, float]:
        assert main(["data", "stats", "samples.jsonl", "--job", "job.json", "--json", *options]) == 0
        found = json.loads(capsys.readouterr().out)["statistics"]
        return found["patches"]["mean"], found["text_tokens"]["mean"]

    assert count() == (16.0, 40.0)
    assert count("--max-pixels", str(28 * 28 * 9), "--characters-per-token", "4") == (36.0, 20.0)
    assert count("--patch-size", "28")[0] == 4.0


def test_a_job_that_waits_for_its_samples(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "samples.jsonl").rename("raw.jsonl")
    command = ["data", "stats", "raw.jsonl", "--job", "job.json", "--out"]
    assert main([*command, "other.jsonl"]) == 2
    assert "sample file samples.jsonl: there is no such file" in capsys.readouterr().err
    assert main([*command, "samples.jsonl", "--json"]) == 0
    waited = json.loads(capsys.readouterr().out)
    assert read_job("job.json").samples is not None
    assert main([*command, "samples.jsonl"]) == 2
    assert "samples.jsonl is there already" in capsys.readouterr().err
    assert main([*command, "other.jsonl", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == waited
    (folder / "samples.jsonl").unlink()
    job = json.loads((folder / "job.json").read_text())
    job["workload"]["seq_length"] = 4096
    (folder / "job.json").write_text(json.dumps(job))
    assert main([*command, "samples.jsonl"]) == 2
    assert "workload.seq_length is 4096, and workload.samples has" in capsys.readouterr().err
    assert not (folder / "samples.jsonl").exists()


def test_samples_are_written_as_lines(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "stats", "samples.jsonl", "--out", "compact.parquet"]) == 2
    assert "--out compact.parquet: a compact sample file is JSONL; name it .jsonl" in capsys.readouterr().err
    assert not (folder / "compact.parquet").exists()
    for told in ("wrote new/one.jsonl, and made its folder\n", "wrote new/two.jsonl\n"):
        assert main(["data", "stats", "samples.jsonl", "--out", told.split()[1].rstrip(",")]) == 0
        assert capsys.readouterr().err.endswith(told)


def test_audio_for_a_model_that_hears_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "samples.jsonl").write_text('{"audio_seconds": [60], "text_tokens": 4}\n')
    for command in (["data", "stats", "samples.jsonl", "--job", "job.json"], ["plan", "job.json"]):
        assert main(command) == 2
        assert "the samples have 1 audios, and the model has no encoder of audios" in capsys.readouterr().err


@pytest.mark.usefixtures("folder")
def test_plans_tell_their_step_over_drawn_batches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "job.json", "--set", "search.objective=mean", "--out", "planned"]) == 0
    told = capsys.readouterr().out
    assert "over 20 drawn batches (arrival order): mean" in told
    assert "ranked by the mean of steps over drawn batches" in told
    assert "by its step of mean samples" in told
    (plan,) = Path("planned").glob("*.json")
    ranked = json.loads(plan.read_text())["step_over_batches"]
    assert ranked["ranking"]["rank_lower_bound_ms"] <= ranked["mean_ms"] <= ranked["p95_ms"] <= ranked["p99_ms"]
    assert main(["simulate", "job.json", "--config", str(plan), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)["step_over_batches"]
    assert again == {key: value for key, value in ranked.items() if key != "ranking"}
    job = read_job("job.json")
    page = report(job, read_plan(plan, job), search=False).report
    assert page.job.facts[-1].startswith("given over 20 drawn batches (arrival order): mean ")
