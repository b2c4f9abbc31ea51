"""What every planner of the comparison is asked and answers: a row of a table in plain numbers; a step, and if it fits.

Others know dense decoders alone, laid out by pipeline, tensor and data parallel sizes. A row that is more than that is
refused for all of them with its reason (Unsaid), so that all are asked the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mm_autoparallel.measurements.case import MeasuredCase


class Unsaid(Exception):
    """Why a row, or a layout of it, cannot be said in a planner's options, in a sentence."""


@dataclass(frozen=True)
class Layout:
    """A decoder of `num_layers` equal layers and how it is trained; sizes in numbers, tokens and samples.

    gated: three matrices in the feed-forward, else two. flash: no score matrices are kept. fused_norm: norms are one
    kernel. recompute: every layer recomputes whole, else none does. gradient_bytes: of one gradient as it is
    accumulated. overlap_grad_reduce: gradients are reduced behind the backward. layers_per_stage: as they lay.
    What the row leaves out is a fact of its software (model/job/stacks.py).
    """

    num_layers: int
    hidden_size: int
    ffn_size: int
    gated: bool
    num_heads: int
    num_kv_groups: int
    head_size: int
    vocab_size: int
    seq_length: int
    global_batch_size: int
    pp: int
    tp: int
    dp: int
    mbs: int
    zero: int
    sequence_parallel: bool
    scatter_gather_p2p: bool
    recompute: bool
    flash: bool
    fused_norm: bool
    gradient_bytes: float
    overlap_grad_reduce: bool
    layers_per_stage: tuple[int, ...]
    devices_per_node: int

    @property
    def num_devices(self) -> int:
        return self.pp * self.tp * self.dp

    @property
    def num_micro_batches(self) -> int:
        """Of one step, on each data parallel replica."""
        return self.global_batch_size // (self.dp * self.mbs)


@dataclass(frozen=True)
class Answer:
    """What a planner says of a layout. peak_bytes: of the fullest device, as the planner counts it."""

    step_ms: float
    peak_bytes: float
    fits: bool


Predict = Callable[[Layout], Answer]
"""Raises Unsaid where the layout cannot be said in the planner's options; whatever else it raises is its own crash."""


@dataclass(frozen=True)
class Source:
    """Where a planner's code is: the git repository and the commit that the adapter was written for.

    folders: of the repository, that are needed. packages: what it imports, by the name it is installed under.
    load(folder): imports it, with its checkout `folder` first on the path, and gives, for each way of using it that is
    compared, what predicts.
    """

    name: str
    repository: str
    commit: str
    folders: tuple[str, ...]
    packages: tuple[str, ...]
    load: Callable[[Path], Mapping[str, Predict]]


def layout_of(case: MeasuredCase) -> Layout:
    """The row in plain numbers. Raises Unsaid for what no planner of the comparison can say."""
    model, workload, plan = case.job.model, case.job.workload.run_by(case.software), case.plan
    strategy, text = plan.strategy, model.text
    layers, recomputed = text.layers, plan.recompute.get("text", ())
    placed = plan.layers["text"]
    for what, is_there in (
        ("encoders", bool(model.encoders)),
        ("images in place of text", text.images is not None),
        ("experts", layers.experts is not None),
        ("latent or delta attention", layers.latent is not None or layers.delta is not None),
        ("context parallelism", strategy.cp > 1),
        ("several chunks a stage", strategy.vpp > 1),
        ("a mode of layers besides recomputation", any(plan.modes.values())),
        ("recomputation of some operators", bool(workload.recompute_operators)),
        ("recomputation of some layers", any(recomputed) and tuple(recomputed) != tuple(placed)),
    ):
        if is_there:
            raise Unsaid(f"the row has {what}")
    return Layout(
        num_layers=layers.num_layers,
        hidden_size=layers.hidden_size,
        ffn_size=layers.ffn_size,
        gated=layers.gated,
        num_heads=layers.num_heads,
        num_kv_groups=layers.num_kv_groups or layers.num_heads,
        head_size=layers.head_dim or layers.hidden_size // layers.num_heads,
        vocab_size=text.vocab_size,
        seq_length=workload.seq_length,
        global_batch_size=workload.global_batch_size,
        pp=strategy.pp,
        tp=strategy.tp,
        dp=strategy.dp,
        mbs=strategy.mbs,
        zero=strategy.zero,
        sequence_parallel=workload.sequence_parallel and strategy.sequence_parallel and strategy.tp > 1,
        scatter_gather_p2p=workload.scatter_gather_p2p,
        recompute=any(recomputed),
        flash=workload.attention == "flash",
        fused_norm=workload.known_facts.norms == "fused",
        gradient_bytes=workload.gradient_bytes,
        overlap_grad_reduce=workload.overlap_grad_reduce,
        layers_per_stage=tuple(placed),
        devices_per_node=case.job.cluster.devices_per_node,
    )
