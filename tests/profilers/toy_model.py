"""A model small enough to know by heart: what its blocks keep, hold and hand on follows from the sizes below."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.model.readers.job_file import parse_job
from mm_autoparallel.profilers.subject import Build, Layout, Subject

WIDTH, INNER, VOCAB, PATCH = 32, 64, 40, 12
SEQ_LENGTH, IMAGE_TOKENS, MERGE = 16, 4, 4
NUM_LAYERS = {"vision": 4, "text": 6}
FLOAT_BYTES = 4


class Layer(nn.Module):
    """x + down(relu(up(x · table)))."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, state: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return state + self.down(torch.relu(self.up(state * table)))


class Vision(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.embed = nn.Linear(PATCH, WIDTH)
        self.blocks = nn.ModuleList(Layer() for _ in range(depth))
        self.merger = nn.Linear(MERGE * WIDTH, WIDTH)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        state = self.embed(patches)
        table = torch.ones(patches.shape[1], WIDTH)
        for block in self.blocks:
            state = block(state, table)
        return self.merger(state.view(state.shape[0], -1, MERGE * WIDTH))


class Toy(nn.Module):
    """Image tokens stand before text tokens."""

    def __init__(self, depth: dict[str, int]) -> None:
        super().__init__()
        self.vision = Vision(depth["vision"])
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(depth["text"]))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, patches: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        images = self.vision(patches)
        state = torch.cat([images, self.embed(tokens[:, images.shape[1] :])], dim=1)
        table = torch.ones(state.shape[1], WIDTH)
        for layer in self.layers:
            state = layer(state, table)
        logits = self.head(state)
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


LAYOUT = Layout(layers={"vision": "vision.blocks", "text": "layers"}, post={"vision": "vision.merger"})


def build_model(build: Build) -> nn.Module:
    torch.manual_seed(0)
    model = Toy(dict(build.depth))
    if build.tp_mesh is not None:
        for layer in (*model.vision.blocks, *model.layers):
            parallelize_module(layer, build.tp_mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model.train()


def forward_step(model: nn.Module, num_samples: int, workload: Workload) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    patches = torch.randn(num_samples, workload.image_tokens_per_sample * MERGE, PATCH, generator=generator)
    tokens = torch.randint(VOCAB, (num_samples, workload.seq_length), generator=generator)
    loss = model(patches, tokens)
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


def build_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


SUBJECT = Subject(build_model, forward_step, build_optimizer, LAYOUT)

JOB: dict[str, Any] = {
    "model": {
        "name": "toy",
        "encoders": [
            {
                "name": "vision",
                "freeze": False,
                "stem": {"type": "patches", "in_features": PATCH, "bias": True},
                "layers": {"num_layers": 4, "hidden_size": WIDTH, "ffn_size": INNER, "num_heads": 4, "norm": "layer"},
                "projector": {"merge_tokens": MERGE, "layer_sizes": [MERGE * WIDTH, WIDTH]},
            }
        ],
        "text": {
            "vocab_size": VOCAB,
            "layers": {"num_layers": 6, "hidden_size": WIDTH, "ffn_size": INNER, "num_heads": 4, "norm": "rms"},
        },
    },
    "cluster": {
        "num_nodes": 1,
        "devices_per_node": 8,
        "device": {
            "name": "toy-device",
            "memory_bytes": 1_000_000_000,
            "bf16_flops_per_s": 1e9,
            "memory_bytes_per_s": 1e9,
            "context_bytes": 0,
            "node_link": {"bandwidth_bytes_per_s": 1e6, "latency_ms": 0.5},
            "network_link": {"bandwidth_bytes_per_s": 1e6, "latency_ms": 0.5},
        },
    },
    "workload": {"global_batch_size": 8, "seq_length": SEQ_LENGTH, "image_tokens_per_sample": IMAGE_TOKENS},
}


def make_job(**changes: Any) -> Job:
    """The toy's job; changes: keys `a.b.c` → value."""
    document = copy.deepcopy(JOB)
    for path, value in changes.items():
        *parents, key = path.split(".")
        place = document
        for parent in parents:
            place = place[parent]
        place[key] = value
    return parse_job(document, Path("toy.yaml"))
