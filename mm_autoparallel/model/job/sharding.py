"""What data-parallel ranks shard and what the host keeps: which framework runs which of it.

ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054): 0 nothing, 1 optimizer states, 2 gradients too, 3 weights too. The
framework is the workload's `stack`; what each runs stands in its code:

- Megatron-LM: its distributed optimizer is ZeRO 1; Megatron-FSDP runs 2 and 3 beside tensor, context and expert
  parallelism, reducing gradients (2, 3) and gathering weights (3) in every micro-batch, and reshards weights after each
  pass (core/distributed/fsdp/mcore_fsdp_adapter.py). Beside a pipeline its version 2 refuses to run, and version 1 is
  neither documented (docs/user-guide/parallelism-guide.md) nor among its functional tests: no plan is built on that.
  Weights kept until the backward are torch FSDP2's (--torch-fsdp2-no-reshard-after-forward), there with PP 1 and EP 1
  (training/arguments.py). --optimizer-cpu-offload keeps shards of states on the host.
- DeepSpeed: ZeRO 2 and 3 are incompatible with its pipeline engine (runtime/pipe/engine.py), ZeRO 3 with experts
  (runtime/engine.py). ZeRO-Offload (Ren et al. 2021, arXiv:2101.06840) needs ZeRO 1 at least.
- MindSpeed: a distributed optimizer (ZeRO 1) and torch FSDP2, as Megatron-LM has it; no ZeRO 2. Its --swap-optimizer
  steps on the device.
- MindSpeed-MM's FSDP trainer (mindspeed_mm/fsdp): torch FSDP2 alone, in every micro-batch, with experts dealt to
  ranks of their own mesh (distributed/parallel_state.py); no pipeline and no tensor parallelism. Copies of weights that
  fewer ranks share (fully_shard_parallel_size) sum their gradients in the last micro-batch (utils/utils.py,
  configure_hsdp_gradient_sync; 26.0 in each). Each rank's part of dealt experts is held once among all ranks.
- Galvatron: ZeRO 2 or 3 by layer (torch's FSDP), beside pipelines too (runtime/parallel.py).
- MindFormers: optimizer parallelism, planned as ZeRO 1; no other stage of its own.
- transformers with torch: FSDP2, which counts here as it is by itself, in every micro-batch, beside pipelines too.
  torch's own pipeline schedules put its reductions and resharding off to the last micro-batch (torch/distributed/
  pipelining/stage.py), as torchtitan keeps weights until the backward there (distributed/fsdp.py): whole gradients and
  weights then stand as long as with ZeRO 1, and a plan of ZeRO 2 or 3 asks for a schedule that leaves both on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mm_autoparallel.model.job.cluster import Cluster, Device
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.model.job.workload import MINDSPEED, Stack, Workload

if TYPE_CHECKING:
    from mm_autoparallel.model.job.strategy import Strategy

ZERO_STAGES = (0, 1, 2, 3)
"""ZeRO stages that are understood."""


def stage_reason(zero: int) -> str | None:
    """Why there is no such ZeRO stage; None where there is."""
    known = ", ".join(map(str, ZERO_STAGES))
    return None if zero in ZERO_STAGES else f"ZeRO {zero} is not understood; known are {known}"


def zero_reason(stack: Stack, zero: int, pp: int, ep: int, reshard: bool, has_experts: bool) -> str | None:
    """Why the framework cannot run ZeRO stage `zero` with `pp` stages and experts dealt to `ep` ranks; None: it can.

    reshard: gathered weights are given up after each pass, else kept from the forward until the backward.
    """
    if reason := stage_reason(zero):
        return reason
    if not reshard and zero != 3:
        return (
            f"weights are kept from forward to backward (reshard false) where ZeRO 3 gathers them, and ZeRO is {zero}"
        )
    if stack == "mindspeed-fsdp" and zero != 3:
        return f"ZeRO {zero}: MindSpeed-MM's FSDP trainer shards weights too (ZeRO 3), and workload.stack is {stack}"
    if zero < 2 or stack == "transformers":
        return None
    if stack == "galvatron":
        return (
            None
            if reshard
            else f"reshard false: Galvatron gives gathered weights up after each pass, and workload.stack is {stack}"
        )
    of_stack = f"and workload.stack is {stack}"
    if stack == "mindspeed-fsdp":
        return f"PP {pp}: MindSpeed-MM's FSDP trainer has no pipeline, {of_stack}" if pp > 1 else None
    if stack == "megatron-deepspeed":
        if pp > 1:
            return f"ZeRO {zero} with PP {pp}: DeepSpeed's pipeline engine runs ZeRO 0 and 1 alone, {of_stack}"
        if zero == 3 and has_experts:
            return f"ZeRO 3 with experts: DeepSpeed runs them with ZeRO 0 to 2 alone, {of_stack}"
        if not reshard:
            return f"reshard false: DeepSpeed has no switch that keeps gathered weights until the backward, {of_stack}"
        return None
    if stack == "mindformers":
        return f"ZeRO {zero}: MindFormers has optimizer parallelism (ZeRO 1) alone, {of_stack}"
    if stack in MINDSPEED and zero == 2:
        return f"ZeRO 2: MindSpeed has ZeRO 1 (its distributed optimizer) and ZeRO 3 (torch FSDP2), {of_stack}"
    if reshard and stack not in MINDSPEED:
        if pp > 1:
            return f"ZeRO {zero} with PP {pp}: it is Megatron-FSDP, which is known to run with PP 1 alone, {of_stack}"
    elif pp > 1 or ep > 1:
        what = "ZeRO 3" if stack in MINDSPEED else "ZeRO 3 with reshard false"
        return f"{what} with PP {pp} and EP {ep}: it is torch FSDP2 there, which runs with PP 1 and EP 1, {of_stack}"
    return None


def shard_reason(stack: Stack, shard: int, zero: int, pp: int, cp: int, dp: int) -> str | None:
    """Why `shard` of the dp · cp ranks cannot share one copy of the weights; None: they can."""
    if stack not in ("mindspeed-fsdp", "transformers"):
        return f"shards of {shard} ranks are torch FSDP2's hybrid sharding, and workload.stack is {stack}"
    if zero != 3 or pp > 1:
        return f"shards of {shard} ranks are a choice of ZeRO 3 with PP 1, and ZeRO is {zero}, PP {pp}"
    if shard % cp or dp * cp % shard:
        return (
            f"shards of {shard} ranks must be a multiple of CP {cp} and divide the {dp * cp} ranks of CP {cp} x DP {dp}"
        )
    return None


def offload_reason(stack: Stack, zero: int, device: Device) -> str | None:
    """Why optimizer states cannot lie on the host, where their step is made too; None: they can."""
    if zero == 0:
        return "the optimizer's states go to the host by shards, and ZeRO is 0; ZeRO 1 or more would do"
    if stack in MINDSPEED:
        return "MindSpeed has no step on the host (its --swap-optimizer steps on the device), and workload.stack is it"
    if stack == "mindspeed-fsdp":
        return "MindSpeed-MM's FSDP trainer is planned with its optimizer on the device alone, and workload.stack is it"
    if stack == "mindformers":
        return "no step of MindFormers on the host is known, and workload.stack is it"
    missing = [key for key in ("host_link_bytes_per_s", "host_memory_bytes_per_s") if getattr(device, key) is None]
    if missing:
        keys = " and ".join(f"cluster.device.{key}" for key in missing)
        return f"the optimizer's states go to the host, and {keys} of {device.name} is not known; give it in bytes/s"
    return None


def sharding_reasons(model: Model, cluster: Cluster, workload: Workload, strategy: Strategy) -> Iterator[str]:
    """Each rule that the strategy's sharding breaks under the workload's framework."""
    has_experts = any(modality.layers.experts for modality in model.modalities)
    sharded = strategy.zero, strategy.pp, strategy.ep, strategy.reshard
    if reason := zero_reason(workload.stack, *sharded, has_experts):
        yield reason
    if strategy.tp > 1 and workload.stack == "mindspeed-fsdp":
        yield f"TP {strategy.tp}: MindSpeed-MM's FSDP trainer has no tensor parallelism, and workload.stack is it"
    if workload.stack == "mindspeed-fsdp" and not strategy.reshard and strategy.ep > 1 and strategy.expert_dp > 1:
        yield (  # mindspeed_mm/fsdp/distributed/expert_parallel/expert_fully_shard_parallel.py
            f"reshard false with EP {strategy.ep} and {strategy.expert_dp} ranks to a part of the experts: MindSpeed-"
            "MM's FSDP trainer gives up gathered experts after each pass whatever it does with other weights"
        )
    if strategy.shard:
        reason = shard_reason(workload.stack, strategy.shard, strategy.zero, strategy.pp, strategy.cp, strategy.dp)
        if reason:
            yield reason
    if strategy.optimizer_offload and (reason := offload_reason(workload.stack, strategy.zero, cluster.device)):
        yield reason
