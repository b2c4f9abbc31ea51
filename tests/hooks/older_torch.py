"""The hook in a training environment as MindSpeed-MM pins one, the search in the environment that runs this script.

    python tests/hooks/older_torch.py 2.7.1 [--folder DIR] [--tests]

Makes the environment (PyPI's wheel of torch brings about 3 GB of libraries), installs the package there without its
dependencies, and fails where a pin has changed, something does not import, a search does not end with a plan, or a plan
cannot be trained under. `--tests` runs the profilers' tests there as well. FOLDER keeps environments for the next run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
TOY = ROOT / "tests" / "hooks" / "toy_pretrain.py"
RESULT = "auto_parallel_search_optimal_config.json"

PINS = ("numpy==1.26.4", "pandas==2.0.3", "protobuf==3.20.3", "rich==13.7.1", "pydantic==2.10.6", "pyyaml==6.0.2")
"""What MindSpeed-MM's releases (pyproject.toml) and CANN's tools ask for; numpy is bounded by MindSpeed."""

TRANSFORMERS = {"2.1.0": "4.45.0", "2.6.0": "4.53.0", "2.7.1": "4.57.1"}
"""Beside each torch; 4.57.1 for 4.57.0, which was withdrawn."""

IGNORED = ("trace",)
"""Tests of `trace`, which needs torch 2.7 and transformers 5."""


def run(*command: object, folder: Path | None = None, **environment: str) -> str:
    """Standard output and error of a command that has to end well."""
    print("+", *command, flush=True)
    ended = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if ended.returncode:
        print(ended.stdout[-8000:])
        sys.exit(f"failed with exit code {ended.returncode}: {' '.join(map(str, command))}")
    return ended.stdout


def make_environment(folder: Path, release: str) -> Path:
    """The interpreter of an environment with the pins; one that is there is taken as it is."""
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        run(sys.executable, "-m", "venv", folder)
        wanted = (f"torch=={release}", f"transformers=={TRANSFORMERS[release]}", *PINS, "pytest>=8.2", "hypothesis")
        run(python, "-m", "pip", "install", "-q", *wanted)
        (folder / "ready").touch()
    run(python, "-m", "pip", "uninstall", "-q", "-y", "mm-autoparallel")
    return python


def frozen(python: Path) -> set[str]:
    return set(run(python, "-m", "pip", "list", "--format=freeze").splitlines())


def install_hook(python: Path) -> None:
    """Without dependencies: whatever is pinned stays as it is, and still imports."""
    before = frozen(python)
    run(python, "-m", "pip", "install", "-q", "--no-deps", ROOT)
    added = frozen(python) - before
    if not before < frozen(python) or [line.split("==")[0] for line in added] != ["mm-autoparallel"]:
        sys.exit(f"the environment has changed: {added}, {before - frozen(python)}")
    run(python, "-c", "import numpy, pandas, google.protobuf, rich, torch, transformers; import mm_autoparallel.hooks")


def check_flow(python: Path, folder: Path) -> None:
    """Profile with gloo, search in this script's environment, train under the plan; then what must be refused."""
    asked = ("--auto-parallel-mm", "--nproc-per-node", 2, "--simulated-nproc-per-node", 2, "--tp", 1, 2)
    refused = subprocess.run([python, TOY, *map(str, asked)], cwd=folder, capture_output=True, text=True)
    if refused.returncode != 2 or "--auto-parallel-python" not in refused.stderr:
        sys.exit(f"without a solver the script has to end with exit code 2: {refused.stderr}")
    told = run(python, TOY, *asked, folder=folder, MM_AUTOPARALLEL_PYTHON=sys.executable)
    if "proven" not in told:
        sys.exit(f"the search gave no proof:\n{told}")
    sizes = json.loads((folder / RESULT).read_text())["parallel_config"]
    told = run(
        python,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        2,
        TOY,
        "--auto-parallel-config",
        RESULT,
        folder=folder,
    )
    if told.count("trains with ((Held") != 2:
        sys.exit(f"two processes should have followed the plan:\n{told}")
    print(f"plan {sizes} followed")


def run_tests(python: Path) -> None:
    """The profilers' tests, with the package as it lies in the repository."""
    ignored = [f"--ignore=tests/profilers/{name}" for name in IGNORED]
    options = ("-q", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib", "-o", "filterwarnings=default")
    told = run(python, "-m", "pytest", "tests/profilers", *options, *ignored, folder=ROOT, PYTHONPATH=str(ROOT))
    print(told.splitlines()[-1])


def main() -> None:
    """One release of torch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("release", choices=sorted(TRANSFORMERS))
    parser.add_argument("--folder", type=Path, help="where environments are kept")
    parser.add_argument("--tests", action="store_true", help="run the profilers' tests as well")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        kept = (arguments.folder or Path(name)).absolute()
        python = make_environment(kept / f"pinned-{arguments.release}", arguments.release)
        install_hook(python)
        work = Path(name) / "work"
        work.mkdir()
        check_flow(python, work)
        if arguments.tests:
            run_tests(python)
    print(f"torch {arguments.release}: all well")


if __name__ == "__main__":
    main()
