"""What a host takes to launch a layer: told apart from all that is no layer, written so that a job takes it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_qwen2vl import CONFIG
from torch import Tensor, nn

from mm_autoparallel.cli.main import main
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.model.profiles.calibration import calibration_of
from mm_autoparallel.model.profiles.store import Timing
from mm_autoparallel.model.readers.job_file import read_job
from mm_autoparallel.profilers import host_constants
from mm_autoparallel.profilers.clock import Effort
from mm_autoparallel.profilers.host_constants import HostTimes, measure_host
from mm_autoparallel.profilers.subject import Build, Subject

CPU = torch.device("cpu")
WORKLOAD = Workload(global_batch_size=1, seq_length=8)
LAYER_S = {"vision": (0.002, 0.003), "text": (0.005, 0.011)}
REST_S = 0.4


class Clock:
    """Seconds that pass only where a layer, or what is none, says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


class Spend(torch.autograd.Function):
    """Takes its time in forward and backward."""

    @staticmethod
    def forward(context: Any, value: Tensor, clock: Clock, forward_s: float, backward_s: float) -> Tensor:
        context.spent = clock, backward_s
        clock.now_s += forward_s
        return value.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        clock, backward_s = context.spent
        clock.now_s += backward_s
        return gradients[0], None, None, None


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(host_constants, "time", made)
    return made


def make_subject(clock: Clock) -> Subject:
    class Model(nn.Module):
        def __init__(self, build: Build) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))
            self.depth = build.depth

    def build_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters)

    def forward_step(model: nn.Module, num_samples: int, workload: Workload) -> Tensor:
        assert isinstance(model, Model)
        spent: Any = Spend.apply
        value = spent(num_samples * model.weight, clock, REST_S, REST_S)
        for name, depth in model.depth.items():
            for _ in range(depth):
                value = spent(value, clock, *LAYER_S[name])
        return value.sum()

    return Subject(Model, forward_step, build_optimizer)


def test_a_layer_is_what_more_layers_take_more(clock: Clock) -> None:
    effort = Effort(budget_s=0.0, min_rounds=3, max_rounds=3, max_warm_up=1)
    found = measure_host(make_subject(clock), WORKLOAD, {"vision": 12, "text": 3}, CPU, effort)
    for name, (forward_s, backward_s) in LAYER_S.items():
        assert found[name].forward_ms.median_ms == pytest.approx(forward_s * 1e3)
        assert found[name].backward_ms.median_ms == pytest.approx(backward_s * 1e3)
        assert found[name].backward_factor == pytest.approx(backward_s / forward_s)


def test_a_modality_of_one_layer_cannot_be_told(clock: Clock) -> None:
    effort = Effort(budget_s=0.0, min_rounds=1, max_rounds=1, max_warm_up=1)
    assert list(measure_host(make_subject(clock), WORKLOAD, {"vision": 1, "text": 2}, CPU, effort)) == ["text"]


class TestCommand:
    """With what is measured given, and no model run."""

    def run(self, folder: Path, monkeypatch: pytest.MonkeyPatch, forward_ms: float = 4.0, *options: str) -> int:
        pytest.importorskip("transformers")
        monkeypatch.chdir(folder)
        times = HostTimes(*(Timing(median_ms=ms, mad_ms=0.1, num_samples=9) for ms in (forward_ms, 3 * forward_ms)))
        monkeypatch.setattr(host_constants, "measure_host", lambda *_: {"vision": times, "text": times})
        (folder / "config.json").write_text(json.dumps(CONFIG))
        workload = {"global_batch_size": 4, "seq_length": 32, "image_tokens_per_sample": 8}
        document = {
            "model": "config.json",
            "cluster": {"num_nodes": 1, "devices_per_node": 2, "device": "h200-141g"},
            "workload": workload,
        }
        (folder / "job.json").write_text(json.dumps(document))
        return main(["profile", "job.json", "--host-constants", "--device", "cpu", *options])

    def test_a_job_takes_what_was_measured(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert self.run(tmp_path, monkeypatch) == 0
        said = capsys.readouterr()
        assert "as narrow as this one" in said.err
        path = tmp_path / said.out.strip()
        device = json.loads((path.parent / "device.json").read_text())
        document = json.loads((tmp_path / "job.json").read_text())
        document["cluster"]["device"] = device
        (tmp_path / "job.json").write_text(json.dumps(document | {"calibration": said.out.strip()}))
        found = calibration_of(read_job(tmp_path / "job.json"))
        figures = found.figures
        assert (figures.layer_launch_ms, figures.launch_backward_factor) == (4.0, 3.0)
        assert (figures.rotary_vision_launch_ms, figures.vision_launch_backward_factor) == (4.0, 3.0)
        source = found.sources["layer_launch_ms"]  # "cuda 12.6, torch …" where torch was built for it
        assert source.startswith("measured with ")
        assert "torch " in source
        assert found.description.endswith("its host's measured")

    def test_models_that_do_not_fit_are_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def fill(*_: Any) -> None:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")

        assert self.run(tmp_path, monkeypatch) == 0
        monkeypatch.setattr(host_constants, "measure_host", fill)
        assert main(["profile", "job.json", "--host-constants", "--device", "cpu"]) == 2
        assert "do not fit on this device" in capsys.readouterr().err

    @pytest.mark.nightly
    def test_a_small_model_is_measured_here(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        real = measure_host
        assert self.run(tmp_path, monkeypatch) == 0
        monkeypatch.setattr(host_constants, "measure_host", real)
        capsys.readouterr()
        assert main(["profile", "job.json", "--host-constants", "--device", "cpu"]) == 0
        document = json.loads((tmp_path / capsys.readouterr().out.strip()).read_text())
        assert min(document["figures"][name] for name in ("layer_launch_ms", "rotary_vision_launch_ms")) > 0

    @pytest.mark.parametrize(
        ("forward_ms", "options", "words"),
        [
            (0.0, (), "took no time to launch"),
            (4.0, ("--tp", "2"), "--tp and --host-constants do not go together"),
        ],
    )
    def test_what_cannot_be_told_is_said(
        self,
        forward_ms: float,
        options: tuple[str, ...],
        words: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        assert self.run(tmp_path, monkeypatch, forward_ms, *options) == 2
        assert words in capsys.readouterr().err
        assert not list(tmp_path.glob("subgraph_profiles/*/host_constants.json"))
