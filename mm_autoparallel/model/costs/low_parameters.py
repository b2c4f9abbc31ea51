"""Bytes of weights whose products are low: what a rank holds of one, and what replicas gather of it.

Where weights are kept in the low format (FP8 recipes, unless the stack says otherwise) a rank holds their copies alone,
and the optimizer its fp32 master; else the copies lie beside the BF16 weight, from one micro-batch to the next. Under
ZeRO 3 shards and what is gathered stay BF16 unless the stack states `low_parameters`, and copies go with what was
gathered. All of a layer counts, norms and routers too, which stay BF16 and are its least part.
"""

from __future__ import annotations

from mm_autoparallel.model.blocks.chain import Block, Chain, PredictionModule, TransformerLayer
from mm_autoparallel.model.job.cluster import Device
from mm_autoparallel.model.job.precision import RECIPES, Recipe, of_prediction
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.job.workload import Workload


def high_fraction(chain: Chain, block: Block, workload: Workload, strategy: Strategy) -> float:
    """The part of the layers of `block` that stay in BF16 beside low ones: the decoder's first and last, where the
    stack keeps these (StackFacts.low_first_last). Its cost is then the mean of its layers."""
    if workload.known_facts.low_first_last or strategy.precision_of(workload) == "bf16" or block.modality != "text":
        return 0.0
    layers = [other for other in chain.blocks if other.modality == "text" and other.role == "layer"]
    return min(1.0, sum(block == end for end in (layers[0], layers[-1])) / block.count)


def held_weight_bytes(
    block: Block, workload: Workload, strategy: Strategy, device: Device, high_part: float = 0.0
) -> float:
    """Of one weight of `block`, between the passes. high_part: as high_fraction tells it."""
    recipe = _recipe_of(block, workload, strategy)
    if recipe is None:
        return workload.weight_bytes
    kept_low = _keeps_low(recipe, workload, strategy)
    if strategy.zero == 3:
        low_bytes = recipe.kept_bytes if kept_low else workload.weight_bytes
    else:
        low_bytes = recipe.copies_bytes(device) + (0.0 if kept_low else workload.weight_bytes)
    return (1 - high_part) * low_bytes + high_part * workload.weight_bytes


def gathered_weight_bytes(block: Block, workload: Workload, strategy: Strategy) -> float:
    """Of one weight of `block`, as the ranks that share it gather it; layers that stay in BF16 count as low ones."""
    recipe = _recipe_of(block, workload, strategy)
    if recipe is None or not _keeps_low(recipe, workload, strategy):
        return workload.weight_bytes
    return recipe.kept_bytes


def _recipe_of(block: Block, workload: Workload, strategy: Strategy) -> Recipe | None:
    """Of a layer whose products are low, that of a module that predicts one token more included; None of all else."""
    precision = strategy.precision_of(workload, block.modality)
    if isinstance(block.structure, PredictionModule):
        precision = of_prediction(precision)
    elif not isinstance(block.structure, TransformerLayer):
        return None
    return None if precision == "bf16" else RECIPES[precision]


def _keeps_low(recipe: Recipe, workload: Workload, strategy: Strategy) -> bool:
    """Whether weights are kept and gathered in the low format."""
    stated = workload.known_facts.low_parameters
    return not recipe.keeps_weights and strategy.zero != 3 if stated is None else stated
