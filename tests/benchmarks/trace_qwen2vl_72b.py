"""How long tracing all kinds of blocks of Qwen2-VL-72B takes, and how much memory of this machine.

    python tests/benchmarks/trace_qwen2vl_72b.py [--tp 1 2 4 8] [--mbs 1]

TP 1, 2, 4 and 8, as they are and recomputed whole, at the example's 4,096 tokens, half of them images. Aims: 60 s on
two cores, 8 GB.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "qwen2vl_72b_h200" / "job.yaml"


def main() -> None:
    """Trace into an empty folder and print what it took, imports included."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tp", nargs="+", default=["1", "2", "4", "8"])
    parser.add_argument("--mbs", nargs="+", default=["1"])
    arguments = parser.parse_args()
    start_s = time.monotonic()
    from mm_autoparallel.cli.main import main as run

    with tempfile.TemporaryDirectory() as folder:
        code = run(["trace", str(EXAMPLE), "--tp", *arguments.tp, "--mbs", *arguments.mbs, "--out", folder])
    took_s = time.monotonic() - start_s
    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"exit code {code}, {took_s:.1f} s, {peak_gib:.2f} GiB of memory at most")


if __name__ == "__main__":
    main()
