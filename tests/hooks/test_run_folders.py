"""PROFILES/logs: a run removes what an earlier run left there, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

from mm_autoparallel.hooks.runs import _make_folder

LONG_AGO = (0, 0)


def test_only_old_folders_that_a_run_has_marked_are_removed(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    kept, old = _make_folder(logs, 0), _make_folder(logs, 0)
    mine = logs / "my_run"
    alike, elsewhere = logs / old.name.replace("node0", "node1"), tmp_path / old.name
    linked = logs / old.name.replace("node0", "node2")
    for folder in (mine, alike, elsewhere):
        folder.mkdir()
        (folder / "checkpoint").touch()
    (elsewhere / "made-by-mm-autoparallel").touch()
    linked.symlink_to(elsewhere)
    (kept / "checkpoint").touch()  # written a moment ago, whatever else is old
    for path in (*logs.rglob("*"), *elsewhere.iterdir(), elsewhere):
        if path != kept / "checkpoint":
            os.utime(path, LONG_AGO, follow_symlinks=False)
    new = _make_folder(logs, 0)
    assert {*logs.iterdir()} == {kept, mine, alike, linked, new}
    assert [path.name for path in mine.iterdir()] == ["checkpoint"]
    assert sorted(path.name for path in elsewhere.iterdir()) == ["checkpoint", "made-by-mm-autoparallel"]
