"""A job without a file: `plan --model` and `init` on every Hugging Face fixture and every named model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mm_autoparallel.cli.job_words import PATH, describe_flags
from mm_autoparallel.cli.main import main
from mm_autoparallel.cli.parser import build_parser
from mm_autoparallel.integrations.huggingface import generic as huggingface_generic
from mm_autoparallel.measurements.models import _NAMED
from mm_autoparallel.model.readers.job_file import read_job
from mm_autoparallel.planner.plan import RESULT_FILE
from mm_autoparallel.planner.search.space import list_space

FIXTURES = Path(__file__).parents[1] / "fixtures" / "huggingface"
CONFIGS = sorted(path for path in FIXTURES.glob("*.json") if path.name != "parameters.json")
FLAGS = ["--nodes", "16", "--device", "h100-80g", "--gbs", "512", "--seq", "4096"]
SMALL = ["--nodes", "1", "--device", "h200-141g", "--gbs", "16", "--seq", "1024"]


def parse(*flags: object) -> object:
    arguments = build_parser().parse_args(["plan", *map(str, flags)])
    return describe_flags(arguments).parse(PATH)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_init_writes_the_job_that_plan_would_plan(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(["init", "--model", str(path), *FLAGS, "--out", str(tmp_path / "job.yaml")]) == 0
    written, direct = read_job(tmp_path / "job.yaml"), parse("--model", path, *FLAGS)
    assert written.sha256 == direct.sha256  # type: ignore[attr-defined]
    assert written.search == direct.search  # type: ignore[attr-defined]
    assert any(entry.reason is None for entry in list_space(written))


@pytest.mark.parametrize("name", ["llama3-70b", "deepseek-v3"])
def test_a_name_is_a_model_too(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert name in _NAMED
    monkeypatch.chdir(tmp_path)
    more = ["--max-vpp", "2", "--set", "search.tp=[1, 2]", "--set", "workload.stack=megatron-te"]
    assert main(["init", "--model", name, *FLAGS, *more]) == 0
    written, direct = read_job(Path("job.yaml")), parse("--model", f"somebody/{name.upper()}", *FLAGS, *more)
    assert (written.sha256, written.search) == (direct.sha256, direct.search)  # type: ignore[attr-defined]
    assert (written.search.tp, written.search.max_vpp, written.workload.stack) == ((1, 2), 2, "megatron-te")


def test_what_is_there_is_never_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text("mine")
    assert main(["init", "--model", "llama3-8b", *SMALL]) == 2
    assert "stays as it is" in capsys.readouterr().err
    assert Path("job.yaml").read_text() == "mine"


def test_a_model_is_planned_without_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    few = ["--set", "search.pp=[2]", "--set", "search.tp=[4]", "--set", "search.mbs=[1]"]
    assert main(["plan", "--model", "qwen2-7b", *SMALL, *few, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert sum(document["layer_placement"]["llm_layer_placement"]) == 28
    assert Path(RESULT_FILE).exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model", "llama9-70b", *SMALL], 'did you mean "llama3-70b"'),
        (["--model", "llama3-8b", *SMALL, "--device", "h10-80g"], 'did you mean "h100-80g"'),
        (["--model", "llama3-8b", *SMALL, "--set", "serach.tp=[1]"], 'did you mean "search"'),
        (["--model", "llama3-8b", *SMALL, "--set", "workload.stak=mindspeed"], 'did you mean "stack"'),
        (["--model", "llama3-8b", *SMALL, "--set", "search.tp=[1"], "--set search.tp=[1"),
        (["--model", "llama3-8b", *SMALL, "--set", "search"], "KEY=VALUE is expected"),
        (["--model", "llama3-8b", "--device", "h100-80g", "--seq", "8"], "--gbs is missing"),
        (["--model", "llama3-8b", "--gbs", "8", "--seq", "8"], "--device is missing"),
        (["--model", "llama3-8b", *SMALL, "--cluster", "job.yaml"], "both say what the cluster is"),
        (["--model", "llama3-8b", *SMALL, "--overwrite"], "--overwrite goes with --script"),
        (["job.yaml", "--gbs", "8"], "--gbs goes with --model"),
        (["job.yaml", "--device", "h100-80g"], "--device goes with --script or --model"),
        (["job.yaml", "--model", "llama3-8b"], "give one of the three"),
        (["--mdel", "llama3-8b"], 'did you mean "--model"'),
        ([], "give one of the three"),
    ],
)
def test_what_is_wrong_is_a_paragraph(
    flags: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *flags]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert words in err
    assert not list(tmp_path.iterdir())


def test_an_unknown_family_is_told_the_nearest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_generic, "find_spec", lambda name: None)
    Path("config.json").write_text('{"model_type": "qwen2_vll"}')
    assert main(["plan", "--model", "config.json", *SMALL]) == 2
    assert 'did you mean "qwen2_vl"' in capsys.readouterr().err


def test_a_mistyped_verb_is_told_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulat"]) == 2
    assert 'did you mean "simulate"' in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_fixture_is_planned(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    limits = ["--set", "search.mbs=[1]", "--time-limit", "60"]
    assert main(["plan", "--model", str(path), "--nodes", "64", *FLAGS[2:], *limits]) == 0
    assert json.loads(Path(RESULT_FILE).read_text())["e2e_time"] > 0
