"""Holds this package's search of Tinker's folders against Tinker itself, on folders with figures drawn at random.

    python tests/frameworks/tinker_upstream.py --tinker DIR --environment DIR [--folders 200] [--seed 1]

--tinker is the folder profiler/tinker of a checkout of Ascend/mstt; --environment one that environments.py makes. Each
folder is searched by both, for 1 to 4 nodes, with EP or without, within memory that cuts some of it off; the rows of
both results.csv must be the same set, to the last printed digit. Prints counts; exits with 1 where one differs.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tinker_folders import write_folder

from mm_autoparallel.integrations.tinker.cost import Cluster
from mm_autoparallel.integrations.tinker.profiles import read_folder
from mm_autoparallel.integrations.tinker.results import RESULTS, format_results, read_results
from mm_autoparallel.integrations.tinker.search import search


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--tinker", type=Path, metavar="DIR")
    parser.add_argument("--environment", type=Path, metavar="DIR")
    parser.add_argument("--folders", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.tinker is None or arguments.environment is None:
        print("tinker: no checkout or no environment is given; nothing was compared")
        return 0
    rng, rows, wrong = random.Random(arguments.seed), 0, 0
    for number in range(arguments.folders):
        nodes, per_node = rng.choice((1, 2, 3, 4)), rng.choice((2, 4, 8))
        num_layers, batch, memory = rng.randint(1, 64), rng.choice((8, 16, 24, 64)), rng.choice((8000, 30000, 120000))
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / "profiled"
            write_folder(folder, rng, num_layers, experts=rng.random() < 0.4, seq_length=rng.choice((1024, 4096)))
            ours = Path(name) / RESULTS
            ours.write_text(format_results(search(read_folder(folder), Cluster(nodes, per_node), batch, memory)))
            found = Counter(read_results(ours))
            theirs = run_upstream(arguments, folder, nodes, per_node, batch, memory, Path(name) / "out")
        rows += sum(found.values())
        if found != theirs:
            wrong += 1
            print(f"folder {number}: {nodes} x {per_node}, {num_layers} layers, batch {batch}, {memory} MB")
            print("  ours alone:", next(iter(found - theirs), None))
            print("  Tinker's alone:", next(iter(theirs - found), None))
    print(f"tinker: {arguments.folders} folders, {rows} rows, {wrong} folders differ")
    return 1 if wrong else 0


def run_upstream(
    arguments: argparse.Namespace, folder: Path, nodes: int, per_node: int, batch: int, memory: int, out: Path
) -> Counter[object]:
    """The rows of Tinker's own results.csv; none where it found nothing."""
    command = [str(arguments.environment / "bin" / "python"), str(arguments.tinker / "tinker_auto_parallel.py")]
    command += ["--mode", "search", "--profiled_data_path", str(folder), "-gbs", str(batch), "-nodes", str(nodes)]
    command += ["-n", str(per_node), "--memory_limit", str(memory), "--cpus", "1", "--output_dir", str(out)]
    path = os.pathsep.join([str(arguments.tinker.parent)])
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, cwd=folder.parent, capture_output=True, text=True, check=False
    )
    results = list(out.rglob(RESULTS))
    if not results:
        if "Error" in done.stderr and "no" not in done.stderr.lower():
            sys.exit(done.stderr[-2000:])
        return Counter()
    return Counter(read_results(results[0]))


if __name__ == "__main__":
    sys.exit(main())
