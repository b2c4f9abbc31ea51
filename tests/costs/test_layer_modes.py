"""Modes of a job's layers: bytes and times by hand, the same as for all layers at once, and what no job may ask for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mm_autoparallel.errors import JobError
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.costs.stage import block_costs, build_problem, describe_provenance
from mm_autoparallel.model.job.cluster import Cluster
from mm_autoparallel.model.job.devices import DEVICES
from mm_autoparallel.model.job.hashing import hash_job
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.layers import Experts, Layers
from mm_autoparallel.model.job.model import Decoder, Model
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.profiles.calibration import assume_calibration, calibration_of
from mm_autoparallel.model.profiles.store import ProfileEntry, Timing, make_manifest, write_profile
from mm_autoparallel.model.readers.job_file import parse_job
from mm_autoparallel.pipeline.problem import ChainBlock, Mode, Problem
from mm_autoparallel.planner.evaluate import evaluate
from mm_autoparallel.planner.plan import Plan

MakeJob = Callable[..., Job]
ALL = ("selective", "activation", "offload", "recompute")
STRATEGY = Strategy(pp=4, tp=2, dp=4, mbs=2)
TOKENS, HIDDEN, FFN, HEADS, HEAD_DIM, RANKS = 4096, 2048, 5632, 16, 128, 2
"""Of the job's text layers; RANKS: tensor parallel."""


def with_modes(job: Job, *modes: str) -> Job:
    return replace(job, search=job.search.model_copy(update={"modes": modes}))


def by_name(problem: Problem) -> dict[str, ChainBlock]:
    return {block.name: block for block in problem.chain}


def text_layer(job: Job, *modes: str) -> tuple[ChainBlock, dict[str, Mode]]:
    block = by_name(build_problem(with_modes(job, *modes), STRATEGY))["text_layer"]
    return block, {mode.name: mode for mode in block.modes}


