"""Memory of a MindFormers pretrain YAML from its sizes, where the pipeline search makes a dry run.

The white-box model of costs/ gives every block's bytes; the ends of the chain (embedding, head, what multi-token
prediction holds beyond a layer) become what their stage holds besides its layers.
"""

from __future__ import annotations

from mm_autoparallel.costs.job_costs import costs_of
from mm_autoparallel.costs.stage import build_problem
from mm_autoparallel.errors import JobError
from mm_autoparallel.frameworks.mindformers.memory_figures import LayerMemory, MemoryFigures
from mm_autoparallel.frameworks.mindformers.model_job import build_job, strategy_of
from mm_autoparallel.frameworks.mindformers.pretrain_yaml import Pretrain
from mm_autoparallel.problem import ChainBlock, Problem
from mm_autoparallel.search.mindformers.selected_memory import add_selected
from mm_autoparallel.simulate.graph import full_graph

SOURCE = "the sizes in the YAML (no dry run, uncalibrated)"
"""Against dry runs of four DeepSeek-V3 configurations (the cases of tests/fixtures/mindformers): kept activations
within 2.4 %, recomputed ones exact in three and a mask of 16 MB low in one, static of an expert layer 5 to 11 % low, of
a dense layer within 10 % in three (one, of 130 MB, is less than its gradients alone). What stages hold beside layers is
0.8 to 1.9 GB low on any, 1.8 to 4.4 GB on the first and 2.9 to 5.2 GB on the last; no cause was found."""

CAUTION = "memory is worked out from sizes and not calibrated; what stages hold beside layers comes out 1 to 5 GB low"
"""What whoever relies on it should know."""


def size_memory(pretrain: Pretrain, with_select: bool = False) -> MemoryFigures:
    """The figures that sizes alone give. with_select: those of select recompute too, and of recompute of exchanges
    where the YAML asks for it.

    Raises JobError where the YAML's sizes or its division are not lawful, or it has no `context.max_device_memory`;
    PlanError where its selected operators are told in no known way.
    """
    if pretrain.max_memory_bytes is None:
        raise pretrain.error("context.max_device_memory", "is missing; it is the limit that stages must fit in")
    job = build_job(pretrain)
    try:
        problem = build_problem(job, strategy_of(pretrain))
    except JobError as error:
        raise JobError(str(error).replace("job file", "MindFormers YAML", 1)) from None
    figures = figures_of(pretrain, problem)
    return add_selected(pretrain, figures, costs_of(job), with_select)


def figures_of(pretrain: Pretrain, problem: Problem) -> MemoryFigures:
    """What the blocks of `problem`, built of `pretrain`'s job, hold, in the terms of the pipeline search."""
    assert pretrain.max_memory_bytes is not None
    layers = [block for block in problem.chain if block.layer]
    dense = layers[0] if pretrain.num_dense else None
    shared_bytes = problem.stage_static_bytes[0] - problem.context_bytes - problem.communicator_bytes
    layer_transient_bytes = max(block.transient_bytes for block in layers)
    ends: dict[str, list[ChainBlock]] = {"first": [], "last": []}
    for block in problem.chain:
        if not block.layer:
            ends["last" if block.pinned == "last" else "first"].append(block)

    def stage_bytes(blocks: list[ChainBlock], in_flight: int) -> float:
        held = sum(block.count * (block.static_bytes + in_flight * block.activation_bytes) for block in blocks)
        return shared_bytes + held + max([layer_transient_bytes, *(block.transient_bytes for block in blocks)])

    first_in_flight, last_in_flight = _ends_in_flight(problem)
    # a multi-token prediction module is one of the layers for MindFormers: only what it holds beyond one is the stage's
    last_bytes = stage_bytes(ends["last"], last_in_flight) - pretrain.mtp_depth * (
        layers[-1].static_bytes + last_in_flight * layers[-1].activation_bytes
    )
    limit_bytes = float(pretrain.max_memory_bytes)
    return MemoryFigures(
        _layer(dense) if dense else None,
        _layer(layers[-1]),
        (stage_bytes(ends["first"], first_in_flight), stage_bytes([], 0), last_bytes),
        (limit_bytes,) * 3,
        SOURCE,
        (f"{CAUTION}; give --memory with figures of dry runs if there are any",),
    )


def _layer(block: ChainBlock) -> LayerMemory:
    recomputed_bytes = block.recompute.activation_bytes if block.recompute else block.activation_bytes
    return LayerMemory(block.static_bytes, block.activation_bytes, recomputed_bytes)


def _ends_in_flight(problem: Problem) -> tuple[int, int]:
    """Micro-batches in flight of the first chunk of the first stage, and of the last chunk of the last."""
    graph = full_graph(problem.schedule, problem.num_stages, problem.num_chunks, problem.num_microbatches)
    return int(graph.in_flight[0][:, 0].max()), int(graph.in_flight[-1][:, -1].max())
