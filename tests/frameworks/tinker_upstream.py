"""Holds this package's search of Tinker's folders against Tinker itself, on folders with figures drawn at random.

    python tests/frameworks/tinker_upstream.py --tinker DIR --environment DIR [--folders 200] [--seed 1]

--tinker is the folder profiler/tinker of a checkout of Ascend/mstt; --environment one that environments.py makes. Each
folder is searched by both, for 1 to 4 nodes, with EP or without, within memory that cuts some of it off; the rows of
both results.csv must be the same ways, their figures equal within one unit of the last printed digit (a sum that ends
in 5 behind it is rounded either way, by the order of its terms). The first folder is written by this package, of the
costs of a launch script's model. Prints counts; exits with 1 where one differs.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tinker_folders import Row, read_results, write_folder

from mm_autoparallel.api.imported import import_launch
from mm_autoparallel.integrations.tinker.cost import Cluster
from mm_autoparallel.integrations.tinker.profiles import read_folder
from mm_autoparallel.integrations.tinker.results import RESULTS, format_results
from mm_autoparallel.integrations.tinker.search import search
from mm_autoparallel.integrations.tinker.written_profiles import Named, format_folder, list_configs

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "megatron_core" / "train_8b.sh"
LAST_DIGIT, PER_TOKENS = 0.0015, 100.0
"""Figures are printed with three digits behind the point, tokens with one."""


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
    rng, num_rows, wrong = random.Random(arguments.seed), 0, 0
    for number in range(arguments.folders):
        nodes, per_node = rng.choice((1, 2, 3, 4)), rng.choice((2, 4, 8))
        num_layers, batch, memory = rng.randint(2, 64), rng.choice((8, 16, 24, 64)), rng.choice((8000, 30000, 120000))
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / "profiled"
            if number == 0:
                write_priced(folder)
                nodes, per_node, batch, memory = 2, 8, 64, 60000
            else:
                write_folder(folder, rng, num_layers, experts=rng.random() < 0.4, seq_length=rng.choice((1024, 4096)))
            ours = Path(name) / RESULTS
            ours.write_text(format_results(search(read_folder(folder), Cluster(nodes, per_node), batch, memory)))
            found = sort_rows(read_results(ours))
            theirs = run_upstream(arguments, folder, nodes, per_node, batch, memory, Path(name) / "out")
        num_rows += len(found)
        if not are_same(found, theirs):
            wrong += 1
            print(f"folder {number}: {nodes} x {per_node}, {num_layers} layers, batch {batch}, {memory} MB")
            ours_alone, theirs_alone = ({(row.sizes, row.layers) for row in rows} for rows in (found, theirs))
            print("  ours alone:", sorted(ours_alone - theirs_alone)[:3])
            print("  Tinker's alone:", sorted(theirs_alone - ours_alone)[:3])
    print(f"tinker: {arguments.folders} folders, {num_rows} rows, {wrong} folders differ")
    return 1 if wrong else 0


def write_priced(path: Path) -> None:
    """What `tinker --mode profile` writes, of analytic costs."""
    job = import_launch(EXAMPLE, device="h100-80g").job
    configs, _ = list_configs(job, (1, 2, 4, 8), (0, 1), 4)
    path.mkdir()
    named = Named("gpt", "8b", "", "260101-000000", "analytic", {"pretrain_script_path": None})
    for name, text in format_folder(job, configs, named, is_between_known=True).items():
        (path / name).write_text(text)


def sort_rows(rows: Sequence[Row]) -> list[Row]:
    """By strategy and layers."""
    return sorted(rows, key=lambda row: (row.sizes, row.layers))


def are_same(ours: Sequence[Row], theirs: Sequence[Row]) -> bool:
    """Whether both hold the same ways with the same figures."""
    if [(row.sizes, row.layers) for row in ours] != [(row.sizes, row.layers) for row in theirs]:
        return False

    def figures(row: Row) -> list[float]:
        return [*row.times_ms, *row.memory_gb, row.step_ms, row.peak_gb, row.tokens_per_device_s / PER_TOKENS]

    return all(
        abs(one - other) < LAST_DIGIT
        for mine, own in zip(ours, theirs, strict=True)
        for one, other in zip(figures(mine), figures(own), strict=True)
    )


def run_upstream(
    arguments: argparse.Namespace, folder: Path, nodes: int, per_node: int, batch: int, memory: int, out: Path
) -> list[Row]:
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
        return []
    return sort_rows(read_results(results[0]))


if __name__ == "__main__":
    sys.exit(main())
