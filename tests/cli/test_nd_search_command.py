"""`nd-search` as a MindFormers user meets it: tables and YAMLs where they belong, one paragraph for an error."""

from __future__ import annotations

import csv
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from mm_autoparallel.cli.main import main
from mm_autoparallel.integrations.mindformers.layout import read_layout
from mm_autoparallel.integrations.mindformers.pretrain_yaml import read_pretrain
from mm_autoparallel.integrations.mindformers.profile_table import read_candidates

Run = Callable[..., subprocess.CompletedProcess[str]]
Here = Callable[..., tuple[int, str, str]]

EXAMPLES = Path(__file__).parents[2] / "examples" / "mindformers"
LLAMA = EXAMPLES / "pretrain_llama3_70b.yaml"


@pytest.fixture
def run_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Runs `nd-search ARGUMENTS` in this process, in an empty folder: exit code, output, what was told."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.chdir(tmp_path)
        code = main(["nd-search", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


@pytest.mark.nightly
def test_a_thousand_devices(run_cli: Run, tmp_path: Path) -> None:
    source = EXAMPLES / "pretrain_deepseek3_1024.yaml"
    before = source.read_bytes()
    result = run_cli("nd-search", "--yaml_path", source, "--output_path", "out", "--json")
    assert result.returncode == 0, result.stderr
    assert source.read_bytes() == before
    document = json.loads(result.stdout)
    space = rows_of(tmp_path / "out" / "nd_space.csv")
    assert len(space) == len(document["space"]) > 4000
    for row in space:
        assert (row["status"] == "unlawful") == (row["peakMem"] == "")
        assert (row["status"] == "fits") == (row["reason"] == "")
    candidates = read_candidates(tmp_path / "out" / "nd_candidate_config.csv")
    assert set(candidates) == {
        tuple(int(row[name]) for name in ("dp", "tp", "pp", "ep")) for row in space if row["status"] == "fits"
    }
    assert (tmp_path / "out" / "nd_candidate_config.csv").read_text().startswith("dp,tp,pp,ep,peakMem\n")
    yamls = sorted((tmp_path / "out" / "profile_yaml").iterdir())
    assert len(yamls) == 20
    names = {"DP{}_TP{}_PP{}_EP{}".format(*candidate) for candidate in candidates}
    whole = {path.stem for path in (tmp_path / "out" / "dryrun_yaml").iterdir()}
    assert whole == {path.name.removesuffix("_pretrain.yaml") for path in yamls} <= names
    for path in yamls:
        pretrain = read_pretrain(path)
        assert pretrain.dp * pretrain.tp * pretrain.pp <= 64
        assert sum(map(sum, read_layout(pretrain).layers)) == pretrain.num_layers
        assert path.read_text().count("#") == before.decode().count("#")
        assert f'profile_output: "profile_data/{path.name.removesuffix("_pretrain.yaml")}"' in path.read_text()


@pytest.mark.slow
def test_a_search_goes_on_from_what_is_there(run_here: Here, tmp_path: Path) -> None:
    """Dry runs count before sizes, profiled candidates are not profiled again, a small search needs few devices."""
    for folder in ("dry/DP8_TP8_PP1_EP1", "done/DP8_TP8_PP1_EP1"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "dry/DP8_TP8_PP1_EP1/dryrun_new.log").write_text("Used peak memory usage (without fragments): 1234M\n")
    arguments = ("--yaml_path", LLAMA, "--gbs", "16", "--rank_num", "16", "--solver_name", "highs")
    code, _, told = run_here(*arguments, "--dryrun_data_dir", "dry", "--output_path", "out;id")
    assert code == 0, told
    assert "8,8,1,1,1234" in (tmp_path / "out;id" / "nd_candidate_config.csv").read_text()
    assert "--solver_name HIGHS" in told
    assert "rank --yaml_path 'out;id/dryrun_yaml' " in told  # to be copied into a shell
    sources = {row["source"] for row in rows_of(tmp_path / "out;id" / "nd_space.csv")}
    assert sources == {"", "sizes", "dry run"}
    code, said, told = run_here(*arguments, "--dryrun_data_dir", "dry", "--profile_data_dir", "done", "--rank_num", "8")
    assert code == 0, told
    left = tmp_path / "output" / "nd_output" / "profile_yaml" / "DP2_TP2_PP2_EP2_pretrain.yaml"
    left.write_text("of an earlier search")
    _, _, told = run_here(*arguments, "--dryrun_data_dir", "dry", "--profile_data_dir", "done", "--rank_num", "8")
    assert f"holds {left.name} too" in told
    assert ": 1234 of 59392 MB; not profiled: profiled already" in said
    assert not (tmp_path / "output" / "nd_output" / "profile_yaml" / "DP8_TP8_PP1_EP1_pretrain.yaml").exists()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--yaml_path", "nowhere.yaml"], ["nowhere.yaml", "no such file"]),
        ([], ["config/pretrain_deepseek3_128p.yaml", "no such file"]),
        (["--gbs", "0"], ["--gbs"]),
        (["--rank_num", "many"], ["--rank_num"]),
        (["--parallel_num", "-1"], ["--parallel_num"]),
        (["--max_expert_parallel", "1.5"], ["--max_expert_parallel"]),
        (["--solver_name", "SCIP"], ["SCIP", "CP-SAT", "HIGHS"]),
        (["--mindformers_dir", "nowhere"], ["--mindformers_dir", "nowhere"]),
        (["--register_path", "nowhere"], ["--register_path"]),
        (["--dataset", "nowhere"], ["--dataset"]),
        (["--small_dataset", "nowhere"], ["--small_dataset"]),
        (["--env_json", "nowhere"], ["--env_json"]),
        (["--yaml_path", LLAMA, "--env_json", LLAMA], ["--env_json", "names to texts"]),
        (["--yaml_path", LLAMA, "--dataset", LLAMA, "--gbs", "16"], ["dataset_dir"]),
        (["--yaml_path", LLAMA, "--dryrun_data_dir", "nowhere"], ["nowhere", "no such folder"]),
        (["--yaml_path", LLAMA, "--profile_data_dir", "nowhere"], ["nowhere", "no such folder"]),
        (["--yaml_path", LLAMA, "--gbs", "1"], ["none of", "lawful"]),
        (["--dataset_dir", "x"], ["--dataset x"]),
    ],
)
def test_values_that_are_not_allowed_are_named(
    run_here: Here, tmp_path: Path, more: list[str | Path], words: list[str]
) -> None:
    code, _, told = run_here(*more)
    assert code == 2, told
    assert len(told.splitlines()) == 1, told
    for word in words:
        assert word in told
    assert not list(tmp_path.iterdir())


def test_an_environment_without_a_floor(run_here: Here, tmp_path: Path) -> None:
    (tmp_path / "env.json").write_text("[" * 100_000)
    code, _, told = run_here("--yaml_path", LLAMA, "--env_json", "env.json")
    assert code == 2
    assert "nested too deeply" in told


def test_nothing_that_fits_is_told(run_here: Here, tmp_path: Path) -> None:
    small = tmp_path / "small.yaml"
    text = LLAMA.read_text(encoding="utf-8")
    limit = next(line for line in text.splitlines() if "max_device_memory" in line)
    small.write_text(text.replace(limit, '  max_device_memory: "2GB"'), encoding="utf-8")
    code, _, told = run_here("--yaml_path", small, "--gbs", "16")
    assert code == 3
    assert "comes closest" in told
    assert [path.name for path in tmp_path.iterdir()] == ["small.yaml"]
