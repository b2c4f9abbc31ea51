"""examples/gpt under --auto-tuning and --auto-settings on this machine's cores: what a search leaves and tells."""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from started import REPOSITORY, Ended, Started

from mm_autoparallel import hooks, signals
from mm_autoparallel.api import read_plan, simulate
from mm_autoparallel.api.jobs import read_job
from mm_autoparallel.profilers.launch import Launch, make_environment

pytest.importorskip("torch")

EXAMPLE = REPOSITORY / "examples" / "gpt"
SCRIPT = EXAMPLE / "pretrain_gpt.py"
TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 128 --global-batch-size 2 "
    "--attention-dropout 0 --hidden-dropout 0 --untie-embeddings-and-output-weights"
)
NAMES = ("Data Parallel Size", "Tensor Parallel Size", "Pipeline Parallel Size", "Virtual Pipeline Size")

pytestmark = pytest.mark.slow


def read_rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "model_results.csv").open() as stream:
        return list(csv.DictReader(stream))


def read_block(told: str) -> list[dict[str, str]]:
    """The recommended configurations, read back from what was printed."""
    _, block = told.split("The recommended configs are:\n")
    parts = re.split(r"<==========Top #\d config==========>\n", block)[1:]
    lines = [re.findall(r"^(\S[^\n]{29})(\S[^\n]{39,})$", part, re.MULTILINE) for part in parts]
    return [{name.strip(): value.strip() for name, value in one} for one in lines]


def tops(folder: Path, prefix: str = "auto_tuning") -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob(f"{prefix}_top*.json")}


def check_plans(folder: Path, prefix: str = "auto_tuning") -> None:
    """The plans are simulated as they were planned, for the job that lies beside them."""
    job = read_job(folder / f"{prefix}_job.json")
    for name, text in tops(folder, prefix).items():
        simulation = simulate(job, read_plan(folder / name, job))
        assert simulation.fits
        assert simulation.step_ms == pytest.approx(json.loads(text)["e2e_time"], rel=1e-9)


# ------------------------------------------------------------------------------------------------------------- quickly


@pytest.fixture(autouse=True)
def _signals_stay(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A hook that runs in this process takes it for its own, and heeds its signals from then on."""
    monkeypatch.setattr(signals, "_owns_process", [False])
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def tune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """The example's hook in this process, whose children are the example itself, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MM_AUTO_IS_NOT_HANDED_ON", "1")

    def run(*more: str) -> Ended:
        flags = [*TINY.split(), *more]
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *flags])
        monkeypatch.setattr(sys, "orig_argv", [sys.executable, str(SCRIPT), *flags])
        parser = argparse.ArgumentParser()
        hooks.add_arguments(parser)
        hooks.add_tuning_arguments(parser)
        with pytest.raises(SystemExit) as ended:
            hooks.auto_tuning(parser.parse_known_args(flags)[0], cast("Any", None), search={"cp": [1]})
        told = capfd.readouterr()
        return Ended(cast("int", ended.value.code), told.out, told.err)

    return run


def test_three_configurations_come_out_and_the_environment_stays(
    tune: Callable[..., Ended], tmp_path: Path, told_on_terminal: None
) -> None:
    before = dict(os.environ)
    ended = tune("--auto-tuning", "--auto-tuning-ranks", "2", "--nproc-per-node", "1")
    assert ended.code == 0, ended.stderr
    assert dict(os.environ) == before
    block, folder = read_block(ended.stderr), tmp_path / "auto_tuning_dir"
    plans = [json.loads(text) for _, text in sorted(tops(folder).items())]
    assert len(block) == len(plans) == 3
    for told, plan in zip(block, plans, strict=True):
        assert [told[name] for name in NAMES] == [
            str(plan["parallel_config"][key]) for key in ("DP", "TP", "PP", "VPP")
        ]
        assert told["Performance"] == f"{plan['e2e_time']:.3f} ms"
        assert told["Memory"] == f"{max(plan['peak_memory_bytes']) / 2**20:.1f} MB"
    assert len({json.dumps(plan["parallel_config"]) for plan in plans}) == 3
    flags = (folder / "auto_tuning_top1" / "megatron_args.txt").read_text()
    assert f"--pipeline-model-parallel-size {plans[0]['parallel_config']['PP']}\n" in flags
    check_plans(folder)


