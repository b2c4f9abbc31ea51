"""A job of a tower and a decoder so small that layouts of both are worked out by hand, and a plan of two layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mm_autoparallel.model.job.arrangement import Arrangement, ModuleLayout
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.readers.job_file import parse_job
from mm_autoparallel.planner.plan import Plan


def make_job(stack: str | None = None, freeze: bool = False, hears: bool = False, **search: Any) -> Job:
    """Two nodes of four devices; a tower of two layers and a decoder of four, 24 samples a step.

    hears: a frozen tower of one layer for sounds beside it.
    """
    layers = {"hidden_size": 512, "ffn_size": 2048, "num_heads": 8}
    projector = {"norm": "layer", "norm_size": 512, "merge_tokens": 4, "layer_sizes": [2048, 512], "freeze": freeze}
    tower = {
        "name": "vision",
        "stem": {"type": "patches", "in_features": 588},
        "layers": layers | {"num_layers": 2, "norm": "layer"},
        "projector": projector,
        "freeze": freeze,
    }
    towers = [tower]
    if hears:
        towers.append(
            {
                "name": "audio",
                "stem": {"type": "mel_frames", "num_mel_bins": 80},
                "layers": layers | {"num_layers": 1, "norm": "layer"},
                "projector": {"layer_sizes": [512, 512], "freeze": True},
                "freeze": True,
            }
        )
    text = {"vocab_size": 4096, "layers": layers | {"num_layers": 4, "norm": "rms"}}
    workload = {"global_batch_size": 24, "seq_length": 1024, "image_tokens_per_sample": 256}
    content = {
        "model": {"text": text, "encoders": towers},
        "cluster": {"num_nodes": 2, "devices_per_node": 4, "device": "a100-80g"},
        "workload": workload
        | ({"stack": stack} if stack else {})
        | ({"audio_tokens_per_sample": 128} if hears else {}),
        "search": {"failure_price": 0.0, "choice": "point"} | search,
    }
    return parse_job(content, Path("job.yaml"))


def apart(pp: int, tp: int, dp: int, mbs: int, offset: int = 4, name: str = "vision", cp: int = 1) -> Arrangement:
    """On ranks of its own."""
    return Arrangement("disaggregated", "inline", ModuleLayout(name, pp, tp, dp, mbs, cp, offset))


def shared(run: Any, tp: int, dp: int, mbs: int, pp: int = 1, cp: int = 1) -> Arrangement:
    """On the decoder's."""
    return Arrangement("colocated", run, ModuleLayout("vision", pp, tp, dp, mbs, cp))


APART = Plan(
    Strategy(3, 2, 1, 4, arrangement=apart(1, 1, 4, 1)),
    {"vision": (2, 0, 0), "text": (0, 3, 1)},
    {"vision": (0, 0, 0), "text": (0, 1, 0)},
    24,
)
PHASES = Plan(Strategy(2, 2, 2, 1, arrangement=shared("phases", 1, 8, 3)), {"text": (2, 2)}, {"text": (0, 0)}, 24)
