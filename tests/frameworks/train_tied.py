"""Trains a model whose embedding is its head too, by code that `export --to torch` wrote; test_torch_export.py runs it.

    train_tied.py FOLDER...      each with the files of a plan for as many processes

It writes FOLDER/losses.RANK.json, and FOLDER/tied.RANK.json: the shared weights' gradient of each step, where the rank
has them. With one process and no plan's files in FOLDER it trains the model as it is.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
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
        losses, tied = train(load(folder), model, tokens) if planned else train_whole(model, tokens)
        for kind, found in (("losses", losses), ("tied", tied)):
            if found:
                (folder / f"{kind}.{os.environ['RANK']}.json").write_text(json.dumps(found))
        dist.barrier()
    dist.destroy_process_group()


Found = tuple[list[float], list[list[float]]]


def train_whole(model: Tied, tokens: Tensor) -> Found:
    """The model on one process."""
    optimizer, losses, tied = torch.optim.SGD(model.parameters(), lr=RATE), [], []
    for _ in range(STEPS):
        loss = loss_of(model.head(nn.Sequential(*model.layers)(model.embed(tokens))), tokens)
        loss.backward()
        tied += gradients(model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses, tied


def gradients(parameters: Iterable[nn.Parameter]) -> list[list[float]]:
    """Of those among them that have the embedding's sizes, all numbers of each."""
    found = [each.grad for each in parameters if each.shape == (WORDS, WIDTH) and each.grad is not None]
    whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in found]
    return [each.flatten().tolist() for each in whole]


def train(code, model: Tied, tokens: Tensor) -> Found:
    """By the exported code; what this rank has of it."""
    parts = {"text": code.parts_of(model, before=["embed"], layers="layers", after=["head"])}
    training = code.PlannedTraining(parts, torch.device("cpu"), loss_of)
    optimizer = training.make_optimizer(torch.optim.SGD, lr=RATE)
    share = SAMPLES // code.DP
    replica = training.mesh.get_local_rank("replicate" if code.ZERO < 3 else "shard")
    mine, losses, tied = tokens[replica * share :][:share], [], []
    for _ in range(STEPS):
        losses.append(training.step(mine, target=mine))
        tied += gradients(training.parameters())
        optimizer.step()
        optimizer.zero_grad()
    return [loss for loss in losses if loss is not None], tied


if __name__ == "__main__":
    main()
