"""`pipeline-search` as a MindFormers user meets it: from YAML to YAML, known answers, one paragraph for an error."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from mm_autoparallel.cli.main import main

Run = Callable[..., subprocess.CompletedProcess[str]]

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "tests" / "fixtures"
CASES: dict[str, Any] = json.loads((FIXTURES / "known_answers" / "taylor.json").read_text(encoding="utf-8"))["cases"]
EXAMPLES = ROOT / "examples" / "mindformers"


@pytest.fixture
def case(tmp_path: Path) -> Callable[[str], list[str | Path]]:
    """Puts a case's YAML into the working directory; the arguments that solve it, memory as a dry run left it."""

    def prepare(name: str) -> list[str | Path]:
        known = CASES[name]
        shutil.copy(FIXTURES / "mindformers" / f"{name}.yaml", tmp_path / "pretrain.yaml")
        pairs = zip(
            ("layer_mem", "act_mem", "re_comp_mem"), ("static_mb", "activation_mb", "recomputed_mb"), strict=True
        )
        lines = [
            f"{key}{'012' if key == 'layer_mem' and i == 0 else '0' if i == 0 else ''}={known[figure][i]}"
            for key, figure in pairs
            for i in (0, 1)
        ]
        limits = zip(("mem_lim_stage0", "mem_lim_others", "mem_lim_last"), known["limit_mb"], strict=True)
        lines += [f"{key}={value}" for key, value in limits]
        (tmp_path / "memory.txt").write_text("\n".join(lines) + "\n")
        ratios = ("layer_ratio", "backward_ratio", "head_loss", "recompute_ratio")
        options: list[str | Path] = ["-yaml", "pretrain.yaml", "--memory", "memory.txt"]
        for option, ratio in zip(("-layer_ratio", "-b_ratio", "-head_loss", "-ra_ratio"), ratios, strict=True):
            options += [option, str(known[ratio])]
        return options

    return prepare


def assert_one_paragraph(result: subprocess.CompletedProcess[str], exit_code: int, *words: str) -> None:
    assert result.returncode == exit_code, result.stderr
    told = [line for line in result.stderr.splitlines() if "compiling" not in line and "warning" not in line]
    assert len(told) == 1, result.stderr
    for word in words:
        assert word in told[0]


