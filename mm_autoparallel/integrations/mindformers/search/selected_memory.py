"""What layers keep where a pretrain YAML has some of their operators run again, and the time this takes, from sizes.

Default operators (the activation of a dense feed-forward) free 72 MB of a layer of DeepSeek-V3 with 4,096 tokens at
TP 4, and 78 MB in two published dry runs; 144 and 156 MB with 8,192 tokens. Of a layer with experts they free nothing,
there 1 MB. (A fourth, at TP 8, frees 134 MB where this says 72.)
"""

from __future__ import annotations

from dataclasses import replace

from mm_autoparallel.integrations.mindformers.memory_figures import LayerMemory, MemoryFigures, OtherRecompute
from mm_autoparallel.integrations.mindformers.model_job import strategy_of
from mm_autoparallel.integrations.mindformers.pretrain_yaml import Pretrain, recompute_config
from mm_autoparallel.integrations.mindformers.recompute_kinds import BOTH, COMM, SELECT
from mm_autoparallel.integrations.mindformers.selected_operators import (
    COMM_KEY,
    SELECT_KEYS,
    check_no_exclusions,
    read_selected,
)
from mm_autoparallel.model.blocks.chain import TransformerLayer
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.operators.mindformers_recompute import frees_nothing

_Patterns = tuple[tuple[str, ...], tuple[str, ...]]
"""Of operators that run again, and of operators after which the exchange does."""


def add_selected(pretrain: Pretrain, figures: MemoryFigures, costs: CostModel, with_select: bool) -> MemoryFigures:
    """`figures` of `pretrain` with what its selected operators save. costs: of its job.

    with_select: a layer may run them again or not. Recompute of exchanges is offered where the YAML asks for it.
    Else, where the YAML has them run again in every layer that is not recomputed whole, such a layer keeps less.
    Raises JobError where with_select finds nothing to save, PlanError where the YAML selects in no known form.
    """
    select, comm = (read_selected(pretrain, key) for key in SELECT_KEYS)
    asks_for_comm = bool(recompute_config(pretrain).get(COMM_KEY))
    if with_select:
        kinds: dict[str, _Patterns] = {SELECT: (select.patterns, ())}
        if asks_for_comm:
            kinds = {BOTH: (select.patterns, comm.patterns), **kinds, COMM: ((), comm.patterns)}
    elif select.everywhere or comm.everywhere:
        chosen = (select.patterns if select.everywhere else (), comm.patterns if comm.everywhere else ())
        kinds = {SELECT: chosen}
    else:
        return figures
    check_no_exclusions(pretrain)
    expert, dense = (
        None if memory is None else _others(pretrain, costs, memory, index, kinds)
        for memory, index in ((figures.expert, -1), (figures.dense, 0))
    )
    assert expert is not None
    found = [memory for memory in (dense, expert) if memory]
    if with_select and all(o.kept_bytes == memory.activation_bytes for memory in found for o in memory.others):
        raise pretrain.error(
            "recompute_config.select_recompute",
            f"({', '.join(select.patterns)}) frees nothing that is known to be kept, so there is nothing to search; "
            "name other operators, or give --memory FILE with select_mem",
        )
    if not with_select:
        dense, expert = (None if memory is None else _always(memory, memory.others[0]) for memory in (dense, expert))
        assert expert is not None
    notes = (*figures.notes, *_idle_notes(costs, kinds))
    return replace(figures, dense=dense, expert=expert, notes=notes)


def _always(memory: LayerMemory, recompute: OtherRecompute) -> LayerMemory:
    """`memory` of a layer that has no choice but this recompute, or that of all of it."""
    assert recompute.extra_factor is not None
    return replace(memory, activation_bytes=recompute.kept_bytes, others=(), extra_factor=recompute.extra_factor)


def _others(
    pretrain: Pretrain, costs: CostModel, memory: LayerMemory, index: int, kinds: dict[str, _Patterns]
) -> LayerMemory:
    """`memory` of the model's layer at `index` (0: the first, -1: the last) with each kind's bytes and time."""
    layers = [block.role == "layer" for block in costs.chain.blocks]
    others = []
    for kind, (rerun, exchanges) in kinds.items():
        estimates = costs.estimate_rerun(strategy_of(pretrain), rerun, exchanges)
        plain, lighter = [pair for pair, is_layer in zip(estimates, layers, strict=True) if is_layer][index]
        freed_bytes = plain.activation_bytes - lighter.activation_bytes
        kept_bytes = max(memory.recomputed_bytes, memory.activation_bytes - freed_bytes)
        extra_factor = (lighter.backward_input_ms - plain.backward_input_ms) / plain.forward_ms
        others.append(OtherRecompute(kind, kept_bytes, extra_factor))
    return replace(memory, others=tuple(others))


def _idle_notes(costs: CostModel, kinds: dict[str, _Patterns]) -> list[str]:
    """A sentence for each key whose patterns free nothing, in part or in all."""
    layers = [block.structure for block in costs.chain.blocks if isinstance(block.structure, TransformerLayer)]
    notes = []
    for position, key in enumerate(SELECT_KEYS):
        patterns = dict.fromkeys(pattern for chosen in kinds.values() for pattern in chosen[position])
        idle = frees_nothing(patterns, layers, gathered=position == 1)
        if idle:
            notes.append(f"{key}: {', '.join(idle)} free nothing that is known to be kept; they count as nothing")
    return notes
