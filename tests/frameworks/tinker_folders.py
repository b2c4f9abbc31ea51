"""Folders of measurements as Tinker's profiler writes them, with figures drawn at random."""

from __future__ import annotations

import json
import random
from pathlib import Path

from mm_autoparallel.integrations.tinker.profiles import COLUMNS, DATA, INTER, INTRA

BLOCKS = ("embedding", "transformer_block", "final_norm", "post_process")
SIZES = ",".join(str(2**power) for power in range(11))


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
