"""`edit` and `--set` as a user runs them: plans and jobs changed by words, refused where they cannot be."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]

PLAN = {
    "parallel_config": {"PP": 2, "TP": 8, "DP": 4, "CP": 2, "MBS": 2},
    "layer_placement": {"vit_layer_placement": [32, 0], "llm_layer_placement": [38, 42]},
    "layer_recompute": {"vit_layer_recompute": [0, 0], "llm_layer_recompute": [38, 0]},
}


@pytest.fixture
def job(repository: Path) -> Path:
    return repository / "examples" / "qwen2vl_72b" / "job.yaml"


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(PLAN))
    return path


def test_moves_and_modes_in_their_order(run_cli: Run, job: Path, plan: Path, tmp_path: Path) -> None:
    new = tmp_path / "new.json"
    done = run_cli(
        "edit", job, "--config", plan, "--move", "text:0:1:2", "--mode", "text:1:offload=3", "--out", new
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(new.read_text())
    assert found["layer_placement"]["llm_layer_placement"] == [36, 44]
    assert found["layer_recompute"]["llm_layer_recompute"] == [36, 2]  # layers keep their modes
    assert found["layer_modes"] == {"offload": {"llm": [0, 3]}}
    before = json.loads(run_cli("simulate", job, "--config", plan, "--json").stdout)["e2e_time"]
    after = json.loads(run_cli("simulate", job, "--config", new, "--json").stdout)["e2e_time"]
    assert f"({(after / before - 1) * 100:+.1f} %)" in done.stdout
    assert found["e2e_time"] == after


def test_sizes_take_the_nearest_strategy_placed_anew(run_cli: Run, job: Path, plan: Path, tmp_path: Path) -> None:
    new = tmp_path / "new.json"
    done = run_cli("edit", job, "--config", plan, "--sizes", "PP=4", "--out", new)
    assert done.returncode == 0, done.stderr
    config = json.loads(new.read_text())["parallel_config"]
    assert config.items() >= {"PP": 4, "TP": 8, "CP": 2, "MBS": 2, "DP": 2}.items()


def test_sizes_that_a_plan_has_leave_it_as_it_is(run_cli: Run, job: Path, plan: Path, tmp_path: Path) -> None:
    new = tmp_path / "new.json"
    done = run_cli("edit", job, "--config", plan, "--sizes", "PP=2,MBS=2", "--out", new)
    assert done.returncode == 0, done.stderr
    assert "+0.00 ms" in done.stdout
    assert json.loads(new.read_text())["layer_placement"] == PLAN["layer_placement"]


def test_an_order_is_changed_and_one_that_never_ends_refused(
    run_cli: Run, job: Path, plan: Path, tmp_path: Path
) -> None:
    count = 512 // (4 * 2)
    one_by_one = [word for m in range(count) for word in (f"{m}F0", f"{m}B0")]
    plan.write_text(json.dumps(PLAN | {"schedule": "free", "order": [one_by_one, one_by_one]}))
    ahead = ["0F0", *(word for m in range(1, count) for word in (f"{m}F0", f"{m - 1}B0")), f"{count - 1}B0"]
    new = tmp_path / "new.json"
    done = run_cli("edit", job, "--config", plan, "--order", f"0:{' '.join(ahead)}", "--out", new)
    assert done.returncode == 0, done.stderr
    assert json.loads(new.read_text())["order"] == [ahead, one_by_one]
    assert "(-" in done.stdout
    swapped = ["0F0", "1F0", "0B0", "1B0", *one_by_one[4:]]
    done = run_cli("edit", job, "--config", plan, "--order", f"1:{' '.join(swapped)}", "--out", tmp_path / "no.json")
    assert done.returncode == 2
    assert "stage 0 waits with 0B0 for 0B0 of stage 1, stage 1 waits with 1F0 for 1F0 of stage 0" in done.stderr


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ([], "nothing to change"),
        (["--move", "text:0:1"], "--move 'text:0:1' is not understood; it is such as text:3:4:1"),
        (["--mode", "text:0:recompute"], "is not understood; it is such as text:2:recompute=4"),
        (["--move", "text:0:1:39"], "39 text layers cannot leave"),
        (["--move", "txt:0:1:1"], "no part 'txt' (did you mean \"text\"?)"),
        (["--move", "text:0:2:1"], "no virtual stage 2; they are 0 to 1"),
        (["--mode", "text:0:recompute=39"], "recomputes 39 layers on stage 0, which holds 38"),
        (["--mode", "text:0:recompite=1"], "modes names 'recompite'"),
        (["--order", "0F0 0B0"], "--order '0F0 0B0' is not understood; it is such as 2:0F0 1F0 0B0 1B0"),
        (["--order", "0:0F0 0B0"], "the plan has no order of single actions to change"),
        (["--sizes", "PP=7"], "128 is no multiple of 7"),
        (["--sizes", "XP=7"], "--sizes 'XP=7'"),
        (["--set", "cluster.num_node=4", "--move", "text:0:1:1"], "cluster.num_node"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    run_cli: Run, job: Path, plan: Path, tmp_path: Path, flags: list[str], told: str
) -> None:
    done = run_cli("edit", job, "--config", plan, *flags, "--out", tmp_path / "new.json")
    assert done.returncode == 2
    assert told in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "new.json").exists()


def test_the_plan_is_not_written_over(run_cli: Run, job: Path, plan: Path) -> None:
    done = run_cli("edit", job, "--config", plan, "--move", "text:0:1:1", "--out", plan)
    assert done.returncode == 2
    assert json.loads(plan.read_text()) == PLAN


def test_other_values_of_a_job_s_keys(run_cli: Run, job: Path, plan: Path) -> None:
    def step(*flags: str) -> float:
        done = run_cli("simulate", job, "--config", plan, "--json", *flags)
        assert done.returncode == 0, done.stderr
        return float(json.loads(done.stdout)["e2e_time"])

    assert step("--set", "cluster.device.network_link.bandwidth_bytes_per_s=1e9") > step()
    assert step("--set", "workload.global_batch_size=256") < step()
    assert step("--set", "cluster.device={based_on: ascend-910b-64g, bf16_flops_per_s: 1e14}") > step()
    slow = ("--set", "cluster.device.bf16_flops_per_s=1e14", "--set", "cluster.device.memory_bytes=4e10")
    assert step(*slow) > step()


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("cluster.num_nodes", "KEY=VALUE is expected"),
        ("clutser.num_nodes=4", 'did you mean "cluster"?'),
        ("cluster.num_nodes.x=4", "holds no keys"),
        ("cluster.num_nodes=[", "the value of"),
        ("cluster.num_nodes=four", 'cluster.num_nodes is "four"'),
        ("search.pp.9=4", "9 is no place of a list of 5"),
        ("cluster.device.memory=1e10", "memory is not a key known here"),
    ],
)
def test_values_that_cannot_be(run_cli: Run, job: Path, plan: Path, word: str, told: str) -> None:
    done = run_cli("simulate", job, "--config", plan, "--set", word)
    assert done.returncode == 2
    assert told in done.stderr
    assert len(done.stderr.splitlines()) == 1
