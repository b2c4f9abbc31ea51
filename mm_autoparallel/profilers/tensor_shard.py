"""One rank's part of a Hugging Face model under tensor parallelism, as Megatron divides it (arXiv:1909.08053).

Matrices by columns, then by rows; the embedding and the head by vocabulary, with a cross-entropy that never gathers the
logits. Weights are random, so a rank keeps the first part of what it built, whichever rank it is: sizes, operators and
collectives are those of training, values are not.

With sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2) the ranks divide the tokens between
the matrices as well: what enters the first of two matrices is gathered, what leaves the second is summed and scattered.
Autograd keeps the gathered input of the first; Megatron-LM keeps a rank's part and gathers it again. The tokens are
divided as they enter a modality's first layer, and joined before its projector, whose ranks all do the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mm_autoparallel.errors import ProfileError
from mm_autoparallel.profilers.torch_releases import DeviceMesh, all_gather, reduce_scatter
from mm_autoparallel.profilers.transformers_releases import head_sizes, keeps_its_width

Move = Callable[[Tensor, dist.ProcessGroup], Tensor]
"""Of what a rank has to what it has once the group has spoken."""

_ATTENTION = (("q_proj", "k_proj", "v_proj", "qkv", "q", "k", "v"), ("o_proj", "out_proj", "proj", "projection_layer"))
_FEED_FORWARD = (("gate_proj", "up_proj", "fc1"), ("down_proj", "fc2"))
"""Names of matrices divided by columns, and by rows (transformers 5: Qwen2-VL, Qwen2.5-VL, LLaVA, InternVL, Omni)."""


def shard_layer(layer: nn.Module, mesh: DeviceMesh, sequence_parallel: bool = False) -> None:
    """Divide a transformer layer in place. Raises ProfileError where its attention or its MLP cannot be divided."""
    if all(hasattr(layer, name) for name in ("fc1", "fc2")):  # Whisper's form, which audio towers have
        _shard_pair(layer, _FEED_FORWARD, mesh, sequence_parallel, first=layer.fc1)
    elif not hasattr(layer, "mlp"):
        raise ProfileError(
            f"{type(layer).__name__} has no part `mlp`, so it cannot be divided among tensor parallel ranks; with "
            "transformers 5 more classes can be, or limit the job's search to tp: [1], or profile with --tp 1"
        )
    for name, module in layer.named_children():
        if name in ("self_attn", "attn", "attention"):
            _check_attention(module)
            if hasattr(module, "kv_b_proj"):
                _shard_latent(module, mesh, sequence_parallel)
                continue
            _shard_pair(module, _ATTENTION, mesh, sequence_parallel)
            for size in head_sizes():
                # Only where a forward reshapes by them; what else a module keeps of its size is not read there.
                if isinstance(getattr(module, size, None), int):
                    setattr(module, size, getattr(module, size) // mesh.size())
        elif name == "mlp":
            if hasattr(module, "experts"):
                _shard_experts(module, mesh, sequence_parallel)
            else:
                _shard_pair(module, _FEED_FORWARD, mesh, sequence_parallel)


def shard_sequence(
    first_layer: nn.Module, projector: nn.Module | None, mesh: DeviceMesh, last_layer: nn.Module | None = None
) -> None:
    """Divide a modality's tokens among the ranks from its first layer on, and join them before its projector; after its
    last layer where that is given."""
    group = mesh.get_group()
    own_tokens = 0  # of a rank; whoever runs the first layer alone may give it these

    def part(hidden: Tensor) -> Tensor:
        nonlocal own_tokens
        if hidden.shape[-2] == own_tokens:
            return hidden
        own_tokens = hidden.shape[-2] // mesh.size()
        return _split(hidden, group)

    def divide(_module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        return _with_hidden(arguments, named, part)

    def join(_module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        return _with_hidden(arguments, named, lambda hidden: _join(hidden, group))

    def join_output(_module: nn.Module, _arguments: Any, output: Any) -> Any:
        return (_join(output[0], group), *output[1:]) if isinstance(output, tuple) else _join(output, group)

    first_layer.register_forward_pre_hook(divide, with_kwargs=True)
    if last_layer is not None:
        last_layer.register_forward_hook(join_output)
    elif projector is not None:
        projector.register_forward_pre_hook(join, with_kwargs=True)


def shard_vocabulary(
    embedding: nn.Embedding, head: nn.Linear, mesh: DeviceMesh, sequence_parallel: bool = False
) -> None:
    """Divide the table and the head by vocabulary, in place; where they share their weights they still do."""
    num_rows = embedding.num_embeddings // mesh.size()
    tied = head.weight is embedding.weight
    embedding.weight = _part(embedding.weight[:num_rows])
    head.weight = embedding.weight if tied else _part(head.weight[:num_rows])
    group = mesh.get_group()

    def own_rows(_module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (arguments[0] % num_rows,)

    def join(_module: nn.Module, _arguments: Any, output: Tensor) -> Tensor:
        return _reduce(output, group)

    def enter(_module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        entering = _gather if sequence_parallel else _copy
        return (entering(arguments[0], group), *arguments[1:])

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
    if keeps_its_width(module):
        raise ProfileError(
            f"{type(module).__name__} of this release of transformers gives its output the width of its input, and "
            "cannot be divided among tensor parallel ranks; install transformers 5, limit the job's search to tp: [1], "
            "or profile with --tp 1"
        )
    for name in norms:
        if next(getattr(module, name).parameters()).numel() != head_dim:
            raise ProfileError(
                f"{type(module).__name__} normalises queries and keys over all heads ({name}), which cannot be divided "
                "among tensor parallel ranks; limit the job's search to tp: [1], or profile with --tp 1"
            )


def _shard_pair(
    module: nn.Module,
    names: tuple[tuple[str, ...], tuple[str, ...]],
    mesh: DeviceMesh,
    sequence_parallel: bool,
    first: Any = None,
) -> None:
    """Divide matrices of `module`. first: what takes the input of those divided by columns (None: `module`)."""
    tp = mesh.size()
    columns, rows = ([getattr(module, name) for name in part if hasattr(module, name)] for part in names)
    if not columns or len(rows) != 1:
        raise ProfileError(
            f"{type(module).__name__} has none of the matrices {', '.join(names[0])} and {', '.join(names[1])}, so it "
            "cannot be divided among tensor parallel ranks; profile with --tp 1"
        )
    for linear in columns:
        _keep_columns(linear, tp)
    _keep_rows(rows[0], tp)
    _divide_between(first or module, rows[0], mesh, sequence_parallel)


def _keep_columns(linear: nn.Linear, tp: int) -> None:
    linear.weight = _part(linear.weight[: linear.out_features // tp])
    if linear.bias is not None:
        linear.bias = _part(linear.bias[: linear.out_features // tp])


def _keep_rows(linear: nn.Linear, tp: int) -> None:
    linear.weight = _part(linear.weight[:, : linear.in_features // tp])


def _shard_latent(module: Any, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Attention with compressed keys and values, as Megatron-LM divides it (its
    core/transformer/multi_latent_attention.py).

    Compressing matrices are whole on every rank, and see a rank's own tokens under sequence parallelism; what they made
    is gathered. Keys' norm comes after that here, on all tokens, for this code cuts them from one tensor with the
    rotated part.
    """
    tp, group, entering = mesh.size(), mesh.get_group(), _gather if sequence_parallel else _copy
    query = module.q_proj if module.q_lora_rank is None else module.q_b_proj
    for linear in (query, module.kv_b_proj):
        _keep_columns(linear, tp)
    _keep_rows(module.o_proj, tp)

    def enter(_module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (entering(arguments[0], group), *arguments[1:])

    def gather(_module: nn.Module, _arguments: Any, output: Tensor) -> Tensor:
        return entering(output, group)

    def leave(_module: nn.Module, _arguments: Any, output: Tensor) -> Tensor:
        return (_scatter if sequence_parallel else _reduce)(output, group)

    query.register_forward_pre_hook(enter)
    module.kv_a_proj_with_mqa.register_forward_hook(gather)
    module.o_proj.register_forward_hook(leave)
    if sequence_parallel:
        _see_own_tokens(module, (module.q_a_proj or module.q_proj, module.kv_a_proj_with_mqa), tp)


def _see_own_tokens(module: nn.Module, inner: tuple[nn.Module, ...], tp: int) -> None:
    """Let `module`, which reads the number of all tokens from its input, have one of that shape, which takes no memory,
    and `inner` the rank's own tokens."""
    own: list[Tensor] = []

    def widen(hidden: Tensor) -> Tensor:
        own[:] = [hidden]
        return hidden[..., :1, :].expand(*hidden.shape[:-2], tp * hidden.shape[-2], -1)

    def enter(_module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        return _with_hidden(arguments, named, widen)

    def see(_module: nn.Module, _arguments: tuple[Any, ...]) -> tuple[Tensor]:
        return (own[0],)

    def leave(_module: nn.Module, _arguments: Any, _output: Any) -> None:
        own.clear()

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(leave)
    for each in inner:
        each.register_forward_pre_hook(see, prepend=True)


def _shard_experts(block: nn.Module, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Every rank holds its part of every expert, and the whole router; what the ranks make is summed."""
    tp: int = mesh.size()
    experts: Any = block.experts
    shared: Any = getattr(block, "shared_expert", None) or getattr(block, "shared_experts", None)
    first, second = (getattr(experts, name, None) for name in ("gate_up_proj", "down_proj"))
    if not isinstance(first, nn.Parameter) or not isinstance(second, nn.Parameter):
        raise ProfileError(
            f"{type(block).__name__} holds its experts in no matrices gate_up_proj and down_proj, so they cannot be "
            "divided among tensor parallel ranks; use --tp 1"
        )
    # [experts, 2 x width, hidden] and [experts, hidden, width], as transformers 5 has them
    experts.gate_up_proj = _part(first[:, : first.shape[1] // tp])
    experts.down_proj = _part(second[:, :, : second.shape[2] // tp])
    if shared is not None:
        for linear in (shared.gate_proj, shared.up_proj):
            _keep_columns(linear, tp)
        _keep_rows(shared.down_proj, tp)
    _divide_between(block, block, mesh, sequence_parallel)


def _divide_between(first: nn.Module, last: nn.Module, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """What enters `first` is what all ranks have; the sum of what `last` gives is what all have again."""
    group = mesh.get_group()

    def enter(_module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        entering = _gather if sequence_parallel else _copy
        return _with_hidden(arguments, named, lambda hidden: entering(hidden, group))

    def leave(_module: nn.Module, _arguments: Any, output: Tensor) -> Tensor:
        leaving = _scatter if sequence_parallel else _reduce
        return leaving(output, group)

    first.register_forward_pre_hook(enter, with_kwargs=True)
    last.register_forward_hook(leave)


def _with_hidden(
    arguments: tuple[Any, ...], named: dict[str, Any], change: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call's arguments with another hidden state: the first of them, or the one of that name."""
    if arguments:
        return (change(arguments[0]), *arguments[1:]), named
    return arguments, named | {"hidden_states": change(named["hidden_states"])}


def _apply(function: Any, *arguments: Any) -> Tensor:
    result: Tensor = function.apply(*arguments)
    return result


def _part(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)


class _Reduce(torch.autograd.Function):
    """In place, which an _Exchange is not."""

    @staticmethod
    def forward(context: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        context.mark_dirty(tensor)
        dist.all_reduce(tensor, group=group)
        return tensor

    @staticmethod
    def backward(_context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _same(tensor: Tensor, _group: dist.ProcessGroup) -> Tensor:
    return tensor.view_as(tensor)


def _all_reduce(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    whole = part.contiguous()
    dist.all_reduce(whole, group=group)
    return whole


def _all_gather(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[…, tokens of this rank, width] → […, tokens, width]."""
    num_ranks, first = group.size(), part.shape[0]
    parts = part.new_empty((num_ranks * first, *part.shape[1:]))
    all_gather(parts, part.contiguous(), group)
    return parts.view(num_ranks, first, *part.shape[1:]).movedim(0, -3).flatten(-3, -2)


def _reduce_scatter(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[…, tokens, width] → the sum over the ranks, of the tokens of this rank."""
    divided = whole.reshape(*whole.shape[:-2], group.size(), -1, whole.shape[-1])
    parts = divided.movedim(-3, 0).contiguous()
    part = torch.empty_like(parts[0])
    reduce_scatter(part, parts.flatten(0, 1), group)
    return part


def _own_part(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    return whole.chunk(group.size(), dim=-2)[group.rank()].clone()  # a view would keep the whole alive


class _Exchange(torch.autograd.Function):
    """`there(tensor, group)` forward, and of its gradient `back(gradient, group)`."""

    @staticmethod
    def forward(context: Any, tensor: Tensor, group: dist.ProcessGroup, there: Move, back: Move) -> Tensor:
        context.group, context.back = group, back
        return there(tensor, group)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return context.back(gradient, context.group), None, None, None


def _copy(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Every rank has the input; its gradient is the sum of what the ranks' parts give."""
    return _apply(_Exchange, tensor, group, _same, _all_reduce)


def _reduce(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of what the ranks' parts give, in its place; every rank has its gradient."""
    return _apply(_Reduce, part, group)


def _gather(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Every rank gets all tokens and does something else with them: their gradient is summed."""
    return _apply(_Exchange, part, group, _all_gather, _reduce_scatter)


def _scatter(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of what the ranks give, of which each gets its tokens."""
    return _apply(_Exchange, whole, group, _reduce_scatter, _all_gather)


def _split(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Of what every rank has, each keeps its tokens."""
    return _apply(_Exchange, whole, group, _own_part, _all_gather)


def _join(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Every rank gets all tokens and does the same with them: each needs its part of the gradient."""
    return _apply(_Exchange, part, group, _all_gather, _own_part)


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
