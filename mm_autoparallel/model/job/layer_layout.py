"""Layer layout: how the devices of a stage share single layers of it, where not all of them are shared alike.

All layouts of a stage divide its same devices and the same samples of a micro-batch: a layer with fewer tensor parallel
ranks has more data parallel ones, each with fewer of the samples. Galvatron's and PaddlePaddle's trainers run such
strategies by layer, as any code on torch's meshes can; Megatron-LM has one tensor parallel size for all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mm_autoparallel.model.job.layer_modes import HOST_MODES, LAYER_MODES
from mm_autoparallel.model.job.workload import Stack, Workload

if TYPE_CHECKING:
    from mm_autoparallel.model.job.strategy import Strategy

LAYER_WISE_STACKS: tuple[Stack, ...] = ("transformers", "galvatron")
"""Stacks whose layers may be shared in several ways."""

_NAME = re.compile(r"tp(\d{1,6})(?:_cp(\d{1,6}))?_dp(\d{1,6})_zero([0-3])(_kept)?")


@dataclass(frozen=True, order=True)
class LayerLayout:
    """Tensor, context and data parallel ranks of a layer, and what the latter shard; reshard: as Strategy's."""

    tp: int
    dp: int
    cp: int = 1
    zero: int = 1
    reshard: bool = True

    @property
    def name(self) -> str:
        """As plans and modes of layers call it: `tp4_dp2_zero1`, with context parallelism `tp4_cp2_dp2_zero1`."""
        cp = f"_cp{self.cp}" if self.cp > 1 else ""
        return f"tp{self.tp}{cp}_dp{self.dp}_zero{self.zero}{'' if self.reshard else '_kept'}"

    @property
    def num_devices(self) -> int:
        """Of the stage that it is a layout of."""
        return self.tp * self.cp * self.dp

    def mode(self, name: str = "") -> str:
        """What plans call a layer in this layout and in the mode `name`, if that is any."""
        return f"{self.name}+{name}" if name else self.name


def parse_layout(name: str) -> LayerLayout | None:
    """The layout of that name; None where it is no name of one."""
    found = _NAME.fullmatch(name)
    if not found:
        return None
    tp, cp, dp, zero, kept = found.groups()
    layout = LayerLayout(int(tp), int(dp), int(cp or 1), int(zero), not kept)
    return layout if layout.name == name and min(layout.tp, layout.cp, layout.dp) > 0 else None


def split_mode(name: str) -> tuple[str, str]:
    """The layout's name in a mode's and the mode's own; empty where it has none."""
    layout, _, mode = name.partition("+")
    return (layout, mode) if parse_layout(layout) else ("", name)


def list_layout_modes(strategy: Strategy) -> tuple[str, ...]:
    """What plans may call layers in the layouts of `strategy`, in the order in which a stage's layers take them."""
    return tuple(layout.mode(mode) for layout in strategy.layouts for mode in (*LAYER_MODES, ""))


def layer_wise_reasons(workload: Workload, modes: tuple[str, ...] = ()) -> Iterator[str]:
    """Why no layers of one stage can be shared in several ways. modes: that layers may run in."""
    several = "layers of one stage are shared in several ways"
    if workload.stack not in LAYER_WISE_STACKS:
        by_module = "; MindSpeed-MM gives an encoder sizes of its own by search.layouts [chain, colocated]"
        yield (
            f"{several} by stacks {' and '.join(LAYER_WISE_STACKS)} alone, and workload.stack is {workload.stack}"
            f"{by_module if workload.stack == 'mindspeed-mm' else ''}"
        )
    for key in ("micro_batch_scale", "samples"):
        if getattr(workload, key):
            yield f"{several} where micro-batches are equal alone, and workload.{key} is given"
    moved = [mode for mode in modes if mode in HOST_MODES]
    if moved:
        yield f"{several} without modes that move bytes to the host, as {moved[0]} does"
