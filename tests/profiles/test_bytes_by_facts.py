"""What a stack's facts decide of kept bytes: norms, gathered logits, kernels of attention, copies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mm_autoparallel.model.blocks.chain import Attention, FeedForward, Norm, OutputHead, TransformerLayer
from mm_autoparallel.model.blocks.tokens import TokenCounts
from mm_autoparallel.model.job.stacks import FACTS, StackFacts
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.model.operators.ends import list_operators
from mm_autoparallel.model.operators.operators import Operators, Share

S, B, H, A, V = 1024, 2, 512, 8, 50304
N = S * B
X = 2 * N * H
LOGITS = N * V
LAYER = TransformerLayer(H, "rms", Attention(A, A, H // A), FeedForward(2 * H, gated=True))
FUSED = StackFacts(elementwise="fused")


def layer(facts: StackFacts, **share: Any) -> Operators:
    return list_operators(LAYER, TokenCounts(S, S, S, 1), Share(mbs=B, facts=facts, **share))


def kept(facts: StackFacts, **share: Any) -> float:
    return layer(facts, **share).kept_bytes(True)


def stated(**facts: Any) -> StackFacts:
    return FUSED.stated(StackFacts(**facts))


def test_unfused_norms_keep_six_boundaries_more() -> None:
    """An fp32 copy and the normed numbers before their weight, of both: 2 · (2 + 1) X."""
    assert kept(stated(norms="operators")) - kept(FUSED) == 6 * X


@pytest.mark.parametrize(
    ("norm", "eager", "operators"),
    [("rms", False, True), ("rms", True, True), ("layer", False, True), ("layer", True, False)],
)
def test_what_norms_read_and_write(norm: Norm, eager: bool, operators: bool) -> None:
    """One by one 12 and 24 times the fp32 copy, else 2 and 3 times the bf16 numbers. Eager code's layer norms are
    PyTorch's, which are fused."""
    found = list_operators(
        replace(LAYER, norm=norm), TokenCounts(S, S, S, 1), Share(mbs=B, facts=stated(norms="operators"), eager=eager)
    )
    norms = [stream for stream in found.streams if stream.name in ("norm 1", "norm 2")]
    passing = (12 * 2 * X, 24 * 2 * X) if operators else (2 * X, 3 * X)
    assert [(one.forward_bytes, one.backward_bytes) for one in norms] == [passing, passing]


def test_unfused_norms_are_divided_by_sequence_parallelism() -> None:
    divided = {"tp": 4, "sequence_parallel": True}
    assert kept(stated(norms="operators"), **divided) - kept(FUSED, **divided) == 6 * X / 4


def test_norms_that_gather_keep_their_outputs_whole() -> None:
    divided = {"tp": 4, "sequence_parallel": True}
    assert kept(stated(gathers="norm"), **divided) - kept(FUSED, **divided) == 2 * (X - X / 4)
    assert kept(stated(gathers="norm"), tp=4) == kept(FUSED, tp=4)


def test_what_is_gathered_in_the_norm_is_not_gathered_again() -> None:
    """The backward of a layer then needs no room for it."""
    divided = {"tp": 4, "sequence_parallel": True}

    def at_work(facts: StackFacts) -> float:
        return layer(facts, **divided).working_bytes(True, True)

    assert at_work(stated(gathers="norm")) < at_work(FUSED)


def test_copies_of_operators_one_by_one() -> None:
    """The activated gate, and attention's output as the kernel gave it."""
    assert kept(stated(keeps_copies=True)) - kept(FUSED) == 2 * X + X
    assert kept(stated(keeps_gate=True)) - kept(FUSED) == 2 * X


def test_a_value_within_the_joint_matrix_keeps_it_whole() -> None:
    """Query and key before rotation stay beside the value, as many heads each here."""
    assert kept(stated(keeps_joint=True)) - kept(FUSED) == 2 * X


@pytest.mark.parametrize(("kernel", "score_bytes"), [("", 2), ("fused-softmax", 5), ("torch", 9)])
def test_bytes_of_a_score_by_kernel(kernel: Any, score_bytes: int) -> None:
    flash = kept(stated(), statistics_bytes=0.0)
    unfused = kept(stated(attention=kernel), fused_attention=False)
    assert unfused - flash == score_bytes * B * A * S**2


def test_gradients_of_an_fp32_softmax_are_fp32() -> None:
    """Two score matrices pass in the backward of attention, of 2 bytes a score or of 4."""

    def passing(kernel: Any) -> float:
        return max(p.size_bytes for p in layer(stated(attention=kernel), fused_attention=False).with_backward)

    assert passing("torch") - passing("fused-softmax") == 2 * 2 * B * A * S**2


def test_gathered_logits_hold_18_bytes_each_on_every_rank() -> None:
    """bf16, fp32, log-softmax, two gradients; under TP the rank's own part in bf16 once more."""

    def at_work(**share: Any) -> float:
        block = OutputHead(V, H, "rms")
        facts = stated(gathered_logits=True)
        operators = list_operators(block, TokenCounts(S, S, S, 1), Share(mbs=B, facts=facts, **share))
        return operators.kept_bytes(True) + operators.working_bytes(True, True, shared_gradients=True)

    norm = 2 * X + 4 * N
    assert at_work() == norm + 18 * LOGITS
    assert at_work(tp=4) == norm + (18 + 2 / 4) * LOGITS


def test_a_run_keeps_gradients_and_states_as_its_stack_does_unless_it_says_otherwise() -> None:
    plain = Workload(global_batch_size=8, seq_length=S)
    assert FACTS["aleph-alpha"].gradient_bytes == 2.0
    assert plain.run_by("aleph-alpha").gradient_bytes == 2.0
    assert plain.run_by("aleph-alpha").reduction_bytes == 4.0
    assert plain.run_by("megatron-core").gradient_bytes == 4.0
    assert plain.run_by("llm-foundry").optimizer_bytes == 10.0
    assert plain.run_by("megatron-core").optimizer_bytes == 12.0
    said = Workload(global_batch_size=8, seq_length=S, gradient_bytes=4.0)
    assert said.run_by("aleph-alpha").gradient_bytes == 4.0
