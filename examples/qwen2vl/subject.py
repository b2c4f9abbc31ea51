"""Subject: the model and its step as mm_autoparallel profiles them, from the same code that trains."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from data import Batch, SampleShape, make_batch, shape_of_tokens
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.profilers.subject import Build, Layout, Subject
from model import Stage, build_stage, whole_chain
from parallel import make_shard
from parts import make_optimizer, make_recipe
from sizes import make_config

LAYOUT = Layout(layers={"vision": "vision.layers", "text": "text.layers"}, post={"vision": "vision.post"})


def make_workload(arguments: argparse.Namespace, document: dict[str, Any], shape: SampleShape) -> dict[str, Any]:
    """What a step processes and in which types it keeps what it trains, as a job file's `workload`."""
    merge = document["vision_config"]["spatial_merge_size"]
    return {
        "global_batch_size": arguments.global_batch_size,
        "seq_length": arguments.seq_length,
        "image_tokens_per_sample": shape.image_tokens(merge),
        "images_per_sample": shape.num_images,
        # AdamW keeps two 32-bit moments, and a 32-bit copy of 16-bit weights; gradients have the weights' type.
        "weight_bytes": 2 if arguments.bf16 else 4,
        "gradient_bytes": 2 if arguments.bf16 else 4,
        "optimizer_bytes": 12 if arguments.bf16 else 8,
        "overlap_param_gather": False,
    }


def make_subject(arguments: argparse.Namespace, document: dict[str, Any]) -> Subject:
    """How the whole model is built at any depth, run on a batch of any size, and updated."""
    config = make_config(document)

    def build_model(build: Build) -> Stage:
        shard = make_shard(build.tp_mesh) if build.tp_mesh is not None and build.tp_mesh.size() > 1 else None
        recipe = make_recipe(arguments, config, build.device, shard)
        return build_stage(recipe, whole_chain(dict(build.depth)))

    @lru_cache(maxsize=2)
    def batch_of(num_samples: int, shape: SampleShape) -> Batch:
        return make_batch(range(num_samples), shape, config, arguments.seed)

    def forward_step(model: nn.Module, num_samples: int, workload: Workload) -> torch.Tensor:
        merge = config.vision_config.spatial_merge_size
        shape = shape_of_tokens(
            workload.seq_length, workload.image_tokens_per_sample, workload.images_per_sample, merge
        )
        device = next(model.parameters()).device
        tensors = batch_of(num_samples, shape).tensors()
        return model(**{name: each if name == "image_grid" else each.to(device) for name, each in tensors.items()})

    def build_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return make_optimizer(arguments, parameters)

    return Subject(build_model, forward_step, build_optimizer, LAYOUT)