@pytest.mark.parametrize("name", CASES)
def test_a_published_case_goes_from_yaml_to_yaml(
    run_cli: Run, tmp_path: Path, case: Callable[..., Any], name: str
) -> None:
    known, arguments = CASES[name], case(name)
    before = (tmp_path / "pretrain.yaml").read_text(encoding="utf-8")
    result = run_cli("pipeline-search", *arguments, "-dryrun", "n", "-check", "n", "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["status"] == "optimal"
    assert document["objective"] == pytest.approx(known["best_step"], rel=1e-6)
    after = (tmp_path / "pretrain.yaml").read_text(encoding="utf-8")
    written = yaml.safe_load(after)
    offset, recompute = written["model"]["model_config"]["offset"], written["recompute_config"]["recompute"]
    assert (offset, recompute) == (document["offset"], document["recompute"])
    stages, chunks = known["num_stages"], known["num_chunks"]
    base = 62 // (stages * chunks)
    assert sum(map(sum, offset)) == 62 % (stages * chunks)
    for row, again in zip(offset, recompute, strict=True):
        assert len(row) == len(again) == stages
        assert all(0 <= r <= base + shift for shift, r in zip(row, again, strict=True))
    assert all(p <= m for p, m in zip(document["peak_memory_bytes"], document["memory_limit_bytes"], strict=True))
    assert [line for line in before.splitlines() if "#" in line and "[" not in line] == [
        line for line in after.splitlines() if "#" in line and "[" not in line
    ]
    assert (tmp_path / "pipeline_output" / "pretrain.mps").read_text().startswith("NAME pretrain")


def test_recompute_of_the_first_layers_is_what_is_planned(run_cli: Run, case: Callable[..., Any]) -> None:
    """768_4k_gp: its published optimum recomputes expert layers behind dense ones, which no recompute list can say."""
    result = run_cli("pipeline-search", *case("768_4k_gp"))
    assert result.returncode == 0, result.stderr
    assert "a step takes 3638.635872" in result.stderr
    assert "objective 3603.397732" in result.stdout
    assert "recompute_config.recompute: [[5, 2, 0, 0, 0, 0]]" in result.stdout


@pytest.mark.parametrize("name", ["pretrain_deepseek3", "pretrain_llama3_70b"])
def test_an_example_needs_nothing_but_its_yaml(run_cli: Run, tmp_path: Path, name: str) -> None:
    shutil.copy(EXAMPLES / f"{name}.yaml", tmp_path)
    result = run_cli("pipeline-search", "-yaml", f"{name}.yaml")
    assert result.returncode == 0, result.stderr
    assert "not calibrated" in result.stderr
    before = (EXAMPLES / f"{name}.yaml").read_text().splitlines()
    after = (tmp_path / f"{name}.yaml").read_text().splitlines()
    changed = [old.split(":")[0].strip() for old, new in zip(before, after, strict=True) if old != new]
    assert sorted(changed) == ["offset", "recompute"]
    again = run_cli("pipeline-search", "-yaml", f"{name}.yaml")
    assert again.returncode == 0, again.stderr
    assert (tmp_path / f"{name}.yaml").read_text().splitlines() == after


@pytest.mark.nightly
def test_the_page_is_followed(run_cli: Run, tmp_path: Path) -> None:
    """Every command in its blocks, in order, in one folder."""
    section = (ROOT / "docs" / "start" / "mindformers.md").read_text(encoding="utf-8")
    said = {}
    for line in (line for block in section.split("```\n")[1::2] for line in block.splitlines()):
        command, *words = line.split()
        if command == "cp":
            shutil.copy(ROOT / words[0], tmp_path / words[1])
            continue
        assert command == "mm-autoparallel"
        result = run_cli(*words, timeout_s=600)
        assert result.returncode == 0, result.stderr
        said[words[0]] = result.stdout
    assert "optimal" in said["pipeline-search"]


SELECT_MEMORY = {
    "layer_mem": 100,
    "act_mem": 100,
    "re_comp_mem": 10,
    "select_mem": 55,
    "mem_lim_stage0": 1400,
    "mem_lim_others": 1400,
    "mem_lim_last": 1400,
}
SMALL = """# eight layers on four stages
model:
  model_config:
    type: LlamaConfig
    num_layers: 12
    offset: 0
parallel_config: {pipeline_stage: 4, micro_batch_num: 16}
recompute_config:
  select_recompute:
    add: &counts [0, 0, 0, 0]
    mul: *counts
"""


@pytest.mark.nightly
def test_select_recompute_is_searched_and_written(run_cli: Run, tmp_path: Path) -> None:
    """Whole recompute of a third of a layer's time saves 90, select recompute of 2 % saves 45: few layers need more."""
    (tmp_path / "memory.txt").write_text("".join(f"{name}={value}\n" for name, value in SELECT_MEMORY.items()))
    (tmp_path / "pretrain.yaml").write_text(SMALL)
    arguments = ("pipeline-search", "-yaml", "pretrain.yaml", "--memory", "memory.txt", "-head_loss", "0.5", "--json")
    whole = json.loads(run_cli(*arguments).stdout)
    assert not any(map(any, whole["selected"].values()))
    assert any(map(any, whole["recompute"]))
    result = run_cli(*arguments, "--select", "y", "--select_ratio", "0.02")
    assert result.returncode == 0, result.stderr
    select = json.loads(result.stdout)
    assert select["status"] == "optimal"
    assert select["step"] < whole["step"]
    counts = select["selected"]["select_recompute"]
    config = yaml.safe_load((tmp_path / "pretrain.yaml").read_text())["recompute_config"]
    assert [config["select_recompute"]["add"]] == [config["select_recompute"]["mul"]] == counts
    assert [config["recompute"]] == select["recompute"]
    assert all(p <= 1400 * 2**20 for p in select["peak_memory_bytes"])
    (tmp_path / "pretrain.yaml").write_text(SMALL)
    highs = run_cli(*arguments, "--select", "y", "--select_ratio", "0.02", "--solver_name", "HIGHS")
    assert highs.returncode == 0, highs.stderr
    other = json.loads(highs.stdout)
    assert other["step"] == pytest.approx(select["step"], rel=1e-4)  # HiGHS's own gap
    written = (tmp_path / "pretrain.yaml").read_text()
    (tmp_path / "pretrain.yaml").write_text(SMALL)
    solution = ("-extract", "y", "-solution", "pipeline_output/pretrain.sol")
    assert run_cli(*arguments, "--select", "y", "--select_ratio", "0.02", *solution).returncode == 0
    assert (tmp_path / "pretrain.yaml").read_text() == written
    assert_one_paragraph(run_cli(*arguments, *solution), 2, "rs_type2", "another model", "recompute")
    for stage, (layers, again, some) in enumerate(zip(*select["layers"], *select["recompute"], *counts, strict=True)):
        assert again <= max(some, again) <= layers
        kept = 10 * again + 55 * max(some - again, 0) + 100 * (layers - max(some, again))
        assert select["peak_memory_bytes"][stage] == pytest.approx((100 * layers + (4 - stage) * kept) * 2**20)


FFN = r"feed_forward\.routed_experts\.ffn"
SELECTED = rf"""  select_recompute: ['{FFN}\.mul', '{FFN}\.w1\.activation\.silu', attention_norm, ffn_norm]  # my
  select_comm_recompute: True
"""


def test_sizes_tell_what_selected_operators_save(run_cli: Run, tmp_path: Path) -> None:
    """All layers run them again, or those that the search chooses; patterns of all layers become counts."""
    text = (EXAMPLES / "pretrain_deepseek3.yaml").read_text(encoding="utf-8")
    text = text.replace("  mp_comm_recompute: True\n", SELECTED)
    path = tmp_path / "pretrain.yaml"
    path.write_text(text, encoding="utf-8")
    arguments = ("pipeline-search", "-yaml", "pretrain.yaml", "-layer_ratio", "0.71", "-b_ratio", "1.627", "--json")
    arguments += ("-ra_ratio", "0.25")
    always = json.loads(run_cli(*arguments).stdout)
    assert yaml.safe_load(path.read_text(encoding="utf-8"))["recompute_config"]["select_comm_recompute"] is True
    path.write_text(text, encoding="utf-8")
    chosen = json.loads(run_cli(*arguments, "--select", "y").stdout)
    assert chosen["step"] < always["step"]
    assert any(map(any, chosen["selected"]["select_recompute"]))
    config = yaml.safe_load(path.read_text(encoding="utf-8"))["recompute_config"]
    counts = chosen["selected"]["select_recompute"][0]
    assert list(config["select_recompute"].values()) == [counts] * 4
    assert "# my\n" in path.read_text(encoding="utf-8")
    nothing = text.replace(SELECTED, "  select_recompute: ['feed_forward\\.reshape']\n")
    path.write_text(nothing, encoding="utf-8")
    assert_one_paragraph(run_cli(*arguments, "--select", "y"), 2, "select_recompute", "reshape", "nothing")
    assert path.read_text(encoding="utf-8") == nothing


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--select_ratio", "0.1"], ["--select_ratio", "--select y"]),
        (["-mb", "4"], ["-mb", "SAPP"]),
        (["--select", "y", "--memory", "memory.txt"], ["memory.txt", "select_mem"]),
    ],
)
def test_select_needs_its_figures(run_cli: Run, tmp_path: Path, more: list[str], words: list[str]) -> None:
    (tmp_path / "memory.txt").write_text("act_mem=1\n")
    (tmp_path / "pretrain.yaml").write_text(SMALL)
    assert_one_paragraph(run_cli("pipeline-search", "-yaml", "pretrain.yaml", *more), 2, *words)
    assert (tmp_path / "pretrain.yaml").read_text() == SMALL


