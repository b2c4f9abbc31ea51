"""Branches of launch scripts that are not taken, and groups that nothing uses; conditions are held against bash."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from mm_autoparallel.integrations.shell_text import LaunchScript

SET = 'A=4\nB="$A"\nFLAG=true\nOFF=false\nEMPTY=\nNAME=\'llama 3\'\nD=${GIVEN:-8}\nN=${2:-"two"}\nSUM=$((A * D))\n'

KNOWN = (
    "[ $A = 4 ]",
    '[ "$A" == "4" ]',
    "[ $A -eq 4 ]",
    "[ $A -ge 5 ]",
    "[[ $A -lt 5 && $D -eq 8 ]]",
    "[[ $A -eq 5 || -n $NAME ]]",
    "[[ $A -eq 5 || $A -eq 4 && -z $NAME ]]",
    "[ -z $EMPTY ]",
    '[ -n "$EMPTY" ]',
    "[ ! -z $A ]",
    "! [ $A = 4 ]",
    "[[ -v A ]]",
    "[ -z ${UNSET} ]",
    '[ "$UNSET" ]',
    "[ x$UNSET = x ]",
    "$FLAG",
    '"$OFF"',
    "true",
    "false || true",
    "[ $A = 5 ] && true",
    "[ $A = 5 ] || [ $B = 4 ]",
    '[ "$FLAG" = true ] && [ "$OFF" = true ] || [ $A != 3 ]',
    "(( A > 3 ))",
    "(( A + 1 == D ))",
    "((SUM >= 32))",
    "test $D -le 7",
    "[[ $NAME == llama* ]]",
    '[[ $NAME == "llama*" ]]',
    "[[ $NAME != *3 ]]",
    "[[ $N == two ]]",
    '[ "${A}0" = 40 ]',
    "[ $((A * 2)) -eq $D ]",
    "[ ${UNSET:-7} -gt 6 ]",
    '[ "$1" = "-d" ]',
)
UNKNOWN = (
    "[ -f model.json ]",
    "[ $(nproc) -gt 4 ]",
    "grep -q x y",
    "[ $RANK -eq 0 ]",
    '[ "$SLURM_NNODES" = 2 ]',
    "[[ $NAME =~ ^l ]]",
    "[ $A -eq 4 -a $D -eq 8 ]",
    "[ $NAME -eq 4 ]",
    '[ "$A" = "4 ]',
)


def passed(text: str) -> set[str]:
    return {flag for flag, _ in LaunchScript(Path("train.sh"), text).flags()}


def doubts(text: str) -> list[str]:
    return LaunchScript(Path("train.sh"), text).doubts()


@pytest.mark.parametrize("condition", KNOWN)
def test_what_bash_takes_is_taken(condition: str) -> None:
    script = f"{SET}if {condition}; then\n  X=--yes\nelse\n  X=--no\nfi\n"
    done = subprocess.run(
        ["bash", "-c", f"{script}echo $X"], capture_output=True, text=True, check=True, env={"PATH": "/usr/bin:/bin"}
    )
    assert passed(f"{script}echo $X") == {done.stdout.strip()}


@pytest.mark.parametrize("condition", UNKNOWN)
def test_what_only_the_machine_knows_counts_and_is_said(condition: str) -> None:
    script = f"{SET}if {condition}; then\n  X=--yes\nelse\n  X=--no\nfi\necho $X\n"
    assert passed(script) == {"--yes", "--no"}
    if not condition.endswith('"4 ]'):
        (told,) = doubts(script)
        assert told.startswith("line 10: whether `")
        assert told.endswith("its flags count")


def test_arms_after_the_one_that_is_taken_are_left_out() -> None:
    text = (
        "SIZE=30b\nif [ $SIZE = 7b ]; then\n A='--one'\nelif [ $SIZE = 30b ]; then\n A='--two'\n"
        "elif [ $SIZE = 30b ]; then\n A='--three'\nelse\n A='--four'\nfi\necho $A\n"
    )
    assert passed(text) == {"--two"}
    doubtful = text.replace("[ $SIZE = 7b ]", "[ -d /data ]")
    assert passed(doubtful) == {"--one", "--two"}


def test_branches_within_branches() -> None:
    inner = "  if [ $X = 1 ]; then echo --deep; else echo --other; fi\n"
    assert passed(f"X=1\nif [ $X = 2 ]; then\n{inner}else\n{inner}  echo --last\nfi\n") == {"--deep", "--last"}


def test_variables_hold_what_was_assigned_before_and_for_sure() -> None:
    later = "X=1\nif [ $X = 1 ]; then echo --a; fi\nX=2\nif [ $X = 1 ]; then echo --b; fi\n"
    assert passed(later) == {"--a"}
    maybe = "X=1\nif [ -f f ]; then X=2; fi\nif [ $X = 1 ]; then echo --a; else echo --b; fi\n"
    assert passed(maybe) == {"--a", "--b"}
    inside = "if [ -f f ]; then\n X=2\n if [ $X = 2 ]; then echo --a; else echo --b; fi\nfi\n"
    assert passed(inside) == {"--a"}
    loop = "X=1\nfor i in 1 2; do\n if [ $X = 2 ]; then echo --a; fi\n X=2\ndone\n"
    assert passed(loop) == {"--a"}


def test_a_variable_that_nobody_sets_is_empty_and_that_is_said() -> None:
    text = "if [ -z $DATA ]; then\n  echo --mock-data\nelse\n  echo --data-path $DATA\nfi\n"
    assert passed(text) == {"--mock-data"}
    assert doubts(text) == ["line 1: nobody sets $DATA before, and that is read as empty"]
    assert doubts("if [ -z $DATA ]; then DATA=/data; fi\n") == []


def test_words_in_texts_comments_and_documents_are_no_branches() -> None:
    text = (
        "echo 'if false; then'\n# if false; then\ncat <<EOF\nif false; then\nEOF\n"
        'python -c "\nif False:\n  pass\n"\necho --kept --if else fi\n'
    )
    assert passed(text) >= {"--kept", "--if"}


def test_a_number_is_set_in_the_branch_that_is_taken() -> None:
    text = "S=big\nif [ $S = big ]; then\n  PP=8\nelse\n  PP=2\nfi\npython t.py --pp $PP\n"
    script = LaunchScript(Path("train.sh"), text)
    assert script.evaluate("$PP") == 8
    assert script.set_flag("--pp", 4, {}).text == text.replace("PP=8", "PP=4")


@pytest.mark.parametrize("group", ['EXTRA="\n  --more 1 \\\n"', "EXTRA=(\n  --more 1\n  '--x)'\n)", "EXTRA+=(--more)"])
def test_a_group_that_nothing_uses_is_not_passed(group: str) -> None:
    start = "torchrun pretrain_gpt.py --less 1 $ARGS\n"
    assert passed(f"{group}\n{start}") == {"--less"}
    assert doubts(f"{group}\n{start}") == ["line 1: EXTRA is used nowhere, so that its flags are not passed"]
    for used in ("$EXTRA", '"${EXTRA[@]}"', "${EXTRA}"):
        assert "--more" in passed(f"{group}\n{start.replace('$ARGS', used)}")
    for taken in (". ./run.sh", "source run.sh", 'eval "$CMD"', "export EXTRA"):
        assert "--more" in passed(f"{group}\n{taken}\n{start}")
