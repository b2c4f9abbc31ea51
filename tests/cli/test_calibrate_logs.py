"""`calibrate --logs` as a user runs it: logs of three runs become a calibration, and what is wrong is said."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import made_logs
import pytest

from mm_autoparallel.measurements.logs.catalog import read_cases
from mm_autoparallel.measurements.logs.facts import parse_facts
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.profiles.calibration import assume_calibration, read_calibration
from mm_autoparallel.planner.evaluate import evaluate

RunCli = Callable[..., subprocess.CompletedProcess[str]]

LARGE = {
    "num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 11008, "num_attention_heads": 32, "kv_channels": 128,
    "global_batch_size": 256,
}  # fmt: skip
LAYOUTS: tuple[dict[str, Any], ...] = (
    LARGE,
    LARGE | {"tensor_model_parallel_size": 8, "pipeline_model_parallel_size": 1, "data_parallel_size": 1},
    LARGE | {"micro_batch_size": 4, "tensor_model_parallel_size": 1, "data_parallel_size": 4},
)


def write_logs(folder: Path, **figures: float) -> list[Path]:
    """Logs of three layouts whose steady steps are those of a device with these figures, a little off each."""
    assumed = assume_calibration("a800-80g", "megatron-core")
    true = assumed.model_copy(update={"figures": assumed.figures.model_copy(update=figures)})
    paths = []
    for index, layout in enumerate(LAYOUTS):
        path = folder / f"run_{index}.log"
        path.write_text(made_logs.megatron([1e6] * 5, **layout), encoding="utf-8")
        (case,) = read_cases([path], "a800-80g", parse_facts([]))
        step_ms = evaluate(CostModel(case.job, true), case.plan).step_ms
        steps_ms = [5 * step_ms, *[step_ms, 1.002 * step_ms, 0.998 * step_ms] * 3]
        path.write_text(made_logs.megatron(steps_ms, **layout), encoding="utf-8")
        paths.append(path)
    return paths


def test_three_runs_give_a_calibration(run_cli: RunCli, tmp_path: Path) -> None:
    assumed = assume_calibration("a800-80g", "megatron-core").figures
    true = {"matrix_fraction": 0.88 * assumed.matrix_fraction, "node_fraction": 0.6 * assumed.node_fraction}
    logs = write_logs(tmp_path, **true)
    found = run_cli(
        "calibrate", "--logs", *logs, "--device", "a800-80g", "--free", "matrix,node", "--out", "mine.json"
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    calibration = read_calibration(tmp_path / "mine.json")
    assert (calibration.device, calibration.software) == ("a800-80g", "megatron-core")
    assert calibration.figures.matrix_fraction == pytest.approx(true["matrix_fraction"], rel=0.05)
    assert calibration.figures.node_fraction == pytest.approx(true["node_fraction"], rel=0.25)
    assert [row.table for row in calibration.fitted] == ["run_0.log", "run_1.log", "run_2.log"]
    assert max(abs(row.error_fraction) for row in calibration.fitted) < 0.02
    assert calibration.command.startswith("mm-autoparallel calibrate --logs run_0.log run_1.log run_2.log --device")
    assert "1 of warm-up and 0 outliers dropped" in found.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--device", "a800-80g"), "there is nothing to fit to"),
        (("--logs", "a.log", "--rows", "0", "--device", "a800-80g"), "--rows chooses rows of TABLE.csv"),
        (("--logs", "a.log", "--device", "h100"), "the device 'h100' is not in the catalog"),
        (("--logs", "missing.log", "--device", "a800-80g"), "log missing.log: there is no such file"),
        (("--logs", "b.log", "--device", "a800-80g"), "--fact devices_per_node=N"),
        (("--logs", "c.log", "--device", "a800-80g"), "no step time"),
        (("--logs", "a.log", "--device", "a800-80g", "--base", "a100-80g"), "is of a100-80g, and the device is a800"),
    ],
)
def test_what_is_wrong_is_said(run_cli: RunCli, tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    (tmp_path / "a.log").write_text(made_logs.megatron(), encoding="utf-8")
    (tmp_path / "b.log").write_text(made_logs.megatron(world_size=32, data_parallel_size=8), encoding="utf-8")
    failed = made_logs.megatron(steps_ms=()) + "torch.OutOfMemoryError: CUDA out of memory.\n"
    (tmp_path / "c.log").write_text(failed, encoding="utf-8")
    found = run_cli("calibrate", *arguments, "--out", "mine.json")
    assert found.returncode == 2, found.stderr
    assert words in found.stderr
    assert not (tmp_path / "mine.json").exists()


def test_validate_predicts_logs(run_cli: RunCli, tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(made_logs.megatron(peaks={0: 20000.0}), encoding="utf-8")
    found = run_cli("validate", "--logs", "a.log", "--device", "a800-80g", "--json")
    assert found.returncode == 0, found.stderr
    assert '"a.log: PP2 TP2 DP2 MBS1"' in found.stdout
    for arguments, words in (
        ((), "there is nothing to predict"),
        (("--logs", "a.log"), "a log does not tell its device; give --device NAME"),
        (("--device", "a800-80g"), "--device and --fact are about logs"),
    ):
        refused = run_cli("validate", *arguments)
        assert refused.returncode == 2
        assert words in refused.stderr