INIT = """
pipeline_config: {pipeline_num: 4, num_layer: 16, offset: [0, 1, -1, 0]}
time_config: {head: 3, body: 30, tail: 30}
recompute_config: {recompute: [0, 3, 0, 0]}
memory_usage:
  head_memory: 12900
  tail_memory: 7200
  body_memories: {stage_id: [1, 2], memories: [8900, 6000]}
"""


def test_files_of_pipeline_balance_are_solved(run_cli: Run, tmp_path: Path) -> None:
    """Two stages leave three unknowns open; the third, of another run, settles them."""
    (tmp_path / "init.yaml").write_text(INIT)
    refused = run_cli("pipeline-search", "-yaml", "init.yaml")
    assert_one_paragraph(refused, 2, "init.yaml", "unknowns open", "a dry run with")
    assert not (tmp_path / "pipeline_output").exists()
    more = INIT.replace("[0, 1, -1, 0]}", "[[0, 1, -1, 0], [0, 0, 0, 0]]}").replace(
        "[0, 3, 0, 0]", "[[0, 3, 0, 0], false]"
    )
    more = more.replace("[1, 2]", "[[1, 2], [1]]").replace("[8900, 6000]", "[[8900, 6000], [10000]]")
    (tmp_path / "init.yaml").write_text(more)
    arguments = ("-mb", "16", "-mem", "11000")
    result = run_cli("pipeline-search", "-yaml", "init.yaml", *arguments, "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["status"] == "optimal"
    assert any(map(any, document["recompute"]))
    assert all(p <= 11000 * 2**20 for p in document["peak_memory_bytes"])
    strategy = yaml.safe_load((tmp_path / "pipeline_output" / "init_strategy.yaml").read_text())
    assert strategy == {key: document[key] for key in strategy}
    assert sum(map(sum, strategy["offset"])) == 0
    assert (tmp_path / "init.yaml").read_text() == more
    layers = run_cli("pipeline-search", "-yaml", "pipeline_output/init.json", *arguments, "-s", "4", "--json")
    assert layers.returncode == 0, layers.stderr
    assert json.loads(layers.stdout)["step"] == pytest.approx(document["step"])
    assert_one_paragraph(run_cli("pipeline-search", "-yaml", "init.yaml", "-b_ratio", "3"), 2, "-b_ratio", "SAPP")
    assert run_cli("pipeline-search", "-yaml", "init.yaml", "-mb", "16", "-mem", "4000").returncode == 3


def solution_of(document: dict[str, Any], num_dense: int = 3) -> str:
    """The columns of a solution that a result's lists say, the dense layers first."""
    left, lines = num_dense, ["Model status", "Optimal", "", "# Columns 9", "step 12.5"]
    for chunk, row in enumerate(document["layers"]):
        for stage, held in enumerate(row):
            dense = min(held, left)
            left -= dense
            again = document["recompute"][chunk][stage]
            for kind, count, recomputed in (
                (1, dense, min(dense, again)),
                (2, held - dense, again - min(dense, again)),
            ):
                lines += [f"x_type{kind}_{stage}_{chunk} {count}", f"ra_type{kind}_{stage}_{chunk} {recomputed}"]
    return "\n".join([*lines, "# Rows 1", "r0 3"]) + "\n"


def test_a_solution_is_extracted(run_cli: Run, tmp_path: Path, case: Callable[..., Any]) -> None:
    arguments = case("512_4k")
    original = (tmp_path / "pretrain.yaml").read_text(encoding="utf-8")
    solved = run_cli("pipeline-search", *arguments, "--json")
    written = (tmp_path / "pretrain.yaml").read_text(encoding="utf-8")
    document = json.loads(solved.stdout)
    (tmp_path / "old.sol").write_text(solution_of(document))
    (tmp_path / "pretrain.yaml").write_text(original, encoding="utf-8")
    extracted = run_cli("pipeline-search", *arguments, "-extract", "y", "-solution", "old.sol", "--json")
    assert extracted.returncode == 0, extracted.stderr
    again = json.loads(extracted.stdout)
    assert (again["offset"], again["recompute"], again["status"]) == (
        document["offset"],
        document["recompute"],
        "extracted",
    )
    assert again["step"] == pytest.approx(document["step"])
    assert (tmp_path / "pretrain.yaml").read_text(encoding="utf-8") == written


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda text: text.replace("x_type2_0_0", "x_type2_9_0"), ["x_type2_9_0", "another model"]),
        (lambda text: text.replace("x_type1_0_0 3", "x_type1_0_0 2"), ["another model"]),
        (lambda text: text.replace("x_type1_0_0 3", "x_type1_0_0 2.5"), ["whole number"]),
        (lambda text: "".join(line for line in text.splitlines(True) if "type2_3_1" not in line), ["x_type2_3_1"]),
        (lambda text: text.replace("# Rows 1", "rs_type1_0_0 1\n# Rows 1"), ["rs_type1_0_0"]),
        (lambda text: text.replace("step 12.5", "step"), ["line 5"]),
        (lambda text: "", ["no columns"]),
    ],
)
def test_a_solution_of_another_model_is_named(
    run_cli: Run, tmp_path: Path, case: Callable[..., Any], edit: Callable[[str], str], words: list[str]
) -> None:
    arguments = case("512_4k")
    before = (tmp_path / "pretrain.yaml").read_bytes()
    layers = [[7, 7, 8, 8], [8, 8, 8, 8]]
    (tmp_path / "old.sol").write_text(edit(solution_of({"layers": layers, "recompute": [[7] * 4, [4] * 4]})))
    result = run_cli("pipeline-search", *arguments, "-extract", "y", "-solution", "old.sol")
    assert_one_paragraph(result, 2, "old.sol", *words)
    assert (tmp_path / "pretrain.yaml").read_bytes() == before


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["-layer_ratio", "0"], ["-layer_ratio", "above 0"]),
        (["-b_ratio", "two"], ["-b_ratio"]),
        (["-ra_ratio", "-1"], ["-ra_ratio"]),
        (["-head_loss", "nan"], ["-head_loss"]),
        (["-t", "0"], ["-t", "seconds"]),
        (["-dryrun", "maybe"], ["-dryrun", "neither y nor n"]),
        (["-check", "2"], ["-check"]),
        (["-extract", "y"], ["-solution"]),
        (["-solution", "old.sol"], ["-extract"]),
        (["-solver_name", "SCIP"], ["SCIP", "CP-SAT", "HIGHS"]),
        (["-mindformers", "nowhere.py"], ["nowhere.py"]),
        (["--memory", "nowhere.txt"], ["nowhere.txt", "no such file"]),
        (["-yaml", "nowhere.yaml"], ["nowhere.yaml", "no such file"]),
        (["-unknown", "1"], ["-unknown"]),
    ],
)
def test_values_that_are_not_allowed_are_named(
    run_cli: Run, tmp_path: Path, case: Callable[..., Any], more: list[str], words: list[str]
) -> None:
    arguments = case("768_4k_gp")
    before = (tmp_path / "pretrain.yaml").read_bytes()
    assert_one_paragraph(run_cli("pipeline-search", *arguments, *more), 2, *words)
    assert (tmp_path / "pretrain.yaml").read_bytes() == before
    assert not (tmp_path / "pipeline_output").exists()


