"""Trains real MindSpeed-MM on a CPU: plainly, under a searched plan, under edited ones, and where laws forbid it.

    python tests/real_mindspeed_mm/compare_losses.py --python ENVIRONMENT/bin/python \\
        --release 26.0.0 MINDSPEED_MM MINDSPEED MEGATRON_LM [--release …] [--only TEXT…] [--out FOLDER]

or the same in the environment, as `make nightly` takes it: REAL_MINDSPEED_MM_PYTHON, and REAL_MINDSPEED_MM, entries
`26.0.0=MINDSPEED_MM:MINDSPEED:MEGATRON_LM` with spaces between. The environment of --python has the release's torch
(docs/start/mindspeed-mm.md lists it); the planner searches in the one that runs this file. A table goes to standard
output; exit code 1 where a run did not come out as it must.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

sys.path.append(str(Path(__file__).resolve().parents[1] / "cli"))  # run as a script

import small_vlm
from divisions import LAWS, PLANS, REFUSED, Case, Division, Outcome
from forked_ranks import ForkedRanks

from mm_autoparallel.child_process import followed
from mm_autoparallel.planner.plan import RESULT_FILE

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
RANKS = REPOSITORY / "tests" / "cli" / "forked_ranks.py"
SCRIPT = str(HERE / "train_small_vlm.py")
ITERATIONS = 3
TIMEOUT_S = 900.0

TOLERANCE = 2e-5
"""Assumed: by how much losses of equal computations may differ, relatively: fp32 sums in another order, three steps."""

NORM_TOLERANCE = 0.0021
"""The log has three places of a norm."""

STEP = re.compile(r"iteration +(\d+)/.*? loss: ([-+.\deEnaif]+).*? grad norm: ([-+.\deEnaif]+)")
"""A line of Megatron's log: iteration, loss, norm of all gradients."""


@dataclass(frozen=True)
class Release:
    """Three checkouts that belong together."""

    name: str
    mindspeed_mm: Path
    mindspeed: Path
    megatron: Path


@dataclass(frozen=True)
class Run:
    """What came of a started run. losses, norms: of every iteration that the log has."""

    exit_codes: tuple[int, ...]
    losses: tuple[float, ...]
    norms: tuple[float, ...]
    seconds: float
    output: str

    @property
    def ended_well(self) -> bool:
        return not any(self.exit_codes)


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    release: str
    name: str
    run: Run
    expected: str
    outcome: str
    difference: float | None = None

    @property
    def good(self) -> bool:
        return self.outcome == self.expected

    def __str__(self) -> str:
        losses = self.run.losses
        span = f"{losses[0]:.6f} → {losses[-1]:.6f}" if losses else "–"
        difference = "–" if self.difference is None else f"{self.difference:.1e}"
        what = self.outcome if self.good else f"**{self.outcome}, expected {self.expected}**"
        cells = (self.release, self.name, len(losses), span, difference, f"{self.run.seconds:.0f}", what)
        return f"| {' | '.join(map(str, cells))} |"


