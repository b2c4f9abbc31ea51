"""The operators of the output head: final norm, vocabulary matrix and loss. Letters as in ends.py."""

from __future__ import annotations

from dataclasses import replace

from mm_autoparallel.model.blocks.chain import OutputHead
from mm_autoparallel.model.blocks.tokens import TokenCounts
from mm_autoparallel.model.operators.operators import (
    ELEMENT_BYTES,
    MatrixProduct,
    Operators,
    Passing,
    Saved,
    Share,
    Stream,
    keep_norm,
    stream_norm,
)

_E = ELEMENT_BYTES


def list_head(head: OutputHead, tokens: TokenCounts, share: Share) -> Operators:
    """The head as the job runs it: whole or in pieces of tokens, with what a masked language model puts before it."""
    if share.loss_chunk_tokens and not head.masked:
        return _list_chunked_head(head, tokens, share)
    plain = list_output_head(head, tokens, share)
    return _add_masked(plain, head, tokens, share) if head.masked else plain


def _add_masked(plain: Operators, head: OutputHead, tokens: TokenCounts, share: Share) -> Operators:
    """A square matrix, GELU and a norm before the vocabulary. Pooler and classifier see one token a sample: nothing."""
    n, h = share.rows(tokens.output_tokens) / share.sp, head.hidden_size
    size_bytes = _E * n * h
    added = (
        Saved("input of the square matrix", size_bytes, for_weight=True),
        Saved("its output, input of the activation", size_bytes),
        *keep_norm("norm of the head", head.norm, n, h, share),
    )
    streams = (
        Stream("activation of the head", 2 * size_bytes, 3 * size_bytes),
        stream_norm("norm of the head", n * h, head.norm, share),
    )
    return replace(
        plain,
        products=(MatrixProduct(n, h, h), *plain.products),
        streams=(*streams, *plain.streams),
        saved=(*added, *plain.saved),
    )


def list_output_head(head: OutputHead, tokens: TokenCounts, share: Share) -> Operators:
    """Final norm, vocabulary matrix and cross-entropy."""
    n, h, v = share.rows(tokens.output_tokens), head.hidden_size, head.vocab_size / share.tp
    keeps = share.facts.gathered_logits and share.cross_entropy == "unfused"
    gathers = share.facts.gathered_logits and share.tp > 1
    boundary, whole = _E * n * h / share.sp, _E * n * h
    logits = n * head.vocab_size if share.facts.gathered_logits else n * v
    gathered = whole if share.sp > 1 and not share.eager else 0.0  # eager code keeps it
    scattered = boundary if share.sp > 1 else 0.0
    loss = _list_gathered_loss(logits, n * v if gathers else 0.0) if keeps else _list_cross_entropy(logits, share)
    kept_bytes = sum(saved.size_bytes for saved in loss.saved)
    # parts are gathered side by side and joined along the vocabulary; each rank cuts its part of the gradient out
    copies = (Stream("joined logits", 2 * _E * logits, 2 * _E * logits),) if gathers else ()
    return Operators(
        products=(MatrixProduct(n, h, v, gathered_bytes=whole, joined_bytes=_E * logits if gathers else 0.0),),
        streams=(stream_norm("norm", n * h / share.sp, head.norm, share), *copies, *loss.streams),
        saved=(
            *keep_norm("norm", head.norm, n / share.sp, h, share),
            Saved("norm output, input of the vocabulary matrix", whole if share.eager else boundary, for_weight=True),
            *loss.saved,
        ),
        forward_only=tuple(Passing(p.moment, p.size_bytes + gathered) for p in loss.forward_only),
        with_backward=(
            *(Passing(p.moment, p.size_bytes + gathered) for p in loss.with_backward),
            # what the loss kept is freed by now; the input's gradient is scattered beside the whole one
            Passing(
                "bf16 gradients of logits, input and table",
                _E * logits - kept_bytes + whole + gathered + scattered,
                0.0,
                _E * h * v,
            ),
        ),
        input_bytes=boundary,
        output_bytes=0.0,
    )


def _list_chunked_head(head: OutputHead, tokens: TokenCounts, share: Share) -> Operators:
    """Head and loss in pieces of tokens, each forward and backward at once, so that the gradients of input and table

    are there from the forward on, and what a piece kept is gone (MindSpeed-MM, mindspeed_mm/fsdp/features/memory/
    chunkloss: the products' times are counted where those of the whole head are).
    """
    whole = list_output_head(head, tokens, share)
    n, h, v = share.rows(tokens.output_tokens), head.hidden_size, head.vocab_size / share.tp
    piece = min(n, share.mbs * share.loss_chunk_tokens)
    num_pieces = n / piece if piece else 0.0
    loss = _list_cross_entropy(piece * v, share)
    loss_bytes = sum(saved.size_bytes for saved in loss.saved)
    table_bytes, gradients_bytes = _E * h * v, _E * piece * (v + h)
    at_work = (*loss.with_backward, Passing("bf16 gradients", gradients_bytes))
    passing = tuple(
        Passing(f"{moment.moment} of a piece", moment.size_bytes + loss_bytes, 0.0, table_bytes) for moment in at_work
    )
    return replace(
        whole,
        # each piece adds its gradient of the table to that of the pieces before
        streams=(*whole.streams, Stream("sum of the table's gradients", 0.0, 0.0, 3 * table_bytes * num_pieces)),
        saved=(
            *keep_norm("norm", head.norm, n / share.sp, h, share),
            Saved("gradient of the vocabulary matrix's input", _E * n * h),
            Saved("gradient of the table", table_bytes, for_weight=True),
        ),
        forward_only=tuple(Passing(moment.moment, moment.size_bytes) for moment in passing),
        with_backward=passing,
    )