def test_byte_order_marks_stay_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An edit counts characters, and a parser skips one mark."""
    path, marks = tmp_path / "pretrain.yaml", "\ufeff\ufeff"
    path.write_text(marks + (EXAMPLES / "pretrain_deepseek3.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert main(["pipeline-search", "-yaml", path.name]) == 0
    assert path.read_text(encoding="utf-8").startswith(f"{marks}#")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("parallel_config:", "parallel_confi:", ["parallel_config"]),
        ("micro_batch_num: 120", "micro_batch_num: 121.5", ["micro_batch_num", "121.5"]),
        ("            - -1\n", "            - x\n", ["offset", "whole numbers"]),
        ("pipeline_stage: 6", "pipeline_stage: 63", ["pipeline_stage", "63 chunks for"]),
    ],
)
def test_a_yaml_that_is_wrong_is_left_as_it_was(
    run_cli: Run, tmp_path: Path, case: Callable[..., Any], old: str, new: str, words: list[str]
) -> None:
    arguments = case("768_4k_gp")
    path = tmp_path / "pretrain.yaml"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    before = path.read_bytes()
    assert_one_paragraph(run_cli("pipeline-search", *arguments), 2, "pretrain.yaml", *words)
    assert path.read_bytes() == before
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["memory.txt", "pretrain.yaml"]


def test_a_yaml_without_sizes_takes_its_models_config_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Today's finetune YAMLs: `pretrained_model_dir` is a folder of the user's."""
    monkeypatch.chdir(tmp_path)
    text = """use_legacy: False
pretrained_model_dir: /path/to/Qwen3-0.6B # yours
parallel_config: {pipeline_stage: 4, micro_batch_num: 8}
model:
  model_config:
    offset: 0
context: {max_device_memory: "58GB"}
"""
    sizes = {"model_type": "qwen3", "hidden_size": 1024, "num_hidden_layers": 28, "tie_word_embeddings": True}
    Path("config.json").write_text(json.dumps(sizes))
    Path("finetune.yaml").write_text(text)
    assert main(["pipeline-search", "-yaml", "finetune.yaml"]) == 2
    assert '"/path/to/Qwen3-0.6B"' in capsys.readouterr().err
    assert Path("finetune.yaml").read_text() == text
    assert main(["pipeline-search", "-yaml", "finetune.yaml", "--model_config", "config.json"]) == 0
    found = yaml.safe_load(Path("finetune.yaml").read_text())
    assert sum(found["model"]["model_config"]["offset"]) == 0
    assert found["recompute_config"] == {"recompute": [0, 0, 0, 0]}


