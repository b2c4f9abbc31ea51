"""A pretrain script as a person would write one, with a decoder that takes milliseconds, and ways to go wrong."""

from __future__ import annotations

import argparse
import os
import resource
import signal
from collections.abc import Iterable

import numpy as np  # noqa: F401  (before torch, whose own import of it loses Ctrl-C)
import torch
import torch.distributed as dist
from torch import nn

from mm_autoparallel import hooks
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.profilers.subject import Build, Subject

WIDTH, FFN, HEADS, VOCABULARY = 64, 128, 4, 256

Norm = getattr(nn, "RMSNorm", nn.LayerNorm)  # torch 2.1 has no RMSNorm


class Reduce(torch.autograd.Function):
    """Sum over the tensor parallel group, gradient passed on: the end of a row parallel matrix."""

    @staticmethod
    def forward(context, tensor, group):
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(context, gradient):
        return gradient, None


class Layer(nn.Module):
    def __init__(self, mesh) -> None:
        super().__init__()
        tp = mesh.size() if mesh is not None else 1
        self.group = mesh.get_group() if tp > 1 else None
        self.heads = HEADS // tp
        self.norm, self.norm2 = Norm(WIDTH), Norm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH // tp, bias=False)
        self.out = nn.Linear(WIDTH // tp, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, FFN // tp, bias=False), nn.Linear(FFN // tp, WIDTH, bias=False)

    def reduce(self, tensor):
        return Reduce.apply(tensor, self.group) if self.group is not None else tensor

    def forward(self, hidden):
        batch, length, _ = hidden.shape
        q, k, v = self.qkv(self.norm(hidden)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        hidden = hidden + self.reduce(self.out(mixed.reshape(batch, length, -1)))
        return hidden + self.reduce(self.down(nn.functional.silu(self.up(self.norm2(hidden)))))


class Toy(nn.Module):
    def __init__(self, depth: int, mesh) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(mesh) for _ in range(depth))
        self.norm, self.head = Norm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(self.norm(hidden))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def make_subject(fail: str | None) -> Subject:
    def build_model(build: Build) -> nn.Module:
        if fail is not None and os.environ["RANK"] == fail[-1]:
            if fail.startswith("raise"):
                raise KeyError("the toy's own bug")
            if fail.startswith("kill"):
                os.kill(os.getpid(), signal.SIGKILL)
            if fail.startswith("full"):  # from now on the system cuts every write off, as a full disk does
                resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        torch.manual_seed(0)
        return Toy(build.depth["text"], build.tp_mesh).to(build.device).train()

    def forward_step(model: nn.Module, num_samples: int, workload: Workload) -> torch.Tensor:
        device = next(model.parameters()).device
        tokens = torch.arange(num_samples * workload.seq_length, device=device).view(num_samples, -1) % VOCABULARY
        loss = model(tokens)
        return loss * float("nan") if fail == "nan" else loss

    def build_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters)

    return Subject(build_model, forward_step, build_optimizer)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seq-length", type=int, default=32)
    parser.add_argument("--tp", type=int, nargs="+", default=[1])
    parser.add_argument("--mbs", type=int, nargs="+", default=[1])
    parser.add_argument("--fail")
    hooks.add_arguments(parser)
    arguments = parser.parse_args()
    layers = {"num_layers": 4, "hidden_size": WIDTH, "ffn_size": FFN, "num_heads": HEADS, "norm": "rms", "gated": False}
    pretraining = hooks.Pretraining(
        model={"name": "toy", "text": {"vocab_size": VOCABULARY, "layers": layers}},
        workload={
            "global_batch_size": 8,
            "seq_length": arguments.seq_length,
            "weight_bytes": 4,
            "gradient_bytes": 4,
            "optimizer_bytes": 8,
        },
        subject=make_subject(arguments.fail),
        search={"tp": arguments.tp, "mbs": arguments.mbs},
    )
    hooks.auto_parallel(arguments, pretraining)
    plan = hooks.applied_plan(arguments, pretraining)
    print("trains with", "its own flags" if plan is None else plan.stages)


if __name__ == "__main__":
    main()
