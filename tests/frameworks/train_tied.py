"""Trains a model whose embedding is its head too, by code that `export --to torch` wrote; test_torch_export.py runs it.

    train_tied.py FOLDER...      each with the files of a plan for as many processes; writes FOLDER/losses.RANK.json

With one process and no plan's files in FOLDER it trains the model as it is.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from train_planned import load

WORDS, WIDTH, LAYERS, SAMPLES, STEPS, RATE = 32, 16, 6, 8, 4, 0.1


class Tied(nn.Module):
    """An embedding, layers, and a head with the embedding's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    """The mean over all words."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def main() -> None:
    """See the module's docstring."""
    dist.init_process_group("gloo")
    tokens = torch.randint(WORDS, (SAMPLES, 12), generator=torch.Generator().manual_seed(3))
    for name in sys.argv[1:]:
        folder = Path(name)
        torch.manual_seed(5)
        model = Tied()
        planned = (folder / "planned_pipeline.py").exists()
        losses = train(load(folder), model, tokens) if planned else train_whole(model, tokens)
        if losses:
            (folder / f"losses.{os.environ['RANK']}.json").write_text(json.dumps(losses))
        dist.barrier()
    dist.destroy_process_group()


def train_whole(model: Tied, tokens: Tensor) -> list[float]:
    """The model on one process."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=RATE), []
    for _ in range(STEPS):
        loss = loss_of(model.head(nn.Sequential(*model.layers)(model.embed(tokens))), tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def train(code, model: Tied, tokens: Tensor) -> list[float]:
    """By the exported code; the losses where this rank has them."""
    parts = {"text": code.parts_of(model, before=["embed"], layers="layers", after=["head"])}
    training = code.PlannedTraining(parts, torch.device("cpu"), loss_of)
    optimizer = training.make_optimizer(torch.optim.SGD, lr=RATE)
    share = SAMPLES // code.DP
    replica = training.mesh.get_local_rank("replicate" if code.ZERO < 3 else "shard")
    mine, losses = tokens[replica * share :][:share], []
    for _ in range(STEPS):
        losses.append(training.step(mine, target=mine))
        optimizer.step()
        optimizer.zero_grad()
    return [loss for loss in losses if loss is not None]


if __name__ == "__main__":
    main()