class TestByHand:
    def test_selective_frees_the_score_matrices_for_attention_forward_once_more(self, make_job: MakeJob) -> None:
        """5·a·s²·b/t (Korthikanti et al. 2022, equation 1), for both products, softmax and dropout of the scores."""
        job = make_job(attention="unfused", attention_dropout=True)
        block, modes = text_layer(job, *ALL)
        scores = 2 * TOKENS**2 * HEADS / RANKS
        assert block.activation_bytes - modes["selective"].activation_bytes == 5 * scores
        figures, device = calibration_of(job).figures, job.cluster.device
        flops_per_s = device.bf16_flops_per_s * figures.unfused_attention_fraction
        moved_bytes = (4 * 2 + 2 * 2 + 1) * scores  # softmax reads and writes two matrices, dropout two and a mask
        memory_bytes_per_s = device.memory_bytes_per_s * figures.memory_fraction
        expected_ms = (4 * scores * HEAD_DIM / flops_per_s + moved_bytes / memory_bytes_per_s) * 1e3
        assert modes["selective"].extra_backward_ms == pytest.approx(expected_ms)

    def test_activation_frees_one_inner_tensor_for_reading_two_and_writing_one(self, make_job: MakeJob) -> None:
        """tokens · ffn / tp · 2 bytes, where the first product makes two such tensors for a gated activation."""
        job = make_job()
        block, modes = text_layer(job, *ALL)
        inner_bytes = 2 * TOKENS * FFN / RANKS * 2
        assert block.activation_bytes - modes["activation"].activation_bytes == inner_bytes
        memory_bytes_per_s = job.cluster.device.memory_bytes_per_s * calibration_of(job).figures.memory_fraction
        assert modes["activation"].extra_backward_ms == pytest.approx(3 * inner_bytes / memory_bytes_per_s * 1e3)

    def test_offload_moves_all_but_the_input(self, make_job: MakeJob) -> None:
        job = make_job()
        block, modes = text_layer(job, *ALL)
        input_bytes = 2 * TOKENS * HIDDEN / RANKS * 2  # sequence parallel
        assert modes["offload"].activation_bytes == input_bytes
        assert modes["offload"].host_bytes == block.activation_bytes - input_bytes
        assert (modes["offload"].extra_forward_ms, modes["offload"].extra_backward_ms) == (0.0, 0.0)
        problem = build_problem(with_modes(job, "offload"), STRATEGY)
        assert problem.host_ms_per_byte == (1e3 / job.cluster.device.host_link_bytes_per_s,) * 4

    def test_recompute_offload_keeps_nothing_and_two_inputs_pass(self, make_job: MakeJob) -> None:
        job = make_job()
        input_bytes = 2 * TOKENS * HIDDEN / RANKS * 2
        plain, _ = text_layer(job, "recompute")
        block, modes = text_layer(job, "recompute_offload", "recompute")
        moved, rerun = modes["recompute_offload"], modes["recompute"]
        assert (moved.activation_bytes, moved.host_bytes) == (0.0, input_bytes)
        assert rerun.activation_bytes == input_bytes
        assert moved.extra_backward_ms == rerun.extra_backward_ms
        assert block.transient_bytes - plain.transient_bytes == 2 * input_bytes
        problem = build_problem(with_modes(job, "recompute_offload"), STRATEGY)
        assert problem.host_ms_per_byte == (1e3 / job.cluster.device.host_link_bytes_per_s,) * 4

    @pytest.mark.parametrize("name", ["offload", "recompute_offload"])
    def test_copies_take_their_part_of_the_memory_in_both_passes(self, make_job: MakeJob, name: str) -> None:
        """Under figures of all precisions: every byte is read beside the forward and written beside the backward."""
        cluster = Cluster(num_nodes=4, devices_per_node=8, device=DEVICES["h100-80g"])
        job = with_modes(make_job(cluster=cluster), name, "recompute")
        plain, modern = (
            {mode.name: mode for mode in by_name(build_problem(costs, STRATEGY))["text_layer"].modes}
            for costs in (
                CostModel(job, assume_calibration("h100-80g", software)) for software in ("", "megatron-core")
            )
        )
        memory_bytes_per_s = 3.35e12 * assume_calibration("h100-80g", "megatron-core").figures.memory_fraction
        copied_ms = modern[name].host_bytes / memory_bytes_per_s * 1e3
        assert copied_ms > 0
        assert modern[name].extra_forward_ms == pytest.approx(copied_ms)
        rerun_ms = modern["recompute"].extra_backward_ms if name == "recompute_offload" else 0.0
        assert modern[name].extra_backward_ms == pytest.approx(rerun_ms + copied_ms)
        assert plain[name].extra_forward_ms == 0

    def test_layers_on_parts_of_a_micro_batch_restore_a_part(self, make_job: MakeJob) -> None:
        """STRATEGY has two samples a micro-batch; all else of the problem stays."""
        whole, parts = make_job(), make_job(text_chunk_samples=1)
        before, after = (by_name(build_problem(job, STRATEGY)) for job in (whole, parts))
        block, mode = text_layer(whole, "recompute")
        restored_bytes = block.activation_bytes - mode["recompute"].activation_bytes
        freed_bytes = before["text_layer"].transient_bytes - after["text_layer"].transient_bytes
        assert freed_bytes == pytest.approx(restored_bytes / 2)
        assert before["vision_layer"] == after["vision_layer"]
        many = by_name(build_problem(make_job(text_chunk_samples=8), STRATEGY))
        assert many["text_layer"] == before["text_layer"]

    def test_experts_run_their_activation_once_more(self, make_job: MakeJob) -> None:
        """Of every copy of a token one inner tensor; the shared expert's and the dense layer's own widths beside it."""
        experts = Experts(num_experts=8, top_k=2, ffn_size=1024, shared_ffn_size=512, dense_layers=(0,))
        sizes = {"hidden_size": HIDDEN, "ffn_size": FFN, "num_heads": HEADS, "num_kv_groups": 8, "norm": "rms"}
        text = Decoder(vocab_size=32000, layers=Layers(num_layers=8, experts=experts, **sizes))
        job = replace(make_job(image_tokens_per_sample=0, audio_tokens_per_sample=0), model=Model(name="e", text=text))
        chain = build_problem(with_modes(job, "activation"), STRATEGY).chain
        freed = [b.activation_bytes - mode.activation_bytes for b in chain for mode in b.modes]
        rows_bytes = 2 * TOKENS / RANKS * 2
        assert freed == [rows_bytes * FFN, rows_bytes * (2 * 1024 + 512)]


