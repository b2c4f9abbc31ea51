"""Launch scripts as people write them: where a size is changed, and what is refused because nobody could."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.integrations.launch_script import find_world_size, read_launch_script
from mm_autoparallel.integrations.mindspeed_mm.launch_script import check_switches, read_sizes, set_sizes
from mm_autoparallel.integrations.shell_text import LaunchScript
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.planner.plan import Plan

FLAGS = (
    "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 4 --micro-batch-size 1 --global-batch-size 16 "
    "--mm-model m.json"
)


def script(text: str) -> LaunchScript:
    return LaunchScript(Path("train.sh"), text)


def written(text: str, plan: Plan) -> str:
    return set_sizes(script(text), plan, frozen_stage=False).text


@pytest.fixture
def plan(tiny_plan: Plan) -> Plan:
    """PP 2, TP 2, DP 4, MBS 2, and a batch of 64 in 8 micro-batches."""
    return tiny_plan


def test_numbers_behind_flags(plan: Plan) -> None:
    assert written(f"python x.py {FLAGS}\n", plan) == (
        "python x.py --pipeline-model-parallel-size 2 --use-distributed-optimizer --sequence-parallel "
        "--variable-seq-lengths --tensor-model-parallel-size 2 --micro-batch-size 2 --global-batch-size 64 "
        "--mm-model m.json\n"
    )


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("TP=4", "TP=2"),
        ("export TP=4  # cards", "export TP=2  # cards"),
        ('TP="4"', 'TP="2"'),
        ("TP=${TP:-4}", "TP=${TP:-2}"),
        ("A=1; TP=4; B=2", "A=1; TP=2; B=2"),
        ("CARDS=4\nTP=$CARDS", "CARDS=2\nTP=$CARDS"),
        ("TP=$((2*2))", "TP=2"),
        ("CARDS=4\nTP=$((CARDS/2))", "CARDS=4\nTP=$((CARDS/2))"),
    ],
)
@pytest.mark.parametrize("value", ["$TP", "${TP}", '"$TP"'])
def test_numbers_behind_variables(line: str, expected: str, value: str, plan: Plan) -> None:
    flags = FLAGS.replace("size 4", f"size {value}")
    assert written(f"{line}\npython x.py {flags}\n", plan).startswith(f"{expected}\n")


def test_every_place_of_a_flag_changes_but_comments_stay(plan: Plan) -> None:
    comment = "# --tensor-model-parallel-size 4\n"
    text = f"{comment}run {FLAGS} # --tensor-model-parallel-size 4\nrun {FLAGS}  \\\n  --micro-batch-size=1\n"
    new = written(text, plan)
    assert new.startswith(comment)
    assert new.count("--tensor-model-parallel-size 4") == 2
    assert new.count("--tensor-model-parallel-size 2") == 2
    assert "--micro-batch-size=2\n" in new


def test_a_value_on_the_next_line(plan: Plan) -> None:
    text = FLAGS.replace("--tensor-model-parallel-size 4", "--tensor-model-parallel-size \\\n   4")
    assert "--tensor-model-parallel-size \\\n   2" in written(text, plan)


def test_chunks_beside_the_stages(plan: Plan) -> None:
    two = replace(plan, strategy=Strategy(pp=2, tp=1, dp=8, mbs=2, vpp=2))
    first = written(f"run {FLAGS}\n", two)
    assert "--pipeline-model-parallel-size 2 --virtual-pipeline-model-parallel-size 2 " in first
    assert read_sizes(script(first), 16).sizes["vpp"] == 2
    assert "--virtual-pipeline-model-parallel-size 1" in written(first, plan)


def test_an_optimizer_that_is_not_sharded(plan: Plan) -> None:
    whole = replace(plan, strategy=replace(plan.strategy, zero=0, tp=2))
    lines = f'A="\n  {FLAGS} \\\n  --use-distributed-optimizer \\\n  --bf16\n"\n'
    assert written(lines, whole) == f'A="\n  {written(FLAGS, whole)} \\\n  --bf16\n"\n'
    assert written(f"run {FLAGS} \\\n --use-distributed-optimizer\nnext\n", whole).endswith("json \\\n\nnext\n")
    assert "--use-distributed-optimizer" not in written(f"run --use-distributed-optimizer {FLAGS}", whole)


@pytest.mark.parametrize(
    ("assignments", "expected"),
    [
        ("N=96\nDP=$(($WORLD_SIZE/2/2))\nGBS=$((2*$N*$DP))", "N=8\nDP=$(($WORLD_SIZE/2/2))\nGBS=$((2*$N*$DP))"),
        ("N=8\nDP=4\nGBS=$((2*$N*$DP))", "N=8\nDP=4\nGBS=$((2*$N*$DP))"),
        ("GBS=16", "GBS=64"),
        ("GBS=$((3*5))", "GBS=64"),
        ("DP=$(cat dp.txt)\nGBS=$((2*8*DP))", "DP=$(cat dp.txt)\nGBS=64"),
    ],
)
def test_the_global_batch(assignments: str, expected: str, plan: Plan) -> None:
    flags = FLAGS.replace("--global-batch-size 16", "--global-batch-size $GBS")
    new = written(f"{assignments}\nrun {flags}\n", plan)
    assert new.startswith(f"{expected}\n")
    assert read_sizes(script(new), 16).global_batch_size == 64


@pytest.mark.parametrize(
    "flag", ["--pipeline-model-parallel-size", "--micro-batch-size", "--global-batch-size", "--mm-model"]
)
def test_a_flag_that_is_missing(flag: str, plan: Plan) -> None:
    words = FLAGS.split()
    at = words.index(flag)
    with pytest.raises(JobError, match=f"does not pass {flag}; a plan is written where these flags stand"):
        written(" ".join(words[:at] + words[at + 2 :]), plan)


def test_context_parallel_brings_its_flags_and_one_needs_none(plan: Plan) -> None:
    split = replace(plan, strategy=replace(plan.strategy, cp=2, dp=2))
    both = "--context-parallel-size 2 --context-parallel-algo ulysses_cp_algo"
    assert both in written(FLAGS, split)
    own = "--context-parallel-algo hybrid_cp_algo"
    assert written(f"{FLAGS} {own}", split).count("--context-parallel-algo") == 1
    assert "--context-parallel" not in written(FLAGS, plan)
    assert "--context-parallel-size 2" in written(f"{FLAGS} --context-parallel-size 1", split)
    assert "--context-parallel-size 1" in written(f"{FLAGS} --context-parallel-size 8", plan)


@pytest.mark.parametrize(
    ("before", "value", "message"),
    [
        ("", "$TP", "takes its value from TP, which is assigned nowhere in it; assign it once, as in TP=2"),
        ("TP=4\nTP=8\n", "$TP", "is assigned in lines 1, 2"),
        ("TP=$1\n", "$TP", r"line 1 gives --tensor-model-parallel-size the value \$1, which is known only when"),
        ("", "${TP-4 --other ${PP}", r"the value \$\{TP-4 --other \$\{PP\}, which is known only when"),
        ("", "$(nproc)", r"gives --tensor-model-parallel-size the value \$\(nproc\)"),
        ("PP=2\n", "$PP", "both take their value from PP, and the plan needs 2 for the one and 1"),
    ],
)
def test_a_size_that_cannot_be_changed(before: str, value: str, message: str, plan: Plan) -> None:
    flags = FLAGS.replace("size 4", f"size {value}")
    flags = (
        flags.replace("pipeline-model-parallel-size 2", "pipeline-model-parallel-size ${PP}")
        if "PP" in before
        else flags
    )
    wanted = replace(plan, strategy=replace(plan.strategy, tp=1)) if "PP" in before else plan
    with pytest.raises(JobError, match=message):
        written(f"{before}{flags}", wanted)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--auto-parallel-mm", "searches instead of training"),
        ("--hetero-parallel", "parallel sizes of its own"),
        ("--use-torch-fsdp2", "without a pipeline"),
        ("--num-layers-per-virtual-pipeline-stage 2", "is refused by MindSpeed-MM"),
    ],
)
def test_flags_that_no_plan_goes_with(flag: str, message: str) -> None:
    with pytest.raises(JobError, match=f"x.sh: it passes {flag.split()[0]}, which .*{message}"):
        check_switches(script(f"run {FLAGS} {flag}").has_flag, Strategy(pp=1, tp=1, dp=1, mbs=1), "x.sh")


def test_a_script_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="there is no such file"):
        read_launch_script(tmp_path / "none.sh")
    (tmp_path / "binary.sh").write_bytes(b"\xff\xfe")
    with pytest.raises(JobError, match="UTF-16 text"):
        read_launch_script(tmp_path / "binary.sh")


def test_chunks_without_overlap_need_three_stages() -> None:
    quiet = script(f"{FLAGS} --no-overlap-p2p-communication")
    with pytest.raises(PlanError, match="asks for PP 3 or more"):
        check_switches(quiet.has_flag, Strategy(pp=2, tp=1, dp=1, mbs=1, vpp=2), "x.sh")
    check_switches(quiet.has_flag, Strategy(pp=3, tp=1, dp=1, mbs=1, vpp=2), "x.sh")
    check_switches(script(FLAGS).has_flag, Strategy(pp=2, tp=1, dp=1, mbs=1, vpp=2), "x.sh")


def test_the_world_that_a_script_starts() -> None:
    assert find_world_size(script("N=2\ntorchrun --nnodes $N --nproc_per_node 8 x.py")) == 16
    assert find_world_size(script("torchrun --nnodes=$(wc -l hosts) --nproc-per-node=8 x.py")) is None
    assert find_world_size(script("python x.py")) is None
    assert find_world_size(script("torchrun --standalone --nproc_per_node 4 x.py")) == 4  # torchrun's own default
    assert find_world_size(script("torchrun --nnodes ${NODES:-'2'} --nproc_per_node ${GPUS:-\"8\"} x.py")) == 16


def test_arithmetic_is_that_of_the_shell() -> None:
    """Random expressions, as bash works them out."""
    rng = random.Random(3)
    expressions = []
    for _ in range(40):
        words = [str(rng.randint(1, 9)) for _ in range(4)]
        a, b, c = (rng.choice("+-*/%") for _ in range(3))
        expressions.append(f"$(({words[0]} {a} (X {b} {words[1]}) {c} $X - {words[2]} * ${{X}}))")
    lines = [f"X=7; echo $(( {text[3:-2]} ))" for text in expressions]
    run = subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, text=True, timeout=30)
    expected = [int(line) for line in run.stdout.split()]
    found = [script("X=7").evaluate(text) for text in expressions]
    assert [value for value in found if value is not None] == expected
    assert len(expected) > 30


def test_what_has_no_value() -> None:
    for text in ("$1", "$((1 +))", "$((X/0))", "$NONE", "eight", "$((1 << 2))", "$((A))"):
        assert script("X=1\nA=$B\nB=$A").evaluate(text) is None


LONG_WAYS = {
    "itself": "TP=$TP",
    "itself thrice": "TP=$((TP+TP+TP))",
    "two of each other": "A=$TP\nTP=$A",
    "sums of sums": "".join(f"V{n}=$((V{n + 1}+V{n + 1}+V{n + 1}))\n" for n in range(20)) + "V20=1\nTP=$V0",
    "squares of squares": "".join(f"V{n}=$((V{n + 1}*V{n + 1}))\n" for n in range(18)) + "V18=3\nTP=$V0",
    "many summands": f"TP=$(({'1+' * 20_000}1))",
    "many signs": f"TP=$(({'-' * 3000}1))",
    "many digits": f"TP={'9' * 5000}",
    "digits of another script": "TP=\u0664",
    "many references": f'TP={"${a}" * 50_000}"',
    "many variables": "".join(f"V{n}=$V{n + 1}\n" for n in range(5000)) + "V5000=1\nTP=$V0",
}


@pytest.mark.parametrize("name", LONG_WAYS)
def test_what_no_person_writes_has_no_value(name: str, plan: Plan) -> None:
    text = f"{LONG_WAYS[name]}\nrun {FLAGS.replace('size 4', 'size $TP')}\n"
    with pytest.raises(JobError, match="cannot be told"):
        read_sizes(script(text), 64)
    with contextlib.suppress(JobError):  # a number that it knows it may still put there
        written(text, plan)


@pytest.mark.slow
def test_long_texts_take_as_long_as_they_are(plan: Plan) -> None:
    comments = "#" + " #" * 200_000 + "\n" + "# --micro-batch-size 1\n" * 20_000
    assert written(f"{comments}run {FLAGS}\n", plan).startswith(comments)
    with pytest.raises(JobError, match="is passed 3,000 times; at most 100 places"):
        written(f"run {FLAGS}\n" * 3000, plan)


def test_a_script_that_is_no_script(tmp_path: Path) -> None:
    (tmp_path / "large.sh").write_bytes(b"#" * 2_000_000)
    os.mkfifo(tmp_path / "pipe.sh")
    for name, words in (("large.sh", "2.0 MB large"), ("pipe.sh", "a named pipe")):
        with pytest.raises(JobError, match=words):
            read_launch_script(tmp_path / name)
