"""nd-search → rank → pipeline-search, as its page has it: each tells the next command, the last leaves a YAML."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mm_autoparallel.cli.main import main
from mm_autoparallel.integrations.mindformers.layout import read_layout
from mm_autoparallel.integrations.mindformers.pretrain_yaml import read_pretrain

EXAMPLES = Path(__file__).parents[2] / "examples" / "mindformers"
COLUMNS = "dp,tp,pp,ep,dmratio,bfratio,re_grow_ration,hratio,moe_bw"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command line in this process, in an empty folder: exit code, output, what was told."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(list(arguments))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def next_command(told: str) -> list[str]:
    (line,) = (line for line in told.splitlines() if "then: mm-autoparallel " in line)
    return shlex.split(line.partition("then: mm-autoparallel ")[2])


def test_the_three_steps_end_with_a_yaml_that_runs(run: Run, tmp_path: Path) -> None:
    shutil.copy(EXAMPLES / "pretrain_deepseek3.yaml", tmp_path)
    source = (tmp_path / "pretrain_deepseek3.yaml").read_text(encoding="utf-8")
    narrow = ("--tp", "4", "--pp", "4", "8", "--parallel_num", "1")
    code, _, told = run("nd-search", "--yaml_path", "pretrain_deepseek3.yaml", "--gbs", "128", *narrow)
    assert code == 0, told
    assert "--parser_result" in told
    rank = next_command(told)
    assert rank[0] == "rank"

    code, _, told = run(*rank)
    assert code == 2
    assert "profile_data: there is no such folder" in told
    assert "--parser_result" in told
    yamls = sorted((tmp_path / "output" / "nd_output" / "dryrun_yaml").iterdir())
    names = [path.stem for path in yamls]
    assert len(names) > 1
    rows = [",".join([*re.findall("[0-9]+", name), "0.7,1.6,0.25,1.5,3.0"]) for name in names]
    (tmp_path / "table.csv").write_text("\n".join([COLUMNS, "1,1,1,1,1,1,1,1,1"]) + "\n")
    code, _, told = run(*rank, "--parser_result", "table.csv")
    assert code == 2
    assert all(name in told for name in names)  # every one that is missing, at once
    (tmp_path / "table.csv").write_text("\n".join([COLUMNS, *rows]) + "\n")
    code, out, told = run(*rank, "--parser_result", "table.csv", "--time-limit", "5")
    assert code == 0, told

    evaluate = next_command(told)
    assert evaluate[0] == "pipeline-search"
    best = Path(evaluate[evaluate.index("-yaml") + 1])
    pretrain = read_pretrain(best)
    assert out.startswith(f"1. DP{pretrain.dp} TP{pretrain.tp} PP{pretrain.pp}")
    assert pretrain.global_batch_size == 128
    assert pretrain.vp > 1
    assert pretrain.notes == ()  # pipeline_interleave is on, which pp_interleave_num needs
    assert sum(map(sum, read_layout(pretrain).layers)) == pretrain.num_layers
    before = best.read_bytes()
    assert before.decode().count("#") == source.count("#")
    code, out, _ = run(*evaluate, "--json")
    assert code == 0
    document = json.loads(out)
    assert document["fits"]
    assert best.read_bytes() == before
    (table,) = (tmp_path / "pipeline_output").glob("test_result_*.csv")
    cost = float(table.read_text().splitlines()[1].split(",")[6])
    assert document["step"] * 3.0 == pytest.approx(cost)
    # what it is found to hold is the sum of its causes, the reserve among them
    for peak, causes in zip(document["peak_memory_bytes"], document["memory_by_cause"], strict=True):
        assert sum(causes.values()) == pytest.approx(peak, abs=2)
        assert causes["reserve"] > 0


def test_a_yaml_says_what_its_own_lists_take(run: Run, tmp_path: Path) -> None:
    text = (EXAMPLES / "pretrain_llama3_70b.yaml").read_text(encoding="utf-8")
    (tmp_path / "own.yaml").write_text(text)
    code, out, told = run("pipeline-search", "-yaml", "own.yaml", "--evaluate", "y")
    assert code == 0, told
    assert (tmp_path / "own.yaml").read_text() == text
    (line,) = (line for line in out.splitlines() if line.startswith("stage 0: 10 + 10 layers, 0 + 0 recomputed: "))
    assert re.fullmatch(r"[0-9.]+ GiB of 58.0 GiB \([0-9.]+ GiB too much\)", line.partition("recomputed: ")[2])
    assert "kept activations" in out
    assert "does not fit on" in out
    code, _, told = run("pipeline-search", "-yaml", "own.yaml", "--evaluate", "y", "-extract", "y", "-solution", "x")
    assert code == 2
    code, _, told = run("pipeline-search", "-yaml", "own.yaml", "--reserve", "-1")
    assert code == 2
    (tmp_path / "own.yaml").write_text(text.replace("pipeline_stage: 4", "pipeline_stage: 3"))
    code, _, told = run("pipeline-search", "-yaml", "own.yaml", "--evaluate", "y")
    assert (code, "offset" in told) == (2, True)


def test_a_limit_that_nothing_meets_says_what_takes_it(run: Run, tmp_path: Path) -> None:
    text = (EXAMPLES / "pretrain_llama3_70b.yaml").read_text(encoding="utf-8")
    (tmp_path / "own.yaml").write_text(text.replace('"58GB"', '"20GB"'))
    code, _, told = run("pipeline-search", "-yaml", "own.yaml")
    assert code == 3
    assert re.search(r"stage [0-9] holds [0-9.]+ GiB of 20.0 GiB: .*weights [0-9.]+", told)
    code, _, roomy = run("pipeline-search", "-yaml", "own.yaml", "--reserve", "10240")
    assert code == 3
    assert "reserve 10.0" in roomy


def test_an_offset_of_other_stages_is_replaced(run: Run, tmp_path: Path) -> None:
    text = (EXAMPLES / "pretrain_llama3_70b.yaml").read_text(encoding="utf-8")
    assert re.search(r"^ +offset: ", text, re.MULTILINE)
    (tmp_path / "own.yaml").write_text(re.sub(r"(\n +offset: )[^\n]*", r"\1[1, 1, -1]", text))
    code, _, told = run("pipeline-search", "-yaml", "own.yaml")
    assert code == 0, told
    assert "offset has a list of 3 numbers; pipeline_stage is 4; it is found anew" in told
    assert sum(map(sum, read_layout(read_pretrain(tmp_path / "own.yaml")).layers)) == 80


def test_a_search_of_less_says_that_what_was_there_is_faster(run: Run, tmp_path: Path) -> None:
    """Lists with selected operators, which are searched where that is asked for alone."""
    counts = "[[6, 6, 11, 0], [13, 12, 2, 0]]"
    text = (EXAMPLES / "pretrain_llama3_70b.yaml").read_text(encoding="utf-8")
    for old, new in (
        ('"58GB"', '"50GB"'),
        ("    offset: 0\n", "    offset: [[-4, -4, 1, 1], [4, 4, 0, -2]]\n"),
        (
            "  recompute: False\n",
            "  recompute: [[3, 1, 0, 0], [0, 0, 0, 0]]\n  select_recompute:\n"
            f"    feed_forward\\.mul: {counts}\n    feed_forward\\.w1\\.activation\\.silu: {counts}\n",
        ),
    ):
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "own.yaml").write_text(text)
    code, out, told = run("pipeline-search", "-yaml", "own.yaml", "--evaluate", "y")
    assert code == 0, told
    assert out.splitlines()[-1].endswith("; fits")
    own_step = out.splitlines()[-1].split()[1]
    code, _, told = run("pipeline-search", "-yaml", "own.yaml")
    assert code == 0, told
    assert f"the lists that own.yaml had take {own_step} and fit" in told
    assert "--select y searches selected operators too" in told
