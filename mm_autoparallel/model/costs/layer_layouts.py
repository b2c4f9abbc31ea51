"""Layers that share a stage's devices in several ways: one problem of the problems of each way.

A layer's figures in a layout are those of the same layer where everything is in that layout. Between layers of two
layouts each of the wider one's ranks gathers the activations of all of them, and keeps what it needs (Galvatron,
core/runtime/redistribute.py); gradients go back likewise. What a stage holds or takes whatever its layers are, counts
as in the layout in which it is most.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import permutations

from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.costs.held_once import count_communicators
from mm_autoparallel.model.job.layer_layout import LayerLayout
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.profiles.collectives import group_of
from mm_autoparallel.pipeline.layout import Layout, Reshard
from mm_autoparallel.pipeline.problem import ChainBlock, Mode, Problem


def share_layers(known: CostModel, strategy: Strategy, own: Problem, others: Mapping[LayerLayout, Problem]) -> Problem:
    """The problem whose layers may run as in `own`, the pipeline of the strategy's own layout, or as in any of the
    pipelines of its other layouts.
    """
    problems = (own, *others.values())
    reshards = _list_reshards(known, strategy)
    chain = tuple(
        _share_block(block, {layout: problem.chain[i] for layout, problem in others.items()}, reshards[i])
        if block.layer
        else block
        for i, block in enumerate(own.chain)
    )
    dealing_ranks = strategy.dealing_ranks(known.workload, known.cluster.levels[0].num_devices)
    num_communicators = count_communicators(strategy, known.has_tied_table, dealing_ranks)
    communicator_bytes = float(num_communicators * known.cluster.device.communicator_bytes)
    return replace(
        own,
        chain=chain,
        communicator_bytes=communicator_bytes,
        stage_static_bytes=tuple(
            communicator_bytes + max(problem.stage_static_bytes[s] - problem.communicator_bytes for problem in problems)
            for s in range(own.num_stages)
        ),
        stage_tail_ms=tuple(max(problem.stage_tail_ms[s] for problem in problems) for s in range(own.num_stages)),
    )


def _share_block(
    block: ChainBlock, others: Mapping[LayerLayout, ChainBlock], reshards: tuple[Reshard, ...]
) -> ChainBlock:
    modes: list[Mode] = []
    for layout, there in others.items():
        form = Layout(
            name=layout.name,
            forward_ms=there.forward_ms,
            backward_ms=there.backward_ms,
            static_bytes=there.static_bytes,
            activation_bytes=there.activation_bytes,
            transient_bytes=there.transient_bytes,
            tail_ms=there.tail_ms,
            step_bytes=there.step_bytes,
            step_once_bytes=there.step_once_bytes,
            step_shard_bytes=there.step_shard_bytes,
            footprint=there.footprint,
        )
        modes += (replace(mode, name=layout.mode(mode.name), layout=form) for mode in there.modes)
        modes.append(Mode(layout.mode(), activation_bytes=there.activation_bytes, layout=form))
    return replace(block, modes=(*modes, *block.modes), reshards=reshards)


def _list_reshards(known: CostModel, strategy: Strategy) -> list[tuple[Reshard, ...]]:
    """Of each block, what going between any two layouts of its layers takes; "" names the strategy's own."""
    layouts = {"": strategy.layout} | {layout.name: layout for layout in strategy.layouts}
    alone = {name: strategy.in_layout(layout) for name, layout in layouts.items()}
    costs = {name: known.look_up(each) for name, each in alone.items()}
    found = []
    for i, block in enumerate(known.chain.blocks):
        sizes = {}
        for name, each in alone.items():
            share = known.share_of(block, known.strategy_of(block, each))
            sizes[name] = costs[name][i].output_bytes * share.sp * each.cp
        found.append(
            tuple(
                _form_reshard(known, strategy, (source, target), layouts, sizes)
                for source, target in permutations(layouts, 2)
            )
        )
    return found


def _form_reshard(
    known: CostModel,
    strategy: Strategy,
    names: tuple[str, str],
    layouts: Mapping[str, LayerLayout],
    sizes: Mapping[str, float],
) -> Reshard:
    """sizes: bytes of what the ranks of one replica hand on together, by layout."""
    source, target = (layouts[name] for name in names)
    if (source.tp, source.cp) == (target.tp, target.cp):  # data parallel ranks alike: weights differ, not activations
        return Reshard(*names, 0.0, 0.0)
    wider = max(names, key=lambda name: layouts[name].tp * layouts[name].cp)
    width = layouts[wider].tp * layouts[wider].cp
    of_all = strategy.in_layout(LayerLayout(width, layouts[wider].num_devices // width))
    group = group_of(known.cluster.levels, of_all, "TP", known.network)
    gather_ms = group.all_gather_ms(sizes[wider])
    return Reshard(*names, gather_ms, gather_ms)