def _list_gathered_loss(logits: float, own_logits: float) -> Operators:
    """The loss where every rank gathers all logits and hands an fp32 copy to PyTorch's cross_entropy.

    bf16 logits (those of the rank's own part too), the copy and its log-softmax stay until the backward, which makes a
    fp32 gradient of each of the latter: 18 bytes a logit.
    """
    return Operators(
        streams=(Stream("cross-entropy", (2 + 4 + 4 + 8 + 4) * logits, (4 + 4 + 4 + 2) * logits),),
        saved=(
            Saved("bf16 logits", _E * (logits + own_logits)),
            Saved("fp32 logits and their log-softmax", (4 + 4) * logits),
        ),
        forward_only=(Passing("bf16 and fp32 logits beside their log-softmax", 10 * logits + _E * own_logits),),
        with_backward=(Passing("fp32 gradients of both", 8 * logits),),
    )


def _list_cross_entropy(logits: float, share: Share) -> Operators:
    """The loss of `logits` numbers in bf16, its own inputs included.

    Unfused (Megatron-LM, core/tensor_parallel/cross_entropy.py): an fp32 copy becomes the softmax, and that the
    gradient, which is copied to bf16. Fused (TransformerEngine, pytorch/triton/cross_entropy.py): the gradient is
    written over the bf16 logits in the forward already. Hugging Face (transformers, loss/loss_utils.py, and PyTorch's
    log_softmax and nll_loss): an fp32 copy beside its log-softmax, of which each has a gradient. Its bf16 logits are
    let go before the backward, as its Trainer does (trainer.py, compute_loss returns the loss alone); a loop that holds
    the model's output through the backward needs them too. Shifted: the same on a copy without the last token of each
    sample (MindSpeed-MM, mindspeed_mm/models/vl_model.py, forward). A graph of MindFormers
    (mindformers/core/loss/loss.py, whose gradients are written by hand) keeps the log-softmax and the labels as one-hot
    rows, both in fp32; its backward makes the softmax of one and takes the other from it.
    """
    if share.graph and share.cross_entropy == "unfused":
        return Operators(
            streams=(Stream("cross-entropy", (2 + 4 + 8 + 4 + 4 + 8) * logits, (4 + 4 + 8 + 4 + 2) * logits),),
            saved=(Saved("fp32 log-softmax", 4 * logits), Saved("fp32 one-hot labels", 4 * logits)),
            forward_only=(Passing("bf16 and fp32 logits beside their log-softmax and labels", 14 * logits),),
            with_backward=(Passing("fp32 softmax and the gradient made of it", 8 * logits),),
        )
    if share.cross_entropy == "fused":
        return Operators(
            # logits read for maximum and sum, read again and overwritten; backward: scaled in place
            streams=(Stream("cross-entropy", (2 + 2 + 2) * logits, (2 + 2) * logits),),
            saved=(Saved("bf16 gradient in the logits' place", _E * logits),),
            forward_only=(Passing("bf16 logits", _E * logits),),
        )
    if share.cross_entropy in ("transformers", "shifted"):
        # the loss of a divided vocabulary turns its fp32 copy into the softmax, and keeps that
        divided = share.tp > 1
        # the logits of several samples do not lie together any more without the last token of each: a copy
        copied_bytes = 4 * logits if share.cross_entropy == "shifted" and share.mbs > 1 else 0.0
        return Operators(
            streams=(
                Stream(
                    "cross-entropy",
                    (2 + 4 + 4 + 4 + 4) * logits + 2 * copied_bytes,
                    (4 + 4 + 4 + 4 + 4 + 2) * logits + 2 * copied_bytes,
                ),
            ),
            saved=(Saved("fp32 softmax" if divided else "fp32 log-softmax", 4 * logits),),
            forward_only=(
                Passing(
                    "bf16 and fp32 logits beside their log-softmax", (6 if divided else 10) * logits + copied_bytes
                ),
            ),
            with_backward=(
                Passing("bf16 and fp32 logits beside their log-softmax", (2 if divided else 6) * logits + copied_bytes),
                Passing("fp32 gradient beside the one made of it, bf16 if divided", (6 if divided else 8) * logits),
            ),
        )
    return Operators(
        # forward: bf16 read, fp32 written; maximum read; exponential read and written; sum read.
        # backward: softmax read, gradient written, read again, bf16 gradient written
        streams=(Stream("cross-entropy", (2 + 4 + 4 + 8 + 4) * logits, (4 + 4 + 4 + 2) * logits),),
        saved=(Saved("fp32 softmax", 4 * logits),),
        forward_only=(Passing("bf16 and fp32 logits", 6 * logits),),
        with_backward=(Passing("bf16 logits beside the fp32 softmax", 2 * logits),),
    )
