"""Model: a GPT as a chain of parts, of which any contiguous piece is a stage: embedding, layers, head with the loss.

By its flags it is of GPT-3's kind (layer norms, biases, learned positions), of Llama's (RMS norms, gated feed-forward,
rotary positions, grouped keys and values) or of Mixtral's (the same with experts). Every matrix draws its weights from
a generator of its own, seeded by the run's seed and its name, and keeps this rank's slice: whatever the parallel sizes,
the model is the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, scaled_dot_product_attention, silu
from torch.utils.checkpoint import checkpoint

from parallel import ALONE, Group, copied, entered, exchanged, left, summed, whole_weight

ROTARY_BASE = 10000.0


@dataclass(frozen=True)
class Sizes:
    """What the flags say of the model. num_experts: 0 without. deals_evenly: tokens go to all experts in turn, whatever
    their router prefers. vocab_size: padded."""

    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_groups: int
    vocab_size: int
    seq_length: int
    rms: bool
    gated: bool
    biased: bool
    rotary: bool
    num_experts: int
    top_k: int
    deals_evenly: bool
    init_std_scale: float


@dataclass(frozen=True)
class Recipe:
    """How weights are drawn, on what, and among which ranks they are divided."""

    sizes: Sizes
    seed: int
    device: torch.device
    tp: Group = ALONE
    ep: Group = ALONE

    def draw(self, name: str, *shape: int, divided: int | None = None) -> nn.Parameter:
        """A matrix of `shape`, of which this rank keeps its slice along the dimension `divided`."""
        digest = hashlib.sha256(f"{self.seed} {name}".encode()).digest()
        generator = torch.Generator(self.device).manual_seed(int.from_bytes(digest[:7], "big"))
        values = torch.empty(shape, device=self.device).normal_(0.0, self.sizes.init_std_scale, generator=generator)
        return self._keep(values, divided)

    def fill(self, value: float, size: int, divided: int | None = None) -> nn.Parameter:
        """A vector of one value, likewise."""
        return self._keep(torch.full((size,), value, device=self.device), divided)

    def _keep(self, values: Tensor, divided: int | None) -> nn.Parameter:
        if divided is not None:
            return nn.Parameter(values.chunk(self.tp.size, divided)[self.tp.place].clone())
        parameter = nn.Parameter(values)
        parameter.is_whole = True  # so that a norm over all ranks counts it once
        return parameter


class Linear(nn.Module):
    """A matrix divided by columns (its outputs) or rows (its inputs; the ranks' products are still to be summed)."""

    def __init__(
        self, recipe: Recipe, name: str, inputs: int, outputs: int, divided: Literal["columns", "rows"]
    ) -> None:
        super().__init__()
        self.by_rows, self.tp = divided == "rows", recipe.tp
        self.weight = recipe.draw(name, outputs, inputs, divided=1 if self.by_rows else 0)
        biased = recipe.sizes.biased
        self.bias = recipe.fill(0.0, outputs, divided=None if self.by_rows else 0) if biased else None

    def forward(self, hidden: Tensor) -> Tensor:
        return linear(hidden, self.weight, None if self.by_rows else self.bias)

    def total(self, product: Tensor) -> Tensor:
        """The sum of all ranks' products, with the bias."""
        hidden = left(product, self.tp)
        return hidden if self.bias is None else hidden + whole_weight(self.bias, self.tp)


class Norm(nn.Module):
    """RMS norm or layer norm, whole on every rank."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        width, self.tp = recipe.sizes.hidden_size, recipe.tp
        self.weight = recipe.fill(1.0, width)
        self.bias = None if recipe.sizes.rms else recipe.fill(0.0, width)

    def forward(self, hidden: Tensor) -> Tensor:
        weight = whole_weight(self.weight, self.tp)
        if self.bias is None:
            return nn.functional.rms_norm(hidden, weight.shape, weight, 1e-5)
        return nn.functional.layer_norm(hidden, weight.shape, weight, whole_weight(self.bias, self.tp))


class Attention(nn.Module):
    """Causal attention; tensor parallel ranks have heads of their own."""

    def __init__(self, recipe: Recipe, name: str) -> None:
        super().__init__()
        sizes, self.tp = recipe.sizes, recipe.tp
        width = sizes.hidden_size // sizes.num_heads
        self.head_dim = width
        self.query = Linear(recipe, f"{name}.query", sizes.hidden_size, sizes.hidden_size, "columns")
        groups = width * sizes.num_kv_groups
        self.key = Linear(recipe, f"{name}.key", sizes.hidden_size, groups, "columns")
        self.value = Linear(recipe, f"{name}.value", sizes.hidden_size, groups, "columns")
        self.out = Linear(recipe, f"{name}.out", sizes.hidden_size, sizes.hidden_size, "rows")

    def forward(self, hidden: Tensor, angles: Tensor | None) -> Tensor:
        hidden = entered(hidden, self.tp)
        query, key, value = (
            part(hidden).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        if angles is not None:
            query, key = _rotate(query, angles), _rotate(key, angles)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.out.total(self.out(mixed.transpose(1, 2).flatten(2)))


def _rotate(heads: Tensor, angles: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021, arXiv:2104.09864); angles: (sequence, half a head)."""
    first, second = heads.chunk(2, -1)
    cosine, sine = angles.cos(), angles.sin()
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)


