"""The on-line form on two real gloo processes: every sample arrives once, whole, where the balancer deals it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

SCRIPT = Path(__file__).with_name("exchanging.py")


@pytest.mark.nightly
@pytest.mark.slow
def test_samples_arrive_where_they_are_dealt(tmp_path: Path) -> None:
    from exchanging import COST, PLAN, own_part

    from mm_autoparallel import BatchBalancer

    started = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(tmp_path), str(rank)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    ended = [process.communicate(timeout=300) for process in started]
    assert [process.returncode for process in started] == [0, 0], ended
    told = [json.loads(output.splitlines()[-1]) for output, _ in ended]
    assert told[0]["refused"] == told[1]["refused"]
    assert "float32" in told[0]["refused"]
    balancer = BatchBalancer(PLAN, micro_batches=2, token_cap=2000, cost=COST)
    for batch in range(2):
        everyone = [*own_part(0, batch), *own_part(1, batch)]
        ranks = balancer.assign([sample for sample, _ in everyone]).ranks
        for rank, replica in enumerate(ranks):
            expected = [
                [
                    [int(everyone[i][1]["ids"][0]), len(everyone[i][1]["ids"]), len(everyone[i][1]["pixels"])]
                    for i in held
                ]
                for held in replica
            ]
            assert told[rank]["got"][2 * batch : 2 * batch + 2] == expected
