"""Parts: what one rank trains, and how it is divided: stages of the chain, or of an encoder and a decoder apart."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import Qwen2VLConfig

from colocated import Colocated
from crossing import Crossing, Features
from data import SampleShape
from model import PROJECTOR, VISION_TOWER, Fill, Held, Recipe, Stage, build_stage, count_frozen
from optimizer import AdamW, ShardedAdamW
from parallel import Ranks, average_gradients, divide, make_shard, replicate_stage
from parallelism import Parallelism
from pipeline import Layout, Pipeline
from prefetch import Prefetch


def make_recipe(
    arguments: argparse.Namespace, config: Qwen2VLConfig, device: torch.device, shard: Any = None
) -> Recipe:
    """How the parts of the model are made under these flags."""
    dtype = torch.bfloat16 if arguments.bf16 else torch.float32
    frozen = VISION_TOWER if arguments.freeze_vit else frozenset()
    frozen |= PROJECTOR if arguments.freeze_projector else frozenset()
    return Recipe(config, arguments.seed, arguments.init_method_std, device, dtype, shard, frozen=frozen)


def make_optimizer(
    arguments: argparse.Namespace, parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None = None
) -> AdamW | ShardedAdamW:
    """AdamW with the flags' settings; with `group`, its state divided among that group's ranks."""
    options = {
        "lr": arguments.lr,
        "betas": (arguments.adam_beta1, arguments.adam_beta2),
        "eps": arguments.adam_eps,
        "weight_decay": arguments.weight_decay,
    }
    return AdamW(parameters, **options) if group is None else ShardedAdamW(parameters, group, **options)


@dataclass
class Part:
    """This rank's stages of an encoder, a decoder or the chain, and what updates them.

    held: of each stage its number in the whole model and what it holds. bare: the stages themselves; stages: as their
    replicas train. by_hand: nobody averages gradients but `average`.
    """

    ranks: Ranks
    held: list[tuple[int, tuple[Held, ...]]]
    bare: list[Stage]
    stages: list[nn.Module]
    optimizer: AdamW | ShardedAdamW
    by_hand: bool

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Of all its stages."""
        return [parameter for stage in self.bare for parameter in stage.parameters()]

    @property
    def copies(self) -> int:
        """Ranks among which its parameters repeat or divide."""
        return self.ranks.size("dp") * self.ranks.size("tp")

    def average(self) -> None:
        """Average gradients over replicas, where nothing has done it yet."""
        if self.by_hand:
            average_gradients(self.parameters, self.ranks.group("dp"))


@dataclass
class Share:
    """One rank's share of a run. pipeline: of the chain, of the decoder, or of an encoder on ranks of its own.

    colocated: the encoder beside the decoder, where ranks hold both; prefetch: the same of one that works ahead.
    encodes: this rank holds an encoder alone. before: stages of such an encoder, in front of the decoder's.
    """

    parts: list[Part]
    pipeline: Pipeline
    crossing: Crossing | None = None
    colocated: Colocated | None = None
    prefetch: Prefetch | None = None
    encodes: bool = False
    before: int = 0


