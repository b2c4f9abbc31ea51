"""workload.samples.packing from job file to step: attention within samples alone, and bounds that hold."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mm_autoparallel.errors import JobError, ProfileError
from mm_autoparallel.model.blocks.chain import Attention
from mm_autoparallel.model.blocks.tokens import TokenCounts
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.costs.sample_loads import loads_ms, relative_loads, relative_sizes, sample_laws
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.operators.attention import count_pairs
from mm_autoparallel.model.readers.job_file import parse_job
from mm_autoparallel.planner.drawn_batches import DrawnBatches, draw_batches
from mm_autoparallel.planner.evaluate import Estimate, evaluate
from mm_autoparallel.planner.over_batches import step_over_batches
from mm_autoparallel.planner.plan import Plan

TEXT = {"text_tokens": {"values": [256, 512, 1024, 2048], "weights": [4, 3, 2, 1]}, "batches": 40}
PACKED = TEXT | {"packing": {"tokens": 4096, "rule": "first_fit_decreasing"}}
LAYERS = {"num_layers": 4, "hidden_size": 2048, "ffn_size": 5632, "num_heads": 16, "norm": "rms"}
MODEL = {"name": "text", "text": {"vocab_size": 32000, "layers": LAYERS}}


def text_job(samples: Any, **workload: Any) -> Job:
    cluster = {"num_nodes": 1, "devices_per_node": 4, "device": "a100-80g"}
    given = {"global_batch_size": 16} | ({"samples": samples} if samples else {}) | workload
    return parse_job({"model": MODEL, "cluster": cluster, "workload": given}, Path("job.yaml"))


def step_of(job: Job, dp: int = 2) -> Estimate:
    return evaluate(
        job,
        Plan(
            strategy=Strategy(pp=2, tp=1, dp=dp, mbs=1),
            layers={"text": (2, 2)},
            recompute={"text": (0, 0)},
            global_batch_size=job.workload.global_batch_size,
        ),
    )


def test_a_packed_sequence_counts_each_samples_own_length_squared() -> None:
    attention = Attention(num_heads=16, num_kv_groups=16, head_dim=128, causal=True, rotary=True)
    whole = count_pairs(attention, TokenCounts(4096, 4096, 4096, num_spans=1))
    assert count_pairs(attention, TokenCounts(4096, 4096, 4096, num_spans=4)) == 4 * 1024**2 / 2 == whole / 4
    job = text_job(PACKED)
    assert job.samples is not None
    assert job.samples.sequences is not None
    law = sample_laws(CostModel(job), job.samples)["text"]
    relative = relative_loads(CostModel(job), job.samples)["text"]
    for s in (0, 7, job.samples.num_sequences - 1):
        held = job.samples.text_tokens[job.samples.sequences[s] : job.samples.sequences[s + 1]].astype(float)
        own_ms = law.square_ms * (held**2).sum() + law.linear_ms * held.sum()
        assert relative[s] * law.mean_ms == pytest.approx(own_ms)
    assert law.square_ms > 0.0


def test_the_workload_is_that_of_the_mean_sequence() -> None:
    job, plain = text_job(PACKED), text_job(TEXT)
    assert job.samples is not None
    assert job.samples.num_sequences < len(job.samples) == 20_000
    assert job.workload.seq_length == pytest.approx(4096, rel=0.02)  # they fill up: short ones are many
    squares = np.mean(job.samples.of_sequences(job.samples.text_tokens.astype(float) ** 2))
    assert job.workload.samples_per_sequence == round(4096**2 / squares) == 4
    assert job.sha256 != plain.sha256
    assert relative_loads(CostModel(job), job.samples)["text"].mean() == pytest.approx(1.0, rel=0.05)
    whole = text_job(None, seq_length=job.workload.seq_length)
    assert step_of(job).step_ms < step_of(whole).step_ms  # attention within samples is less


def test_sequences_of_one_sample_each_are_the_samples() -> None:
    alike = {"text_tokens": 1024, "batches": 40}
    job, plain = text_job(alike | {"packing": {"tokens": 1024, "padded": True}}), text_job(alike)
    assert job.workload.samples_per_sequence == 1
    assert step_of(job).step_ms == step_of(plain).step_ms
    over, of_plain = step_of(job).over_batches, step_of(plain).over_batches
    assert over is not None
    assert of_plain is not None
    assert over.steps_ms == pytest.approx(of_plain.steps_ms, rel=1e-9)
    assert over.packing == "in_order up to 1024 tokens, 1.0 samples a sequence, 100 % full, padded"


def test_padding_runs_through_the_decoder() -> None:
    job, open_job = (text_job(TEXT | {"packing": {"tokens": 4096, "padded": one}}) for one in (True, False))
    assert job.samples is not None
    known = CostModel(job)
    assert relative_sizes(known, job.samples)["text"] == pytest.approx(4096 / job.workload.seq_length)
    assert job.workload.seq_length == 4096 > open_job.workload.seq_length
    law, samples = sample_laws(known, job.samples)["text"], job.samples
    padding = 4096.0 - samples.of_sequences(samples.text_tokens)
    own_ms = samples.of_sequences(loads_ms(samples, law, job.model)) + law.span_ms(padding)
    assert relative_loads(known, samples)["text"] * law.mean_ms == pytest.approx(own_ms)


@pytest.mark.parametrize("rule", ["in_order", "first_fit_decreasing"])
def test_no_mean_over_all_batches_is_below_the_step_at_the_mean(rule: str) -> None:
    """Every batch that four sequences can make, so that nothing is left to chance."""
    job = text_job(PACKED | {"packing": {"tokens": 4096, "rule": rule}}, global_batch_size=4)
    estimate = step_of(job)
    drawn = draw_batches(CostModel(job))
    random = np.random.default_rng(3)
    for _ in range(5):
        some = random.choice(len(drawn.load_factor["text"]), 4, replace=False)
        of = ({name: values[some] for name, values in part.items()} for part in (drawn.load_factor, drawn.size_factor))
        every = DrawnBatches(*of, np.array(list(product(range(4), repeat=4))))
        over = step_over_batches(every, estimate.batch_steps)
        assert over.at_mean_ms <= over.mean_ms * (1 + 1e-12)
        assert over.mean_ms > over.at_mean_ms * 1.0001  # they do differ


def test_a_plan_says_what_packing_was_assumed() -> None:
    document = step_of(text_job(PACKED)).plan_document()["step_over_batches"]
    assert document["packing"].startswith("first_fit_decreasing up to 4096 tokens, 6.1 samples")
    assert "packing" not in step_of(text_job(TEXT)).plan_document()["step_over_batches"]
    over = step_of(text_job(PACKED)).over_batches
    assert over is not None
    assert "(arrival order; packed first_fit_decreasing up to 4096 tokens" in over.words


@pytest.mark.parametrize(
    ("samples", "workload", "message"),
    [
        (TEXT | {"packing": {"tokens": 1000}}, {}, r"samples.packing: sample \d+ has 2,048 tokens and"),
        (TEXT | {"packing": {"tokens": 4096, "rule": "best"}}, {}, "workload.samples.packing.rule"),
        (TEXT | {"packing": {}}, {}, "workload.samples.packing.tokens"),
        (PACKED, {"attention": "unfused"}, "attention is unfused, which works out the scores of all pairs"),
        (PACKED, {"stack": "mindformers"}, "stack mindformers are planned for whole sequences"),
        (PACKED, {"seq_length": 512}, "workload.seq_length is 512, and workload.samples has 4,0"),
        (PACKED, {"samples_per_sequence": 9}, "workload.samples_per_sequence is 9, and workload.samples has 3.7"),
        (None, {"seq_length": 4, "samples_per_sequence": 9}, "samples_per_sequence is 9, more than the 4 tokens"),
    ],
)
def test_what_cannot_be_packed_is_named(samples: Any, workload: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        text_job(samples, **workload)


def test_packed_layers_are_not_measured_as_whole_ones() -> None:
    pytest.importorskip("torch")
    from mm_autoparallel.profilers.kinds import find_kinds

    with pytest.raises(ProfileError, match="samples_per_sequence is 4, and layers are run here on whole sequences"):
        find_kinds(text_job(PACKED))


def test_keys_of_packed_samples_travel_between_context_parallel_ranks() -> None:
    """Each sample is divided among all of them, however short it is."""
    costs = CostModel(text_job(None, seq_length=4096, samples_per_sequence=8))
    layer = next(block for block in costs.chain.blocks if block.kind == "text_layer")
    at = costs.chain.blocks.index(layer)
    alone, shared = (costs.look_up(Strategy(pp=1, tp=1, dp=1, mbs=1, cp=cp))[at] for cp in (1, 2))
    assert shared.total_ms > alone.total_ms / 2
