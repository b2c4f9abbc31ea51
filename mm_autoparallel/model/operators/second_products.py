"""Selective recomputation by operator, as torchtitan's policy has it (torchtitan/distributed/activation_checkpoint.py).

From forward to backward stay a layer's input, what attention gives, and the outputs of the first, third and so on of
its matrices, in the order in which they multiply: query, key, value, output, the feed-forward's first (gate and up by
themselves) and last. The others run once more, with norms, rotations, residuals and activations. Under sequence
parallelism sums stay too, so that what they are made of does not run again, and gathers do.
"""

from __future__ import annotations

from dataclasses import replace

from mm_autoparallel.model.blocks.chain import Attention, FeedForward, TransformerLayer
from mm_autoparallel.model.operators.operators import ELEMENT_BYTES, MatrixProduct, Operators, Passing, Saved, Share

_E = ELEMENT_BYTES
_OUTPUT = 3
"""Place of attention's output matrix among a layer's."""


def rerun_second_products(operators: Operators, layer: TransformerLayer, n: float, share: Share) -> Operators:
    """`operators` of a dense `layer` for `n` tokens of this device, under that policy; of other layers as they are."""
    attention, mlp, h = layer.attention, layer.mlp, layer.hidden_size
    if not (isinstance(attention, Attention) and isinstance(mlp, FeedForward)):
        return operators
    query = attention.num_heads * attention.head_dim / share.tp
    keys = max(attention.num_kv_groups / share.tp, 1.0) * attention.head_dim
    inner = [(h, mlp.ffn_size / share.tp)] * (2 if mlp.gated else 1)
    matrices = [(h, query), (h, keys), (h, keys), (query, h), *inner, (mlp.ffn_size / share.tp, h)]
    summed = (_OUTPUT, len(matrices) - 1)  # places whose results tensor parallel ranks sum
    own = _E * n * h / share.sp
    saved, again = [Saved("layer input", own)], []
    for place, (inputs, outputs) in enumerate(matrices):
        if place % 2 == 0:
            size_bytes = own if place in summed else _E * n * outputs
            saved.append(Saved(f"output of matrix {place + 1}", size_bytes))
        elif place in summed and share.sp > 1:
            saved.append(Saved(f"sum of what matrix {place + 1} gave", own))
        elif place != len(matrices) - 1:  # nothing in the layer's backward asks for the last one's output
            again.append(MatrixProduct(n, inputs, outputs, precision=share.precision))
    gathers = [
        MatrixProduct(0.0, h, 0.0, gathered_bytes=_E * n * h, precision=share.precision) for _ in range(2)
    ]  # one for each half
    kept_of_core = [part for part in operators.saved if part.name in ("attention output", "softmax statistics")]
    freed_bytes = operators.kept_bytes(trainable=True)
    saved += kept_of_core
    restored_bytes = max(0.0, freed_bytes - sum(part.size_bytes for part in saved))
    return replace(
        operators,
        saved=tuple(saved),
        with_backward=tuple(
            Passing(p.moment, p.size_bytes + restored_bytes, p.weight_bytes, p.gradient_bytes)
            for p in operators.with_backward
        ),
        rerun=Operators(products=(*gathers, *again), streams=operators.streams),
    )
