"""What DeepSpeed's layer with experts does otherwise than Megatron-LM's, which MindSpeed had as --moe-model-type
deepspeed_moe (mindspeed/moe, to 2.1.0_core_r0.8.0).

Every expert has C = f · S · k / E places of each rank (capacity factor f, workload.expert_capacity_factor), and what is
beyond them is dropped, so no rank has more than another; places that stay empty are computed and sent like the others.
Tokens are dealt to these E · C places, and outputs are summed from them, by two products with masks of S × E · C
numbers (Lepikhin et al. 2020, arXiv:2006.16668, algorithm 1; DeepSpeed, MOELayer.forward: einsum "sec,sm->ecm" and
"sec,ecm->sm"). Token rearrangement (--enable-token-rearrange-opt) permutes tokens by their indices in the place of
both.
"""

from __future__ import annotations

from dataclasses import replace

from mm_autoparallel.model.operators.operators import ELEMENT_BYTES, MatrixProduct, Operators, Saved


def deal_by_products(operators: Operators, num_tokens: float, num_places: float, width: int) -> Operators:
    """`operators` of a layer with experts whose `num_tokens` go to `num_places` and back by products, not by a permute.

    The gradient of the dispatch mask is never asked for, that of the combining weights is that of a second matrix.
    """
    dispatch = MatrixProduct(num_places, num_tokens, width, trains=False)
    combine = MatrixProduct(num_tokens, num_places, width)
    mask_bytes = ELEMENT_BYTES * num_tokens * num_places
    return replace(
        operators,
        products=(*operators.products, dispatch, combine),
        streams=tuple(stream for stream in operators.streams if stream.name != "permute and unpermute"),
        saved=(*operators.saved, Saved("dispatch mask and combining weights", 2 * mask_bytes)),
    )
