"""Operators that MindSpeed and MindSpeed-MM take from torch_npu, in plain torch: what they compute, not how fast.

Written from the operators' public description (arguments, layouts, sparse modes), for the runs in `train_small_vlm.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

LEFT_UP_CAUSAL, RIGHT_DOWN_CAUSAL, BAND = 2, 3, 4
"""Values of sparse_mode whose mask follows from the places of queries and keys; 0 and 1 take the mask as given."""


def npu_rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """`x` over its root mean square (last dimension, in fp32) times `gamma`, and the reciprocal of that root."""
    wide = x.float()
    reciprocal = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * reciprocal).to(x.dtype) * gamma, reciprocal


def npu_swiglu(x: Tensor, dim: int = -1) -> Tensor:
    """SiLU of the first half of `x` times its second half."""
    gate, up = x.chunk(2, dim=dim)
    return functional.silu(gate) * up


def npu_rotary_mul(x: Tensor, cos: Tensor, sin: Tensor, rotary_mode: str = "half") -> Tensor:
    """`x` turned by the angles of `cos` and `sin`; the pairs are the halves of the last dimension."""
    if rotary_mode != "half":
        raise NotImplementedError(f"npu_rotary_mul with rotary_mode {rotary_mode} has no stand-in here")
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


def npu_fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = 2147483647,
    next_tockens: int = 2147483647,
    inner_precise: int = 0,
    prefix: Any = None,
    actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None,
    sparse_mode: int = 0,
    **_: Any,
) -> tuple[Tensor, ...]:
    """Attention; the first of what it gives is in the layout of `query`.

    Layouts: SBH, BSH, BSND, BNSD, TND (sequences one after the other, ending at actual_seq_qlen and _kvlen). A mask is
    true where a key must not be seen.
    """
    if pse is not None or keep_prob < 1:
        raise NotImplementedError("npu_fusion_attention with pse or dropout has no stand-in here")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """All (batch, heads, length, channels)."""
        repeats = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
        hidden = _hidden(q.shape[-2], k.shape[-2], atten_mask, sparse_mode, pre_tockens, next_tockens)
        scores = (q.float() @ k.float().transpose(-1, -2)) * scale
        if hidden is not None:
            scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        return (torch.softmax(scores, dim=-1) @ v.float()).to(q.dtype)

    if input_layout == "TND":
        assert actual_seq_qlen is not None
        assert actual_seq_kvlen is not None
        parts = []
        starts = zip([0, *actual_seq_qlen], [0, *actual_seq_kvlen], strict=True)
        for (q0, k0), q1, k1 in zip(starts, actual_seq_qlen, actual_seq_kvlen, strict=False):
            one = attend(*(x.transpose(0, 1)[None] for x in (query[q0:q1], key[k0:k1], value[k0:k1])))
            parts.append(one[0].transpose(0, 1))
        return (torch.cat(parts), *[torch.empty(0)] * 6)
    forth, back = _LAYOUTS[input_layout]
    out = attend(*(forth(x, x.shape[-1] * head_num // query.shape[-1]) for x in (query, key, value)))
    return (back(out), *[torch.empty(0)] * 6)


def _hidden(
    queries: int, keys: int, mask: Tensor | None, sparse_mode: int, pre_tockens: int, next_tockens: int
) -> Tensor | None:
    """What each query must not see, (queries, keys) or with more dimensions before; None where it sees all."""
    behind = torch.arange(keys)[None, :] - torch.arange(queries)[:, None]
    if sparse_mode == LEFT_UP_CAUSAL:
        return behind > 0
    if sparse_mode == RIGHT_DOWN_CAUSAL:
        return behind > keys - queries
    if sparse_mode == BAND:
        return (behind - (keys - queries) > next_tockens) | (behind - (keys - queries) < -pre_tockens)
    return None if mask is None else mask.bool()


def _split(x: Tensor, heads: int) -> Tensor:
    """(…, heads × channels) → (…, heads, channels)"""
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)


_LAYOUTS: dict[str, tuple[Callable[[Tensor, int], Tensor], Callable[[Tensor], Tensor]]] = {
    "SBH": (lambda x, n: _split(x, n).permute(1, 2, 0, 3), lambda x: x.permute(2, 0, 1, 3).flatten(2)),
    "BSH": (lambda x, n: _split(x, n).transpose(1, 2), lambda x: x.transpose(1, 2).flatten(2)),
    "BSND": (lambda x, _: x.transpose(1, 2), lambda x: x.transpose(1, 2)),
    "BNSD": (lambda x, _: x, lambda x: x),
}
"""Each layout to (batch, heads, length, channels) and back."""


@torch.no_grad()
def npu_apply_adam_w(
    beta1_power: float,
    beta2_power: float,
    lr: float,
    weight_decay: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    grad: Tensor,
    max_grad_norm: Tensor | None,
    amsgrad: bool,
    maximize: bool,
    *,
    out: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """One step of AdamW on `out` (weights and both averages), in place.

    beta1_power and beta2_power are those of the step before: the operator multiplies them once more by the betas.
    """
    if amsgrad:
        raise NotImplementedError("npu_apply_adam_w with amsgrad has no stand-in here")
    weight, average, square = out
    grad = -grad if maximize else grad
    weight.mul_(1 - lr * weight_decay)
    average.mul_(beta1).add_(grad, alpha=1 - beta1)
    square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    root = (square / (1 - beta2_power * beta2)).sqrt_().add_(epsilon)
    weight.addcdiv_(average, root, value=-lr / (1 - beta1_power * beta1))
    return out


def fused_adamw(
    weights: list[Tensor],
    grads: list[Tensor],
    averages: list[Tensor],
    squares: list[Tensor],
    max_squares: list[Tensor],
    steps: list[Tensor],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    amsgrad: bool,
    maximize: bool,
    **_: Any,
) -> None:
    """What torch._fused_adamw_ does, with a step that is a whole number: torch's own on CPU wants it in fp32."""
    for weight, grad, average, square, step in zip(weights, grads, averages, squares, steps, strict=True):
        before = int(step) - 1
        npu_apply_adam_w(
            beta1**before, beta2**before, float(lr), weight_decay, beta1, beta2, eps, grad, None, amsgrad, maximize,
            out=(weight, average, square),
        )  # fmt: skip


def npu_confusion_transpose(x: Tensor, perm: Sequence[int], shape: Sequence[int], transpose_first: bool) -> Tensor:
    """Permute and reshape, in the order that `transpose_first` says."""
    return x.permute(*perm).reshape(*shape) if transpose_first else x.reshape(*shape).permute(*perm)


def npu_gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """GELU."""
    return functional.gelu(x, approximate=approximate)


def npu_scaled_masked_softmax(x: Tensor, mask: Tensor, scale: float = 1.0, fixed_triu_mask: bool = False) -> Tensor:
    """Softmax over the last dimension of `scale` × `x`, of what `mask` does not hide."""
    if fixed_triu_mask:
        mask = torch.ones(x.shape[-2:], dtype=torch.bool).triu(1)
    return torch.softmax((x.float() * scale).masked_fill(mask.bool(), -math.inf), dim=-1).to(x.dtype)


OPERATORS = {
    each.__name__: each
    for each in (
        npu_rms_norm,
        npu_swiglu,
        npu_rotary_mul,
        npu_fusion_attention,
        npu_apply_adam_w,
        npu_confusion_transpose,
        npu_gelu,
        npu_scaled_masked_softmax,
    )
}
