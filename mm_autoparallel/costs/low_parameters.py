"""Bytes of weights whose products are low: what a rank holds of one, and what replicas gather of it.

Where weights are kept in the low format (FP8 recipes, unless the stack says otherwise) a rank holds their copies alone,
and the optimizer its fp32 master; else the copies lie beside the BF16 weight, from one micro-batch to the next. Under
ZeRO 3 shards and what is gathered stay BF16 unless the stack states `low_parameters`, and copies go with what was
gathered. All of a layer counts, of which norms and routers, BF16 on every device, are a thousandth.
"""

from __future__ import annotations

from mm_autoparallel.blocks.chain import Block, TransformerLayer
from mm_autoparallel.job.cluster import Device
from mm_autoparallel.job.precision import RECIPES, Recipe
from mm_autoparallel.job.strategy import Strategy
from mm_autoparallel.job.workload import Workload


def held_weight_bytes(block: Block, workload: Workload, strategy: Strategy, device: Device) -> float:
    """Of one weight of `block`, between the passes."""
    recipe = _recipe_of(block, workload, strategy)
    if recipe is None:
        return workload.weight_bytes
    kept_low = _keeps_low(recipe, workload, strategy)
    if strategy.zero == 3:
        return recipe.element_bytes + recipe.block_bytes if kept_low else workload.weight_bytes
    return recipe.copies_bytes(device) + (0.0 if kept_low else workload.weight_bytes)


def gathered_weight_bytes(block: Block, workload: Workload, strategy: Strategy) -> float:
    """Of one weight of `block`, as the ranks that share it gather it."""
    recipe = _recipe_of(block, workload, strategy)
    if recipe is None or not _keeps_low(recipe, workload, strategy):
        return workload.weight_bytes
    return recipe.parameter_bytes


def _recipe_of(block: Block, workload: Workload, strategy: Strategy) -> Recipe | None:
    """Of a layer whose products are low; None of all else."""
    precision = strategy.precision_of(workload, block.modality)
    return RECIPES[precision] if precision != "bf16" and isinstance(block.structure, TransformerLayer) else None


def _keeps_low(recipe: Recipe, workload: Workload, strategy: Strategy) -> bool:
    """Whether weights are kept and gathered in the low format."""
    stated = workload.known_facts.low_parameters
    if stated is None:
        return not recipe.keeps_weights and strategy.zero != 3
    return stated and recipe.parameter_bytes < workload.weight_bytes