class FeedForward(nn.Module):
    """Two matrices with GELU between them, or three of which one gates. What it gives is still to be summed."""

    def __init__(self, recipe: Recipe, name: str) -> None:
        super().__init__()
        sizes = recipe.sizes
        width, inner = sizes.hidden_size, sizes.ffn_size
        self.gate = Linear(recipe, f"{name}.gate", width, inner, "columns") if sizes.gated else None
        self.up = Linear(recipe, f"{name}.up", width, inner, "columns")
        self.down = Linear(recipe, f"{name}.down", inner, width, "rows")

    def forward(self, hidden: Tensor) -> Tensor:
        up = self.up(hidden)
        return self.down(gelu(up) if self.gate is None else silu(self.gate(hidden)) * up)


class Dense(nn.Module):
    """A feed-forward that all tokens take."""

    def __init__(self, recipe: Recipe, name: str) -> None:
        super().__init__()
        self.tp, self.inner = recipe.tp, FeedForward(recipe, name)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.inner.down.total(self.inner(entered(hidden, self.tp)))


class Experts(nn.Module):
    """Feed-forwards of which each token takes the `top_k` that its router prefers (Jiang et al., arXiv:2401.04088).

    Expert parallel ranks hold a run of them each, and deal tokens among themselves. No token is dropped. A router that
    was never trained sends nearly all tokens of a layer to the same experts; `deals_evenly` does not let it.
    """

    def __init__(self, recipe: Recipe, name: str) -> None:
        super().__init__()
        sizes, self.tp, self.ep = recipe.sizes, recipe.tp, recipe.ep
        self.num_experts, self.top_k, self.deals_evenly = sizes.num_experts, sizes.top_k, sizes.deals_evenly
        self.router = recipe.draw(f"{name}.router", sizes.num_experts, sizes.hidden_size)
        held = sizes.num_experts // self.ep.size
        first = held * self.ep.place
        self.experts = nn.ModuleList(
            FeedForward(recipe, f"{name}.expert{number}") for number in range(first, first + held)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = entered(hidden, self.tp)
        flat = hidden.flatten(0, 1)
        scores = linear(flat, copied(self.router, self.tp)).softmax(-1)
        if self.deals_evenly:
            chosen = torch.arange(len(flat) * self.top_k, device=flat.device).view(-1, self.top_k) % self.num_experts
            shares = scores.gather(-1, chosen)
        else:
            shares, chosen = scores.topk(self.top_k)
        shares = shares / shares.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        token = order // self.top_k
        counts = chosen.flatten().bincount(minlength=self.num_experts)
        given = self._run(flat[token], counts) * shares.flatten()[order, None]
        return left(torch.zeros_like(flat).index_add(0, token, given).view_as(hidden), self.tp)

    def _run(self, rows: Tensor, counts: Tensor) -> Tensor:
        """What the experts make of rows that are sorted by expert, in their order. counts: of each expert's rows."""
        if self.ep.size == 1:
            parts = rows.split(counts.tolist())
            return torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        dealt = counts.view(self.ep.size, -1)
        came = torch.empty_like(dealt)
        dist.all_to_all_single(came, dealt.contiguous(), group=self.ep.handle)
        sent, received = dealt.sum(1).tolist(), came.sum(1).tolist()
        parts = exchanged(rows, sent, received, self.ep).split(came.flatten().tolist())
        held = len(self.experts)
        made: list[Tensor] = [rows] * len(parts)
        for number, expert in enumerate(self.experts):
            own = parts[number::held]  # from each rank in turn
            made[number::held] = expert(torch.cat(own)).split([len(part) for part in own])
        return exchanged(torch.cat(made), received, sent, self.ep)


class Layer(nn.Module):
    """Attention and feed-forward, each behind its norm and beside its input."""

    def __init__(self, recipe: Recipe, number: int) -> None:
        super().__init__()
        name = f"layer{number}"
        self.attention_norm, self.attention = Norm(recipe), Attention(recipe, f"{name}.attention")
        kind = Experts if recipe.sizes.num_experts else Dense
        self.feed_forward_norm, self.feed_forward = Norm(recipe), kind(recipe, f"{name}.feed_forward")

    def forward(self, hidden: Tensor, angles: Tensor | None) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden), angles)
        return hidden + self.feed_forward(self.feed_forward_norm(hidden))


