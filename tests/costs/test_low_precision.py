"""Low precision in times and bytes: products, quantisation, gathers, kept inputs, weights, and BF16 as it was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mm_autoparallel.model.blocks.expand import expand
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.costs.low_parameters import gathered_weight_bytes, held_weight_bytes, high_fraction
from mm_autoparallel.model.costs.stage import build_problem
from mm_autoparallel.model.job.devices import DEVICES
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.precision import PRECISIONS
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.operators.analytic import Rates, rates_of
from mm_autoparallel.model.operators.operators import AttentionProduct, MatrixProduct, Share
from mm_autoparallel.model.profiles.calibration import Calibration, assume_calibration, calibration_of
from mm_autoparallel.model.profiles.cost import BlockCost
from mm_autoparallel.model.readers.job_file import parse_job
from mm_autoparallel.planner.plan import parallel_config
from mm_autoparallel.planner.search.space import describe_strategy, list_space

LAYERS = {
    "num_layers": 4,
    "hidden_size": 4096,
    "ffn_size": 14336,
    "num_heads": 32,
    "num_kv_groups": 8,
    "norm": "rms",
}
TOWER = {
    "name": "vision",
    "stem": {"type": "patches", "in_features": 1176},
    "layers": {"num_layers": 2, "hidden_size": 1024, "ffn_size": 4096, "num_heads": 16, "norm": "layer"},
    "projector": {"norm": "layer", "norm_size": 1024, "merge_tokens": 4, "layer_sizes": [4096, 4096]},
}
STRATEGY = Strategy(pp=2, tp=2, dp=4, mbs=1)
E, N, H, F = 2, 4096, 4096, 14336


def job_of(device: str = "gb300-288g", search: dict[str, Any] | None = None, tower: bool = False, **work: Any) -> Job:
    model: dict[str, Any] = {"text": {"vocab_size": 32000, "layers": LAYERS}}
    workload = {"global_batch_size": 32, "seq_length": N} | work
    if tower:
        model["encoders"] = [TOWER]
        workload["image_tokens_per_sample"] = 1024
    cluster = {"num_nodes": 4, "devices_per_node": 4, "device": device}
    return parse_job(
        {"model": model, "cluster": cluster, "workload": workload, "search": search or {}}, Path("job.yaml")
    )


def layer_of(job: Job, strategy: Strategy = STRATEGY, part: str = "text") -> BlockCost:
    """Of one layer on a device whose host is never waited for."""
    assumed = calibration_of(job)
    launches = dict.fromkeys(("layer_launch_ms", "vision_launch_ms", "rotary_vision_launch_ms"), 0.0)
    costs = CostModel(job, assumed.model_copy(update={"figures": assumed.figures.model_copy(update=launches)}))
    found = zip(costs.chain.blocks, costs.look_up(strategy), strict=True)
    return next(cost for block, cost in found if block.modality == part and block.role == "layer")


def total_ms(cost: BlockCost) -> float:
    return cost.forward_ms + cost.backward_input_ms + cost.backward_weight_ms


class TestProducts:
    def rates(self, device: str = "b200-192g", **figures: Any) -> Rates:
        assumed = assume_calibration(device, modern=True)
        changed = assumed.model_copy(update={"figures": assumed.figures.model_copy(update=figures)})
        cluster = job_of().cluster.model_copy(update={"device": DEVICES[device]})
        return rates_of(cluster, changed, STRATEGY)

    def test_peak_fraction_clock_and_recipe_make_the_rate(self) -> None:
        rates, device = self.rates(), DEVICES["b200-192g"]
        assert rates.matrix_flops_per_s == pytest.approx(0.80 * 0.70 * device.bf16_flops_per_s)
        for precision, expected in (
            ("fp8_current", 0.79 * 4500),
            ("mxfp8", 0.93 * 0.79 * 4500),
            ("nvfp4", 0.64 * 9000),
        ):
            ms = rates.matrix_ms(1e15, 0.0, precision=precision)
            assert ms == pytest.approx(1e18 / (0.70 * expected * 1e12)), precision

    def test_without_a_figure_of_its_own_it_follows_bf16(self) -> None:
        rates = self.rates(matrix_fraction=0.40, fp8_matrix_fraction=None, edge_factor=0.0)
        assert rates.low["fp8_current"].rate_factor == pytest.approx(2 * 0.79 / 0.80)

    def test_edges_grow_with_what_is_computed_while_a_byte_moves(self) -> None:
        rates = self.rates("h100-80g")
        reached = 0.51 * 3.35e12
        assert rates.edge_count == pytest.approx(0.12 * 0.80 * 989.4e12 / reached)
        assert rates.low["fp8_current"].edge_count == pytest.approx(0.12 * 0.79 * 1978.9e12 / reached)
        assert self.rates("h100-80g", edge_factor=0.0, edge_count=20).low["fp8_current"].edge_count == 20

    def test_operands_move_in_their_own_size(self) -> None:
        plain, low = MatrixProduct(10, 20, 30), MatrixProduct(10, 20, 30, precision="fp8_current")
        assert plain.moved_bytes == 2 * (10 * 20 + 20 * 30 + 10 * 30)
        assert low.moved_bytes == 10 * 20 + 20 * 30 + 2 * 10 * 30
        assert (plain.gather_factor, low.gather_factor) == (1, 0.5)

    def test_hopper_writes_a_transposed_copy(self) -> None:
        found = [self.rates(name).low["fp8_current"].quantised_bytes for name in ("h100-80g", "b200-192g")]
        assert found == [6, 5]

    def test_attention_falls_behind_where_sequences_are_short(self) -> None:
        rates = self.rates()
        core = AttentionProduct(1e12, 2.5e12, 0.0, key_count=1700, query_size=128, value_size=128)
        best_ms = rates.attention_ms(1e12, backward=False)
        assert rates.core_ms(core, backward=False) == pytest.approx(2 * best_ms)
        assert rates.core_ms(replace(core, low=True), backward=False) == pytest.approx(2 * best_ms / 1.25)
        assert rates.core_ms(replace(core, query_size=192), backward=False) == pytest.approx(2 * best_ms / 0.9)
        assert rates.core_ms(replace(core, query_size=64, value_size=64), False) == pytest.approx(2 * best_ms / 0.72)
        backward_ms = rates.attention_ms(2.5e12, backward=True)
        assert rates.core_ms(core, backward=True) == pytest.approx(backward_ms * (1700 + 2200) / 1700)


class TestLayers:
    def test_fewer_bits_are_faster_and_keep_less(self) -> None:
        costs = [layer_of(job_of(precision=name)) for name in ("bf16", "mxfp8", "nvfp4")]
        times, kept = [total_ms(cost) for cost in costs], [cost.activation_bytes for cost in costs]
        assert times == sorted(times, reverse=True)
        assert kept == sorted(kept, reverse=True)
        assert 1.2 < times[0] / times[1] < 2

    def test_kept_inputs(self) -> None:
        """Of QKV and feed-forward (norms' outputs), of both second products; attention keeps its own output."""
        bf16, low = (layer_of(job_of(precision=name)) for name in ("bf16", "fp8_current"))
        inputs = N * (2 * H + F) / 2  # of two tensor parallel ranks, sequence parallel
        assert bf16.activation_bytes - low.activation_bytes == pytest.approx(inputs - N * H / 2)

    def test_quantisation_costs_bytes_of_inputs_and_output_gradients(self) -> None:
        fused = job_of(precision="fp8_current", facts={"fused_casts": True})
        plain, half = layer_of(job_of(precision="fp8_current")), layer_of(fused)
        width = (32 + 2 * 8) * 128
        reached, backward_bytes = 0.51 * 8e12, 5 * N * (width / 2 + H + F + H)
        spared = plain.forward_ms - half.forward_ms, plain.backward_input_ms - half.backward_input_ms
        # QKV and the feed-forward take h, their second products a half of a·d and of f
        assert spared[0] == pytest.approx(0.5 * 5 * N * (H + H / 2 + H + F / 2) / reached * 1e3)
        assert spared[1] == pytest.approx(0.5 * backward_bytes / reached * 1e3)

    def test_towers_stay_beside_a_low_decoder(self) -> None:
        plain, low = job_of(tower=True, search={"precision": ["bf16", "mxfp8"]}), job_of(tower=True, precision="mxfp8")
        both = job_of(tower=True, precision="mxfp8", tower_precision="mxfp8")
        assert layer_of(low, part="vision") == layer_of(plain, part="vision") != layer_of(both, part="vision")
        assert layer_of(low) == layer_of(both) != layer_of(plain)

    def test_first_and_last_layer_in_bf16(self) -> None:
        """Two of four: the mean of both."""
        mixed = layer_of(job_of(precision="mxfp8", facts={"low_first_last": False}))
        low = layer_of(job_of(precision="mxfp8"))
        high = layer_of(job_of(search={"precision": ["bf16", "mxfp8"]}))
        assert total_ms(mixed) == pytest.approx((total_ms(low) + total_ms(high)) / 2)
        assert mixed.activation_bytes == pytest.approx((low.activation_bytes + high.activation_bytes) / 2)

    @pytest.mark.parametrize(("overlap", "part"), [("user_buffers", 0.5), ("asynchronous", 0.7)])
    def test_overlap_leaves_its_part_of_tensor_parallel_traffic(self, overlap: str, part: float) -> None:
        """Whatever else hides: forward gathers two inputs and scatters two outputs."""
        strategy = Strategy(pp=2, tp=4, dp=2, mbs=1)
        alone = layer_of(job_of(), strategy)
        beside = layer_of(job_of(facts={"tp_overlap": overlap}), strategy)
        bare_ms = alone.forward_ms - (alone.forward_ms - beside.forward_ms) / (1 - part)
        traffic_ms = alone.forward_ms - bare_ms
        whole = E * N * H
        expected_ms = 4 * (3 / 4 * whole / (0.65 * 900e9) * 1e3)
        assert expected_ms < traffic_ms < 1.3 * expected_ms  # latencies beside

    def test_low_gathers_move_half(self) -> None:
        """Half of the traffic is gathers: what user buffers spare of it falls from 4 to 3 parts."""
        strategy, overlap = Strategy(pp=2, tp=4, dp=2, mbs=1), {"facts": {"tp_overlap": "user_buffers"}}
        spared = [
            layer_of(job_of(precision=name, search={"precision": [name, "mxfp8"]}), strategy).forward_ms
            - layer_of(job_of(precision=name, search={"precision": [name, "mxfp8"]}, **overlap), strategy).forward_ms
            for name in ("bf16", "fp8_current")
        ]
        assert spared[1] / spared[0] == pytest.approx(3 / 4, rel=0.1)  # latencies stay


class TestWeights:
    def bytes_of(self, precision: str, zero: int = 1, device: str = "b200-192g", **facts: Any) -> tuple[float, float]:
        workload = job_of(precision=precision, **({"facts": facts} if facts else {})).workload
        block = next(b for b in self.blocks() if b.role == "layer")
        strategy = replace(STRATEGY, zero=zero)
        held = held_weight_bytes(block, workload, strategy, DEVICES[device])
        return held, gathered_weight_bytes(block, workload, strategy)

    def blocks(self) -> Any:
        return expand(job_of().model).blocks

    @pytest.mark.parametrize(
        ("precision", "device", "expected"),
        [
            ("bf16", "b200-192g", (2, 2)),
            ("fp8_current", "b200-192g", (1, 1)),
            ("fp8_current", "h100-80g", (2, 1)),
            ("mxfp8", "b200-192g", (2.0625, 1.03125)),
            ("nvfp4", "b200-192g", (3.125, 2)),
        ],
    )
    def test_held_and_gathered(self, precision: str, device: str, expected: tuple[float, float]) -> None:
        assert self.bytes_of(precision, device=device) == expected

    def test_kept_in_bf16_copies_lie_beside(self) -> None:
        assert self.bytes_of("mxfp8", low_parameters=False) == (4.0625, 2)
        assert self.bytes_of("mxfp8", zero=3) == (2, 2)
        assert self.bytes_of("mxfp8", zero=3, low_parameters=True) == (1.03125, 1.03125)

    def test_embedding_and_head_stay(self) -> None:
        workload = job_of(precision="mxfp8").workload
        ends = [block for block in self.blocks() if block.role != "layer"]
        assert ends
        assert {gathered_weight_bytes(block, workload, STRATEGY) for block in ends} == {2}

    def test_a_plans_memory_has_them(self) -> None:
        def weights(precision: str) -> float:
            problem = build_problem(job_of(precision=precision), STRATEGY)
            return next(b.footprint.weight_bytes for b in problem.chain if b.layer and b.footprint)

        assert weights("fp8_current") == weights("bf16") / 2

    def test_high_layers_count_by_their_number(self) -> None:
        job = job_of(precision="mxfp8", facts={"low_first_last": False})
        chain = expand(job.model)
        layer = next(block for block in chain.blocks if block.role == "layer")
        assert high_fraction(chain, layer, job.workload, STRATEGY) == 0.5
        assert high_fraction(chain, layer, job_of(precision="mxfp8").workload, STRATEGY) == 0


class TestSearch:
    def test_named_ones_alone_are_tried(self) -> None:
        limits = {"pp": [2], "tp": [2], "cp": [1], "mbs": [1]}
        assert {e.strategy.precision for e in list_space(job_of(search=limits))} == {""}
        asked = job_of(search=limits | {"precision": ["bf16", "mxfp8", "nvfp4"]})
        found = [entry.strategy for entry in list_space(asked)]
        assert [strategy.precision for strategy in found] == ["", "mxfp8", "nvfp4"]  # bf16 is the workload's own
        assert describe_strategy(found[1]) == "PP 2 TP 2 DP 4 MBS 1 mxfp8"
        assert parallel_config(found[1])["PRECISION"] == "mxfp8"
        assert "PRECISION" not in parallel_config(found[0])
        steps = [sum(b.count * b.forward_ms for b in build_problem(asked, strategy).chain) for strategy in found]
        assert steps == sorted(steps, reverse=True)

    def test_a_strategys_own_is_the_same_as_the_workloads(self) -> None:
        search = {"precision": ["bf16", "mxfp8"]}
        chosen = layer_of(job_of(search=search), replace(STRATEGY, precision="mxfp8"))
        assert chosen == layer_of(job_of(precision="mxfp8"))


class TestUnchanged:
    @pytest.mark.parametrize("device", ["a100-80g", "h100-80g", "ascend-910b-64g"])
    def test_bf16_rates_are_the_peaks_fraction(self, device: str) -> None:
        cluster = job_of().cluster.model_copy(update={"device": DEVICES[device]})
        figures = assume_calibration(device).figures
        rates = rates_of(cluster, assume_calibration(device), STRATEGY)
        assert rates.matrix_flops_per_s == DEVICES[device].bf16_flops_per_s * figures.matrix_fraction
        assert rates.edge_count == 20
        core = AttentionProduct(1e12, 2e12, 0.0, key_count=64, query_size=64, value_size=128)
        assert rates.core_ms(core, backward=False) == rates.attention_ms(1e12, backward=False)

    def test_other_stacks_keep_their_figures_of_older_devices_for_bf16_alone(self) -> None:
        def used(device: str, **keys: Any) -> Calibration:
            return calibration_of(job_of(device, **keys))

        assert assume_calibration("h100-80g", "fsdp").figures.memory_fraction == 0.70
        assert used("h100-80g").figures.memory_fraction == 0.51
        assert used("b200-192g").calibrated
        for keys in ({"precision": "fp8_current"}, {"search": {"precision": ["bf16", "fp8_current"]}}):
            assert used("h100-80g", **keys).figures.memory_fraction == 0.51
            assert not used("b200-192g", **keys).calibrated
        assert used("gb300-288g").figures.fp8_matrix_fraction == 0.79

    def test_a_share_is_bf16(self) -> None:
        assert not Share().low
        assert Share().input_bytes == E
        assert {name for name in PRECISIONS if Share(precision=name).low} == set(PRECISIONS) - {"bf16"}
