"""Profile runs as a child process makes them: files, progress, what is skipped, and what stops them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import toy_model as toy  # noqa: E402
from forked_ranks import ForkedRanks  # noqa: E402
from torch import nn  # noqa: E402

from mm_autoparallel.errors import ProfileError  # noqa: E402
from mm_autoparallel.model.profiles.operators.base import OperatorBase, base_path  # noqa: E402
from mm_autoparallel.model.profiles.store import ProfileEntry, ProfileFile, file_name, read_profile  # noqa: E402
from mm_autoparallel.profilers import worker  # noqa: E402
from mm_autoparallel.profilers.blocks import OPERATOR_ROUNDS  # noqa: E402
from mm_autoparallel.profilers.clock import Effort  # noqa: E402
from mm_autoparallel.profilers.subject import Build, Subject  # noqa: E402
from mm_autoparallel.profilers.worker import Configuration, profile  # noqa: E402

HERE = Path(__file__).parent
KINDS = ["vision_layer", "text_layer", "vision_pre", "vision_post", "text_pre", "text_post"]
QUICK = Effort(budget_s=0.1, min_rounds=3, max_rounds=3, max_warm_up=1)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "BLOCKS_EFFORT", QUICK)
    monkeypatch.setattr(worker, "OPTIMIZER_EFFORT", QUICK)


def run(folder: Path, *configurations: Configuration, subject: Subject = toy.SUBJECT, **more: Any) -> list[str]:
    lines: list[str] = []
    threads = torch.get_num_threads()
    try:
        profile(subject, toy.make_job(), configurations, folder, "toy --again", "group", lines.append, **more)
    finally:
        torch.set_num_threads(threads)
    return lines


def read(folder: Path, tp: int, mbs: int) -> ProfileFile:
    return read_profile(folder / file_name(tp, 1, mbs, toy.make_job().workload))


@pytest.mark.slow
def test_a_file_for_each_configuration(tmp_path: Path) -> None:
    folder = tmp_path / "device" / "model"
    lines = run(folder, Configuration(1, 1), Configuration(1, 2), operators=base_path(tmp_path))
    assert len(lines) == 2 * len(KINDS)
    assert lines[0].startswith("TP 1 MBS 1 vision_layer: ")
    assert lines[0].count(" ms") == 2
    for mbs in (1, 2):
        found = read(folder, 1, mbs)
        assert found.command == "toy --again"
        assert found.device == "toy-device"
        assert found.software["torch"] == torch.__version__
        assert [entry.kind for entry in found.entries] == KINDS
        assert {(entry.tp, entry.mbs, entry.arrangement, entry.out_of_memory) for entry in found.entries} == {
            (1, mbs, "group", False)
        }
        tokens = {entry.kind: (entry.tokens, entry.spans) for entry in found.entries}
        assert tokens["vision_post"] == (toy.IMAGE_TOKENS * toy.MERGE, 1)
        assert tokens["text_pre"] == (toy.SEQ_LENGTH, 1)
        assert all(entry.optimizer_ms is not None for entry in found.entries)
    with OperatorBase.open(base_path(tmp_path)) as base:
        ((place, platform),) = base.list_platforms().items()
        assert platform.holds_for("toy-device", {"torch": str(torch.__version__)})
        timed = list(base.list_timed(place))
    assert {one.source for one in timed} == {"block profile"}
    assert min(one.num_samples for one in timed) >= OPERATOR_ROUNDS
    batches = {tensor.shape[0] for one in timed for tensor in one.form.inputs if len(tensor.shape) == 3}
    assert {1, 2} <= batches  # of both micro-batches


@pytest.mark.slow
def test_what_is_there_is_not_measured_again(tmp_path: Path) -> None:
    run(tmp_path, Configuration(1, 1))
    (path,) = tmp_path.iterdir()
    before = path.read_text()
    lines = run(tmp_path, Configuration(1, 1), Configuration(1, 2))
    assert {line.split(":")[0].rsplit(" ", 1)[0] for line in lines} == {"TP 1 MBS 2"}
    assert path.read_text() == before
    assert run(tmp_path, Configuration(1, 2), Configuration(1, 1)) == []


def test_a_loss_that_is_no_number_names_the_part(tmp_path: Path) -> None:
    def build_model(build: Build) -> nn.Module:
        model = toy.build_model(build)
        with torch.no_grad():
            model.layers[1].down.bias[3] = float("nan")
        return model

    with pytest.raises(ProfileError, match=r"loss is no finite number; the first part .* is text_layer_1, or"):
        run(tmp_path, Configuration(1, 1), subject=replace(toy.SUBJECT, build_model=build_model))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_loss_that_is_no_number_at_another_size_names_the_part(tmp_path: Path) -> None:

    def forward_step(model: nn.Module, num_samples: int, workload: Any) -> torch.Tensor:
        model.layers[1].down.bias.data[3] = 0.0 if num_samples == 1 else float("nan")
        return toy.forward_step(model, num_samples, workload)

    with pytest.raises(ProfileError, match=r"loss is no finite number; the first part .* is text_layer_1, or"):
        run(tmp_path, Configuration(1, 1), Configuration(1, 2), subject=replace(toy.SUBJECT, forward_step=forward_step))
    assert read(tmp_path, 1, 1).entries
    assert len(list(tmp_path.iterdir())) == 1


def test_context_parallel_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="CP 2 is asked for"):
        run(tmp_path, Configuration(1, 1, cp=2))


def test_a_group_needs_its_ranks(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="TP 2 is to be measured in groups of 2 ranks, and there are 1"):
        run(tmp_path, Configuration(2, 1))


def start(arguments: list[str], timeout_s: float = 100) -> subprocess.CompletedProcess[str]:
    """A process of its own, single-threaded, that finds the toy."""
    environment = os.environ | {"PYTHONPATH": f"{HERE.parent.parent}:{HERE}", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
    )


@pytest.mark.nightly
@pytest.mark.slow
def test_without_memory_it_is_recorded_and_the_rest_goes_on(tmp_path: Path) -> None:
    """A real limit: the process may take 400 MB more than it has when it begins, and 40,000 samples take more."""
    script = tmp_path / "limited.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import resource
            from pathlib import Path
            import toy_model as toy
            from mm_autoparallel.profilers import worker
            from mm_autoparallel.profilers.clock import Effort

            worker.BLOCKS_EFFORT = worker.OPTIMIZER_EFFORT = Effort(0.1, 3, 3, 1)
            mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (mapped + 400_000_000,) * 2)
            configurations = [worker.Configuration(1, mbs) for mbs in (1, 40_000, 40_001, 2)]
            worker.profile(
                toy.SUBJECT, toy.make_job(), configurations, Path({str(tmp_path / "out")!r}), "toy", "group", print
            )
            """
        )
    )
    result = start([str(script)])
    assert result.returncode == 0, result.stderr[-3000:]
    assert [line for line in result.stdout.splitlines() if "memory" in line] == [
        "TP 1 MBS 40000: out of memory",
        "TP 1 MBS 40001: out of memory",
    ]
    assert len(list((tmp_path / "out").iterdir())) == 4
    entries = read(tmp_path / "out", 1, 40_000).entries
    assert [entry.kind for entry in entries] == KINDS
    assert all(entry.out_of_memory and entry.forward_ms is None for entry in entries)
    assert not any(entry.out_of_memory for entry in read(tmp_path / "out", 1, 2).entries)