class Bench:
    """Runs of one release, each in a folder of its own below `folder`."""

    def __init__(self, release: Release, python: Path, folder: Path, ranks: ForkedRanks) -> None:
        self._release, self._python, self._folder, self._ranks = release, python, folder, ranks

    def train(self, name: str, arguments: Sequence[str], num_ranks: int = 1, hook: bool = False) -> Run:
        """Train with `arguments` on several ranks, bf16 computed as fp32; `hook`: started through the planner's."""
        folder = self.folder(name)
        request = {
            "argv": [SCRIPT, *arguments],
            "hook": hook,
            "num_ranks": num_ranks,
            "folder": str(folder),
            "log": str(folder / "log.txt"),
            "environment": self._environment() | {"REAL_MM_WIDE": "1"},
            "path": self._path(),
            "timeout_s": TIMEOUT_S,
        }
        (folder / "log.txt").unlink(missing_ok=True)
        began = time.monotonic()
        codes = self._ranks.ask(request)
        if codes is None:
            _stop(f"{self._python}: it cannot load torch and transformers, or was ended; what it said stands above")
        return self._read(folder, codes, time.monotonic() - began)

    def search(self, name: str, arguments: Sequence[str]) -> Run:
        """The hook with `arguments`, as a person starts it; it starts its own processes."""
        folder = self.folder(name)
        began = time.monotonic()
        with (folder / "log.txt").open("wb") as log:
            process = subprocess.Popen(
                followed([str(self._python), "-m", "mm_autoparallel.hooks.mindspeed_mm", SCRIPT, *arguments]),
                cwd=folder,
                env={**os.environ, **self._environment(), "PYTHONPATH": os.pathsep.join(self._path())},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            try:
                process.wait(TIMEOUT_S)
            finally:
                process.kill()  # what it started dies with it
                process.wait()
        return self._read(folder, (process.returncode,), time.monotonic() - began)

    def _read(self, folder: Path, codes: tuple[int, ...], seconds: float) -> Run:
        output = (folder / "log.txt").read_text(encoding="utf-8", errors="replace")
        steps = {int(i): (float(loss), float(norm)) for i, loss, norm in STEP.findall(output)}
        losses, norms = zip(*(steps[i] for i in sorted(steps)), strict=True) if steps else ((), ())
        return Run(codes, losses, norms, seconds, output)

    def folder(self, name: str) -> Path:
        path = self._folder / self._release.name / re.sub(r"[^\w.]+", "-", name)
        path.mkdir(parents=True, exist_ok=True)
        return path

    def flags(self, name: str, model: dict[str, object]) -> list[str]:
        """The script's command line, with the model's file in the run's folder."""
        files = small_vlm.write_files(self.folder(name), model)
        tools = self._release.mindspeed_mm / "mindspeed_mm" / "tools" / "tools.json"
        return small_vlm.flags(*files, tools, "bf16", ITERATIONS)

    def _path(self) -> list[str]:
        release = self._release
        return [*map(str, (HERE, release.mindspeed_mm, release.mindspeed, release.megatron, REPOSITORY))]

    def _environment(self) -> dict[str, str]:
        return {
            "TORCH_EXTENSIONS_DIR": str(self._folder / "extensions"),
            "MINDSPEED_MM_CHECKOUT": str(self._release.mindspeed_mm),
            "MM_AUTOPARALLEL_PYTHON": sys.executable,
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "OMP_NUM_THREADS": "1",
        }


def run_release(release: Release, bench: Bench, only: Sequence[str]) -> Iterator[Row]:
    """All runs of a release, one after the other; of searches, edited plans and laws those that `only` names."""
    plain = {frozen: _plain(bench, frozen) for frozen in (False, True)}
    for frozen, run in plain.items():
        name = "plain, 1 process, no hook" + (", frozen vision" if frozen else "")
        trained = run.ended_well and len(run.losses) == ITERATIONS and all(map(_finite, (*run.losses, *run.norms)))
        yield Row(release.name, name, run, "trains", "trains" if trained else "crashes")
        if not trained:
            return
    if _wanted("search", only):
        yield from _search(bench, release, plain[False])
    for case in (*PLANS, *LAWS, *REFUSED):
        if _wanted(case.name, only):
            yield _judge(bench, release, case, plain[case.frozen_vision])


def _wanted(name: str, only: Sequence[str]) -> bool:
    return not only or any(part in name for part in only)


def _finite(number: float) -> bool:
    return abs(number) < float("inf")


def _plain(bench: Bench, frozen: bool) -> Run:
    name = "plain-frozen" if frozen else "plain"
    return bench.train(name, bench.flags(name, small_vlm.model_json("bf16", frozen)))


def _search(bench: Bench, release: Release, plain: Run) -> Iterator[Row]:
    """The hook's search on two processes for four, in bf16 as it is; then training under the plan it found."""
    flags = bench.flags("search", small_vlm.model_json("bf16"))
    asked = ("--auto-parallel-mm", "--nproc-per-node", "2", "--simulated-nproc-per-node", "4")
    run = bench.search("search", (*flags, *asked))
    found = bench.folder("search") / RESULT_FILE
    text = _describe(found) if run.ended_well and found.exists() else ""
    yield Row(release.name, f"search{text}", run, "found", "found" if text else f"exit {run.exit_codes[0]}")
    if text:
        flags = bench.flags("found", small_vlm.model_json("bf16"))
        sizes = json.loads(found.read_text())["parallel_config"]
        num_processes = sizes["PP"] * sizes["TP"] * sizes["DP"] * sizes.get("CP", 1)
        under = ("--auto-parallel-config", str(found))
        trained = bench.train("found", (*flags, *under), num_processes, hook=True)
        divides_sequences = sizes["TP"] > 1 and sizes.get("SEQUENCE_PARALLEL", True)
        expected = "same forward" if divides_sequences else "equal"
        yield _compare(release, "training under the plan found", trained, plain, expected)


def _describe(path: Path) -> str:
    plan = json.loads(path.read_text())
    sizes = {name: size for name, size in plan["parallel_config"].items() if size != 1}
    placed = plan["layer_placement"]
    listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
    proven = ", proven" if plan.get("proven") else ""
    return f": {listed}; vision {placed['vit_layer_placement']}, text {placed['llm_layer_placement']}{proven}"


def _judge(bench: Bench, release: Release, case: Case, plain: Run) -> Row:
    model = small_vlm.model_json("bf16", case.frozen_vision)
    expected = case.outcome(release.name)
    if case.by_hand:
        _place_by_hand(model, case.division)
        flags = _divide_by_hand(bench.flags(case.name, model), case.division)
        run = bench.train(f"{case.name}-by-hand", (*flags, *case.flags), case.division.num_processes)
    else:
        flags = bench.flags(case.name, model)
        path = bench.folder(case.name) / "plan.json"
        path.write_text(json.dumps(case.division.plan(), indent=1))
        under = ("--auto-parallel-config", str(path))
        run = bench.train(case.name, (*flags, *under), case.division.num_processes, hook=True)
    row = _compare(release, f"{case.name}{' (by hand)' * case.by_hand}", run, plain, expected)
    if expected == "refused" and is_refusal(run):
        row = replace(row, outcome="refused")
    if row.outcome in ("refused", "crashes") and row.good and not re.search(case.says, run.output):
        row = replace(row, outcome=f"{row.outcome} for another reason")
    return row


def is_refusal(run: Run) -> bool:
    """Whether every rank ended with exit code 2, without a traceback, before MindSpeed was imported."""
    started = "Traceback" in run.output or "mindspeed.megatron_adaptor" in run.output
    return set(run.exit_codes) == {2} and not started


def _place_by_hand(model: dict[str, object], division: Division) -> None:
    parts = ((model["image_encoder"]["vision_encoder"], division.vision), (model["text_decoder"], division.text))  # type: ignore[index]
    for part, rows in parts:
        part["pipeline_num_layers"] = rows if division.vpp > 1 else rows[0]


def _divide_by_hand(flags: list[str], division: Division) -> list[str]:
    values = {
        "--pipeline-model-parallel-size": division.pp,
        "--tensor-model-parallel-size": division.tp,
        "--context-parallel-size": division.cp,
        "--micro-batch-size": division.mbs,
    }
    divided = list(flags)
    for flag, value in values.items():
        divided[divided.index(flag) + 1] = str(value)
    if division.vpp > 1:
        divided += ["--virtual-pipeline-model-parallel-size", str(division.vpp)]
    return divided


def _compare(release: Release, name: str, run: Run, plain: Run, expected: Outcome | str) -> Row:
    outcome, difference = judge_losses(run, plain)
    return Row(release.name, name, run, expected, outcome, difference)


def judge_losses(run: Run, plain: Run) -> tuple[str, float | None]:
    """What came of it (divisions.Outcome), and the largest relative difference of a loss to the undivided run."""
    if not run.ended_well or len(run.losses) != len(plain.losses):
        return "crashes", None
    differences = [abs(a - b) / abs(b) for a, b in zip(run.losses, plain.losses, strict=True)]
    norms = [abs(a - b) for a, b in zip(run.norms, plain.norms, strict=True)]
    # Compared one by one: no maximum takes a loss that is no number along.
    alike = all(loss <= TOLERANCE for loss in differences) and all(norm <= NORM_TOLERANCE for norm in norms)
    outcome = "equal" if alike else "same forward" if differences[0] <= TOLERANCE else "differs"
    return outcome, max(differences)


def _named_releases(text: str) -> Iterator[Release]:
    for entry in text.split():
        name, _, rest = entry.partition("=")
        folders = rest.split(":")
        if not name or len(folders) != 3:
            _stop(f"REAL_MINDSPEED_MM: {entry} is no entry; NAME=MINDSPEED_MM:MINDSPEED:MEGATRON_LM is expected")
        yield _release(name, folders)


def _release(name: str, folders: Sequence[str]) -> Release:
    checkouts = [Path(folder).resolve() for folder in folders]
    for checkout, package in zip(checkouts, ("mindspeed_mm", "mindspeed", "megatron"), strict=True):
        if not (checkout / package).is_dir():
            _stop(f"{name}: there is no {checkout / package}; a checkout that has it is expected")
    return Release(name, *checkouts)


def _stop(message: str) -> NoReturn:
    print(message, file=sys.stderr)
    sys.exit(2)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=os.environ.get("REAL_MINDSPEED_MM_PYTHON"), metavar="PATH")
    parser.add_argument(
        "--release", nargs=4, action="append", default=[], metavar=("NAME", "MINDSPEED_MM", "MINDSPEED", "MEGATRON_LM")
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="runs whose names hold one of these")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="of logs and files (default: a temporary one)")
    return parser.parse_args()


