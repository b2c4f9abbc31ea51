"""Commands that are killed, crowded, or run where something is missing: nothing is lost, and nothing stays behind."""

from __future__ import annotations

import json
import resource
from importlib.util import find_spec
from pathlib import Path

import pytest
from kills import CLI, COMMANDS, EXAMPLES, RESULT, look, run
from started import Started

from mm_autoparallel.pipeline.simulate import compiled

PLAN = (*CLI, "plan", EXAMPLES / "llava_1_5_7b" / "job.yaml", "--cache", "c")


@pytest.mark.nightly
def test_killed_at_random_moments(tmp_path: Path) -> None:
    """A handful; `python tests/reliability/kills.py --kills 200` is the same at length."""
    commands = [command for command in COMMANDS if not command.needs_torch or find_spec("transformers")]
    tally = run(commands, 5, 3, tmp_path, ("plan", "pretrain"))
    print(tally)
    assert tally.faults == []


@pytest.mark.slow
def test_four_at_once_in_one_folder(tmp_path: Path) -> None:
    for ended in [started.wait() for started in [Started(PLAN, tmp_path) for _ in range(4)]]:
        assert ended.code == 0, ended.stderr
    _, torn, temporary = look(tmp_path)
    assert (torn, temporary) == ([], [])
    assert (tmp_path / RESULT).exists()


@pytest.mark.slow
def test_where_the_disk_is_full(tmp_path: Path) -> None:
    """Neither result nor cache is half there, and what stood there stays."""
    (tmp_path / RESULT).write_text('{"an": "older one"}')
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, before[1]))  # room for 300 bytes a file
    try:
        started = Started(PLAN, tmp_path, {"TMPDIR": str(tmp_path)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    ended = started.wait()
    assert ended.code == 2
    assert f"{RESULT} cannot be written" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert json.loads((tmp_path / RESULT).read_text()) == {"an": "older one"}
    assert look(tmp_path) == ({tmp_path / RESULT}, [], [])


@pytest.mark.slow
def test_where_much_is_missing(tmp_path: Path) -> None:
    """No home that can be written, 64 open files, a locale without umlauts, and no shared memory where root can ask."""
    surroundings = {"HOME": "/proc", "XDG_CACHE_HOME": "", "LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0"}
    surroundings["NUMBA_CACHE_DIR"] = str(compiled.kernel_folder())  # they are not compiled anew
    command = ["bash", "-c", 'ulimit -n 64; exec "$@"', "bash", *PLAN]
    if (
        Started(["unshare", "--mount", "mount", "-t", "tmpfs", "-o", "ro", "none", "/dev/shm"], tmp_path).wait().code
        == 0
    ):
        hide = 'mount -t tmpfs -o ro none /dev/shm; exec "$@"'
        command = ["unshare", "--mount", "bash", "-c", hide, "bash", *command]
    ended = Started(command, tmp_path, surroundings).wait()
    assert ended.code == 0, ended.stderr
    assert ended.stderr == f"mm-autoparallel: wrote {RESULT}\n"
    assert look(tmp_path)[1:] == ([], [])