class TestSameAsForAllLayers:
    def test_selective_on_every_layer_is_recompute_operators(self, make_job: MakeJob) -> None:
        for_all = make_job(attention="unfused", recompute_operators=("core_attn",))
        by_mode = with_modes(make_job(attention="unfused"), "recompute", "selective")
        held = {"vision": (4, 0, 0, 0), "audio": (2, 0, 0, 0), "text": (2, 2, 2, 2)}
        nothing = dict.fromkeys(held, (0, 0, 0, 0))
        plain = Plan(STRATEGY, held, nothing, 64)
        mixed = replace(plain, modes={"text": {"selective": (2, 2, 2, 2)}})
        expected, found = evaluate(for_all, plain), evaluate(by_mode, mixed)
        assert found.step_ms == pytest.approx(expected.step_ms, rel=1e-12)
        kept = found.timeline.loads.activation_bytes
        assert kept == pytest.approx(expected.timeline.loads.activation_bytes, rel=1e-12)

    def test_recompute_alone_is_the_job_of_before(self, make_job: MakeJob) -> None:
        job = make_job()
        problem = build_problem(job, STRATEGY)
        assert problem == build_problem(with_modes(job, "recompute"), STRATEGY)
        assert problem.host_ms_per_byte == ()
        assert "modes" not in describe_provenance(job, STRATEGY)
        text = by_name(problem)["text_layer"]
        assert [mode.name for mode in text.modes] == ["recompute"]
        wide, _ = text_layer(job, *ALL)
        assert replace(wide, modes=text.modes) == by_name(build_problem(job, STRATEGY))["text_layer"]


class TestWhichBlocks:
    def test_modes_stand_in_the_jobs_order_on_layers_that_keep_something(self, make_job: MakeJob) -> None:
        named = by_name(build_problem(with_modes(make_job(), *ALL), STRATEGY))
        assert [mode.name for mode in named["text_layer"].modes] == list(ALL)
        assert [name for name, block in named.items() if block.modes] == ["text_layer"]  # the encoders are frozen

    def test_a_mode_by_which_a_modality_keeps_no_less_is_left_out(self, make_job: MakeJob) -> None:
        """No part of this model has latent attention."""
        job = with_modes(make_job(selective_operators=("mla_up_proj",)), *ALL)
        assert [mode.name for mode in by_name(build_problem(job, STRATEGY))["text_layer"].modes] == [*ALL[1:]]


