"""What else a profile may measure (recompute, optimizer, parameters, outputs, memory, network) in the problem."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mm_autoparallel.errors import ProfileError
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.costs.stage import block_costs, build_problem, describe_provenance
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.profiles.network import Fit, Operation, Overlap, write_network
from mm_autoparallel.model.profiles.store import Origin, ProfileEntry, Timing, make_manifest, write_profile
from mm_autoparallel.pipeline.problem import ChainBlock, Problem

MakeJob = Callable[..., Job]
STRATEGY = Strategy(pp=4, tp=2, dp=4, mbs=1)
ALONE = replace(STRATEGY, pp=1, dp=16)
TOKENS = {"text_pre": 4096, "text_layer": 4096, "text_post": 4096, "vision_layer": 4096, "vision_post": 4096}


def by_name(problem: Problem) -> dict[str, ChainBlock]:
    return {block.name: block for block in problem.chain}


def timing(median_ms: float) -> Timing:
    return Timing(median_ms=median_ms, mad_ms=0.0, num_samples=9)


def entry(kind: str, **extras: Any) -> ProfileEntry:
    figures: dict[str, Any] = {
        "forward_ms": timing(7.0),
        "backward_input_ms": timing(8.0),
        "backward_weight_ms": timing(6.0),
        "activation_bytes": 900,
        "checkpoint_bytes": 90,
        "transient_bytes": 9,
    }
    return ProfileEntry(**({"kind": kind, "tp": 2, "mbs": 1, "tokens": TOKENS[kind]} | figures | extras))


def write(job: Job, path: Path, *entries: ProfileEntry) -> Path:
    write_profile(path, make_manifest(job.model, job.workload, job.cluster.device.name, {}, "profile it"), entries)
    return path


class TestBlocks:
    def test_recompute_takes_what_it_was_measured_to_take(self, make_job: MakeJob, tmp_path: Path) -> None:
        path = write(make_job(), tmp_path / "p.json", entry("text_layer", recompute_ms=timing(6.5)))
        recompute = by_name(build_problem(make_job(profiles=(path,)), STRATEGY))["text_layer"].recompute
        assert recompute
        assert (recompute.extra_backward_ms, recompute.activation_bytes) == (6.5, 90)

    def test_and_a_forward_where_it_was_not(self, make_job: MakeJob, tmp_path: Path) -> None:
        path = write(make_job(), tmp_path / "p.json", entry("text_layer"))
        recompute = by_name(build_problem(make_job(profiles=(path,)), STRATEGY))["text_layer"].recompute
        assert recompute
        assert recompute.extra_backward_ms == 7.0

    @pytest.mark.parametrize(("zero", "shards"), [(0, 1), (1, 4)])
    def test_a_measured_optimizer_step_is_sharded_by_zero(
        self, make_job: MakeJob, tmp_path: Path, zero: int, shards: int
    ) -> None:
        strategy = replace(STRATEGY, zero=zero)
        tails = {}
        for measured_ms in (40.0, 80.0):
            path = write(
                make_job(), tmp_path / f"{measured_ms}.json", entry("text_layer", optimizer_ms=timing(measured_ms))
            )
            tails[measured_ms] = by_name(build_problem(make_job(profiles=(path,)), strategy))["text_layer"].tail_ms
        assert tails[80.0] - tails[40.0] == pytest.approx(40.0 / shards)

    def test_a_frozen_block_has_no_optimizer_step(self, make_job: MakeJob, tmp_path: Path) -> None:
        extras = {"optimizer_ms": timing(40.0), "recompute_ms": timing(1.0)}
        path = write(make_job(), tmp_path / "p.json", entry("vision_layer", **extras))
        block = by_name(build_problem(make_job(profiles=(path,)), STRATEGY))["vision_layer"]
        assert (block.tail_ms, block.recompute) == (0.0, None)

    def test_parameters_and_outputs_are_those_of_the_live_model(self, make_job: MakeJob, tmp_path: Path) -> None:
        """A framework without sequence parallelism hands on whole tensors."""
        whole_bytes = 4096 * 2048 * 2
        extras = {"parameter_count": 10**6, "output_bytes": whole_bytes}
        path = write(make_job(), tmp_path / "p.json", entry("text_layer", **extras))
        block = by_name(build_problem(make_job(profiles=(path,)), STRATEGY))["text_layer"]
        assert block.output_bytes == whole_bytes
        assert block.output_bytes == 2 * by_name(build_problem(make_job(), STRATEGY))["text_layer"].output_bytes
        assert block.static_bytes == 10**6 * (2 + 4 + 12 / 4)

    def test_what_encoders_made_ready_is_what_was_measured(self, make_job: MakeJob, tmp_path: Path) -> None:
        path = write(make_job(), tmp_path / "p.json", entry("vision_post", output_bytes=10**6))
        plain, measured = (
            {name: block.output_bytes for name, block in by_name(build_problem(job, STRATEGY)).items()}
            for job in (make_job(), make_job(profiles=(path,)))
        )
        for name in ("vision_post", "audio_layer", "audio_post"):
            assert measured[name] - plain[name] == 10**6 - plain["vision_post"]
        assert measured["text_layer"] == plain["text_layer"]


class TestTiedTable:
    """A live model's head counts the table that it shares; the chain counts it once, with the embedding."""

    TABLE, NORM = 32_000_000, 2048

    def job(self, make_job: MakeJob, tmp_path: Path, head_count: int, head_ms: float) -> Job:
        job = make_job(tied=True)
        embedding = entry("text_pre", parameter_count=self.TABLE, optimizer_ms=timing(32.0))
        head = entry("text_post", parameter_count=head_count, optimizer_ms=timing(head_ms))
        return make_job(tied=True, profiles=(write(job, tmp_path / f"{head_count}-{head_ms}.json", embedding, head),))

    @pytest.mark.parametrize("strategy", [STRATEGY, ALONE])
    def test_it_is_counted_alike_whether_the_head_says_so(
        self, make_job: MakeJob, tmp_path: Path, strategy: Strategy
    ) -> None:
        counts = (self.NORM, self.NORM + self.TABLE)
        apart, shared = (
            by_name(build_problem(self.job(make_job, tmp_path, count, 1e-6 * count), strategy)) for count in counts
        )
        for name in ("text_pre", "text_post"):
            assert shared[name].static_bytes == apart[name].static_bytes
            assert shared[name].tail_ms == pytest.approx(apart[name].tail_ms)

    def test_it_stands_at_both_ends_and_is_updated_there(self, make_job: MakeJob, tmp_path: Path) -> None:
        jobs = [self.job(make_job, tmp_path, self.NORM, head_ms) for head_ms in (0.8, 1.6)]
        both, slower = (by_name(build_problem(job, STRATEGY)) for job in jobs)
        once = by_name(build_problem(jobs[0], ALONE))
        assert both["text_post"].static_bytes == (self.NORM + self.TABLE) * (2 + 4 + 12 / 4)
        assert once["text_post"].static_bytes == self.NORM * (2 + 4 + 12 / 16)
        # the copy is updated at the embedding's pace, 32 ms over four replicas; a step of the head alone is overhead
        assert 32 / 4 < both["text_post"].tail_ms < both["text_pre"].tail_ms + 1
        assert slower["text_post"].tail_ms - both["text_post"].tail_ms == pytest.approx(0.8 / 4)
        assert once["text_post"].tail_ms < 1


