"""What `lint` prints, writes and ends with; and that no file of whatever content breaks it."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
from seeded import GOOD, MISTAKES

from mm_autoparallel.api.linted import lint_files, list_rules
from mm_autoparallel.cli.main import main
from mm_autoparallel.integrations.catalog import frameworks
from mm_autoparallel.integrations.described import Given
from mm_autoparallel.integrations.megatron_core.file_rules import OF_KIND

UNIT = re.compile(r"_(?:ms|bytes|tokens|fraction|count|probability|per_s)$")
BAD = GOOD.replace("--global-batch-size 128", "--global-batch-size 130").replace("    --overlap-grad-reduce\n", "")


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "launch").mkdir()
    path = Path("launch/bad one.sh")
    path.write_text(BAD, encoding="utf-8")
    Path("good.sh").write_text(GOOD, encoding="utf-8")
    return path


def test_exit_codes(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    device = ["--device", "h100-80g"]
    assert main(["lint", "good.sh", *device]) == 0
    assert main(["lint", str(script), *device]) == 1
    assert main(["lint", str(script), *device, "--ignore", "batch-divisible", "--ignore", "flags-contradict"]) == 0
    waste = Path("waste.sh")
    waste.write_text(GOOD.replace("TP=2\n", "TP=1\n"), encoding="utf-8")
    assert main(["lint", "waste.sh", *device]) == 0
    assert main(["lint", "waste.sh", *device, "--fail-on", "warning"]) == 1
    assert main(["lint", "good.sh"]) == 0
    assert main(["lint", "good.sh", "--fail-on", "note"]) == 1  # nothing was simulated
    for wrong in (
        ["lint", "none.sh"],
        ["lint", "good.sh", "--from", "megatron"],
        ["lint", "good.sh", "--ignore", "batch"],
    ):
        capsys.readouterr()
        assert main(wrong) == 2
        told = capsys.readouterr().err
        assert told.count("\n") == 1
        assert "Traceback" not in told
    assert main(["lint", "good.sh", "--json", "--format", "sarif"]) == 2
    assert main(["lint", "good.sh", "--out", "x.json"]) == 2


def test_json(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", str(script), "good.sh", "--device", "h100-80g", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "mm-autoparallel/lint/1"
    assert document["files"] == [
        {"file": str(script), "framework": "megatron-core"},
        {"file": "good.sh", "framework": "megatron-core"},
    ]
    assert document["counts"] == {"error": 2, "warning": 0, "note": 0}
    assert [(one["rule"], one["file"]) for one in document["findings"]] == [
        ("batch-divisible", str(script)),
        ("flags-contradict", str(script)),
    ]
    assert BAD.splitlines()[document["findings"][0]["line"] - 1].strip() == "--global-batch-size 130"


def test_sarif_has_what_its_schema_asks_for(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["lint", str(script), "--device", "h100-80g", "--format", "sarif", "--out", "found.sarif"]
    assert main(arguments) == 1
    assert "[batch-divisible]" in capsys.readouterr().out
    text = Path("found.sarif").read_text(encoding="utf-8")
    document = json.loads(text)
    assert document["version"] == "2.1.0"
    (run,) = document["runs"]
    driver = run["tool"]["driver"]
    assert driver["name"] == "mm-autoparallel"
    rules = [rule["id"] for rule in driver["rules"]]
    assert len(set(rules)) == len(rules)
    for result in run["results"]:
        assert rules[result["ruleIndex"]] == result["ruleId"]
        assert result["level"] in ("error", "warning", "note")
        assert result["message"]["text"]
        (location,) = result["locations"]
        assert location["physicalLocation"]["artifactLocation"]["uri"] == "launch/bad%20one.sh"
        assert location["physicalLocation"]["region"]["startLine"] >= 1
    assert main(arguments) == 1
    assert Path("found.sarif").read_text(encoding="utf-8") == text


def test_figures_are_named_by_their_units(tmp_path: Path) -> None:
    seen = set()
    for name, mistake in MISTAKES.items():
        text = GOOD
        for old, new in mistake.changes.items():
            text = text.replace(old, new)
        path = tmp_path / f"{name.replace(' ', '_')}.sh"
        path.write_text(text, encoding="utf-8")
        for one in lint_files([path], device="h100-80g").findings:
            seen |= {*one.figures}
    assert len(seen) > 8
    assert {name for name in seen if not UNIT.search(name)} == set()


def test_blackwell_asks_for_no_single_connection(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    path.write_text(GOOD.replace("CONNECTIONS=1", "CONNECTIONS=32"), encoding="utf-8")
    keys = [{one.rule.key for one in lint_files([path], device=name).findings} for name in ("h100-80g", "b200-192g")]
    assert "device-max-connections" in keys[0]
    assert "device-max-connections" not in keys[1]


def test_a_yaml_of_functional_tests_is_looked_at_where_it_says_it(tmp_path: Path) -> None:
    path = tmp_path / "model_config.yaml"
    lines = [
        *("ENV_VARS:", "  CUDA_DEVICE_MAX_CONNECTIONS: 1", "MODEL_ARGS:", "  --num-layers: 12", "  --hidden-size: 512"),
        *("  --num-attention-heads: 8", "  --seq-length: 1024", "  --max-position-embeddings: 512", "  --bf16: true"),
        *("  --micro-batch-size: 4", "  --global-batch-size: 33", "  --tensor-model-parallel-size: 2"),
        *("  --checkpoint-activations: true", "  --vocab-size: 51200", "  --num-layers: 12"),
        "  --expert-tensor-parallel-size: 2",
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    found = lint_files([path], device="h100-80g", given=Given(world_size=8)).findings
    assert [(one.rule.key, one.line) for one in found] == [
        ("sequence-positions", 8),
        ("batch-divisible", 11),
        ("old-flag", 13),
        ("passed-twice", 15),
        ("flag-without-effect", 16),
    ]


@pytest.mark.parametrize(("name", "entry"), [("mindspeed-mm", "pretrain_vlm.py"), ("mindspeed-llm", "pretrain_gpt.py")])
def test_scripts_of_other_frameworks_have_the_rules_of_their_kind_alone(name: str, entry: str, tmp_path: Path) -> None:
    path = tmp_path / "finetune.sh"
    linter = frameworks()[name].linter
    assert linter is not None
    found = set()
    for mistake in MISTAKES.values():
        text = GOOD
        for old, new in mistake.changes.items():
            text = text.replace(old, new)
        path.write_text(text.replace("pretrain_gpt.py", entry), encoding="utf-8")
        here = {one.rule.key for one in linter().find(path, Given())}
        assert here <= {mistake.rule, *mistake.also}
        found |= here
    assert {rule.key for rule in OF_KIND} <= found <= {rule.key for rule in linter().rules}


@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_done_to_a_script_it_is_answered(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    keys = {rule.key for rules in list_rules().values() for rule in rules}
    path = tmp_path / "train.sh"
    seen = set()
    for _ in range(40):
        lines = BAD.splitlines(keepends=True)
        for _ in range(rng.randint(1, 4)):
            place = rng.randrange(len(lines))
            match rng.randrange(4):
                case 0:
                    del lines[place]
                case 1:
                    lines[place] = re.sub(r"\d+", str(rng.choice([0, 3, 7, 10**9, -1])), lines[place])
                case 2:
                    lines[place] = re.sub(r"\d+", rng.choice(["$X", "x", "", "$((2*", "`date`"]), lines[place])
                case _:
                    lines[place] = lines[place][: rng.randrange(1, len(lines[place]) + 1)] + "\n"
        path.write_text("".join(lines) + "\ntorchrun pretrain_gpt.py\n", encoding="utf-8")
        seen |= {one.rule.key for one in lint_files([path], device="h100-80g").findings}
    assert len(seen) > 3
    assert seen <= keys