class TestWhereItWasMeasured:
    def test_differences_are_analytic_and_recompute_is_measured(self, make_job: MakeJob, tmp_path: Path) -> None:
        job = make_job()
        path = tmp_path / "p.json"
        figures: dict[str, Any] = {name: Timing(median_ms=7.0, mad_ms=0.0, num_samples=9) for name in TIMES}
        sizes = {"activation_bytes": 600_000_000, "checkpoint_bytes": 17_000_000, "transient_bytes": 9}
        entry = ProfileEntry(kind="text_layer", tp=2, mbs=2, tokens=TOKENS, **figures, **sizes)
        write_profile(path, make_manifest(job.model, job.workload, job.cluster.device.name, {}, "measure"), [entry])
        estimated, estimated_modes = text_layer(job, *ALL)
        _, modes = text_layer(make_job(profiles=(path,)), *ALL)
        assert (modes["recompute"].extra_backward_ms, modes["recompute"].activation_bytes) == (7.0, 17_000_000)
        for name in ("selective", "activation"):
            freed_bytes = estimated.activation_bytes - estimated_modes[name].activation_bytes
            assert modes[name].activation_bytes == 600_000_000 - freed_bytes
            assert modes[name].extra_backward_ms == estimated_modes[name].extra_backward_ms
        assert modes["offload"].host_bytes == 600_000_000 - 17_000_000
        told = describe_provenance(with_modes(make_job(profiles=(path,)), *ALL), STRATEGY)
        assert told["blocks"]["text_layer"]["time"] == "measured"
        assert told["modes"]["selective"] == "analytic"
        assert "PCIe" in told["modes"]["offload"]

    def test_no_more_is_freed_than_was_measured(self, make_job: MakeJob, tmp_path: Path) -> None:
        job = make_job()
        figures: dict[str, Any] = {name: Timing(median_ms=7.0, mad_ms=0.0, num_samples=9) for name in TIMES}
        sizes = {"activation_bytes": 900, "checkpoint_bytes": 90, "transient_bytes": 9}
        entry = ProfileEntry(kind="text_layer", tp=2, mbs=2, tokens=TOKENS, **figures, **sizes)
        manifest = make_manifest(job.model, job.workload, job.cluster.device.name, {}, "measure")
        write_profile(tmp_path / "p.json", manifest, [entry])
        _, modes = text_layer(make_job(profiles=(tmp_path / "p.json",)), *ALL)
        assert modes["activation"].activation_bytes == 90


TIMES = ("forward_ms", "backward_input_ms", "backward_weight_ms", "recompute_ms")


class TestStep:
    def test_a_step_of_one_stage_is_the_sum_of_its_layers(self, make_job: MakeJob) -> None:
        """Of M micro-batches: every block's forward and backward, what modes add, or the link where that is longer."""
        strategy = Strategy(pp=1, tp=2, dp=16, mbs=2)
        layers = {"vision": (4,), "audio": (2,), "text": (8,)}
        plan = Plan(strategy, layers, {"vision": (0,), "audio": (0,), "text": (1,)}, 64)
        mixed = replace(plan, modes={"text": {"offload": (3,), "selective": (2,)}})
        for link_bytes_per_s in (25e9, 1e9):
            job = on_link(make_job(), link_bytes_per_s)
            problem, costs = build_problem(with_modes(job, *ALL), strategy), block_costs(job, strategy)
            modes = {mode.name: mode for mode in by_name(problem)["text_layer"].modes}
            forward_ms = sum(costs[b.name].forward_ms * b.count for b in problem.chain)
            backward_ms = sum(b.backward_ms * b.count for b in problem.chain)
            backward_ms += 2 * modes["selective"].extra_backward_ms + costs["text_layer"].forward_ms
            link_ms = 3 * modes["offload"].host_bytes / link_bytes_per_s * 1e3
            assert (link_ms > backward_ms) == (link_bytes_per_s == 1e9)
            tail_ms = sum(b.tail_ms * b.count for b in problem.chain)
            expected_ms = 2 * (max(forward_ms, link_ms) + max(backward_ms, link_ms)) + tail_ms
            # the job's own search allows recompute alone: a plan may say more
            assert evaluate(job, mixed).step_ms == pytest.approx(expected_ms, rel=1e-12)

    def test_what_a_stage_keeps_is_the_sum_of_its_layers(self, make_job: MakeJob) -> None:
        job = with_modes(make_job(), *ALL)
        held = {"vision": (4, 0, 0, 0), "audio": (2, 0, 0, 0), "text": (1, 1, 5, 1)}
        modes = {"text": {"activation": (0, 0, 1, 0), "offload": (0, 0, 2, 0)}}
        recompute = {"vision": (0,) * 4, "audio": (0,) * 4, "text": (0, 0, 1, 0)}
        estimate = evaluate(job, Plan(STRATEGY, held, recompute, 64, modes=modes))
        block, of = text_layer(job, *ALL)
        kept_bytes = sum(n * of[name].activation_bytes for name, n in (("activation", 1), ("offload", 2)))
        kept_bytes += of["recompute"].activation_bytes + block.activation_bytes
        assert estimate.timeline.loads.activation_bytes[2] == pytest.approx(kept_bytes, rel=1e-12)
        peak_bytes = estimate.problem.stage_static_bytes[2] + 5 * block.static_bytes + 2 * kept_bytes
        assert estimate.peak_memory_bytes[2] == pytest.approx(peak_bytes + block.transient_bytes, rel=1e-12)
        assert estimate.host_bytes == (
            0.0,
            0.0,
            2 * 2 * of["offload"].host_bytes,
            0.0,
        )  # of two micro-batches in flight
        assert estimate.warnings[-1].startswith("stage 2 keeps ")


