"""Ranks meet, decide together, and hear of one that does not go on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from mm_autoparallel.profilers.lockstep import ALONE, PeersStopped, join_ranks  # noqa: E402

SCRIPT = """
import json, sys
from pathlib import Path
import torch.distributed as dist
from mm_autoparallel.profilers.lockstep import PeersStopped, join_ranks

dist.init_process_group("gloo")
lockstep = join_ranks()
dist.destroy_process_group()  # it needs no default group
rank = lockstep.rank
lockstep.wait()
found = [lockstep.num_ranks, lockstep.largest(10.0 + rank), lockstep.average([rank, 2.0])]
if rank == 1:
    found.append(lockstep.stop(7))
else:
    try:
        lockstep.average([1.0, 2.0, 3.0])
    except PeersStopped as stopped:
        found.append(stopped.reasons)
found.append(lockstep.largest(float(rank)))  # they go on together
Path(sys.argv[1], f"rank{rank}").write_text(json.dumps(found))
"""


@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    script = tmp_path / "two.py"
    script.write_text(SCRIPT)
    options = ["--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *options, str(script), str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    for rank in (0, 1):
        assert json.loads((tmp_path / f"rank{rank}").read_text()) == [2, 11.0, [0.5, 2.0], {"1": 7}, 1.0]


def test_one_rank_waits_for_nobody() -> None:
    ALONE.wait()
    assert ALONE.largest(3.0) == 3.0
    assert ALONE.average([1.0, 2.0]) == [1.0, 2.0]
    assert ALONE.stop(2) == {0: 2}
    assert join_ranks() is ALONE


def test_who_stopped_is_told() -> None:
    assert str(PeersStopped({0: 1, 3: 2})) == "ranks 0, 3 stopped"
