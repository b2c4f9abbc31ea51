"""Optimizer: AdamW with 32-bit state, the learning rate's course, and clipping by the norm over all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Shard
from torch.optim.adamw import adamw


class AdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) of parameters in any type; its state is float32.

    16-bit parameters have a 32-bit copy, which is what is updated: 12 bytes of state a parameter, 8 for 32-bit ones.
    Of a DTensor, the slice that this rank holds is updated.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = closure() if closure else None
        for group in self.param_groups:
            held = [parameter for parameter in group["params"] if parameter.grad is not None]
            if held:
                self._update(group, held)
        return loss

    def _update(self, group: dict[str, Any], held: Sequence[nn.Parameter]) -> None:
        values = [local(parameter) for parameter in held]
        states = [self._state_of(parameter, value) for parameter, value in zip(held, values, strict=True)]
        masters = [state.get("master", value) for state, value in zip(states, values, strict=True)]
        adamw(
            masters,
            [local(parameter.grad).float() for parameter in held],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=values[0].device.type in ("cpu", "cuda"),
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for value, master in zip(values, masters, strict=True):
            if value is not master:
                value.copy_(master)

    def _state_of(self, parameter: nn.Parameter, value: Tensor) -> dict[str, Tensor]:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=value.device)
            state["exp_avg"] = torch.zeros_like(value, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(value, dtype=torch.float32)
            if value.dtype != torch.float32:
                state["master"] = value.float()
        return state


class ShardedAdamW:
    """AdamW whose state is divided over data-parallel ranks (ZeRO stage 1) by ZeroRedundancyOptimizer.

    It broadcasts whole parameters, so slices of DTensors are lent to it as parameters of their own.
    """

    def __init__(self, params: Iterable[nn.Parameter], group: dist.ProcessGroup, **options: Any) -> None:
        self._owners = list(params)
        with torch.no_grad():
            self._lent = [
                nn.Parameter(parameter.to_local()) if isinstance(parameter, DTensor) else parameter
                for parameter in self._owners
            ]
        self.inner = ZeroRedundancyOptimizer(self._lent, AdamW, process_group=group, **options)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups with their learning rate."""
        return self.inner.param_groups

    @property
    def state(self) -> Any:
        """State of the parameters that this rank updates."""
        return self.inner.optim.state

    def step(self) -> None:
        """Update this rank's share of the parameters and exchange the results."""
        for owner, lent in zip(self._owners, self._lent, strict=True):
            if owner is not lent and owner.grad is not None:
                lent.grad = local(owner.grad)
        self.inner.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters."""
        for owner in self._owners:
            if owner.grad is not None:
                owner.grad = None if set_to_none else owner.grad.zero_()


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank holds, in the same memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


@torch.no_grad()
def clip_gradients(shares: Iterable[tuple[Iterable[nn.Parameter], int]], limit_factor: float) -> float:
    """Scale gradients so that their norm over all ranks is at most `limit_factor`; the norm before.

    shares: parameters, and the number of ranks among which they repeat or divide (data times tensor parallel). Every
    gradient counts once, however many ranks hold it.
    """
    gradients, total = [], torch.zeros(())
    for parameter, num_replicas in ((each, number) for parameters, number in shares for each in parameters):
        if parameter.grad is None:
            continue
        gradient = local(parameter.grad)
        num_slices = 1
        if isinstance(parameter, DTensor):
            sharded = [
                parameter.device_mesh.size(d) for d, p in enumerate(parameter.placements) if isinstance(p, Shard)
            ]
            num_slices = math.prod(sharded)
        total = total.to(gradient.device) + gradient.float().square().sum() * num_slices / num_replicas
        gradients.append(gradient)
    dist.all_reduce(total)
    norm = float(total.sqrt())
    if norm > limit_factor:
        for gradient in gradients:
            gradient.mul_(limit_factor / (norm + 1e-6))
    return norm


def learning_rate(iteration: int, arguments: Any) -> float:
    """The rate of an iteration, counted from 0: linear warm-up, then constant, linear or cosine to the least rate.

    Megatron-LM's OptimizerParamScheduler, counted in iterations.
    """
    num_iterations = arguments.lr_decay_iters or arguments.train_iters
    warmup = arguments.lr_warmup_iters
    if arguments.lr_warmup_fraction is not None:
        warmup = arguments.lr_warmup_fraction * num_iterations
    step = iteration + 1
    if warmup and step <= warmup:
        return float(arguments.lr * step / warmup)
    if arguments.lr_decay_style == "constant":
        return float(arguments.lr)
    progress = min(1.0, max(0.0, (step - warmup) / max(1.0, num_iterations - warmup)))
    left = 1.0 - progress if arguments.lr_decay_style == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return float(arguments.min_lr + (arguments.lr - arguments.min_lr) * left)