def on_link(job: Job, host_link_bytes_per_s: float | None) -> Job:
    device = job.cluster.device.model_copy(update={"host_link_bytes_per_s": host_link_bytes_per_s})
    return replace(job, cluster=job.cluster.model_copy(update={"device": device}))


DOCUMENT: dict[str, Any] = {
    "model": {
        "name": "small",
        "text": {
            "vocab_size": 1024,
            "layers": {
                "num_layers": 4,
                "hidden_size": 64,
                "ffn_size": 256,
                "num_heads": 8,
                "num_kv_groups": 8,
                "norm": "rms",
            },
        },
    },
    "cluster": {"num_nodes": 1, "devices_per_node": 4, "device": "a100-80g"},
    "workload": {"global_batch_size": 8, "seq_length": 128},
}


def read(modes: list[str], **workload: Any) -> Job:
    changed = {"search": {"modes": modes}, "workload": DOCUMENT["workload"] | workload}
    return parse_job(DOCUMENT | changed, Path("job.yaml"))


class TestReading:
    def test_modes_are_read_in_their_order(self) -> None:
        assert read(["offload", "recompute"]).search.modes == ("offload", "recompute")
        assert parse_job(DOCUMENT, Path("job.yaml")).search.modes == ("recompute",)
        assert read([]).search.modes == ()

    def test_which_operators_are_selective_is_part_of_the_job(self) -> None:
        usual, other = read(["selective"]), read(["selective"], selective_operators=["mlp"])
        assert usual.sha256 == parse_job(DOCUMENT, Path("job.yaml")).sha256
        assert other.sha256 != usual.sha256
        assert hash_job(other.model, other.cluster, other.workload) == other.sha256

    @pytest.mark.parametrize(
        ("modes", "workload", "message"),
        [
            (["offlod"], {}, 'search.modes[0] is "offlod"; one of'),
            (["offload", "offload"], {}, "offload stands there twice"),
            (["selective"], {"implementation": "transformers"}, "transformers recomputes whole layers alone"),
            (["activation"], {"recompute_operators": ["mlp_act", "moe_act"]}, "this mode changes nothing"),
            (["selective"], {"selective_operators": []}, "workload.selective_operators"),
        ],
    )
    def test_what_cannot_be_is_refused(self, modes: list[str], workload: dict[str, Any], message: str) -> None:
        with pytest.raises(JobError) as refusal:
            read(modes, **workload)
        assert message in str(refusal.value)

    def test_offload_needs_a_known_link_to_the_host(self) -> None:
        device = DEVICES["a100-80g"].model_dump() | {"host_link_bytes_per_s": None}
        cluster = {"num_nodes": 1, "devices_per_node": 4, "device": device}
        with pytest.raises(JobError, match="host_link_bytes_per_s of a100-80g is not known"):
            parse_job(DOCUMENT | {"cluster": cluster, "search": {"modes": ["offload"]}}, Path("job.yaml"))
