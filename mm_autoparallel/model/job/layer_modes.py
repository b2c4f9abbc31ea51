"""Modes of a layer: ways to run it that keep less of it from its forward until its backward.

- recompute: it keeps its input and runs its whole forward once more in its backward (Chen et al. 2016,
  arXiv:1604.06174; Megatron's --recompute-granularity full).
- selective: workload.selective_operators run once more, all else is kept (Korthikanti et al. 2022, arXiv:2205.05198;
  Megatron's --recompute-modules).
- activation: the activation between the matrices of its feed-forward runs once more (MindSpeed's
  --recompute-activation-function; inside experts Megatron's moe_act).
- offload: all that it keeps beside its input goes to the host while the forward goes on and comes back before its
  backward (Megatron-LM's --fine-grained-activation-offloading).
- swap_attention: the same of what its attention and its norms keep, and not its feed-forward (MindSpeed's --swap-
  attention, whose --swap-modules are input_norm, self_attention and post_attention_norm).
- recompute_offload: recompute whose input lies on the host meanwhile (MindSpeed-MM's FSDP trainer, activation_offload_
  plan beside recompute_plan: features/memory/async_offload.py moves a layer's input and nothing else).
"""

from __future__ import annotations

from typing import Literal, get_args

from mm_autoparallel.model.job.cluster import Device
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.model.job.workload import MINDSPEED, RecomputeOperator, Workload

LayerMode = Literal["recompute", "selective", "activation", "offload", "recompute_offload", "swap_attention"]

LAYER_MODES: tuple[LayerMode, ...] = get_args(LayerMode)

HOST_MODES: tuple[LayerMode, ...] = ("offload", "recompute_offload", "swap_attention")
"""Those that use the link to the host."""

OTHER_MODES: tuple[LayerMode, ...] = tuple(mode for mode in LAYER_MODES if mode != "recompute")
"""Those that a plan's file counts beside its recompute lists."""

FEED_FORWARD: tuple[RecomputeOperator, ...] = ("mlp", "moe")
"""What the mode `swap_attention` leaves on the device: all that these operators keep."""

ACTIVATIONS: tuple[RecomputeOperator, ...] = ("mlp_act", "moe_act")
"""What runs once more in the mode `activation`."""


def rerun_operators(mode: LayerMode, workload: Workload) -> tuple[RecomputeOperator, ...]:
    """What a layer in `mode` runs once more, beside what all layers do (workload.recompute_operators): selective and
    activation name operators, the other modes none."""
    named: dict[LayerMode, tuple[RecomputeOperator, ...]] = {
        "selective": workload.selective_operators,
        "activation": ACTIVATIONS,
    }
    return tuple(name for name in named.get(mode, ()) if name not in workload.recompute_operators)


def second_products_reason(model: Model, workload: Workload) -> str | None:
    """Why layers of `model` cannot run every other matrix once more, where `workload` says so; None: they can, or it
    does not."""
    if "second_products" not in (*workload.recompute_operators, *workload.selective_operators):
        return None
    if workload.stack != "transformers":
        return f"second_products is of torchtitan (stack transformers), and workload.stack is {workload.stack}"
    if workload.attention != "flash":
        return f"second_products keeps what flash attention gives, and workload.attention is {workload.attention}"
    for modality in model.modalities:
        layers = modality.layers
        parts = {"experts": layers.experts, "latent attention": layers.latent, "a delta rule": layers.delta}
        found = [name for name, part in parts.items() if part]
        if found:
            return (
                "second_products is known of layers with plain attention and feed-forwards, and those of "
                f"{modality.name} have {' and '.join(found)}"
            )
    return "second_products is not known of layers with adapters" if getattr(model, "adapters", None) else None


def mode_reason(mode: LayerMode, workload: Workload, device: Device) -> str | None:
    """Why no layer can run in `mode`, whatever the strategy; None: it can."""
    if mode in HOST_MODES and device.host_link_bytes_per_s is None:
        return (
            f"what is offloaded goes over the link to the host, and cluster.device.host_link_bytes_per_s of "
            f"{device.name} is not known; give it in bytes/s"
        )
    if mode == "swap_attention" and workload.stack not in MINDSPEED:
        return f"it is MindSpeed's (stack {' or '.join(MINDSPEED)}), and workload.stack is {workload.stack}"
    if mode not in ("selective", "activation"):
        return None
    if workload.implementation == "transformers":
        return "it runs operators once more, and workload.implementation transformers recomputes whole layers alone"
    if not rerun_operators(mode, workload):
        return (
            f"workload.recompute_operators makes every layer run {', '.join(workload.recompute_operators)} once more, "
            "so this mode changes nothing"
        )
    return None
