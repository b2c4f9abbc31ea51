"""Subject of a MindSpeed-MM script: its own model provider and forward step, on a model cut to few layers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.profilers.mindspeed_mm import runtime
from mm_autoparallel.profilers.mindspeed_mm.batch import make_batch
from mm_autoparallel.profilers.subject import Build, Subject

ModelProvider = Callable[..., nn.Module]
ForwardStep = Callable[[Iterator[Any], Any], tuple[Any, Callable[[Any], Any]]]
CutModel = Callable[[Any, Mapping[str, int]], None]


def make_subject(
    model_provider: ModelProvider,
    forward_step: ForwardStep,
    cut_model: CutModel,
    extra_arguments: Callable[[Any], Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Subject:
    """The Subject of what a script hands to `training.pretrain`. Megatron is started when a model is first built.

    cut_model: cuts the live configuration (attributes as in model.json) to some layers of each modality.
    """
    script = _Script(model_provider, forward_step, cut_model, extra_arguments, defaults)
    return Subject(script.build_model, script.step, script.build_optimizer)


class _Wrapped:
    """What a forward step takes for a model in Megatron's wrappers: it reaches through `.module.module`."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class _CopiedAdamW(torch.optim.Optimizer):
    """AdamW on fp32 copies: gradients are copied there, the step is taken, and parameters are copied back."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})
        self._own = [parameter for group in self.param_groups for parameter in group["params"]]
        self._copies = [parameter.detach().float().clone().requires_grad_() for parameter in self._own]
        self._adam = torch.optim.AdamW(self._copies, lr=1e-5)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step; `closure` is torch's and not called, because gradients are there already."""
        assert closure is None
        for own, copied in zip(self._own, self._copies, strict=True):
            copied.grad = None if own.grad is None else own.grad.float()
        self._adam.step()
        for own, copied in zip(self._own, self._copies, strict=True):
            own.copy_(copied)


class _Script:
    """A started Megatron: its arguments, the whole model's configuration, and the groups that are there now."""

    def __init__(
        self,
        model_provider: ModelProvider,
        forward_step: ForwardStep,
        cut_model: CutModel,
        extra_arguments: Callable[[Any], Any] | None,
        defaults: Mapping[str, Any] | None,
    ) -> None:
        self._provide, self._forward, self._cut = model_provider, forward_step, cut_model
        self._extra_arguments, self._defaults = extra_arguments, defaults
        self._arguments: Any = None
        self._whole: Any = None
        self._divided: tuple[int, Any] | None = None

    def build_model(self, build: Build) -> nn.Module:
        """The whole model on one stage, cut to the depth that is asked for."""
        self._start()
        self._divide(1 if build.tp_mesh is None else build.tp_mesh.size())
        self._arguments.mm.model = copy.deepcopy(self._whole)
        self._cut(self._arguments.mm.model, build.depth)
        model = self._provide(pre_process=True, post_process=True)
        runtime.mark_parameters(model)
        model.to(build.device)
        if self._half is not None:
            model.to(self._half)
        return model.train()

    def step(self, model: nn.Module, num_samples: int, workload: Workload) -> torch.Tensor:
        """The script's own forward step and loss, on a batch made here."""
        self._arguments.micro_batch_size = num_samples
        batch = make_batch(self._whole, num_samples, workload, self._half or torch.float32)
        device = next(model.parameters()).device
        batch = {key: value.to(device) for key, value in batch.items()}
        output, loss_of = self._forward(iter([batch]), _Wrapped(_Wrapped(model)))
        loss: torch.Tensor = loss_of(output)[0]
        return loss.sum()

    def build_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """AdamW, on fp32 copies of the parameters where those are of half precision, as Megatron has it."""
        return torch.optim.AdamW(parameters, lr=1e-5) if self._half is None else _CopiedAdamW(parameters)

    @property
    def _half(self) -> torch.dtype | None:
        """The type that Megatron's wrapper turns a model to."""
        if getattr(self._arguments, "bf16", False):
            return torch.bfloat16
        return torch.float16 if getattr(self._arguments, "fp16", False) else None

    def _start(self) -> None:
        if self._arguments is None:
            self._arguments = runtime.start(self._extra_arguments, self._defaults)
            self._whole = copy.deepcopy(self._arguments.mm.model)

    def _divide(self, tp: int) -> None:
        """Anew where the size or the default process group has changed."""
        here = (tp, dist.group.WORLD)
        if self._divided is None or self._divided[0] != tp or self._divided[1] is not here[1]:
            runtime.divide(self._arguments, tp)
            self._divided = here
