"""Losses: cross-entropy of the next token, also where each rank holds a slice of the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy, pad

from data import IGNORED


def next_token_loss(logits: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    """Mean loss over the tokens whose next one counts.

    logits: (samples, sequence, vocabulary, or this rank's slice of it where `weight`, the output matrix, is a DTensor).
    labels: (samples, sequence), IGNORED where a token is not to be predicted. Computed in float32 as Hugging Face does.
    """
    flat = logits.flatten(0, 1).float()
    targets = pad(labels, (0, 1), value=IGNORED)[:, 1:].flatten()  # the last token has no next one
    if isinstance(weight, DTensor):
        losses = _SlicedCrossEntropy.apply(flat, targets, weight.device_mesh.get_group())
        return losses.sum() / (targets != IGNORED).sum()
    return cross_entropy(flat, targets, ignore_index=IGNORED)


class _SlicedCrossEntropy(torch.autograd.Function):
    """Cross-entropy of each row over a vocabulary whose slices lie on the ranks of a group, rank order.

    Three numbers a row cross the network (largest logit, sum of exponentials, the target's logit) in place of the
    logits (Shoeybi et al. 2019, arXiv:1909.08053, section 3).
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: dist.ProcessGroup) -> Tensor:
        largest = logits.max(dim=-1).values
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        logits = logits - largest[:, None]
        width = logits.shape[-1]
        places = targets - dist.get_rank(group) * width
        mine = (places >= 0) & (places < width)
        places = places.clamp(0, width - 1)
        picked = logits.gather(1, places[:, None])[:, 0] * mine
        shares = logits.exp_()
        both = torch.stack([shares.sum(dim=-1), picked])
        dist.all_reduce(both, group=group)
        total, picked = both
        shares /= total[:, None]
        counted = targets != IGNORED
        ctx.save_for_backward(shares, places, mine & counted, counted)
        return (total.log() - picked) * counted

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        shares, places, mine, counted = ctx.saved_tensors
        result = shares * (gradient * counted)[:, None]
        result.scatter_add_(1, places[:, None], -(gradient * mine)[:, None].to(result.dtype))
        return result, None, None
