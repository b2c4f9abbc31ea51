"""Trains the example's model by code that `export --to torch` wrote; test_torch_export.py runs it.

    train_planned.py FOLDER...      each with the files of a plan for as many processes; writes FOLDER/losses.json

With one process and no plan's files in FOLDER it trains the whole model, which is what the others are held against.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "qwen2vl"))

import torch
import torch.distributed as dist

from arguments import make_parser, read_model_document, read_shape
from data import make_batch
from model import Piece, Recipe, build_stage, whole_chain
from sizes import make_config

SMALL = "--num-layers 6 --vision-num-layers 4 --hidden-size 64 --ffn-hidden-size 128 --vocab-size 512 --seq-length 32"
SAMPLES, STEPS, RATE = 8, 3, 0.5


def load(folder: Path) -> ModuleType:
    """The exported code."""
    spec = importlib.util.spec_from_file_location("planned_pipeline", folder / "planned_pipeline.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["planned_pipeline"] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """See the module's docstring."""
    arguments = make_parser().parse_args([*SMALL.split(), "--image-size", "56"])
    document = read_model_document(arguments)
    shape, config = read_shape(arguments, document), make_config(document)
    recipe = Recipe(config, 7, 0.05, torch.device("cpu"), torch.float32)
    dist.init_process_group("gloo")
    for name in sys.argv[1:]:
        folder = Path(name)
        if (folder / "planned_pipeline.py").exists():
            losses = train(load(folder), recipe, lambda first, last: make_batch(range(first, last), shape, config, 7))
        else:
            losses = train_whole(recipe, make_batch(range(SAMPLES), shape, config, 7))
        if losses:
            (folder / f"losses.{os.environ['RANK']}.json").write_text(json.dumps(losses))
        dist.barrier()
    dist.destroy_process_group()


def train_whole(recipe: Recipe, batch) -> list[float]:
    """The whole model on one process."""
    model, losses = build_stage(recipe, whole_chain({"vision": 4, "text": 6})), []
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(STEPS):
        loss = model(**batch.tensors())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def train(code: ModuleType, recipe: Recipe, samples) -> list[float]:
    """By the exported code; the losses of this rank's replica, where it holds the last stage."""

    def parts_of(modality: str, layers: int):
        def part(role: str, index: int = 0):
            return partial(build_stage, recipe, [Piece(modality, role, index)])

        return code.Parts([part("layer", index) for index in range(layers)], [part("pre")], [part("post")])

    parts = {"vision": parts_of("vision", 4), "text": parts_of("text", 6)}
    divide = code.divide_usual_names if code.TP > 1 else None
    training = code.PlannedTraining(parts, torch.device("cpu"), divide=divide)
    optimizer = training.make_optimizer(torch.optim.SGD, lr=RATE)
    replicas, share = training.mesh["replicate", "shard"], SAMPLES // code.DP
    shard = code.SIZES.get("SHARD") or code.DP if code.ZERO == 3 else 1
    mine = replicas.get_local_rank("replicate") * shard + replicas.get_local_rank("shard")
    batch, losses = samples(mine * share, (mine + 1) * share).tensors(), []
    for _ in range(STEPS):
        losses.append(training.step(target=batch["labels"], **batch))
        optimizer.step()
        optimizer.zero_grad()
    return [loss for loss in losses if loss is not None]


if __name__ == "__main__":
    main()