def test_an_offset_of_other_stages_is_where_the_search_begins(
    tmp_path: Path, case: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "pretrain.yaml"
    arguments = case("768_4k_gp")
    path.write_text(path.read_text().replace("            - -1\n", ""))
    assert main(["pipeline-search", *map(str, arguments)]) == 0
    assert "has a list of 5 numbers; pipeline_stage is 6; it is found anew" in capsys.readouterr().err
    (offset,) = yaml.safe_load(path.read_text())["model"]["model_config"]["offset"]
    assert (len(offset), sum(offset)) == (6, 62 % 6)


def test_a_limit_that_nothing_meets_is_told(run_cli: Run, tmp_path: Path, case: Callable[..., Any]) -> None:
    arguments = case("768_4k_gp")
    memory = tmp_path / "memory.txt"
    memory.write_text(memory.read_text().replace("mem_lim_others=55065.0", "mem_lim_others=5506.0"))
    before = (tmp_path / "pretrain.yaml").read_bytes()
    assert_one_paragraph(run_cli("pipeline-search", *arguments), 3, "memory")
    assert (tmp_path / "pretrain.yaml").read_bytes() == before


WITHOUT_HIGHS = """
import sys
sys.modules["highspy"] = None  # as if it were not installed
from mm_autoparallel.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def test_highs_is_refused_where_it_is_not_installed(tmp_path: Path, case: Callable[..., Any]) -> None:
    arguments = case("768_4k_gp")
    before = (tmp_path / "pretrain.yaml").read_bytes()
    command = [sys.executable, "-c", WITHOUT_HIGHS, "pipeline-search", *map(str, arguments), "--solver_name", "HIGHS"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert_one_paragraph(result, 2, "pip install highspy")
    assert (tmp_path / "pretrain.yaml").read_bytes() == before


@pytest.mark.parametrize(
    "name", [name if name == "768_4k_gp" else pytest.param(name, marks=pytest.mark.nightly) for name in CASES]
)
def test_highs_finds_the_same(run_cli: Run, tmp_path: Path, case: Callable[..., Any], name: str) -> None:
    result = run_cli("pipeline-search", *case(name), "--solver_name", "HIGHS", "-t", "15", "--json")
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["step_any_layers"] == pytest.approx(CASES[name]["best_step"], rel=1e-6)
    assert document["objective"] <= CASES[name]["best_step"] * (1 + 1e-6)
    assert document["lower_bound"] <= document["objective"] * (1 + 1e-6)
    assert (tmp_path / "pipeline_output" / "pretrain.sol").exists()
