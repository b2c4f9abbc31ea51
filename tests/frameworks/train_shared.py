"""Trains a model whose parts share parameters by code that `export --to torch` wrote; test_torch_shared.py runs it.

    train_shared.py FOLDER...       each with the files of a plan for as many processes

A table is the embedding's and the head's, a scale is that of layers 0 and 2. A folder's name says more: made: functions
make the parts; divided: the table is divided on the last stage alone. Raises where a parameter is not what one process
trains it to; writes FOLDER/refused.RANK where the code refuses the model.
"""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from train_planned import load

WIDTH, VOCABULARY, LAYERS, SAMPLES, TOKENS = 8, 13, 4, 8, 5


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(VOCABULARY, WIDTH) / WIDTH**0.5)

    def forward(self, numbers: Tensor) -> Tensor:
        return self.table[numbers]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(1))

    def forward(self, state: Tensor) -> Tensor:
        return state + self.scale * torch.tanh(self.inner(state))


class Head(nn.Module):
    def __init__(self, table: nn.Parameter) -> None:
        super().__init__()
        self.table = table

    def forward(self, state: Tensor) -> Tensor:
        return (state @ self.table.T).contiguous()


class Whole(nn.Module):
    """The model that all ranks build alike."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed, self.layers = Embedding(), nn.ModuleList(Layer() for _ in range(LAYERS))
        self.layers[2].scale = self.layers[0].scale
        self.head = Head(self.embed.table)

    def forward(self, numbers: Tensor) -> Tensor:
        state = self.embed(numbers)
        for layer in self.layers:
            state = layer(state)
        return self.head(state)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def draw(step: int) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(step)
    numbers = torch.randint(0, VOCABULARY, (2, SAMPLES, TOKENS), generator=draws)
    return numbers[0], numbers[1]


def make_parts(code: ModuleType, model: Whole, made: bool):
    """made: by functions, each of a copy of its own, as where no rank holds all; the head's begins otherwise."""
    parts = code.parts_of(model, "layers", ["embed"], ["head"])
    if not made:
        return {"text": parts}

    def make(part: nn.Module):
        def made_part() -> nn.Module:
            own = copy.deepcopy(part)
            if isinstance(own, Embedding | Head):
                own.table.shared_as = "table"
            elif part in (model.layers[0], model.layers[2]):
                own.scale.shared_as = "scale"
            if isinstance(own, Head):
                own.table.data.zero_()
            return own

        return made_part

    return {"text": code.Parts(*([make(part) for part in each] for each in (parts.layers, parts.before, parts.after)))}


def divide_head(part: nn.Module, _: str, mesh) -> None:
    if isinstance(part, Head):
        part.table = nn.Parameter(distribute_tensor(part.table.detach(), mesh, [Shard(0)]))


def train(code: ModuleType, name: str) -> None:
    """Three updates, the second by gradients of two steps added up; held against one process after each."""
    model, alone = Whole(), Whole()
    divide = divide_head if "divided" in name else code.divide_usual_names
    training = code.PlannedTraining(
        make_parts(code, model, "made" in name), torch.device("cpu"), loss_of, divide if code.TP > 1 else None
    )
    optimizer = training.make_optimizer(torch.optim.AdamW, lr=0.05)
    expected = torch.optim.AdamW(alone.parameters(), lr=0.05)
    shard = (code.SIZES.get("SHARD") or code.DP) if code.ZERO == 3 else 1
    replica = training.mesh.get_local_rank("replicate") * shard + training.mesh.get_local_rank("shard")
    mine = slice(replica * SAMPLES // code.DP, (replica + 1) * SAMPLES // code.DP)
    for steps in ([0], [1, 2], [3]):
        for step in steps:
            numbers, target = draw(step)
            loss_of(alone(numbers), target).backward()
            training.step(numbers[mine], target=target[mine])
        check(code, training, alone, [each.grad for each in alone.parameters()], "gradient")
        optimizer.step()
        expected.step()
        check(code, training, alone, list(alone.parameters()), "weight")
        optimizer.zero_grad()
        expected.zero_grad()


def check(code: ModuleType, training, alone: Whole, expected: list[Tensor], kind: str) -> None:
    """Of all parts that this rank holds, part by part, so that a copy that drifts is seen."""
    wanted = dict(zip(alone.parameters(), expected, strict=True))
    whole = code.parts_of(alone, "layers", ["embed"], ["head"])
    for number, stage in zip(training._numbers, training.stages, strict=True):
        held = [part for _, part, _ in code.list_held({"text": whole}, number)]
        assert len(held) == len(stage.parts)
        for ours, theirs in zip(stage.parts, held, strict=True):
            for (path, found), like in zip(ours.named_parameters(), theirs.parameters(), strict=True):
                value = found.grad if kind == "gradient" else found.detach()
                value = value.full_tensor() if isinstance(value, DTensor) else value
                torch.testing.assert_close(
                    value, wanted[like].detach(), rtol=2e-4, atol=1e-6, msg=lambda said, path=path: f"{path} {said}"
                )


def main() -> None:
    """See the module's docstring."""
    dist.init_process_group("gloo")
    for each in sys.argv[1:]:
        folder = Path(each)
        code = load(folder)
        try:
            train(code, folder.name)
        except ValueError as error:
            (folder / f"refused.{os.environ['RANK']}").write_text(str(error))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