class Builder:
    """Makes the share of this rank. fill: gives parts weights from elsewhere."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        config: Qwen2VLConfig,
        shape: SampleShape,
        parallelism: Parallelism,
        device: torch.device,
        fill: Fill | None,
    ) -> None:
        self._arguments, self._config, self._shape, self._parallelism = arguments, config, shape, parallelism
        self._device = device
        self._recipe = replace(make_recipe(arguments, config, device), fill=fill)
        num_samples = parallelism.dp * parallelism.micro_batch_size
        self._num_microbatches = arguments.global_batch_size // num_samples

    def build(self) -> Share:
        """The stages of this rank, ready to train. Every process calls it."""
        sizes = self._parallelism
        if sizes.encoder is None:
            ranks = divide(self._device, sizes.pp, sizes.dp, sizes.tp)
            part = self._make_part(ranks, sizes.pieces, sizes.numbers_on(ranks.place("pp")), 0, sizes.parted)
            layout = replace(self._layout(), order=sizes.order)
            return Share([part], self._make_pipeline(part, layout))
        return self._build_apart() if sizes.encoder.arrangement.apart else self._build_colocated()

    def _build_apart(self) -> Share:
        sizes, encoder = self._parallelism, self._parallelism.encoder
        assert encoder is not None
        own = encoder.arrangement.encoder
        encoders = divide(self._device, own.pp, own.dp, own.tp, own.rank_offset)
        behind = own.num_ranks if own.rank_offset == 0 else 0
        decoders = divide(self._device, sizes.pp, sizes.dp, sizes.tp, behind)
        crossing = self._make_crossing(encoders, decoders, sizes.dp * sizes.micro_batch_size)
        if decoders.here:
            part = self._make_part(decoders, sizes.pieces, sizes.numbers_on(decoders.place("pp")), own.pp)
            pipeline = self._make_pipeline(part, self._layout(), arrive=crossing.arrive)
            return Share([part], pipeline, crossing, before=own.pp)
        part = self._make_part(encoders, encoder.pieces, [encoders.place("pp")], 0)
        layout = replace(
            self._layout(),
            pieces=encoder.pieces,
            micro_batch_size=own.mbs,
            num_frozen=count_frozen(encoder.pieces, self._recipe.frozen),
            num_behind=sizes.pp,
        )
        return Share([part], self._make_pipeline(part, layout, depart=crossing.depart), crossing, encodes=True)

    def _build_colocated(self) -> Share:
        sizes, encoder = self._parallelism, self._parallelism.encoder
        assert encoder is not None
        own, at_once = encoder.arrangement.encoder, encoder.arrangement.away
        encoders = divide(self._device, own.pp, own.dp, own.tp)
        decoders = divide(self._device, sizes.pp, sizes.dp, sizes.tp)
        num_samples = self._arguments.global_batch_size if at_once else sizes.dp * sizes.micro_batch_size
        crossing = self._make_crossing(encoders, decoders, num_samples)
        first = self._make_part(encoders, encoder.pieces, [0], 0, by_hand=True)
        second = self._make_part(
            decoders, sizes.pieces, sizes.numbers_on(decoders.place("pp")), own.pp, by_hand=not at_once
        )
        if encoder.orders:
            prefetch = Prefetch(first.bare[0], crossing, encoder.orders[decoders.place("pp")], self._device)
            pipeline = self._make_pipeline(second, self._layout(), arrive=prefetch.arrive)
            return Share([first, second], pipeline, crossing, prefetch=prefetch)
        again = encoder.arrangement.encoder_run == "recomputed_phases"
        colocated = Colocated(first.bare[0], crossing, again, self._device)
        layout = self._layout()
        if not at_once:
            layout = replace(layout, num_microbatches=1, num_rounds=layout.num_microbatches)
        return Share([first, second], self._make_pipeline(second, layout, arrive=colocated.arrive), crossing, colocated)

    def _layout(self) -> Layout:
        """Of the chain, or of the decoder alone."""
        sizes = self._parallelism
        return Layout(
            sizes.pieces,
            self._num_microbatches,
            sizes.micro_batch_size,
            sizes.schedule,
            num_frozen=count_frozen(sizes.pieces, self._recipe.frozen),
        )

    def _make_part(
        self,
        ranks: Ranks,
        pieces: Sequence[tuple[Held, ...]],
        numbers: Sequence[int],
        before: int,
        by_hand: bool = False,
    ) -> Part:
        """The stages `numbers` of those that hold `pieces`, of which `before` are in front of all of them."""
        sizes = self._parallelism
        recipe = replace(self._recipe, shard=make_shard(ranks.mesh["tp"]) if ranks.size("tp") > 1 else None)
        bare = [build_stage(recipe, pieces[k]) for k in numbers]
        stages = [replicate_stage(stage, ranks, sizes.fsdp, by_hand) for stage in bare]
        parameters = [parameter for stage in bare for parameter in stage.parameters()]
        replicated = ranks.size("dp") > 1
        group = ranks.group("dp") if sizes.zero == 1 and replicated else None
        averages = replicated and (ranks.size("tp") > 1 or by_hand) and not sizes.fsdp
        held = [(before + k, pieces[k]) for k in numbers]
        return Part(ranks, held, bare, stages, make_optimizer(self._arguments, parameters, group), averages)

    def _make_pipeline(self, part: Part, layout: Layout, **ends: Any) -> Pipeline:
        return Pipeline(
            part.stages, part.bare, layout, part.ranks, self._config, self._shape, self._recipe.dtype, **ends
        )

    def _make_crossing(self, encoders: Ranks, decoders: Ranks, num_samples: int) -> Crossing:
        rows = self._shape.image_tokens(self._config.vision_config.spatial_merge_size)
        features = Features(rows, self._config.vision_config.hidden_size, self._recipe.dtype, self._device)
        return Crossing(encoders.of_stage(-1), decoders.of_stage(0), num_samples, features)
