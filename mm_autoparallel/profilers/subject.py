"""Subject: what is profiled, as a pretrain script hands it over: how to build the model and how to step it.

The same three functions serve a profile run on any device, so what is measured is what the script trains.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.profilers.torch_releases import DeviceMesh


@dataclass(frozen=True)
class Layout:
    """Where a live model keeps its parts, as dotted module paths (`model.visual.blocks`).

    layers: modality → the ModuleList of its layers, in the order data flows, `text` last. post: modality → the module
    whose output ends the modality's `*_post` (a projector); what runs after it belongs to the next modality's `*_pre`.
    """

    layers: Mapping[str, str]
    post: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Build:
    """The model that is asked for, randomly initialised, on `device`, ready to train (`model.train()`).

    depth: layers of each modality; the first so many of the model's own. tp_mesh: one-dimensional mesh of the ranks
    among which its layers are divided (tensor parallel); None where each rank holds whole layers. sequence_parallel:
    those ranks divide norms, residuals and what layers hand on as well; asked for of subjects that offer it.
    """

    depth: Mapping[str, int]
    device: torch.device
    tp_mesh: DeviceMesh | None = None
    sequence_parallel: bool = False


@dataclass(frozen=True)
class Subject:
    """A model that can be built at any depth and run on a batch of any size.

    build_model: the model of a Build. forward_step: (model, number of samples, workload) → the scalar loss of one
    forward on a batch made for it; no backward. build_optimizer: the optimizer over some of the parameters.
    layout: where the layers are; None where they are to be found. sequence_parallel: whether build_model can divide
    sequences (Build.sequence_parallel). lacks: kinds of the job's chain that this code does not build; they are neither
    measured nor traced, and cost what their sizes say.
    """

    build_model: Callable[[Build], nn.Module]
    forward_step: Callable[[nn.Module, int, Workload], torch.Tensor]
    build_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    layout: Layout | None = None
    sequence_parallel: bool = False
    lacks: Collection[str] = ()
