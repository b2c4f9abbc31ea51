"""What adapters add to a layer, and what of the layer itself no longer trains (LoRA, Hu et al. 2021, arXiv:2106.09685).

Beside a matrix of `in` by `out` stand one of `in` by r and one of r by `out`, whose product with the input is scaled
and added. Under tensor parallelism the pair is divided as its matrix is (peft, tuners/lora/tp_layer.py): where that is
by columns the second is, and what enters it is gathered; where it is by rows the first is, and its output is summed.
Letters as in layers.py; r: the rank.
"""

from __future__ import annotations

from dataclasses import replace

from mm_autoparallel.model.blocks.chain import Adapters, TransformerLayer
from mm_autoparallel.model.blocks.parameters import list_adapted
from mm_autoparallel.model.operators.operators import ELEMENT_BYTES, MatrixProduct, Operators, Saved, Share, Stream

_E = ELEMENT_BYTES

_OF_QKV, _OF_FC1 = "norm 1 output, input of query, key and value", "norm 2 output, input of the feed-forward"
INPUTS = {
    **dict.fromkeys(("qkv", "q", "k", "v"), _OF_QKV),
    "proj": "attention output",
    **dict.fromkeys(("fc1", "gate", "up"), _OF_FC1),
    "fc2": "activation, input of the second product",
}
"""Target → the kept input of its matrix, which the first matrix of the pair needs too."""


def add_adapters(
    operators: Operators, layer: TransformerLayer, adapters: Adapters, n: float, share: Share
) -> Operators:
    """`operators` of `layer` with its adapters for n tokens of this device, and no gradient of any other weight."""
    needed = set() if share.low else {INPUTS[target] for target in adapters.targets}
    saved = [one if one.name in needed else replace(one, untrained=one.for_weight) for one in operators.saved]
    products = [replace(product, trains=False) for product in operators.products]
    streams = [replace(stream, weight_bytes=0.0) for stream in operators.streams]
    r, own, inputs = adapters.rank, n / share.sp, dict[str, Saved]()
    for target, in_size, out_size, by_columns in list_adapted(layer, adapters, share.tp):
        in_rows, out_rows = (own, n) if by_columns else (n, own)
        between = _E * n * r
        products.append(MatrixProduct(in_rows, in_size, r, summed_bytes=0.0 if by_columns else between))
        products.append(MatrixProduct(out_rows, r, out_size, gathered_bytes=between if by_columns else 0.0))
        taken, given = in_rows * in_size, out_rows * out_size
        # forward scales what the pair gives and adds it; backward scales its gradient and adds that of the input
        streams.append(Stream(f"adapter of {target}", 5 * _E * given, 2 * _E * given + 3 * _E * taken))
        saved.append(Saved(f"adapter of {target}, between its matrices", _E * out_rows * r))
        if adapters.dropout:
            moved = (2 * _E + 1) * taken  # in both directions one number in, one out, and the mask
            streams.append(Stream(f"dropout before the adapter of {target}", moved, moved))
            saved.append(Saved(f"input of the adapter of {target} and its mask", (_E + 1) * taken))
        elif share.low:  # which multiplies in BF16, and so keeps its input beside the low copy
            inputs[INPUTS[target]] = Saved(f"input of the adapter of {target}", _E * taken, for_weight=True)
    return replace(
        operators,
        products=tuple(products),
        streams=tuple(streams),
        saved=(*saved, *inputs.values()),
        with_backward=tuple(replace(p, weight_bytes=0.0, gradient_bytes=0.0) for p in operators.with_backward),
    )
