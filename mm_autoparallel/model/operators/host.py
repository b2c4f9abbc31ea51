"""What a layer waits for beside its operators: gaps between them, and the host that launches them.

A layer takes no less than its host needs for it. Calibrations know that time for their own stack (Figures.layer_launch_
ms and its like); where a stack says which graphs it has (StackFacts.graphs), it is counted from what is launched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mm_autoparallel.model.blocks.chain import (
    Attention,
    Block,
    Experts,
    LatentAttention,
    PredictionModule,
    TransformerLayer,
)
from mm_autoparallel.model.job.stacks import UNKNOWN, Dispatcher, Graphs, StackFacts
from mm_autoparallel.model.job.workload import RecomputeOperator
from mm_autoparallel.model.operators.operators import Share
from mm_autoparallel.model.profiles.cost import BlockCost
from mm_autoparallel.model.profiles.figures import Figures


def pause_layer(cost: BlockCost, gap_ms: float, trainable: bool, has_backward: bool) -> BlockCost:
    """The cost of a layer between whose operators the device stands still for `gap_ms` in forward, and as long for the
    gradients of its inputs and for those of its weights each. A layer that does nothing stays as it is.
    """
    if not gap_ms or not cost.forward_ms:
        return cost
    rest_fraction = 1.0 if cost.recompute_ms is None else min(1.0, cost.recompute_ms / cost.forward_ms)
    return replace(
        cost,
        forward_ms=cost.forward_ms + gap_ms,
        backward_input_ms=cost.backward_input_ms + (gap_ms if has_backward else 0.0),
        backward_weight_ms=cost.backward_weight_ms + (gap_ms if trainable else 0.0),
        recompute_ms=None if cost.recompute_ms is None else cost.recompute_ms + rest_fraction * gap_ms,
    )


def layer_launch_ms(block: Block, figures: Figures, tp: int = 1, facts: StackFacts = UNKNOWN) -> float:
    """What a host takes to launch the forward of a layer: of the decoder, with or without routed experts, where `tp`
    ranks share it with their collectives beside; or of a tower, whose constants are what published runs took as they
    ran. A compiled one has fewer operators.
    """
    structure, compiled = block.structure, _COMPILED if facts.compiled else 1.0
    if block.modality != "text":
        plain_ms = figures.vision_launch_ms or figures.layer_launch_ms
        attention = structure.attention if isinstance(structure, TransformerLayer) else None
        rotates = isinstance(attention, Attention) and attention.rotary
        return compiled * ((figures.rotary_vision_launch_ms or plain_ms) if rotates else plain_ms)
    launch_ms = figures.layer_launch_ms
    if isinstance(structure, TransformerLayer) and isinstance(structure.mlp, Experts):
        launch_ms = max(launch_ms, figures.expert_launch_ms)
    return compiled * launch_ms * (figures.tensor_launch_factor if tp > 1 else 1.0)


_COMPILED = 0.5
"""Launches of a compiled layer over those of one whose operators come one by one (assumed)."""


_HOST_LEFT: Mapping[Graphs, float] = {"none": 1.0, "partial": 0.6}
_HOST_OF_DISPATCHER: Mapping[Dispatcher, float] = {"hybridep": 0.5}
_HOST_OF_DROPS, _HOST_OF_LATENT, _LOCAL_EXPERTS = 0.5, 1.5, 16.0
_SYNCHRONISED_MS: Mapping[Graphs, float] = {"none": 2.0, "partial": 0.5}
_HOST_OF_RERUNS: Mapping[RecomputeOperator, float] = {
    "core_attn": 0.04,
    "mla_up_proj": 0.05,
    "layernorm": 0.09,
    "moe_act": 0.02,
    "mlp": 0.08,
    "mlp_act": 0.02,
    "moe": 0.17,
    "shared_experts": 0.05,
}
"""Parts of a layer's launches: that graphs leave; of hybridep's kernels, which are fewer; of experts that drop tokens
beside partial graphs, which then hold them too; of a dense layer with latent attention; and the local experts at which
launches double. What a host waits for counts of tokens in each layer with experts; what operators that run once more
launch. Assumed: near published steps of Moonlight on H100 (Megatron-Bridge, selective recompute: 4 % core_attn, 5 %
mla_up_proj, 2 % moe_act, 11 % with layernorm) and of Qwen3 30B-A3B under both dispatchers, with and without graphs.
"""


EARLY_EXPERTS_FACTOR = 1.18
"""How many times as long layers with experts took before a stack fused its router and permutation and sent fewer
launches (StackFacts.early_experts). Assumed: near what Megatron-Bridge's releases of 2025 took over those of 2026."""


def host_layer_ms(block: Block, figures: Figures, share: Share) -> tuple[float, float] | None:
    """What a host takes to launch forward and backward of a decoder's layer, and what the device waits for it within;
    None where the stack does not say which graphs it has, or nothing is known of its host.

    A layer with experts: constant · (1 + experts of the rank / 16), for dispatcher, dropped tokens and graphs. Of a
    whole step in one graph a host launches nothing.
    """
    structure, facts = block.structure, share.facts
    layer = structure.layer if isinstance(structure, PredictionModule) else structure
    if not facts.graphs or not isinstance(layer, TransformerLayer) or block.modality != "text":
        return None
    if facts.graphs == "full":
        return 0.0, 0.0
    host_ms, waited_ms = 3 * figures.layer_launch_ms, 0.0
    if isinstance(layer.mlp, Experts):
        host_ms = figures.expert_host_ms * (1.0 + layer.mlp.num_experts / share.ep / _LOCAL_EXPERTS)
        host_ms *= _HOST_OF_DISPATCHER.get(facts.dispatcher, 1.0)
        # known shapes let graphs hold more of it
        host_ms *= _HOST_OF_DROPS if facts.drops_tokens and facts.graphs == "partial" else 1.0
        waited_ms = 0.0 if facts.drops_tokens else _SYNCHRONISED_MS[facts.graphs]
    elif isinstance(layer.attention, LatentAttention):
        host_ms *= _HOST_OF_LATENT
    if not host_ms:
        return None
    host_ms *= 1.0 + sum(_HOST_OF_RERUNS[name] for name in share.recompute_operators if _has_operator(layer, name))
    return _HOST_LEFT[facts.graphs] * host_ms, waited_ms