class Embedding(nn.Module):
    """Rows of the vocabulary, of which each tensor parallel rank has a run, and learned positions where they are."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        sizes, self.tp = recipe.sizes, recipe.tp
        self.weight = recipe.draw("embedding", sizes.vocab_size, sizes.hidden_size, divided=0)
        self.positions = None if sizes.rotary else recipe.draw("positions", sizes.seq_length, sizes.hidden_size)

    def forward(self, tokens: Tensor) -> Tensor:
        places, is_mine = _own_rows(tokens, len(self.weight), self.tp)
        hidden = left(self.weight[places] * is_mine[..., None], self.tp)
        if self.positions is None:
            return hidden
        first = hidden.shape[1] * self.tp.place if self.tp.divides_sequence else 0
        return hidden + whole_weight(self.positions, self.tp)[first : first + hidden.shape[1]]


class Head(nn.Module):
    """Final norm, output matrix divided by the vocabulary, and the mean loss over all next tokens."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        sizes, self.tp = recipe.sizes, recipe.tp
        self.norm = Norm(recipe)
        self.weight = recipe.draw("head", sizes.vocab_size, sizes.hidden_size, divided=0)

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        logits = linear(entered(self.norm(hidden), self.tp), self.weight).flatten(0, 1)
        largest = logits.detach().amax(-1)
        if self.tp.size > 1:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.tp.handle)
        logits = logits - largest[:, None]
        places, is_mine = _own_rows(labels.flatten(), len(self.weight), self.tp)
        wanted = summed(logits.gather(1, places[:, None])[:, 0] * is_mine, self.tp)
        return (summed(logits.exp().sum(-1), self.tp).log() - wanted).mean()


def _own_rows(tokens: Tensor, num_rows: int, tp: Group) -> tuple[Tensor, Tensor]:
    """Where tokens stand in this rank's run of the vocabulary, and whether they do."""
    places = tokens - num_rows * tp.place
    return places.clamp(0, num_rows - 1), (places >= 0) & (places < num_rows)


class Stage(nn.Module):
    """Consecutive layers, with the embedding before the first and the head behind the last of the model.

    Its output is the loss where it ends the model. recomputed: how many of its layers, the first ones, run again in the
    backward instead of keeping their activations.
    """

    def __init__(self, recipe: Recipe, numbers: Sequence[int], is_first: bool, is_last: bool, recomputed: int = 0):
        super().__init__()
        sizes = recipe.sizes
        self.embedding = Embedding(recipe) if is_first else None
        self.layers = nn.ModuleList(Layer(recipe, number) for number in numbers)
        self.head = Head(recipe) if is_last else None
        self.recomputed = recomputed
        half = sizes.hidden_size // sizes.num_heads // 2
        turns = ROTARY_BASE ** (-torch.arange(half, device=recipe.device) / half)
        self.angles = torch.outer(torch.arange(sizes.seq_length, device=recipe.device), turns) if sizes.rotary else None

    def forward(
        self, hidden: Tensor | None = None, *, tokens: Tensor | None = None, labels: Tensor | None = None
    ) -> Tensor:
        if self.embedding is not None:
            hidden = self.embedding(tokens)
        for number, layer in enumerate(self.layers):
            if number < self.recomputed and torch.is_grad_enabled():
                hidden = checkpoint(layer, hidden, self.angles, use_reentrant=False)
            else:
                hidden = layer(hidden, self.angles)
        return hidden if self.head is None else self.head(hidden, labels)
