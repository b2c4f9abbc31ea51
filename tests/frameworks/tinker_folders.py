"""Folders of measurements as Tinker's profiler writes them, with figures drawn at random; its results.csv, read."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from pathlib import Path

from mm_autoparallel.errors import JobError
from mm_autoparallel.files import describe_value, read_text
from mm_autoparallel.integrations.tinker.profiles import COLUMNS, DATA, INTER, INTRA
from mm_autoparallel.integrations.tinker.results import HEADER

BLOCKS = ("embedding", "transformer_block", "final_norm", "post_process")
SIZES = ",".join(str(2**power) for power in range(11))
_ROW = re.compile(
    r"(?P<sizes>(?:\d+,){8})"
    + ",".join(rf'"?\[(?P<{name}>[\d., ]+)\]"?' for name in ("layers", "times", "sizes_gb"))
    + r",(?P<step_ms>[\d.]+),(?P<peak_gb>[\d.]+),(?P<tokens>[\d.]+)"
)


@dataclass(frozen=True)
class Row:
    """A row of results.csv. sizes: tp, sp, ep, mbs, dp, pp, recompute, dist_opt. Lists by stage; times in ms, memory in
    1000 MiB, which Tinker calls GB."""

    sizes: tuple[int, ...]
    layers: tuple[int, ...]
    times_ms: tuple[float, ...]
    memory_gb: tuple[float, ...]
    step_ms: float
    peak_gb: float
    tokens_per_device_s: float


def read_results(path: Path) -> tuple[Row, ...]:
    """The rows of results.csv at `path`, of Tinker's own (lists not quoted) or ours. Raises JobError with the line."""
    lines = read_text(path, "results", "CSV file").splitlines()
    if not lines or lines[0].strip() != HEADER:
        raise JobError(f"{path}: line 1 is {describe_value(lines[0] if lines else '')}; {HEADER} is expected")
    rows = []
    for number, line in enumerate(lines[1:], 2):
        if not line.strip():
            continue
        found = _ROW.fullmatch(line.strip())
        if found is None:
            raise JobError(f"{path}: line {number} is {describe_value(line)}; a row as its header says is expected")
        try:
            rows.append(
                Row(
                    tuple(map(int, found["sizes"].strip(",").split(","))),
                    tuple(map(int, found["layers"].split(","))),
                    tuple(map(float, found["times"].split(","))),
                    tuple(map(float, found["sizes_gb"].split(","))),
                    float(found["step_ms"]),
                    float(found["peak_gb"]),
                    float(found["tokens"]),
                )
            )
        except ValueError as failure:
            raise JobError(f"{path}: line {number}: {failure}") from None
    return tuple(rows)


def write_folder(
    path: Path, rng: random.Random, num_layers: int, *, experts: bool = False, seq_length: int = 4096
) -> None:
    """A folder at `path` for a model of `num_layers` layers. experts: EP 1 and 2 too."""
    path.mkdir(parents=True)
    is_bf16 = rng.random() < 0.5
    said = {"seq_length": seq_length, "fp16": not is_bf16, "bf16": is_bf16, "num_layers": num_layers}
    (path / f"model_info_seq{seq_length}.json").write_text(json.dumps(said))
    named = {"version_profiler": "TinkerProfiler-1.3.3", "model_name": "example", "model_size": "7b"}
    (path / "VERSION_TinkerProfiler-1.3.3.json").write_text(json.dumps(named | {"pretrain_script_path": None}))
    for name in (INTRA, INTER):
        table = ",".join(str(round(rng.uniform(0.5, 200.0), 2)) for _ in range(11))
        (path / name).write_text(f"{SIZES}\n{table}\n")
    lines = [COLUMNS]
    for tp in (1, 2, 4):
        for sp in (0, 1) if tp > 1 else (0,):
            for ep in (1, 2) if experts else (1,):
                for mbs in (1, 2):
                    config = f"example-7b_tp{tp}_sp{sp}_ep{ep}_mbs{mbs}_algo0"
                    lines += [f"{config},{block},{_draw(rng)}" for block in BLOCKS]
                    lines.append("")
    (path / DATA).write_text("\n".join(lines) + "\n")


def _draw(rng: random.Random) -> str:
    times = [rng.uniform(10.0, 20000.0) for _ in range(2)]
    sizes = [rng.choice((0.1, 0.5, 1.0, 32.0, rng.uniform(0.1, 600.0))) for _ in range(2)]
    weights, activations = rng.uniform(0.01, 800.0), rng.uniform(1.0, 4000.0)
    reserved = [rng.uniform(0.0, 600.0) for _ in range(2)]
    return ",".join(f"{figure:.3f}" for figure in (*times, *sizes, weights, activations, *reserved))
