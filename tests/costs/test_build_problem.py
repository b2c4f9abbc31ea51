"""The bridge as a whole: what each block of a Problem says, plausibility on a real job, and laws for any figures."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mm_autoparallel.errors import JobError, ProfileError
from mm_autoparallel.model.blocks.expand import expand
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.costs.stage import block_costs, build_problem, describe_provenance
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.profiles.calibration import calibration_of
from mm_autoparallel.model.profiles.store import hash_model
from mm_autoparallel.model.readers.job_file import read_job
from mm_autoparallel.pipeline.problem import ChainBlock, Problem

MakeJob = Callable[..., Job]
STRATEGY = Strategy(pp=4, tp=2, dp=4, mbs=1)


def by_name(problem: Problem) -> dict[str, ChainBlock]:
    return {block.name: block for block in problem.chain}


class TestChain:
    def test_one_entry_per_block_in_order(self, make_job: MakeJob) -> None:
        job = make_job()
        problem = build_problem(job, STRATEGY)
        blocks = expand(job.model).blocks
        assert [(b.name, b.modality, b.count) for b in problem.chain] == [(b.name, b.modality, b.count) for b in blocks]
        assert problem.num_layers == 4 + 2 + 8
        named = by_name(problem)
        assert [name for name, block in named.items() if block.layer] == ["vision_layer", "audio_layer", "text_layer"]
        assert named["text_post"].pinned == "last"
        assert named["vision_post"].attach == "previous"
        assert named["text_pre"].attach == "next"
        assert {block.recompute_group for block in problem.chain} == {"vision", "audio", "text"}

    def test_shape_of_the_pipeline(self, make_job: MakeJob) -> None:
        job = make_job()
        problem = build_problem(job, replace(STRATEGY, vpp=2, schedule="interleaved_1f1b"))
        assert (problem.num_stages, problem.num_chunks, problem.num_microbatches) == (4, 2, 16)
        assert problem.schedule == "interleaved_1f1b"
        assert len(problem.p2p_ms) == len(problem.p2p_ms_per_byte) == 7
        assert problem.memory_limit_bytes == (job.cluster.memory_limit_bytes,) * 4
        assert len(set(problem.stage_static_bytes)) == 1
        assert problem.context_bytes == float(job.cluster.device.context_bytes)

    def test_times_and_recompute_come_from_the_block_costs(self, make_job: MakeJob) -> None:
        job = make_job()
        cost, block = block_costs(job, STRATEGY)["text_layer"], by_name(build_problem(job, STRATEGY))["text_layer"]
        assert block.forward_ms == cost.forward_ms
        assert block.backward_ms == cost.backward_input_ms + cost.backward_weight_ms
        assert block.activation_bytes == cost.activation_bytes
        assert block.recompute
        assert block.recompute.extra_backward_ms == cost.forward_ms
        assert block.recompute.activation_bytes == cost.checkpoint_bytes
        assert block.recompute.restored_bytes == 0
        restored_bytes = cost.activation_bytes - cost.checkpoint_bytes
        assert block.transient_bytes == cost.transient_bytes + restored_bytes

    def test_static_bytes_sum_to_the_model(self, make_job: MakeJob) -> None:
        """18 bytes a parameter that trains and 2 a frozen one, on one device."""
        job = make_job()
        problem = build_problem(job, Strategy(pp=1, tp=1, dp=1, mbs=1, zero=0))
        costs = block_costs(job, Strategy(pp=1, tp=1, dp=1, mbs=1))
        expected = sum(
            costs[b.name].parameter_count * b.count * (18 if b.trainable else 2) for b in expand(job.model).blocks
        )
        assert sum(block.static_bytes * block.count for block in problem.chain) == pytest.approx(expected)


class TestFreezing:
    def test_frozen_encoders_go_forward_and_no_more(self, make_job: MakeJob) -> None:
        named = by_name(build_problem(make_job(), STRATEGY))
        for name in ("vision_pre", "vision_layer", "vision_post", "audio_layer"):
            block = named[name]
            assert block.forward_ms > 0
            assert block.backward_ms == block.activation_bytes == block.tail_ms == 0
            assert block.recompute is None
            assert not block.sends_gradient
        assert named["text_pre"].sends_gradient
        assert named["text_layer"].recompute

    def test_what_trains_first_decides_where_gradients_cross(self, make_job: MakeJob) -> None:
        named = by_name(build_problem(make_job(freeze_vision=False), STRATEGY))
        assert all(block.sends_gradient for block in named.values())
        assert named["vision_layer"].recompute
        assert named["audio_layer"].recompute is None
        assert named["vision_layer"].tail_ms > 0

    def test_a_frozen_decoder_behind_a_trained_encoder_has_half_a_backward(self, make_job: MakeJob) -> None:
        full = by_name(build_problem(make_job(freeze_vision=False), STRATEGY))["text_layer"]
        frozen = by_name(build_problem(make_job(freeze_vision=False, freeze_text=True), STRATEGY))["text_layer"]
        assert 0 < frozen.backward_ms < full.backward_ms
        assert 0 < frozen.activation_bytes < full.activation_bytes
        assert frozen.static_bytes < full.static_bytes / 3
        assert frozen.tail_ms == 0
        assert frozen.recompute

    def test_a_modality_without_tokens_takes_weights_and_no_time(self, make_job: MakeJob) -> None:
        idle = by_name(build_problem(make_job(audio_tokens_per_sample=0), STRATEGY))["audio_layer"]
        assert (
            idle.forward_ms
            == idle.output_bytes - by_name(build_problem(make_job(), STRATEGY))["vision_post"].output_bytes
            == 0
        )
        assert idle.static_bytes > 0


class TestOutputs:
    def test_what_encoders_made_ready_travels_on(self, make_job: MakeJob) -> None:
        problem = build_problem(make_job(), STRATEGY)
        outputs = {block.name: block.output_bytes for block in problem.chain}
        text_token_bytes = 2 * 2048 / 2  # bf16, over two sequence-parallel ranks
        assert outputs["vision_layer"] == 4 * 1024 * 2 * 1024 / 2
        assert outputs["vision_post"] == 1024 * text_token_bytes
        assert outputs["audio_layer"] == outputs["vision_post"] + 512 * 2 * 1024 / 2
        assert outputs["audio_post"] == (1024 + 512) * text_token_bytes
        assert outputs["text_pre"] == outputs["text_layer"] == 4096 * text_token_bytes
        assert outputs["text_post"] == 0

    def test_micro_batches_of_unequal_length_cycle(self, make_job: MakeJob) -> None:
        job = make_job(micro_batch_scale={"vision": (0.5, 1.0, 2.0)})
        named = by_name(build_problem(job, STRATEGY))
        assert named["vision_layer"].microbatch_scale == (0.5, 1.0, 2.0) * 5 + (0.5,)
        assert named["text_layer"].microbatch_scale == ()


class TestTiedTable:
    def test_it_is_held_and_summed_at_both_ends(self, make_job: MakeJob) -> None:
        tied, untied = (by_name(build_problem(make_job(tied=tied), STRATEGY)) for tied in (True, False))
        assert tied["text_post"].static_bytes == untied["text_post"].static_bytes
        assert tied["text_post"].forward_ms == untied["text_post"].forward_ms
        for name in ("text_pre", "text_post"):
            assert tied[name].tail_ms > untied[name].tail_ms

    def test_one_stage_holds_it_once(self, make_job: MakeJob) -> None:
        alone = Strategy(pp=1, tp=2, dp=4, mbs=1)
        tied, untied = (by_name(build_problem(make_job(tied=tied), alone)) for tied in (True, False))
        assert tied["text_post"].static_bytes < untied["text_post"].static_bytes / 1000
        assert tied["text_pre"].tail_ms == untied["text_pre"].tail_ms


def write_profile(job: Job, path: Path, kind: str, **changed: int) -> None:
    timing = {"median_ms": 7.0, "mad_ms": 0.1, "num_samples": 9}
    entry = {"kind": kind, "tp": 2, "mbs": 1, "tokens": 4096, "activation_bytes": 900, "checkpoint_bytes": 90}
    entry |= {"forward_ms": timing, "backward_input_ms": timing, "backward_weight_ms": timing, "transient_bytes": 9}
    document = {
        "schema": "mm-autoparallel/profile/1",
        "model": {"name": job.model.name, "sha256": hash_model(job.model)},
        "device": job.cluster.device.name,
        "software": {},
        "date": "2025-11-21",
        "command": "mm-autoparallel profile job.yaml",
        "entries": [entry | changed],
    }
    path.write_text(json.dumps(document))


class TestProfiles:
    def test_profiled_kinds_are_measured_and_the_rest_analytic(self, make_job: MakeJob, tmp_path: Path) -> None:
        path = tmp_path / "profile.json"
        write_profile(make_job(), path, "text_layer")
        job = make_job(profiles=(path,))
        block = by_name(build_problem(job, STRATEGY))["text_layer"]
        assert (block.forward_ms, block.backward_ms, block.activation_bytes) == (7.0, 14.0, 900)
        assert block.transient_bytes == 9 + 900 - 90
        assert block.static_bytes == by_name(build_problem(make_job(), STRATEGY))["text_layer"].static_bytes
        provenance = describe_provenance(job, STRATEGY)
        assert provenance["profiles"] == [str(path)]
        assert provenance["blocks"]["text_layer"] == {"time": "measured", "memory": "measured"}
        assert provenance["blocks"]["text_post"] == {"time": "analytic", "memory": "analytic"}
        assert provenance["calibration"].startswith("calibration a100-80g, ")
        json.dumps(provenance)

    def test_a_frozen_block_takes_no_backward_from_its_profile(self, make_job: MakeJob, tmp_path: Path) -> None:
        path = tmp_path / "profile.json"
        write_profile(make_job(), path, "vision_layer")
        block = by_name(build_problem(make_job(profiles=(path,)), STRATEGY))["vision_layer"]
        assert (block.forward_ms, block.backward_ms, block.activation_bytes) == (7.0, 0.0, 0.0)

    def test_a_strategy_that_was_not_profiled_is_refused(self, make_job: MakeJob, tmp_path: Path) -> None:
        path = tmp_path / "profile.json"
        write_profile(make_job(), path, "text_layer")
        job = make_job(profiles=(path,))
        with pytest.raises(ProfileError, match="text_layer was profiled, but not at TP 4, CP 1, MBS 1, 4096 tokens"):
            build_problem(job, replace(STRATEGY, tp=4, dp=2))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [({"tp": 3}, "TP 3"), ({"zero": 4}, "ZeRO 4"), ({"ep": 2}, "EP 2"), ({"mbs": 3}, "global_batch_size 64")],
)
def test_unlawful_strategies_are_refused_in_words(make_job: MakeJob, changed: dict[str, int], reason: str) -> None:
    with pytest.raises(JobError, match=f"job.yaml.*{reason}"):
        build_problem(make_job(), replace(STRATEGY, **changed))


@pytest.fixture(scope="module")
def job_72b(repository: Path) -> Job:
    return read_job(repository / "examples" / "qwen2vl_72b" / "job.yaml")


@pytest.fixture(scope="module")
def layer_72b(job_72b: Job) -> ChainBlock:
    return by_name(build_problem(job_72b, Strategy(pp=8, tp=2, dp=8, mbs=1)))["text_layer"]


class TestQwen2VL72B:
    """On 910B devices, as the example has it: figures a person can check."""

    def test_memory_of_a_layer(self, layer_72b: ChainBlock) -> None:
        matrices = 8192 * (8192 + 2 * 1024) + 8192 * 8192 + 3 * 8192 * 29568
        assert layer_72b.static_bytes == pytest.approx(matrices / 2 * (6 + 12 / 8), rel=1e-3)
        assert layer_72b.activation_bytes == pytest.approx(1.16e9, rel=0.01)
        assert layer_72b.recompute
        assert layer_72b.recompute.activation_bytes == 8192 * 8192 * 2 / 2

    def test_a_layer_runs_at_a_believable_part_of_the_peak(self, job_72b: Job, layer_72b: ChainBlock) -> None:
        flops = 6 * 878e6 * 8192 + 3.5 * 2 * 8192**2 * 8192
        part = (
            flops / 2 / ((layer_72b.forward_ms + layer_72b.backward_ms) / 1e3) / job_72b.cluster.device.bf16_flops_per_s
        )
        assert 0.3 < part < 0.6

    def test_the_published_plan_nearly_fills_its_devices(self, job_72b: Job) -> None:
        """Layers and recompute per stage as in the result example of MindSpeed's guide to automatic parallelism for

        multimodal models (PP 8, TP 2, DP 4, MBS 1): its middle stages fill 64 GB to within a tenth.
        """
        problem = build_problem(job_72b, Strategy(pp=8, tp=2, dp=4, mbs=1))
        block = by_name(problem)["text_layer"]
        assert block.recompute
        for stage, recomputed in enumerate((10, 9, 9, 9, 7, 4), start=1):
            kept_bytes = (11 - recomputed) * block.activation_bytes + recomputed * block.recompute.activation_bytes
            in_flight = 8 - stage
            peak_bytes = problem.stage_static_bytes[stage] + 11 * block.static_bytes + in_flight * kept_bytes
            assert 0.9 < (peak_bytes + block.transient_bytes) / problem.memory_limit_bytes[stage] < 1.1


def scaled(job: Job, memory_factor: float, flops_factor: float, level_factors: tuple[float, float]) -> Job:
    device = job.cluster.device
    better = device.model_copy(
        update={
            "memory_bytes_per_s": device.memory_bytes_per_s * memory_factor,
            "bf16_flops_per_s": device.bf16_flops_per_s * flops_factor,
        }
    )
    levels = tuple(
        level.model_copy(update={"bandwidth_bytes_per_s": level.bandwidth_bytes_per_s * factor})
        for level, factor in zip(job.cluster.levels, level_factors, strict=True)
    )
    return replace(job, cluster=job.cluster.model_copy(update={"device": better, "levels": levels}))


LAWFUL = [
    Strategy(pp=pp, tp=tp, cp=cp, dp=32 // (pp * tp * cp), mbs=mbs, zero=zero)
    for pp in (1, 2, 4)
    for tp in (1, 2, 4)
    for cp in (1, 2)
    for mbs in (1, 2)
    for zero in (0, 1, 2, 3)
    if zero < 2 or pp == 1
]


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    strategy=st.sampled_from(LAWFUL),
    memory_factor=st.floats(1, 8),
    level_factors=st.tuples(st.floats(1, 50), st.floats(1, 50)),
)
def test_more_bandwidth_never_costs_time(
    make_job: MakeJob, strategy: Strategy, memory_factor: float, level_factors: tuple[float, float]
) -> None:
    """A faster device may expose more traffic in a block's tail, but never by more than the block itself got faster."""
    job = make_job(freeze_vision=False)
    slow = build_problem(job, strategy)
    fast = build_problem(scaled(job, memory_factor, 1.0, level_factors), strategy)
    for before, after in zip(slow.chain, fast.chain, strict=True):
        assert after.forward_ms <= before.forward_ms * (1 + 1e-12)
        total_before = before.forward_ms + before.backward_ms + before.tail_ms
        assert after.forward_ms + after.backward_ms + after.tail_ms <= total_before * (1 + 1e-12)
        assert (after.static_bytes, after.activation_bytes) == (before.static_bytes, before.activation_bytes)
    for hop in range(strategy.pp - 1):
        assert fast.p2p_ms[hop] <= slow.p2p_ms[hop]
        assert fast.p2p_ms_per_byte[hop] <= slow.p2p_ms_per_byte[hop] * (1 + 1e-12)


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(strategy=st.sampled_from([replace(strategy, dp=strategy.dp // 2) for strategy in LAWFUL if strategy.dp > 1]))
def test_more_tensor_parallel_never_needs_more_memory_per_layer(make_job: MakeJob, strategy: Strategy) -> None:
    job = make_job(freeze_vision=False)
    wide = replace(strategy, tp=2 * strategy.tp)
    for before, after in zip(build_problem(job, strategy).chain, build_problem(job, wide).chain, strict=True):
        assert after.static_bytes <= before.static_bytes
        assert after.activation_bytes <= before.activation_bytes
        if before.recompute:
            assert after.recompute
            assert after.recompute.activation_bytes <= before.recompute.activation_bytes


def test_context_parallel_halves_activations_and_shards_as_data_parallel_does(make_job: MakeJob) -> None:
    job = make_job(freeze_vision=False)
    data = build_problem(job, Strategy(pp=2, tp=2, dp=8, mbs=1))
    context = build_problem(job, Strategy(pp=2, tp=2, cp=2, dp=4, mbs=1))
    for one, other in zip(data.chain, context.chain, strict=True):
        assert other.activation_bytes == one.activation_bytes / 2
        assert other.static_bytes == one.static_bytes
        assert other.output_bytes == one.output_bytes / 2


class TestCache:
    def test_the_same_answer_again(self, make_job: MakeJob) -> None:
        job = make_job()
        assert build_problem(job, STRATEGY) == build_problem(job, STRATEGY) == build_problem(make_job(), STRATEGY)

    def test_a_changed_job_is_another_job(self, make_job: MakeJob) -> None:
        """Also with the same sha256: a copy made in code keeps the one of its original."""
        job = make_job()
        longer = replace(job, workload=job.workload.model_copy(update={"seq_length": 8192}))
        assert build_problem(job, STRATEGY) != build_problem(longer, STRATEGY)

    @pytest.mark.slow
    def test_a_job_is_forgotten_when_nobody_holds_it(self, make_job: MakeJob) -> None:
        job = make_job()
        build_problem(job, STRATEGY)
        gone = weakref.ref(job)
        del job
        gc.collect()
        assert gone() is None


class TestStacks:
    """What a calibration or a workload says of the software that runs a job."""

    CHUNKED = Strategy(pp=4, tp=2, dp=4, mbs=1, vpp=2)

    def test_a_stack_that_waits_for_its_transfers_makes_layers_longer_and_hops_free(self, make_job: MakeJob) -> None:
        beside, waiting = (build_problem(make_job(overlap_p2p=flag), self.CHUNKED) for flag in (True, False))
        assert any(beside.p2p_ms)
        assert not any(waiting.p2p_ms)
        assert not any(waiting.p2p_ms_per_byte)
        for before, after in zip(beside.chain, waiting.chain, strict=True):
            added_ms = after.forward_ms - before.forward_ms
            assert (added_ms > 0) == before.layer
            assert after.backward_ms - before.backward_ms == pytest.approx(added_ms)

    def test_no_layer_is_faster_than_its_host(self, make_job: MakeJob) -> None:
        job = make_job()
        own = calibration_of(job)
        slow = own.model_copy(update={"figures": own.figures.model_copy(update={"layer_launch_ms": 1e3})})
        for block in build_problem(CostModel(job, slow), STRATEGY).chain:
            assert (block.forward_ms >= 1e3) == block.layer
            assert block.recompute is None or block.recompute.extra_backward_ms >= 1e3

    def test_a_measured_layer_has_shown_how_fast_its_host_is(self, make_job: MakeJob, tmp_path: Path) -> None:
        path = tmp_path / "profile.json"
        write_profile(make_job(), path, "text_layer")
        job = make_job(profiles=(path,))
        own = calibration_of(job)
        slow = own.model_copy(update={"figures": own.figures.model_copy(update={"layer_launch_ms": 1e3})})
        assert by_name(build_problem(CostModel(job, slow), STRATEGY))["text_layer"].forward_ms == 7.0