class TestOutOfMemory:
    def test_the_strategy_is_refused_with_the_point(self, make_job: MakeJob, tmp_path: Path) -> None:
        overfull = ProfileEntry(kind="text_layer", tp=2, mbs=4, tokens=4096, out_of_memory=True)
        path = write(make_job(), tmp_path / "p.json", overfull, entry("text_layer"))
        job = make_job(profiles=(path,))
        large = replace(STRATEGY, mbs=4)
        reason = CostModel(job).overfull_reason(large)
        assert reason
        assert reason.startswith("TP 2, CP 1, MBS 4, 4096 tokens: text_layer ran out of memory when it was profiled")
        with pytest.raises(ProfileError, match=r"job\.yaml: TP 2, CP 1, MBS 4, .* smaller micro-batches may do"):
            build_problem(job, large)
        assert CostModel(job).overfull_reason(STRATEGY) is None
        assert build_problem(job, STRATEGY)

    def test_a_modality_without_tokens_holds_nothing(self, make_job: MakeJob, tmp_path: Path) -> None:
        overfull = ProfileEntry(kind="vision_layer", tp=2, mbs=1, tokens=4096, out_of_memory=True)
        idle = make_job(image_tokens_per_sample=0)
        path = write(idle, tmp_path / "p.json", overfull)
        assert CostModel(make_job(image_tokens_per_sample=0, profiles=(path,))).overfull_reason(STRATEGY) is None