_HOST_OF_CHUNK = 0.2
"""What the pass of a chunk takes a host beside its layers, over what it takes to launch one of them; where stages have
one chunk, the figure of layers has it. Assumed: near Megatron-LM's functional tests, where three chunks of a layer on
each of four A100 gain nothing over one chunk of three (168 and 169 ms)."""


def chunk_launches_ms(
    blocks: Sequence[Block],
    bare: Sequence[BlockCost],
    found: Sequence[BlockCost],
    figures: Figures,
    shares: Sequence[Share],
    factors: Sequence[float],
    num_virtual_stages: int,
) -> list[tuple[float, float]]:
    """What forward and backward of one of each block take longer than `found` because a host runs the passes of several
    chunks a stage; layers share them evenly. 0 where the device keeps its host waiting, where layers were measured, and
    where a stack says which graphs it has.

    bare: costs without launches. factors: on what the host takes for each, as in `found`.
    """
    num_layers = sum(block.count for block in blocks if block.role == "layer")
    more_ms = []
    for block, own, cost, share, factor in zip(blocks, bare, found, shares, factors, strict=True):
        longer = cost
        if block.role == "layer" and cost.time_source == "analytic" and host_layer_ms(block, figures, share) is None:
            launch_ms = factor * layer_launch_ms(block, figures, share.tp, share.facts)
            launch_ms *= 1.0 + _HOST_OF_CHUNK * num_virtual_stages / num_layers
            backward_factor = launch_backward_factor(block, figures)
            longer = launch_layer(own, launch_ms, block.trainable, block.has_backward, backward_factor)
        forward_ms = longer.forward_ms - cost.forward_ms
        more_ms.append((forward_ms, longer.total_ms - cost.total_ms - forward_ms))
    return more_ms


def _has_operator(layer: TransformerLayer, name: RecomputeOperator) -> bool:
    """Whether a layer runs that operator at all."""
    if name == "mla_up_proj":
        return isinstance(layer.attention, LatentAttention)
    if name in ("mlp", "moe", "moe_act"):
        return isinstance(layer.mlp, Experts) == (name != "mlp")
    if name == "shared_experts":
        return isinstance(layer.mlp, Experts) and layer.mlp.shared is not None
    return True


def run_ahead(blocks: Sequence[Block], bare: Sequence[BlockCost], launched: Sequence[BlockCost]) -> list[BlockCost]:
    """`launched` without what a host catches up on: launches are queued (CUDA C++ programming guide, asynchronous
    concurrent execution), so that layers wait for no more than it could not queue while the device worked on embedding,
    head and loss.

    blocks: of one device, in their order. bare: their costs without launches. Routed experts wait for counts of tokens
    in each layer: then nothing is caught up.
    """

    def total_ms(block: Block, cost: BlockCost) -> float:
        return block.count * cost.total_ms

    structures = [block.structure for block in blocks]
    waited_ms = sum(map(total_ms, blocks, launched)) - sum(map(total_ms, blocks, bare))
    if waited_ms <= 0 or any(isinstance(one, TransformerLayer) and isinstance(one.mlp, Experts) for one in structures):
        return list(launched)
    ends_ms = sum(total_ms(block, cost) for block, cost in zip(blocks, bare, strict=True) if block.role != "layer")
    left_fraction = max(0.0, 1.0 - ends_ms / waited_ms)
    return [own.mixed(other, left_fraction) for own, other in zip(bare, launched, strict=True)]


def launch_backward_factor(block: Block, figures: Figures) -> float:
    """How many times as long a layer's backward takes to launch as its forward."""
    return figures.launch_backward_factor if block.modality == "text" else figures.vision_launch_backward_factor


def launch_layer(
    cost: BlockCost, launch_ms: float, trainable: bool, has_backward: bool, backward_factor: float = 2.0
) -> BlockCost:
    """The cost of a layer that its host needs `launch_ms` to launch in forward, and `backward_factor` times that in
    backward, half of it for the gradients of its inputs and half for those of its weights: it takes no less, however
    small its operators are.

    What of it runs once more in its backward is launched once more. A layer that does nothing stays as it is.
    """
    if not launch_ms or not cost.forward_ms:
        return cost
    rest_fraction = 1.0 if cost.recompute_ms is None else min(1.0, cost.recompute_ms / cost.forward_ms)
    input_ms, weight_ms = cost.backward_input_ms, cost.backward_weight_ms
    half_ms = backward_factor / 2 * launch_ms
    least_ms = (1 - rest_fraction) * launch_ms + half_ms
    if has_backward and trainable:
        weight_ms += max(0.0, least_ms + half_ms - input_ms - weight_ms)
    elif has_backward:
        input_ms = max(input_ms, least_ms)
    return replace(
        cost,
        forward_ms=max(cost.forward_ms, launch_ms),
        backward_input_ms=input_ms,
        backward_weight_ms=weight_ms,
        recompute_ms=None if cost.recompute_ms is None else max(cost.recompute_ms, rest_fraction * launch_ms),
    )
