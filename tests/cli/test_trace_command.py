"""`mm-autoparallel trace`: what the owner of no device runs, and that a plan can stand on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_qwen2vl import CLUSTER, CONFIG

from mm_autoparallel.planner.plan import RESULT_FILE

WORKLOAD = {"global_batch_size": 4, "seq_length": 32, "image_tokens_per_sample": 8}
LIMITS = {"cp": [1], "mbs": [1]}


def write_job(folder: Path, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    job = {"model": "config.json", "cluster": CLUSTER, "workload": WORKLOAD, "search": LIMITS}
    path = folder / "job.json"
    path.write_text(json.dumps(job | changes))
    return path


@pytest.mark.nightly
def test_traced_once_and_planned_with(tmp_path: Path, run_cli: Callable) -> None:
    pytest.importorskip("transformers")
    job = write_job(tmp_path)
    first = run_cli("trace", job)
    assert first.returncode == 0, first.stderr
    assert first.stderr.splitlines() == [
        f"mm-autoparallel: {division}, 32 tokens, 2 bytes a weight, flash attention: 6 kinds of blocks"
        for division in ("TP 1 MBS 1", "TP 2 with sequence parallel MBS 1")
    ]
    folder = tmp_path / first.stdout.strip()
    assert folder.parent == tmp_path / "subgraph_profiles" / "traced"

    second = run_cli("trace", job, "--json")
    assert second.stderr.count("traced before") == 2
    document = json.loads(second.stdout)
    assert document["folder"] == first.stdout.strip()
    assert document["implementation"] == "transformers Qwen2VLForConditionalGeneration"
    whole, divided = ({one["kind"]: one for one in file["entries"]} for file in document["files"])
    assert whole["text_layer"]["activation_bytes"] > divided["text_layer"]["activation_bytes"] > 0
    assert divided["text_layer"]["operators"]["forward"]["collective"]["num_calls"] == 4
    assert whole["text_layer"]["operators"]["recompute"]["matrix_product"]["flops"] > 0

    planned = run_cli("plan", write_job(tmp_path, profiles=[first.stdout.strip()]))
    assert planned.returncode == 0, planned.stderr
    plan = json.loads((tmp_path / RESULT_FILE).read_text())
    assert plan["provenance"]["blocks"]["text_layer"] == {
        "time": "analytic",
        "memory": "traced",
        "recompute": "analytic",
    }


@pytest.mark.nightly
def test_options_choose_what_is_traced(tmp_path: Path, run_cli: Callable) -> None:
    pytest.importorskip("transformers")
    workload = {"seq_length": 64, "image_tokens_per_sample": 32}
    job = write_job(tmp_path, workload=WORKLOAD | workload)
    options = ("--attention", "unfused", "--dtype", "fp32", "--seq-lengths", 32, "--recompute", "none", "--tp", 2)
    done = run_cli("trace", job, *options, "--out", "kept", "--json")
    assert done.returncode == 0, done.stderr
    (file,) = json.loads(done.stdout)["files"]
    assert file["path"].startswith("kept/traced/qwen2_vl-")
    assert file["path"].endswith("/tp2-cp1-mbs1-seq32-image16x1-bytes4_4_12-unfused-sp.json")
    entry = next(one for one in file["entries"] if one["kind"] == "text_layer")
    assert entry["parameter_bytes"] == 4 * entry["parameter_count"]
    assert "recompute_transient_bytes" not in entry or entry["recompute_transient_bytes"] is None
    assert "recompute" not in entry["operators"]


@pytest.mark.nightly
def test_code_of_ones_own_is_traced(tmp_path: Path, run_cli: Callable) -> None:
    """A config.json stands for a job whose model says the same in another form, and a module for anything."""
    pytest.importorskip("transformers")
    layers = {"num_layers": 4, "hidden_size": 64, "ffn_size": 128, "num_heads": 4, "norm": "rms"}
    model = {"text": {"vocab_size": 320, "layers": layers}}
    workload = {"global_batch_size": 4, "seq_length": 32}
    job = write_job(tmp_path, model=model, workload=workload, freeze={"text": False})
    refused = run_cli("trace", job)
    assert refused.returncode == 2
    assert "is no Hugging Face config.json" in refused.stderr
    assert "trace --model" in refused.stderr

    text = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
    text |= {"num_attention_heads": 4, "vocab_size": 320, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    (tmp_path / "llama.json").write_text(json.dumps(text))
    by_config = run_cli("trace", job, "--model", "llama.json", "--tp", 1)
    assert by_config.returncode == 0, by_config.stderr
    (tmp_path / "llama.json").write_text(json.dumps(text | {"vocab_size": 640}))
    other = run_cli("trace", job, "--model", "llama.json", "--tp", 1)
    assert other.returncode == 2
    assert "--model llama.json has other sizes than the model inline" in other.stderr

    lines = [
        "from pathlib import Path",
        "from mm_autoparallel.model.readers.model_file import parse_inline_model",
        "from mm_autoparallel.profilers.huggingface import make_subject",
        f"document = {text!r}",
        "model = parse_inline_model(document, Path('job.json')).with_freeze({'text': False})",
        "def subject(workload):",
        "    return make_subject(document, model, workload, Path('config.json'))",
    ]
    (tmp_path / "own_code.py").write_text("\n".join(lines))
    by_name = run_cli("trace", job, "--model", "own_code:subject", "--tp", 1, "--out", "own", "--json")
    assert by_name.returncode == 0, by_name.stderr
    assert json.loads(by_name.stdout)["implementation"] == "own_code:subject"


def test_what_cannot_be_traced_is_one_paragraph(tmp_path: Path, run_cli: Callable) -> None:
    pytest.importorskip("transformers")
    job = write_job(tmp_path)
    for options, told in (
        (("--tp", 3), "none of its lawful strategies has a TP of [3]"),
        (("--model", "no_such_module:subject"), "there is no module no_such_module here"),
        (("--model", "missing.json"), "missing.json"),
    ):
        refused = run_cli("trace", job, *options)
        assert refused.returncode == 2
        assert told in refused.stderr
        assert len(refused.stderr.splitlines()) == 1


@pytest.mark.slow
def test_what_is_shipped_plans_without_torch(tmp_path: Path, repository: Path) -> None:
    text = (repository / "examples/qwen2vl_72b_h200/job.yaml").read_text()
    (tmp_path / "job.yaml").write_text(f"{text}profiles: [traced]\n")
    (tmp_path / "config.json").write_bytes((repository / "examples/qwen2vl_72b_h200/config.json").read_bytes())
    program = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from mm_autoparallel.cli.main import main; raise SystemExit(main(['plan', 'job.yaml']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(repository)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    plan = json.loads((tmp_path / RESULT_FILE).read_text())
    assert {source["memory"] for source in plan["provenance"]["blocks"].values()} == {"traced"}


def test_without_torch_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mm_autoparallel.cli import main, trace

    monkeypatch.setattr(trace, "find_spec", lambda _: None)
    assert main.main(["trace", str(write_job(tmp_path))]) == 2
    told = "mm-autoparallel: `trace` needs PyTorch; install it with `pip install mm-autoparallel[torch]`\n"
    assert capsys.readouterr().err == told
