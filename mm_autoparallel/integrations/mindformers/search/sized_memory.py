"""Memory of a MindFormers pretrain YAML from its sizes, where the pipeline search makes a dry run.

The white-box model of costs/ gives every block's bytes; the ends of the chain (embedding, head, what multi-token
prediction holds beyond a layer) become what their stage holds besides its layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mm_autoparallel.errors import JobError
from mm_autoparallel.integrations.mindformers import memory_keys
from mm_autoparallel.integrations.mindformers.memory_figures import Causes, LayerMemory, MemoryFigures
from mm_autoparallel.integrations.mindformers.model_job import build_job, strategy_of
from mm_autoparallel.integrations.mindformers.model_section import WHAT
from mm_autoparallel.integrations.mindformers.pretrain_yaml import Pretrain
from mm_autoparallel.integrations.mindformers.search.selected_memory import add_selected
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.costs.held_once import SHARED_MASK
from mm_autoparallel.model.costs.memory import sharded_over
from mm_autoparallel.model.costs.stage import build_problem
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.pipeline.problem import ChainBlock, Problem
from mm_autoparallel.pipeline.simulate.graph import full_graph
from mm_autoparallel.units import GIB, format_bytes

SOURCE = "the sizes in the YAML (no dry run, uncalibrated)"
"""Against dry runs of four DeepSeek-V3 configurations (the cases of tests/fixtures/mindformers): kept activations
within 2.4 %, recomputed ones exact in three and a mask of 16 MB low in one, static of an expert layer 5 to 11 % low, of
a dense layer within 10 % in three (one, of 130 MB, is less than its gradients alone)."""

WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer"
ENDS, WORKING, BATCH, RESERVE = "embedding, head and loss", "working", "batch and allocator", "reserve"

DEEPSEEK_RESERVE_BYTES = (4.5 * GIB, 2.0 * GIB, 3.0 * GIB)
"""What the first, any middle and the last stage of those dry runs hold beside layers comes out low by 1.8 to 4.3 GiB,
0.8 to 1.8 and 1.8 to 2.8, and no cause was found; of each the most, rounded up. Other models have no reserve: plans
that published YAMLs of Llama's family run with come as close to their limits as 0.3 GiB
(tests/frameworks/mindformers_published.py).
"""

_FP32_BYTES, _MOMENT_BYTES = 4.0, 8.0


def reserve_of(pretrain: Pretrain, reserve_bytes: float | None) -> tuple[float, float, float]:
    """What is held back on the first, any middle and the last stage for what sizes do not tell. reserve_bytes: on all

    of them alike; None: what is known of the kind of model.
    """
    if reserve_bytes is not None:
        return (reserve_bytes,) * 3
    return DEEPSEEK_RESERVE_BYTES if memory_keys.resembles_deepseek(pretrain) else (0.0,) * 3


def describe_reserve(pretrain: Pretrain, reserve_bytes: float | None) -> str:
    """What whoever relies on memory from sizes should know."""
    held = reserve_of(pretrain, reserve_bytes)
    start = "memory is worked out from sizes and not calibrated"
    if not any(held):
        return f"{start}; nothing is held back for what they do not tell (--reserve MB does)"
    alike = len(set(held)) == 1
    told = " / ".join(format_bytes(size_bytes) for size_bytes in (held[:1] if alike else held))
    where = "of every stage" if alike else "of the first / a middle / the last stage"
    return f"{start}; {told} {where} are held back for what they do not tell (--reserve MB sets it)"


def size_memory(pretrain: Pretrain, with_select: bool = False, reserve_bytes: float | None = None) -> MemoryFigures:
    """The figures that sizes alone give. with_select: those of select recompute too, and of recompute of exchanges
    where the YAML asks for it. reserve_bytes: see reserve_of.

    Raises JobError where the YAML's sizes or its division are not lawful, or it has no `context.max_device_memory`;
    PlanError where its selected operators are told in no known way.
    """
    if pretrain.max_memory_bytes is None:
        raise pretrain.error("context.max_device_memory", "is missing; it is the limit that stages must fit in")
    job = build_job(pretrain)
    try:
        costs = CostModel(job)
        problem = build_problem(costs, strategy_of(pretrain))
    except JobError as error:
        raise JobError(error.reason, where=f"{WHAT} {pretrain.path}") from None
    figures = figures_of(pretrain, problem, job.workload, reserve_bytes)
    return add_selected(pretrain, figures, costs, with_select)


def figures_of(
    pretrain: Pretrain, problem: Problem, workload: Workload, reserve_bytes: float | None = None
) -> MemoryFigures:
    """What the blocks of `problem`, built of `pretrain`'s job with its `workload`, hold, in the terms of the pipeline
    search.
    """
    assert pretrain.max_memory_bytes is not None
    layers = [block for block in problem.chain if block.layer]
    held = {block.name: _held_always(block, pretrain, workload) for block in problem.chain}
    mask_bytes = max(dict(block.footprint.held_once_bytes).get(SHARED_MASK, 0.0) for block in layers if block.footprint)
    batch_bytes = problem.stage_static_bytes[0] - problem.context_bytes - problem.communicator_bytes - mask_bytes
    reserves = reserve_of(pretrain, reserve_bytes)
    layer_transient_bytes = max(block.transient_bytes for block in layers)
    ends: dict[str, list[ChainBlock]] = {"first": [], "last": []}
    for block in problem.chain:
        if not block.layer:
            ends["last" if block.pinned == "last" else "first"].append(block)

    def stage_causes(blocks: Sequence[ChainBlock], in_flight: int, held_back_bytes: float) -> Causes:
        causes: Causes = {}
        for block in blocks:
            _add(causes, held[block.name], block.count)
            _add(causes, {ENDS: in_flight * block.activation_bytes}, block.count)
        transient_bytes = max([layer_transient_bytes, *(block.transient_bytes for block in blocks)])
        _add(causes, {WORKING: transient_bytes, BATCH: batch_bytes, RESERVE: held_back_bytes})
        return causes

    first_in_flight, last_in_flight = _ends_in_flight(problem)
    causes = (
        stage_causes(ends["first"], first_in_flight, reserves[0]),
        stage_causes([], 0, reserves[1]),
        stage_causes(ends["last"], last_in_flight, reserves[2]),
    )
    # a multi-token prediction module is one of the layers for MindFormers: only what it holds beyond one is the stage's
    of_layer = {**held[layers[-1].name], ENDS: last_in_flight * layers[-1].activation_bytes}
    _add(causes[-1], of_layer, -pretrain.mtp_depth)
    if not memory_keys.adds_up_gradients(pretrain):
        _let_gradients_come(causes, problem, held)
    limit_bytes = float(pretrain.max_memory_bytes)
    return MemoryFigures(
        _layer(layers[0], held) if pretrain.num_dense else None,
        _layer(layers[-1], held),
        (sum(causes[0].values()), sum(causes[1].values()), sum(causes[2].values())),
        (limit_bytes,) * 3,
        SOURCE,
        (
            f"{describe_reserve(pretrain, reserve_bytes)}; give --memory with figures of dry runs if there are any",
            *_adapter_notes(pretrain),
        ),
        _kept_masks(problem, mask_bytes),
        causes,
    )


def _add(causes: Causes, more: Mapping[str, float], times: int = 1) -> None:
    for name, size_bytes in more.items():
        causes[name] = causes.get(name, 0.0) + times * size_bytes


def _held_always(block: ChainBlock, pretrain: Pretrain, workload: Workload) -> Causes:
    """Of one of `block`, by cause. Gradients that do not add up wait in fp32, where they are shared as their shards."""
    held = block.footprint
    assert held is not None
    fraction = memory_keys.adapter_fraction(pretrain)
    count = held.weight_bytes / workload.weight_bytes
    shard_count = _shard_count(count, held.optimizer_bytes / workload.optimizer_bytes, pretrain)
    if memory_keys.adds_up_gradients(pretrain):
        gradient_bytes = workload.gradient_bytes * (
            shard_count if memory_keys.shards_added_gradients(pretrain) else count
        )
    else:
        gradient_bytes = _FP32_BYTES * shard_count
    optimizer_bytes = shard_count * workload.optimizer_bytes
    if fraction is None:
        return {WEIGHTS: held.weight_bytes, GRADIENTS: gradient_bytes, OPTIMIZER: optimizer_bytes}
    trained = fraction if block.layer else 0.0  # beside layers nothing is
    return {
        # what is frozen lies there in the type of parameters too, where that is another than the one that computes
        WEIGHTS: (1 + trained) * held.weight_bytes + count * (workload.optimizer_bytes - _MOMENT_BYTES),
        GRADIENTS: trained * gradient_bytes,
        OPTIMIZER: trained * optimizer_bytes,
    }


def _adapter_notes(pretrain: Pretrain) -> tuple[str, ...]:
    kind = memory_keys.adapter_type(pretrain)
    if kind is None:
        return ()
    if memory_keys.adapter_fraction(pretrain) is None:
        return (
            f"adapters of type {kind} (pet_config) are not known for this model; it counts as if all of it trained",
        )
    return (
        "adapters alone train (pet_config): gradients and optimizer are theirs, kept activations as if all trained; "
        "a backward without gradients of weights takes about as long as the forward (-b_ratio 1)",
    )


def _shard_count(count: float, shard_count: float, pretrain: Pretrain) -> float:
    """Parameters of which one rank keeps the states, of `count` on a device. shard_count: with shards over all ranks.

    Smaller groups (optimizer_weight_shard_size) hold more: count = d + e and shard_count = d / z + e / y tell dense
    parameters from experts', which z and y ranks share.
    """
    size, strategy = pretrain.optimizer_shard_size, strategy_of(pretrain)
    dense, expert = sharded_over(strategy), sharded_over(strategy, expert=True)
    if not 0 < size < max(dense, expert):
        return shard_count
    expert_count = (shard_count - count / dense) / (1 / expert - 1 / dense) if expert != dense else 0.0
    return (count - expert_count) / min(dense, size) + expert_count / min(expert, size)


def _let_gradients_come(causes: Sequence[Causes], problem: Problem, held: Mapping[str, Causes]) -> None:
    """Of a single stage whose gradients do not add up: there are none yet while the loss is worked out, and when the
    last has come what the loss kept is long gone. Only what the loss needs more than they counts beside them.

    The first and any stage get equal parts, which cancel for a single one (pipeline_problem.py).
    """
    layer_transient_bytes = max(block.transient_bytes for block in problem.chain if block.layer)
    at_end_bytes = layer_transient_bytes + max(_whole_gradient_bytes(block) for block in problem.chain)
    ends_bytes = sum(of_stage.pop(ENDS, 0.0) for of_stage in causes)
    at_loss_bytes = ends_bytes + max(block.transient_bytes for block in problem.chain)
    gradient_bytes = sum(block.count * held[block.name][GRADIENTS] for block in problem.chain)
    for of_stage, working_bytes in zip(
        causes, (at_end_bytes, at_end_bytes, max(at_end_bytes, at_loss_bytes - gradient_bytes)), strict=True
    ):
        of_stage[WORKING] = working_bytes


def _whole_gradient_bytes(block: ChainBlock) -> float:
    """Of the block whose gradients are being reduced, as they come: in the type of its weights."""
    return block.footprint.weight_bytes if block.footprint else 0.0


def _layer(block: ChainBlock, held: Mapping[str, Causes]) -> LayerMemory:
    recomputed_bytes = block.recompute.activation_bytes if block.recompute else block.activation_bytes
    causes = held[block.name]
    return LayerMemory(sum(causes.values()), block.activation_bytes, recomputed_bytes, causes=causes)


def _kept_masks(problem: Problem, mask_bytes: float) -> tuple[float, ...]:
    """Of each stage, the masks of all layers that its micro-batches in flight keep; chunks make one each."""
    if not mask_bytes:
        return ()
    graph = full_graph(problem.schedule, problem.num_stages, problem.num_chunks, problem.num_microbatches)
    return tuple(mask_bytes * float(rows.sum(axis=1).max()) for rows in graph.in_flight)


def _ends_in_flight(problem: Problem) -> tuple[int, int]:
    """Micro-batches in flight of the first chunk of the first stage, and of the last chunk of the last."""
    graph = full_graph(problem.schedule, problem.num_stages, problem.num_chunks, problem.num_microbatches)
    return int(graph.in_flight[0][:, 0].max()), int(graph.in_flight[-1][:, -1].max())
