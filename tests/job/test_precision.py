"""Precision in jobs: which devices and stacks run it, what is refused, and what it leaves as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mm_autoparallel.errors import JobError
from mm_autoparallel.model.job.cluster import Cluster
from mm_autoparallel.model.job.devices import DEVICES
from mm_autoparallel.model.job.domains import count_joined
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.precision import PRECISIONS, RECIPES, peak_flops_per_s, precision_reason, transposes
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.job.strategy_law import unlawful_reason
from mm_autoparallel.model.profiles.calibration import assume_calibration
from mm_autoparallel.model.readers.job_file import parse_job
from mm_autoparallel.model.readers.megatron_precision import read_megatron_precision

LAYERS = {"num_layers": 4, "hidden_size": 1024, "ffn_size": 4096, "num_heads": 16, "norm": "rms"}


def job_of(device: Any = "gb300-288g", per_node: int = 4, search: dict[str, Any] | None = None, **workload: Any) -> Job:
    return parse_job(
        {
            "model": {"text": {"vocab_size": 32000, "layers": LAYERS}},
            "cluster": {"num_nodes": 2, "devices_per_node": per_node, "device": device},
            "workload": {"global_batch_size": 16, "seq_length": 1024, **workload},
            "search": search or {},
        },
        Path("job.yaml"),
    )


STRATEGY = Strategy(pp=2, tp=2, dp=2, mbs=1)


def reason_of(job: Job, strategy: Strategy = STRATEGY) -> str:
    return unlawful_reason(job.model, job.cluster, job.workload, strategy) or ""


class TestWhatRuns:
    def test_peaks_follow_the_bits(self) -> None:
        device = DEVICES["gb300-288g"]
        peaks = [peak_flops_per_s(device, precision) for precision in ("bf16", "mxfp8", "nvfp4")]
        assert peaks == [2500e12, 5000e12, 15000e12]
        assert [transposes(DEVICES[name]) for name in ("h100-80g", "b200-192g")] == [True, False]

    @pytest.mark.parametrize(
        ("device", "precision", "words"),
        [
            ("a100-80g", "mxfp8", "device a100-80g has no fp8_flops_per_s; it runs bf16"),
            ("h100-80g", "mxfp8", "scales blocks of 32 numbers, and device h100-80g, without fp4_flops_per_s"),
            ("h100-80g", "nvfp4", "multiplies in FP4, and device h100-80g has no fp4_flops_per_s"),
            ("ascend-910b-64g", "fp8_current", "has no fp8_flops_per_s"),
        ],
    )
    def test_a_device_without_the_units_is_refused(self, device: str, precision: str, words: str) -> None:
        assert words in reason_of(job_of(device, precision=precision))
        with pytest.raises(JobError, match=r"search\.precision names"):
            job_of(device, search={"precision": [precision]})

    @pytest.mark.parametrize("stack", ["mindspeed-mm", "megatron-local", "megatron-deepspeed"])
    def test_a_stack_without_the_recipe_is_refused(self, stack: str) -> None:
        assert f"none that workload.stack {stack} runs; it runs bf16" in reason_of(
            job_of(precision="mxfp8", stack=stack)
        )

    def test_rowwise_is_torchs(self) -> None:
        device = DEVICES["h100-80g"]
        assert precision_reason("fp8_rowwise", device, "transformers") is None
        assert "it runs bf16, fp8_delayed" in (precision_reason("fp8_rowwise", device, "megatron-te") or "")

    def test_eager_layers_have_none(self) -> None:
        assert "implementation is transformers" in reason_of(job_of(precision="mxfp8", implementation="transformers"))

    def test_a_name_that_nobody_knows(self) -> None:
        with pytest.raises(JobError, match=r"workload\.precision"):
            job_of(precision="fp9")
        assert "is not understood" in (precision_reason("fp9", DEVICES["h100-80g"], "megatron-te") or "")

    def test_towers_stay_in_bf16_unless_they_say_otherwise(self) -> None:
        plain, low = job_of(precision="nvfp4").workload, job_of(precision="nvfp4", tower_precision="mxfp8").workload
        assert (STRATEGY.precision_of(plain), STRATEGY.precision_of(plain, "vision")) == ("nvfp4", "bf16")
        assert STRATEGY.precision_of(low, "vision") == "mxfp8"
        chosen = Strategy(pp=2, tp=2, dp=2, mbs=1, precision="bf16")
        assert chosen.precision_of(low, "vision") == "bf16"

    @pytest.mark.parametrize(
        "more", [{"tower_precision": "mxfp8"}, {"facts": {"fp8_attention": True}}, {"facts": {"low_parameters": True}}]
    )
    def test_what_is_said_of_low_products_needs_some(self, more: dict[str, Any]) -> None:
        with pytest.raises(JobError, match="bf16 alone"):
            job_of(**more)
        assert job_of(search={"precision": ["bf16", "mxfp8"]}, **more).asks_low

    def test_one_way_to_say_what_is_hidden(self) -> None:
        with pytest.raises(JobError, match="give one"):
            job_of(fused_matmul_fraction=0.5, facts={"tp_overlap": "user_buffers"})


class TestDomains:
    def test_nvl72_of_a_node_of_eight(self) -> None:
        with pytest.raises(JobError, match=r"a node of 72 devices is asked for, .* joins at most 8"):
            job_of("h100-80g", per_node=72)
        with pytest.raises(JobError, match="a node of 16 devices"):
            job_of("b200-192g", per_node=16)

    @pytest.mark.parametrize(
        ("device", "num_nodes", "per_node", "levels"),
        [
            ("gb200-192g", 64, 4, [("node", 4), ("domain", 64), ("cluster", 256)]),
            ("gb300-288g", 18, 4, [("node", 4), ("domain", 72)]),
            ("gb300-288g", 4, 64, [("node", 64), ("cluster", 256)]),
            ("h100-80g", 4, 4, [("node", 4), ("cluster", 16)]),
            ("ascend-910c-64g", 48, 16, [("node", 16), ("cluster", 768)]),
            ("ascend-910c-64g-supernode", 48, 16, [("node", 16), ("domain", 768)]),
        ],
    )
    def test_links_beyond_a_node_make_a_level(
        self, device: str, num_nodes: int, per_node: int, levels: list[tuple[str, int]]
    ) -> None:
        made = Cluster(num_nodes=num_nodes, devices_per_node=per_node, device=DEVICES[device])
        assert [(level.name, level.num_devices) for level in made.levels] == levels
        assert made.max_tensor_parallel == max(size for name, size in levels if name != "cluster")

    @pytest.mark.parametrize(
        ("device", "num_devices", "node_span", "joined"),
        [
            ("gb300-288g", 256, 4, 64),
            ("gb200-192g", 32, 1, 32),
            ("gb200-192g", 144, 1, 72),
            ("b200-192g", 256, 8, 8),
            ("h100-80g", 16, 1, 1),
            ("a100-80g", 16, 4, 4),
        ],
    )
    def test_devices_of_a_domain(self, device: str, num_devices: int, node_span: int, joined: int) -> None:
        assert count_joined(DEVICES[device], num_devices, node_span) == joined

    def test_a_domain_is_reached_as_the_node_is(self) -> None:
        made = Cluster(num_nodes=64, devices_per_node=4, device=DEVICES["gb200-192g"])
        node, domain, network = assume_calibration("gb200-192g").reached(made).levels
        assert node.bandwidth_bytes_per_s == domain.bandwidth_bytes_per_s == 0.65 * 900e9
        assert (domain.scale_ranks, network.scale_ranks) == (None, 1000)
        assert network.bandwidth_bytes_per_s == 0.85 * 50e9


class TestFingerprints:
    def test_defaults_change_none(self) -> None:
        assert job_of(precision="bf16").sha256 == job_of().sha256 == job_of(tower_precision="bf16").sha256
        assert job_of(precision="mxfp8").sha256 != job_of().sha256

    def test_the_catalogs_new_figures_change_none_and_ones_own_do(self) -> None:
        plain = job_of("h100-80g").sha256
        bare = DEVICES["h100-80g"].model_dump() | {"fp8_flops_per_s": None, "domain_devices": None}
        assert job_of(bare).sha256 == plain
        assert job_of({"based_on": "h100-80g", "clock_fraction": 0.9}).sha256 != plain


class TestMegatronsFlags:
    def test_none_is_bf16(self) -> None:
        assert read_megatron_precision({"bf16": True, "fp8": None}).precision == "bf16"

    @pytest.mark.parametrize(
        ("flags", "precision"),
        [
            ({"--fp8-format": "hybrid"}, "fp8_delayed"),
            ({"fp8": "e4m3", "fp8_recipe": "tensorwise"}, "fp8_current"),
            ({"fp8-format": "e4m3", "fp8-recipe": "mxfp8"}, "mxfp8"),
            ({"fp8-format": "e4m3", "fp8-recipe": "blockwise"}, "fp8_blockwise"),
            ({"fp4_format": "e2m1"}, "nvfp4"),
        ],
    )
    def test_recipes(self, flags: dict[str, Any], precision: str) -> None:
        found = read_megatron_precision(flags)
        assert found.precision == precision
        assert found.facts == {"low_parameters": False}

    def test_what_else_they_say(self) -> None:
        flags = {"fp8": "hybrid", "fp8_param_gather": True, "first_last_layers_bf16": True, "tp_comm_overlap": True}
        facts = {"low_parameters": True, "low_first_last": False, "tp_overlap": "user_buffers"}
        assert read_megatron_precision(flags).facts == facts
        assert read_megatron_precision({"fp8": "e4m3", "fp8_dot_product_attention": True}).facts["fp8_attention"]

    @pytest.mark.parametrize(
        ("flags", "words"),
        [
            ({"fp8": "hybrid", "fp4": "e2m1"}, "both given"),
            ({"fp8": "e5m2"}, "e4m3, hybrid"),
            ({"fp8": "e4m3", "fp8_recipe": "custom"}, "known are delayed"),
            ({"fp8": "e4m3", "first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 3}, "is represented"),
        ],
    )
    def test_what_is_not_represented(self, flags: dict[str, Any], words: str) -> None:
        with pytest.raises(ValueError, match=words):
            read_megatron_precision(flags)


def test_every_precision_has_its_recipe() -> None:
    assert set(RECIPES) == set(PRECISIONS)
    assert [RECIPES[name].kept_bytes for name in ("bf16", "fp8_current", "mxfp8", "nvfp4")] == [2, 1, 1.03125, 0.5625]
    # copies of a weight: one scale a tensor serves both directions, but where the device transposes; blocks need two
    hopper, blackwell = DEVICES["h100-80g"], DEVICES["b200-192g"]
    assert [RECIPES["fp8_current"].copies_bytes(device) for device in (hopper, blackwell)] == [2, 1]
    assert RECIPES["mxfp8"].copies_bytes(blackwell) == 2.0625