def run_all(releases: Iterable[Release], python: Path, folder: Path, only: Sequence[str]) -> int:
    """Print the table; 1 where something came out otherwise."""
    print("| release | run | iterations | loss, first → last | difference | seconds | came out |")
    print("|---|---|---|---|---|---|---|")
    bad = 0
    inherited = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "PYTHONPATH")}
    command = followed([str(python), str(RANKS)])
    with contextlib.closing(ForkedRanks(command, {**inherited, "OMP_NUM_THREADS": "1"})) as ranks:
        for release in releases:
            for row in run_release(release, Bench(release, python, folder, ranks), only):
                print(row, flush=True)
                bad += not row.good
    print(f"{bad} run(s) came out otherwise than they must; logs are in {folder}", file=sys.stderr)
    return 1 if bad else 0


def main() -> None:
    """See the module."""
    arguments = _arguments()
    releases = [_release(name, folders) for name, *folders in arguments.release]
    releases += [] if releases else _named_releases(os.environ.get("REAL_MINDSPEED_MM", ""))
    if not releases or not arguments.python:
        print("real MindSpeed-MM is not run: name checkouts (--release or REAL_MINDSPEED_MM) and an environment with "
              "their torch (--python or REAL_MINDSPEED_MM_PYTHON)")  # fmt: skip
        return
    folder = (arguments.out or Path(tempfile.mkdtemp(prefix="real-mindspeed-mm-"))).resolve()
    sys.exit(run_all(releases, Path(arguments.python).absolute(), folder, arguments.only))


if __name__ == "__main__":
    main()
