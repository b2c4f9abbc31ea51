"""Inputs of every kind, mutated: exit codes 0, 2 and 3, nothing slow, nothing large, nothing odd in what is printed.

A short run of attack.py, whose long runs are started by hand.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from attack import Attack, Findings, _events, attack, attack_in_children, main
from mutate import mutate
from targets import TARGETS, Target

SEED, NUM_MUTATIONS = 20251122, 1


@pytest.mark.slow
def test_no_mutation_does_harm(tmp_path: Path) -> None:
    """The first of each target is the right input, which must do what it says."""
    findings = Findings(tmp_path / "kept")
    attack_in_children(
        [Attack(name, SEED, number) for name in TARGETS for number in range(-1, NUM_MUTATIONS)], findings
    )
    print(f"{findings.num_done} mutations, {dict(findings.numbers)}")
    assert findings.num_done == len(TARGETS) * (1 + NUM_MUTATIONS)
    assert not findings.first


FOUND = (
    ("model-megatron", 34, 563),  # a number of 5,000 digits where a word stands
    ("pipeline-search", 34, 1665),  # numbers of layers with 31 digits, told back
    ("sapp-init", 34, 1929),
    ("plan", 36, 2041),  # a device without memory
    ("files-accelerate", 8002, 1496),  # a mapping where a word stands
    ("files-deepspeed", 8002, 1152),  # a byte order mark in a person's file
    ("files-paddle", 8002, 510),  # a micro-batch of a billion samples, whose divisors lint tries
    ("files-torch", 8002, 545),  # a schedule of 5e14 micro-batches
    ("files-torchtitan", 8002, 80),  # a literal that is no finite number
    ("export-megatron", 9001, 320),  # sequences of 1e15 tokens, whose step was told in 26 digits
)
"""Mutations that once did harm: target, seed, number."""


def test_what_was_found_is_mended(tmp_path: Path) -> None:
    findings = Findings(tmp_path / "kept")
    attack_in_children([Attack(*found) for found in FOUND], findings)
    assert findings.num_done == len(FOUND)
    assert not findings.first


def crash() -> int:
    raise ZeroDivisionError("nothing")


def print_and_return(text: str, code: int = 0) -> int:
    print(text)
    return code


def spoil_input() -> int:
    Path("input.json").write_text("{}")
    return 0


def write_outside() -> int:
    Path("../outside/file").write_text("")
    return 0


@pytest.mark.parametrize(
    ("does", "finding"),
    [
        (crash, "ZeroDivisionError in nowhere: nothing"),
        (lambda: sys.exit("no"), "SystemExit in nowhere: no"),
        (lambda: 1, "exit code 1"),
        (lambda: print_and_return("a \x1b[31m b"), "control characters in output: '\\x1b'"),
        (lambda: print_and_return("a step takes inf ms"), "output: inf"),
        (lambda: print_and_return(f"a step takes {'1' * 30} ms"), "a number of 30 digits"),
        (spoil_input, "the input input.json was changed"),
        (write_outside, "a file outside its folder"),
        (lambda: print_and_return("a step takes 1.5 ms", 3), None),
    ],
)
def test_what_does_harm_is_found(does: Callable[[], int], finding: str | None, tmp_path: Path) -> None:
    assert planted(does, tmp_path) == ([] if finding is None else [finding])


def planted(does: Callable[[], int], tmp_path: Path) -> list[str]:
    """What is found of a target that does this."""
    base, room, here = tmp_path / "base", tmp_path / "room", Path.cwd()
    base.mkdir()
    room.mkdir()
    (base / "input.json").write_text('{"a": 1}')
    try:
        return attack(Target(lambda folder: None, lambda rng: does()), Attack("planted", 0, 1), base, room)
    finally:
        os.chdir(here)


def burn() -> int:
    ends_s = time.process_time() + 0.2
    while time.process_time() < ends_s:
        pass
    return 0


def wait() -> int:
    time.sleep(0.2)
    return 0


@pytest.mark.parametrize(
    ("does", "waits_s", "finding"),
    [
        (burn, 60.0, "0 s of processor time"),
        (wait, 60.0, None),
        (wait, 0.1, "0 s, of which 0 of processor time"),
    ],
)
def test_processor_time_is_what_counts(
    does: Callable[[], int], waits_s: float, finding: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attack.LIMIT_S", 0.1)
    monkeypatch.setattr("attack.WAITS_S", waits_s)
    assert planted(does, tmp_path) == ([] if finding is None else [finding])


def test_the_parts_of_a_run_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Attack] = []
    monkeypatch.setattr("attack.attack_in_children", lambda attacks, findings: done.extend(attacks))
    monkeypatch.setattr("attack.compile_search", lambda: None)
    given = ["--targets", "job,plan", "--mutations", "5", "--seed", "3"]
    for part in ("1/3", "2/3", "3/3"):
        assert main([*given, "--part", part]) == 0
    assert len(done) == 10
    assert set(done) == {Attack(name, 3, number) for name in ("job", "plan") for number in range(5)}
    with pytest.raises(SystemExit):
        main([*given, "--part", "4/3"])


def test_a_child_that_hangs_is_given_up() -> None:
    with subprocess.Popen(["sleep", "60"], stdout=subprocess.PIPE, bufsize=0, start_new_session=True) as child:
        assert list(_events(child, hang_s=0.1)) == []
        assert child.returncode == -9


def test_a_seed_comes_back_the_same() -> None:
    texts = ['{"a": [1, 2, {"b": "c"}]}', "a: 1\n"]
    for seed in range(50):
        first, again = (mutate("input.json", texts[0], random.Random(seed), texts) for _ in range(2))
        assert first == again
