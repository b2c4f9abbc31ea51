"""A job planned from the traces that are shipped, and from the same made anew: both plans, and how long each took.

    python tests/benchmarks/shipped_traces.py examples/qwen2vl_72b/job.yaml [--model CODE] [--set KEY=VALUE ...]

--model as `trace` takes it. Exits with 1 where the plans differ in more than the files that they name.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from mm_autoparallel.planner.plan import RESULT_FILE


def main() -> int:
    """Plan twice, tell what differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", type=Path)
    parser.add_argument("--model", metavar="CODE")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    arguments = parser.parse_args()
    changes = [word for change in arguments.set for word in ("--set", change)]
    with tempfile.TemporaryDirectory() as folder:
        shipped, shipped_s = _plan(arguments.job, "traced", changes, Path(folder, "shipped"))
        code = ["--model", arguments.model] if arguments.model else []
        traced_in, trace_s = _run("trace", arguments.job, *code, *changes, "--out", Path(folder, "store"))
        anew, anew_s = _plan(arguments.job, traced_in, changes, Path(folder, "anew"))
    same = _without_files(shipped) == _without_files(anew)
    print(f"from shipped traces  {shipped['e2e_time']:.2f} ms a step, planned in {shipped_s:.1f} s")
    print(
        f"tracing anew         {anew['e2e_time']:.2f} ms a step, traced in {trace_s:.1f} s, planned in {anew_s:.1f} s"
    )
    print("the plans are the same" if same else "the plans differ")
    return 0 if same else 1


def _plan(job: Path, profiles: str, changes: list[str], out: Path) -> tuple[dict[str, Any], float]:
    out.mkdir()
    _, took_s = _run("plan", job, "--set", f"profiles=[{profiles}]", *changes, "--out", out)
    return json.loads((out / RESULT_FILE).read_text(encoding="utf-8")), took_s


def _run(*words: object) -> tuple[str, float]:
    """The last line that a verb prints, and how long it took."""
    start = time.monotonic()
    command = [sys.executable, "-m", "mm_autoparallel.cli.main", *map(str, words)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return (done.stdout.strip().splitlines() or [""])[-1], time.monotonic() - start


def _without_files(plan: dict[str, Any]) -> dict[str, Any]:
    provenance = {key: value for key, value in plan["provenance"].items() if key != "profiles"}
    return plan | {"provenance": provenance}


if __name__ == "__main__":
    sys.exit(main())
