"""One rank's part of a Hugging Face model under tensor parallelism, as Megatron divides it (arXiv:1909.08053).

Matrices by columns, then by rows; the embedding and the head by vocabulary, with a cross-entropy that never gathers the
logits. Weights are random, so a rank keeps the first part of what it built, whichever rank it is: sizes, operators and
collectives are those of training, values are not.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from mm_autoparallel.errors import ProfileError

_ATTENTION = (("q_proj", "k_proj", "v_proj", "qkv"), ("o_proj", "out_proj", "proj", "projection_layer"))
_FEED_FORWARD = (("gate_proj", "up_proj", "fc1"), ("down_proj", "fc2"))
"""Names of matrices divided by columns, and by rows (transformers 5: Qwen2-VL, Qwen2.5-VL, LLaVA, InternVL)."""


def shard_layer(layer: nn.Module, mesh: DeviceMesh) -> None:
    """Divide a transformer layer in place. Raises ProfileError where its attention cannot be divided."""
    for name, module in layer.named_children():
        if name in ("self_attn", "attn", "attention"):
            _check_attention(module)
            _shard_pair(module, _ATTENTION, mesh)
            for size in ("num_heads", "embed_dim"):
                # Only where a forward reshapes by them; what else a module keeps of its size is not read there.
                if isinstance(getattr(module, size, None), int):
                    setattr(module, size, getattr(module, size) // mesh.size())
        elif name == "mlp":
            _shard_pair(module, _FEED_FORWARD, mesh)


def shard_vocabulary(embedding: nn.Embedding, head: nn.Linear, mesh: DeviceMesh) -> None:
    """Divide the table and the head by vocabulary, in place; where they share their weights they still do."""
    num_rows = embedding.num_embeddings // mesh.size()
    tied = head.weight is embedding.weight
    embedding.weight = _part(embedding.weight[:num_rows])
    head.weight = embedding.weight if tied else _part(head.weight[:num_rows])
    group = mesh.get_group()

    def own_rows(_module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (arguments[0] % num_rows,)

    def join(_module: nn.Module, _arguments: Any, output: Tensor) -> Tensor:
        return _apply(_Reduce, output, group)

    def enter(_module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (_apply(_Copy, arguments[0], group), *arguments[1:])

    embedding.register_forward_pre_hook(own_rows)
    embedding.register_forward_hook(join)
    head.register_forward_pre_hook(enter)


def cross_entropy(logits: Tensor, labels: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """The mean loss of logits [tokens, vocabulary] in fp32; with a mesh [tokens, this rank's part of it]."""
    if mesh is None or mesh.size() == 1:
        return nn.functional.cross_entropy(logits.float(), labels)
    return _apply(_VocabularyCrossEntropy, logits, labels % logits.shape[-1], mesh.get_group())


def _check_attention(module: nn.Module) -> None:
    norms = [name for name, norm in module.named_children() if name in ("q_norm", "k_norm") and list(norm.parameters())]
    head_dim = getattr(module, "head_dim", 0)
    for name in norms:
        if next(getattr(module, name).parameters()).numel() != head_dim:
            raise ProfileError(
                f"{type(module).__name__} normalises queries and keys over all heads ({name}), which cannot be divided "
                "among tensor parallel ranks; limit the job's search to tp: [1], or profile with --tp 1"
            )


def _shard_pair(module: nn.Module, names: tuple[tuple[str, ...], tuple[str, ...]], mesh: DeviceMesh) -> None:
    tp, group = mesh.size(), mesh.get_group()
    columns, rows = ([getattr(module, name) for name in part if hasattr(module, name)] for part in names)
    if not columns or len(rows) != 1:
        raise ProfileError(
            f"{type(module).__name__} has none of the matrices {', '.join(names[0])} and {', '.join(names[1])}, so it "
            "cannot be divided among tensor parallel ranks; profile with --tp 1"
        )
    for linear in columns:
        linear.weight = _part(linear.weight[: linear.out_features // tp])
        if linear.bias is not None:
            linear.bias = _part(linear.bias[: linear.out_features // tp])
    rows[0].weight = _part(rows[0].weight[:, : rows[0].in_features // tp])

    def enter(_module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        if arguments:
            return (_apply(_Copy, arguments[0], group), *arguments[1:]), named
        return arguments, named | {"hidden_states": _apply(_Copy, named["hidden_states"], group)}

    def leave(_module: nn.Module, _arguments: Any, output: Tensor) -> Tensor:
        return _apply(_Reduce, output, group)

    module.register_forward_pre_hook(enter, with_kwargs=True)
    rows[0].register_forward_hook(leave)


def _apply(function: Any, *arguments: Any) -> Tensor:
    result: Tensor = function.apply(*arguments)
    return result


def _part(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)


class _Copy(torch.autograd.Function):
    """Every rank has the input; its gradient is the sum of what the ranks' parts give."""

    @staticmethod
    def forward(context: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        context.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=context.group)
        return gradient, None


class _Reduce(torch.autograd.Function):
    """The output is the sum of what the ranks' parts give; every rank has its gradient."""

    @staticmethod
    def forward(context: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        context.mark_dirty(tensor)
        dist.all_reduce(tensor, group=group)
        return tensor

    @staticmethod
    def backward(_context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _VocabularyCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of logits divided by vocabulary: three all-reduces of one number a token."""

    @staticmethod
    def forward(context: Any, logits: Tensor, labels: Tensor, group: dist.ProcessGroup) -> Tensor:
        values = logits.float()
        largest = values.amax(dim=-1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        values = values.sub_(largest[:, None]) if values is not logits else values - largest[:, None]
        chosen = values.gather(1, labels[:, None]).squeeze(1)
        dist.all_reduce(chosen, group=group)
        probabilities = values.exp_()
        total = probabilities.sum(dim=-1)
        dist.all_reduce(total, group=group)
        probabilities.div_(total[:, None])
        context.save_for_backward(probabilities, labels)
        context.dtype = logits.dtype
        return (total.log() - chosen).mean()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        probabilities, labels = context.saved_tensors
        result = probabilities.clone()
        result[torch.arange(len(labels), device=labels.device), labels] -= 1.0
        return result.mul_(gradient / len(labels)).to(context.dtype), None, None