def test_ranks_are_told_nothing_of_a_torchrun_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("MASTER_ADDR", "a.person.s")
    launch = Launch(("python",), 1, Path(), ("localhost", 0), environment={"OMP_NUM_THREADS": "1"})
    handed_on = make_environment(launch)
    assert {*os.environ} - {*handed_on} == {"RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"}
    assert (handed_on["MASTER_ADDR"], handed_on["OMP_NUM_THREADS"]) == ("a.person.s", "1")


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ("--auto-tuning --auto-parallel-mm", "--auto-parallel-mm and --auto-tuning each search a plan"),
        ("--auto-tuning --auto-tuning-log-level loud", "--auto-tuning-log-level is 'loud'"),
        ("--auto-tuning --auto-tuning-ranks 3 --simulated-nproc-per-node 2", "3 devices are planned for"),
        ("--auto-tuning --auto-tuning-work-dir /proc/x", "/proc/x cannot be written"),
        ("--auto-tuning --use-torch-fsdp2", "--use-torch-fsdp2 shards with torch FSDP2"),
    ],
)
def test_what_is_wrong_ends_with_one_paragraph(tune: Callable[..., Ended], more: str, named: str) -> None:
    ended = tune("--nproc-per-node", "1", *more.split())
    assert ended.code == 2
    assert named in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_a_description_of_its_own_is_not_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = argparse.ArgumentParser()
    hooks.add_arguments(parser)
    hooks.add_tuning_arguments(parser)
    monkeypatch.setattr(sys, "argv", ["script.py", "--auto-tuning"])
    pretraining = hooks.Pretraining(model={}, workload={}, subject=cast("Any", None))
    with pytest.raises(SystemExit, match="2"):
        hooks.auto_parallel(parser.parse_args(["--auto-tuning", "--nproc-per-node", "1"]), pretraining)


# ------------------------------------------------------------------------------------------------------------- nightly


SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 256 --global-batch-size 32 "
    "--attention-dropout 0 --hidden-dropout 0 --untie-embeddings-and-output-weights"
)


@pytest.fixture
def start() -> Iterator[Callable[..., Started]]:
    """Starts the example, or a script of it, in a folder; at the end nothing of it may be left."""
    started: list[Started] = []

    def run(folder: Path, flags: str, *, command: tuple[object, ...] = (sys.executable, SCRIPT)) -> Started:
        started.append(Started([*command, *flags.split()], folder, {"OMP_NUM_THREADS": "1", "PYTHON": sys.executable}))
        return started[-1]

    yield run
    left = [name for one in started for name in one.left_over()]
    for one in started:
        if one.process.poll() is None:
            one.kill()
    assert left == []


@pytest.mark.nightly
@pytest.mark.parametrize("model", ["llama2_7b", "mixtral_8x7b", "gpt3_15b"])
def test_each_model_is_planned_for_sixteen_and_measured_once(
    model: str, tmp_path: Path, start: Callable[..., Started]
) -> None:
    flags = "--auto-tuning --auto-tuning-ranks 16 --nproc-per-node 2"
    command = ("bash", EXAMPLE / f"{model}.sh")
    first = start(tmp_path, flags, command=command).wait(900)
    assert first.code == 0, first.stderr
    assert "costs: measured now" in first.stderr
    check_plans(tmp_path / "auto_tuning_dir")
    found = tops(tmp_path / "auto_tuning_dir")
    assert len(found) == len(read_block(first.stderr)) == 3
    again = start(tmp_path, flags, command=command).wait(900)
    assert again.code == 0, again.stderr
    assert "costs: measured before" in again.stderr
    assert "measuring" not in again.stderr
    assert tops(tmp_path / "auto_tuning_dir") == found
    assert read_block(again.stderr) == read_block(first.stderr)


@pytest.mark.nightly
def test_killed_in_the_middle_it_goes_on(tmp_path: Path, start: Callable[..., Started]) -> None:
    flags = f"{SMALL} --auto-settings --auto-settings-work-dir work --auto-settings-ranks 2 --nproc-per-node 2"
    profiles, trials = tmp_path / "work" / "subgraph_profiles", tmp_path / "work" / "trials"
    first = start(tmp_path, flags)
    first.wait_until(lambda: list(profiles.glob("*/*/tp1*.json")))
    first.kill()
    assert first.left_over() == []
    kept = {path: path.read_bytes() for path in profiles.glob("*/*/tp*.json")}
    second = start(tmp_path, flags)
    second.wait_until(lambda: list(trials.glob("*.json")))
    second.kill()
    assert second.left_over() == []
    kept |= {path: path.read_bytes() for path in trials.glob("*.json")}
    third = start(tmp_path, flags).wait(600)
    assert third.code == 0, third.stderr
    assert "costs: measured before" in third.stderr
    assert {path: path.read_bytes() for path in kept} == kept
    assert len(tops(tmp_path / "work", "auto_settings")) == 3
    fourth = start(tmp_path, flags).wait(600)
    assert "training" not in fourth.stderr
    assert read_block(fourth.stderr) == read_block(third.stderr)


