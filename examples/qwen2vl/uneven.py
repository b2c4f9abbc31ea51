"""Samples of different sizes, and who runs which: as they arrive, or as the planner's BatchBalancer deals them.

The loss is the mean over all words of the global batch, so that neither changes the gradient. All replicas know all
sizes beforehand, so nothing is sent to agree.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from dataclasses import replace

from transformers import Qwen2VLConfig

from data import SampleShape
from failures import TrainingError
from mm_autoparallel import BatchBalancer, DistributedBalancedBatchSampler, Sample, SampleCost
from parallelism import Parallelism

SIDES = (0.25, 0.5, 0.75, 1.0)
SHARES = (0.5, 0.25, 0.15, 0.1)
"""Sides of images as parts of --image-size, and how often each is drawn: many small ones, few large."""

FLOPS_PER_MS = 1e9
"""Assumed; only what encoder and decoder take beside each other decides how samples are dealt."""


class UnevenBatches:
    """The samples of a run, and the micro-batches of one replica."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        config: Qwen2VLConfig,
        largest: SampleShape,
        parallelism: Parallelism,
        replica: int,
        num_replicas: int,
    ) -> None:
        """largest: of all samples. Raises TrainingError where these flags do not go with samples that differ."""
        if parallelism.pp > 1 or parallelism.tp > 1 or parallelism.fsdp:
            raise TrainingError(
                "--uneven-images runs on one stage, without tensor parallel and FSDP2: there every rank would wait for "
                "tensors of one size, or for as many of them; drop the flag, or divide by replicas alone"
            )
        self._size = arguments.global_batch_size
        self._num_microbatches = self._size // (num_replicas * parallelism.micro_batch_size)
        self._replica, self._num_replicas = replica, num_replicas
        merge = config.vision_config.spatial_merge_size
        self._merge = merge
        count = arguments.train_iters * self._size
        self.shapes = [draw_shape(largest, merge, arguments.seed, index) for index in range(count)]
        self._dealt: Iterator[list[int]] | None = None
        if arguments.balance_samples:
            samples = [
                Sample((shape.grid[0] * shape.grid[1],) * shape.num_images, tokens=shape.seq_length)
                for shape in self.shapes
            ]
            balancer = BatchBalancer(
                {
                    "parallel_config": {"PP": 1, "TP": 1, "DP": num_replicas, "MBS": parallelism.micro_batch_size},
                    "layer_placement": {
                        "vit_layer_placement": [config.vision_config.depth],
                        "llm_layer_placement": [config.text_config.num_hidden_layers],
                    },
                },
                micro_batches=self._num_microbatches,
                token_cap=largest.seq_length * parallelism.micro_batch_size,
                cost=count_cost(config, arguments.freeze_vit),
            )
            sampler = DistributedBalancedBatchSampler(
                samples, balancer, rank=replica, global_batch_size=self._size, shuffle=False
            )
            self._dealt = iter(sampler)

    def micro_batches(self, iteration: int) -> list[list[int]]:
        """The samples of each micro-batch of this replica in an iteration; iterations follow one another."""
        if self._dealt is not None:
            return [next(self._dealt) for _ in range(self._num_microbatches)]
        per_replica = self._size // self._num_replicas
        first = iteration * self._size + self._replica * per_replica
        size = per_replica // self._num_microbatches
        return [list(range(start, start + size)) for start in range(first, first + per_replica, size)]

    def num_words(self, index: int) -> int:
        """Tokens of a sample whose prediction counts."""
        shape = self.shapes[index]
        return shape.seq_length - shape.image_tokens(self._merge) - 2 * shape.num_images

    def in_iteration(self, iteration: int) -> range:
        """The samples of the global batch."""
        return range(iteration * self._size, (iteration + 1) * self._size)


def draw_shape(largest: SampleShape, merge: int, seed: int, index: int) -> SampleShape:
    """The shape of sample `index`, alike in every run: a side of its images, and from a quarter to all of the words."""
    draws = random.Random(f"{seed} {index}")
    (part,) = draws.choices(SIDES, SHARES)
    down, across = (max(1, round(part * side / merge)) * merge for side in largest.grid)
    images = largest.num_images * down * across // merge**2 + 2 * largest.num_images
    most_words = largest.seq_length - largest.image_tokens(merge) - 2 * largest.num_images
    return replace(largest, grid=(down, across), seq_length=images + max(1, round(draws.uniform(0.25, 1) * most_words)))


def count_cost(config: Qwen2VLConfig, frozen: bool) -> SampleCost:
    """What samples cost by the multiplications that they are: two for a weight and token, and twice that backward; the
    products of attention beside them, of which a causal decoder needs half."""
    vision, text = config.vision_config, config.text_config
    vision_weights = vision.depth * (4 + 2 * vision.mlp_ratio) * vision.embed_dim**2
    width = text.hidden_size
    key_value = width * text.num_key_value_heads // text.num_attention_heads
    text_weights = text.num_hidden_layers * width * (2 * width + 2 * key_value + 3 * text.intermediate_size)
    text_weights += width * text.vocab_size
    passes = 1 if frozen else 3
    return SampleCost(
        image_ms=(
            passes * 4 * vision.depth * vision.embed_dim / FLOPS_PER_MS,
            passes * 2 * vision_weights / FLOPS_PER_MS,
            0.0,
        ),
        token_ms=(3 * 2 * text.num_hidden_layers * width / FLOPS_PER_MS, 3 * 2 * text_weights / FLOPS_PER_MS),
        encoder_frozen=frozen,
    )