def network(job: Job, folder: Path, hidden_fraction: float | None = None, level: str = "node", **slower: float) -> Path:
    """Every operation in pairs of ranks of one level, at 1 ms and 1 GB/s unless `slower` names it."""
    operations: tuple[Operation, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
    fits = [
        Fit(
            operation=operation,
            num_ranks=2,
            level=level,
            latency_ms=slower.get(operation, 1.0),
            bandwidth_bytes_per_s=1e9,
            residual_fraction=0.0,
        )
        for operation in operations
    ]
    overlaps = []
    if hidden_fraction is not None:
        times = {name: timing(1.0) for name in ("traffic_ms", "compute_ms", "together_ms")}
        pair: dict[str, Any] = {"operation": "all_reduce", "num_ranks": 2, "level": "node"}
        overlaps.append(Overlap(hidden_fraction=hidden_fraction, **pair, **times))
    path = folder / f"network-{level}-{hidden_fraction}-{len(slower)}.json"
    origin = Origin(device=job.cluster.device.name, software={}, date="2025-11-21", command="profile it")
    write_network(path, origin, fits, overlaps)
    return path


class TestNetwork:
    def test_hops_take_the_measured_line(self, make_job: MakeJob, tmp_path: Path) -> None:
        job = make_job(profiles=(network(make_job(), tmp_path),))
        inside = build_problem(job, Strategy(pp=4, tp=2, dp=1, mbs=1))
        assert inside.p2p_ms == (1.0,) * 3
        assert inside.p2p_ms_per_byte == (1e-6,) * 3
        across, plain = build_problem(job, STRATEGY), build_problem(make_job(), STRATEGY)
        assert across.p2p_ms == plain.p2p_ms
        assert across.p2p_ms_per_byte == plain.p2p_ms_per_byte

    def test_collectives_inside_a_block_do(self, make_job: MakeJob, tmp_path: Path) -> None:
        job = make_job(profiles=(network(make_job(), tmp_path),))
        slower = make_job(profiles=(network(make_job(), tmp_path, all_gather=2.0),))
        costs, slow = block_costs(job, STRATEGY), block_costs(slower, STRATEGY)
        assert costs["text_layer"].forward_ms > block_costs(make_job(), STRATEGY)["text_layer"].forward_ms
        # before the attention's and before the feed-forward's first product
        assert slow["text_layer"].forward_ms - costs["text_layer"].forward_ms == pytest.approx(2.0)

    def test_gradients_are_reduced_on_it(self, make_job: MakeJob, tmp_path: Path) -> None:
        strategy = Strategy(pp=1, tp=1, dp=2, mbs=1, zero=0)
        job = make_job(profiles=(network(make_job(), tmp_path),), overlap_grad_reduce=False)
        slower = make_job(profiles=(network(make_job(), tmp_path, all_reduce=4.0),), overlap_grad_reduce=False)
        tail, slow = (by_name(build_problem(j, strategy))["text_layer"].tail_ms for j in (job, slower))
        assert slow - tail == pytest.approx(3.0)
        gradient_bytes = 4 * block_costs(job, strategy)["text_layer"].parameter_count
        assert tail > gradient_bytes / 1e9 * 1e3

    def test_only_the_measured_part_is_hidden(self, make_job: MakeJob, tmp_path: Path) -> None:
        strategy = Strategy(pp=1, tp=1, dp=2, mbs=1, zero=0)

        def tail_ms(hidden_fraction: float | None, **workload: Any) -> float:
            job = make_job(profiles=(network(make_job(), tmp_path, hidden_fraction),), **workload)
            return by_name(build_problem(job, strategy))["text_layer"].tail_ms

        whole, hidden = tail_ms(0.0), tail_ms(1.0)
        assert hidden < whole
        assert tail_ms(0.25) == pytest.approx(0.75 * whole + 0.25 * hidden)
        assert tail_ms(None) == hidden
        assert tail_ms(-0.25) == pytest.approx(1.25 * whole - 0.25 * hidden)  # both at once take longer than in turn
        assert tail_ms(1.0, overlap_grad_reduce=False) == tail_ms(0.0, overlap_grad_reduce=False) == whole

    def test_a_tied_table_is_summed_on_it(self, make_job: MakeJob, tmp_path: Path) -> None:
        strategy = Strategy(pp=2, tp=1, dp=1, mbs=1)
        fast, slow = (
            by_name(build_problem(make_job(tied=True, profiles=(network(make_job(), tmp_path, **s),)), strategy))
            for s in ({}, {"all_reduce": 5.0})
        )
        for name in ("text_pre", "text_post"):
            assert slow[name].tail_ms - fast[name].tail_ms == pytest.approx(4.0)

    @pytest.mark.parametrize("part", ["backward_input_ms", "backward_weight_ms"])
    def test_so_it_is_inside_a_block(self, make_job: MakeJob, tmp_path: Path, part: str) -> None:
        """Behind products of the backward sums and gathers run; products here are longer than either."""
        slow, half, quick = (
            getattr(block_costs(make_job(profiles=(network(make_job(), tmp_path, f),)), STRATEGY)["text_layer"], part)
            for f in (0.0, 0.5, 1.0)
        )
        assert quick < half < slow
        assert half == pytest.approx((slow + quick) / 2)

    def test_of_another_device_it_is_refused(self, make_job: MakeJob, tmp_path: Path) -> None:
        path = network(make_job(), tmp_path)
        path.write_text(json.dumps(json.loads(path.read_text()) | {"device": "h100-80g"}))
        with pytest.raises(ProfileError, match=r"network file .*: device is h100-80g and the job's cluster has a100"):
            build_problem(make_job(profiles=(path,)), STRATEGY)

    def test_one_folder_may_hold_both(self, make_job: MakeJob, tmp_path: Path) -> None:
        write(make_job(), tmp_path / "p.json", entry("text_layer"))
        network(make_job(), tmp_path)
        job = make_job(profiles=(tmp_path,))
        assert block_costs(job, STRATEGY)["text_layer"].forward_ms == 7.0
        assert describe_provenance(job, STRATEGY)["communication"]["profile"].startswith(str(tmp_path))


class TestProvenance:
    def test_without_measurements_it_is_as_ever(self, make_job: MakeJob) -> None:
        found = describe_provenance(make_job(), STRATEGY)
        assert (found["communication"], found["optimizer"]) == ("analytic", "analytic")
        assert found["blocks"]["text_layer"] == {"time": "analytic", "memory": "analytic"}

    def test_each_figure_by_itself(self, make_job: MakeJob, tmp_path: Path) -> None:
        extras = {"optimizer_ms": timing(1.0), "recompute_ms": timing(1.0), "arrangement": "shard"}
        path = write(make_job(), tmp_path / "p.json", entry("text_layer", **extras), entry("text_pre"))
        found = describe_provenance(make_job(profiles=(path,)), STRATEGY)
        expected = {"time": "measured", "memory": "measured", "arrangement": "shard", "recompute": "measured"}
        assert found["blocks"]["text_layer"] == expected
        assert found["blocks"]["text_pre"] == {"time": "measured", "memory": "measured"}
        assert found["optimizer"] == "measured and analytic"

    def test_each_operation_by_itself(self, make_job: MakeJob, tmp_path: Path) -> None:
        job = make_job(profiles=(network(make_job(), tmp_path, 0.5),), tied=True)
        found = describe_provenance(job, Strategy(pp=8, tp=2, cp=2, dp=1, mbs=1))["communication"]
        assert found.pop("profile").endswith(".json")
        assert found == {
            "tensor_parallel": {"all_gather": "measured", "reduce_scatter": "measured"},
            "context_parallel": {"send_recv": "measured"},
            "data_parallel": {"reduce_scatter": "measured", "all_gather": "measured"},
            "tied_table": {"all_reduce": "analytic"},
            "pipeline": {"send_recv": "measured and analytic"},
            "overlap": "measured",
        }
        json.dumps(found)

    def test_what_is_derived_and_what_is_assumed(self, make_job: MakeJob, tmp_path: Path) -> None:
        job = make_job(profiles=(network(make_job(), tmp_path),))
        found = describe_provenance(job, Strategy(pp=1, tp=4, dp=8, mbs=1, zero=0))["communication"]
        assert found["tensor_parallel"] == {"all_gather": "interpolated", "reduce_scatter": "interpolated"}
        assert found["data_parallel"] == {"all_reduce": "analytic"}
        assert found["overlap"].startswith("assumed")
        assert "pipeline" not in found