@pytest.mark.nightly
def test_what_is_trained_is_what_is_told(tmp_path: Path, start: Callable[..., Started]) -> None:
    flags = f"{SMALL} --auto-settings --auto-settings-type black --auto-settings-ranks 2 --nproc-per-node 2"
    ended = start(tmp_path, flags).wait(900)
    assert ended.code == 0, ended.stderr
    rows = read_rows(tmp_path)
    steps = [float(row["e2e_time"]) for row in rows]
    assert steps == sorted(steps)
    trained = [row for row in rows if row["trial_trained_ms"]]
    assert len(trained) == len(rows) > 5
    assert {row["whole"] for row in rows} == {"true"}
    assert {(row["pp"], row["tp"], row["dp"]) for row in rows} == {("1", "1", "2"), ("1", "2", "1"), ("2", "1", "1")}
    best = read_block(ended.stderr)[0]
    assert best["Trained Performance"] == f"{steps[0]:.3f} ms"


@pytest.mark.nightly
def test_a_plan_for_more_devices_is_trained_cut(tmp_path: Path, start: Callable[..., Started]) -> None:
    experts = "--swiglu --disable-bias-linear --num-experts 4"
    flags = f"{SMALL} {experts} --auto-settings --auto-settings-ranks 16 --nproc-per-node 2"
    ended = start(tmp_path, flags).wait(600)
    assert ended.code == 0, ended.stderr
    rows = read_rows(tmp_path)
    assert len(rows) == 5
    for row in rows:
        factor = float(row["trial_trained_ms"]) / float(row["trial_planned_ms"])
        assert float(row["e2e_time"]) == pytest.approx(float(row["planned_ms"]) * factor, rel=1e-3)
    assert all("Performance by trial" in one for one in read_block(ended.stderr))


@pytest.mark.nightly
def test_started_by_torchrun_the_first_rank_searches(tmp_path: Path, start: Callable[..., Started]) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, SCRIPT)
    flags = f"{TINY} --auto-tuning --auto-tuning-ranks 1024 --nproc-per-node 2 --global-batch-size 2048"
    ended = start(tmp_path, flags, command=torchrun).wait(600)
    assert ended.code == 0, ended.stderr
    assert ended.stderr.count("The recommended configs are:") == 1
    assert {json.loads(plan)["world_size"] for plan in tops(tmp_path / "auto_tuning_dir").values()} == {1024}


@pytest.mark.nightly
def test_two_nodes_measure_and_train_together(tmp_path: Path, start: Callable[..., Started], free_port: int) -> None:
    flags = (
        f"{TINY} --auto-settings --auto-settings-ranks 2 --nnodes 2 --nproc-per-node 1 --master-port {free_port} "
        "--global-batch-size 8"
    )
    nodes = [start(tmp_path, f"{flags} --node-rank {node}") for node in (0, 1)]
    ended = [node.wait(600) for node in nodes]
    assert [one.code for one in ended] == [0, 0], [one.stderr for one in ended]
    assert "Trained Performance" in read_block(ended[0].stderr)[0]
    assert "The recommended configs" not in ended[1].stderr


@pytest.mark.nightly
@pytest.mark.parametrize("routing", ["", "--moe-router-force-load-balancing"])
def test_the_flags_of_a_plan_train_as_one_process_does(
    routing: str, tmp_path: Path, start: Callable[..., Started]
) -> None:
    divisions = {
        1: ("",),
        2: (
            "",
            "--tensor-model-parallel-size 2 --sequence-parallel",
            "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|t*3L --use-distributed-optimizer",
            "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --recompute-granularity full "
            "--recompute-method block --recompute-num-layers 1",
            "--expert-model-parallel-size 2",
        ),
        4: ("--expert-model-parallel-size 2 --tensor-model-parallel-size 2 --use-distributed-optimizer",),
    }
    experts = f"--swiglu --disable-bias-linear --num-experts 4 {routing}"
    model = f"{SMALL} {experts} --train-iters 4 --position-embedding-type rope"
    losses = []
    for number, lines in divisions.items():
        torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={number}", SCRIPT)
        for line in lines:
            ended = start(tmp_path, f"{model} {line}", command=torchrun).wait(300)
            assert ended.code == 0, ended.stderr
            losses.append([float(text) for text in re.findall(r"lm loss: (\S+)", ended.stdout)])
    assert len(losses[0]) == 4
    assert losses[0][-1] < losses[0][0]
    for found in losses[1:]:
        assert found == pytest.approx(losses[0], rel=1e-5)