def entries_by_kind(folder: Path, tp: int, mbs: int) -> dict[str, ProfileEntry]:
    return {entry.kind: entry for entry in read(folder, tp, mbs).entries}


@pytest.mark.slow
def test_a_group_of_two_ranks_and_one_rank_s_shard_hold_the_same(tmp_path: Path, forked_ranks: ForkedRanks) -> None:
    for arrangement in ("group", "shard"):
        arguments = [str(tmp_path / arrangement), arrangement, "1,1", "2,1"]
        forked_ranks.run(HERE / "toy_child.py", arguments, 2, tmp_path, [HERE.parent.parent], 100)
    group, shard = (entries_by_kind(tmp_path / arrangement, 2, 1) for arrangement in ("group", "shard"))
    whole = entries_by_kind(tmp_path / "group", 1, 1)
    for kind in KINDS:
        for name in ("activation_bytes", "checkpoint_bytes", "transient_bytes", "parameter_count", "output_bytes"):
            assert getattr(group[kind], name) == getattr(shard[kind], name), f"{kind} {name}"
        assert group[kind].arrangement == "group"
        assert shard[kind].arrangement == "shard"
    weights, biases = 2 * toy.WIDTH * toy.INNER, toy.INNER
    assert whole["text_layer"].parameter_count == weights + biases + toy.WIDTH
    assert group["text_layer"].parameter_count == (weights + biases) // 2 + toy.WIDTH
    # 2 KiB pass each rank at 0.8 MB/s in 0.5 + 1.28 ms twice: the all-reduce of the toy's network, in each direction
    layer = shard["text_layer"]
    assert layer.forward_ms is not None
    assert layer.forward_ms.median_ms > 3.56


