"""What hosts and unequal lengths cost: a host of their own for towers, replicas that wait, shapes sent ahead."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from mm_autoparallel.errors import JobError
from mm_autoparallel.hooks.profiling import list_divisions
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.costs.stage import build_problem
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.profiles.calibration import assume_calibration
from mm_autoparallel.model.readers.job_file import parse_job

WIDTHS: dict[str, Any] = {"num_layers": 4, "hidden_size": 64, "ffn_size": 128, "num_heads": 4}


def make_job(rotary: bool = True, device: str = "ascend-910b-64g", heads: int = 4, **workload: Any) -> Job:
    tower = {
        "name": "vision",
        "stem": {"type": "patches", "in_features": 588},
        "layers": WIDTHS
        | {"norm": "layer", "gated": False, "rotary": rotary, "num_heads": heads, "hidden_size": 16 * heads},
        "projector": {"merge_tokens": 4, "layer_sizes": [64 * heads, 64]},
    }
    text = {"vocab_size": 512, "tied": False, "layers": WIDTHS | {"norm": "rms", "gated": True}}
    document = {
        "model": {"name": "small", "encoders": [tower], "text": text},
        "cluster": {"num_nodes": 1, "devices_per_node": 8, "device": device},
        "workload": {
            "global_batch_size": 32,
            "seq_length": 64,
            "image_tokens_per_sample": 16,
            "sequence_parallel": False,
            "stack": "mindspeed-mm",
        }
        | workload,
    }
    return parse_job(document, Path("job.yaml"))


def forwards(job: Job, tp: int = 1, **figures: float) -> dict[str, float]:
    base = assume_calibration(job.cluster.device.name, "mindspeed-mm")
    costs = CostModel(job, base.model_copy(update={"figures": base.figures.model_copy(update=figures)}))
    pairs = zip(costs.chain.blocks, costs.look_up(Strategy(pp=1, tp=tp, dp=8 // tp, mbs=1)), strict=True)
    return {block.name: cost.forward_ms for block, cost in pairs if block.role == "layer"}


class TestHost:
    def test_layers_of_a_tower_wait_for_a_host_of_their_own(self) -> None:
        assert forwards(make_job(rotary=True)) == {"vision_layer": 4.0, "text_layer": 1.33}
        assert forwards(make_job(rotary=False)) == {"vision_layer": 2.5, "text_layer": 1.33}
        assert forwards(make_job(rotary=False, device="ascend-910c-64g")) == {"vision_layer": 1.5, "text_layer": 0.8}

    def test_a_tower_whose_host_nobody_measured_has_that_of_the_decoder(self) -> None:
        found = forwards(make_job(), layer_launch_ms=2.0, vision_launch_ms=0.0, rotary_vision_launch_ms=0.0)
        assert found == {"vision_layer": 2.0, "text_layer": 2.0}

    def test_tensor_parallel_ranks_launch_collectives_too(self) -> None:
        assert forwards(make_job(), tp=2)["text_layer"] == pytest.approx(1.3 * 1.33)


def factor_of(job: Job, strategy: Strategy) -> float:
    (factor,) = set(build_problem(job, strategy).time_factors)
    return factor


class TestLengths:
    def test_replicas_wait_for_the_slowest_sum_and_stages_for_each_other(self) -> None:
        job = make_job(length_spread_fraction=0.15)
        alone = Strategy(pp=1, tp=1, dp=8, mbs=1)  # four micro-batches
        assert factor_of(job, alone) == pytest.approx(1 + 0.15 * math.sqrt(2 * math.log(8) / 4))
        piped = Strategy(pp=4, tp=2, dp=1, mbs=1)
        assert factor_of(job, piped) == pytest.approx(1 + 0.15 * 0.75 / math.sqrt(math.pi))
        assert factor_of(make_job(), alone) == 1.0

    def test_shapes_sent_before_tensors_wait_at_every_boundary_both_ways(self) -> None:
        def tails(strategy: Strategy, varied: bool) -> tuple[float, ...]:
            return build_problem(make_job(variable_seq_lengths=varied), strategy).stage_tail_ms

        piped, alone = Strategy(pp=4, tp=1, dp=2, mbs=1), Strategy(pp=1, tp=1, dp=8, mbs=1)
        waits = [late - soon for soon, late in zip(tails(piped, False), tails(piped, True), strict=True)]
        assert waits == pytest.approx([30.0] * 4)
        assert tails(alone, False) == tails(alone, True)

    @pytest.mark.parametrize("spread", [-0.1, 1.5])
    def test_an_impossible_spread(self, spread: float) -> None:
        with pytest.raises(JobError, match="length_spread_fraction"):
            make_job(length_spread_fraction=spread)


class TestReplicatedTowers:
    """Three heads in the tower, four in the decoder."""

    def job(self, **workload: Any) -> Job:
        return make_job(heads=3, **workload)

    def test_heads_that_tp_does_not_divide_are_refused_or_whole_on_every_rank(self) -> None:
        strategy = Strategy(pp=1, tp=2, dp=4, mbs=1)
        with pytest.raises(JobError, match="TP 2 does not divide the attention heads of vision, 3"):
            build_problem(self.job(), strategy)
        whole = self.job(replicate_towers=True)
        costs = CostModel(whole, assume_calibration("ascend-910b-64g", "mindspeed-mm"))
        shared, alone = (
            {block.name: cost for block, cost in zip(costs.chain.blocks, costs.look_up(one), strict=True)}
            for one in (strategy, Strategy(pp=1, tp=1, dp=8, mbs=1))
        )
        for name in ("vision_pre", "vision_layer", "vision_post"):
            assert shared[name] == alone[name]
        assert shared["text_layer"].parameter_count < 0.6 * alone["text_layer"].parameter_count
        assert build_problem(whole, strategy).chain[1].static_bytes > 0

    def test_a_decoder_is_never_whole(self) -> None:
        with pytest.raises(JobError, match="TP 8 does not divide the attention heads of text, 4"):
            build_problem(self.job(replicate_towers=True), Strategy(pp=1, tp=8, dp=1, mbs=1))

    def test_profiles_are_taken_where_the_tower_divides(self) -> None:
        assert {one.tp for one in list_divisions(self.job(replicate_towers=True))} == {1}