@pytest.mark.nightly
@pytest.mark.slow
def test_collectives_of_a_shard_are_those_of_a_group(tmp_path: Path, forked_ranks: ForkedRanks) -> None:
    script = tmp_path / "record.py"
    script.write_text(
        textwrap.dedent(
            """
            import json, sys
            import torch
            import torch.distributed as dist
            from torch.distributed.device_mesh import init_device_mesh
            import toy_model as toy
            from mm_autoparallel.profilers.shard import fake_mesh, record_collectives
            from mm_autoparallel.profilers.subject import Build

            def record(mesh):
                model = toy.build_model(Build(toy.NUM_LAYERS, torch.device("cpu"), mesh))
                _, found = record_collectives(lambda: toy.forward_step(model, 2, toy.make_job().workload).backward())
                return [[one.operation, one.size_bytes] for one in found]

            dist.init_process_group("gloo")
            rank, real = dist.get_rank(), record(init_device_mesh("cpu", (2,)))
            dist.destroy_process_group()
            with fake_mesh(2, "cpu") as mesh:
                imagined = record(mesh)
            if rank == 0:
                print(json.dumps([real, imagined]))
            """
        )
    )
    real, imagined = json.loads(forked_ranks.run(script, [], 2, tmp_path, [HERE.parent.parent, HERE], 100))
    assert real == imagined
    state = 2 * toy.SEQ_LENGTH * toy.WIDTH * 4
    # a sum forward and one backward in each layer
    assert real == [["all_reduce", state]] * (2 * sum(toy.NUM_LAYERS.values()))


@pytest.mark.slow
def test_a_rank_that_fails_stops_the_others(tmp_path: Path, forked_ranks: ForkedRanks) -> None:
    script = tmp_path / "failing.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import os
            from dataclasses import replace
            from pathlib import Path
            import torch.distributed as dist
            import toy_model as toy
            from mm_autoparallel.errors import ProfileError
            from mm_autoparallel.profilers.worker import Configuration, profile

            dist.init_process_group("gloo")
            rank = dist.get_rank()

            def forward_step(model, num_samples, workload):
                if rank == 1 and num_samples == 2:
                    raise ValueError("rank 1 has no data")
                return toy.forward_step(model, num_samples, workload)

            subject = replace(toy.SUBJECT, forward_step=forward_step)
            configurations = [Configuration(1, 1), Configuration(1, 2)]
            told = ""
            try:
                profile(subject, toy.make_job(), configurations, Path({str(tmp_path / "out")!r}), "toy", "group", print)
            except (ProfileError, ValueError) as failure:
                told = str(failure)
            Path({str(tmp_path)!r}, f"rank{{rank}}").write_text(told)
            dist.destroy_process_group()
            """
        )
    )
    forked_ranks.run(script, [], 2, tmp_path, [HERE.parent.parent, HERE], 100)
    assert (tmp_path / "rank1").read_text() == "rank 1 has no data"
    assert "profiling stopped because rank 1 failed" in (tmp_path / "rank0").read_text()
    assert [path.name for path in (tmp_path / "out").iterdir()] == [file_name(1, 1, 1, toy.make_job().workload)]
