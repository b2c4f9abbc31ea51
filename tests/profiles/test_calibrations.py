"""Calibrations: the shipped files, which one a job gets, what it changes, and files that are none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mm_autoparallel.errors import ProfileError
from mm_autoparallel.model.job.cluster import Cluster, Level
from mm_autoparallel.model.job.devices import DEVICES
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.profiles.calibration import (
    SHIPPED,
    Calibration,
    assume_calibration,
    calibration_of,
    find_calibration,
    read_calibration,
    shipped_calibrations,
)
from mm_autoparallel.model.profiles.figures import HOST_FIGURES, Figures
from mm_autoparallel.model.readers.job_file import parse_job

MODEL = {
    "text": {
        "vocab_size": 1024,
        "layers": {"num_layers": 2, "hidden_size": 64, "ffn_size": 128, "num_heads": 4, "norm": "rms"},
    }
}


def job_of(tmp_path: Path, device: str = "a100-80g", **keys: Any) -> Job:
    cluster = {"num_nodes": 1, "devices_per_node": 8, "device": device}
    workload = {"global_batch_size": 8, "seq_length": 256}
    return parse_job({"model": MODEL, "cluster": cluster, "workload": workload, **keys}, tmp_path / "job.yaml")


class TestShipped:
    @pytest.mark.parametrize("name", sorted(shipped_calibrations()))
    def test_a_file_is_what_its_name_says(self, name: str) -> None:
        found = shipped_calibrations()[name]
        assert name == found.software if found.others else name in (found.device, f"{found.device}.{found.software}")
        assert DEVICES.keys() >= set(found.devices)
        assert found.calibrated
        assert set(found.sources) <= set(Figures.model_fields)

    @pytest.mark.parametrize("name", sorted(shipped_calibrations()))
    def test_it_says_what_it_was_fitted_to_and_how_it_did(self, name: str) -> None:
        found = shipped_calibrations()[name]
        assert all(row.content for row in found.fitted)
        errors = {(table, int(row)): error for table, rows in found.held_out.items() for row, error in rows.items()}
        assert errors
        assert errors.keys().isdisjoint({(row.table, row.row) for row in found.fitted})
        inside = [
            found.interval.low_factor <= 1 / (1 + error) <= found.interval.high_factor for error in errors.values()
        ]
        assert sum(inside) >= 0.8 * len(inside)
        assert found.command.startswith("mm-autoparallel calibrate ")
        assert any(source.startswith("calibrated on ") for source in found.sources.values())

    def test_they_lie_in_the_package(self) -> None:
        assert {path.stem for path in SHIPPED.glob("*.json")} == set(shipped_calibrations())


class TestFinding:
    def test_a_device_has_one_of_its_own_name(self) -> None:
        assert find_calibration("a100-80g").name == "a100-80g"
        assert find_calibration("b200-192g").software == "megatron-core"

    def test_a_stack_has_its_own(self) -> None:
        assert find_calibration("a100-80g", "megatron-deepspeed").name == "a100-80g.megatron-deepspeed"

    def test_an_unknown_stack_gets_assumed_figures_with_a_wider_interval(self) -> None:
        known, other = find_calibration("a100-80g"), find_calibration("a100-80g", "somebody's own")
        assert not other.calibrated
        assert other.figures == assume_calibration("a100-80g").figures
        assert other.interval.low_factor < known.interval.low_factor
        assert other.interval.high_factor > known.interval.high_factor

    @pytest.mark.parametrize("name", ["h100-80g", "ascend-910b-64g", "a device of the user's"])
    def test_a_device_without_one_says_so_and_widens(self, name: str) -> None:
        found = find_calibration(name)
        assert not found.calibrated
        assert found.description == f"uncalibrated, assumed figures of {name}"
        widest = max(known.interval.high_factor for known in shipped_calibrations().values() if known.name in DEVICES)
        assert found.interval.high_factor > widest
        assert set(found.sources) == set(Figures.model_fields)
        assert not found.figures.shard_gigabyte_ms
        assert "DeepSpeed" in find_calibration(name, "deepspeed").sources["shard_gigabyte_ms"]

    def test_a_host_is_the_stacks_on_whatever_device(self) -> None:
        found = find_calibration("a800-80g", "megatron-core")
        assert not found.calibrated
        launches = {c.figures.layer_launch_ms for c in shipped_calibrations().values() if c.software == "megatron-core"}
        assert found.figures.layer_launch_ms == min(launches) > 0
        assert "the same stack" in found.sources["layer_launch_ms"]
        assert find_calibration("a800-80g").figures.layer_launch_ms == 0
        modern = find_calibration("h100-80g", "megatron-core")  # its own are assumed
        assert modern.figures.layer_launch_ms == assume_calibration("h100-80g", "megatron-core").figures.layer_launch_ms

    def test_megatron_cores_host_beside_a100_is_an_older_one(self) -> None:
        """Megatron-LM's functional tests: 5.5 and 4.0 ms for a text layer on A100 and H100."""
        older, newer = (assume_calibration(name, "megatron-core").figures for name in ("a100-80g", "h100-80g"))
        assert older.layer_launch_ms / newer.layer_launch_ms == 5.5 / 4.0
        assert older.tensor_launch_factor == newer.tensor_launch_factor
        others = assume_calibration("a100-80g", "megatron-lm").figures  # hides what megatron-core hides
        assert others.layer_launch_ms == 0
        changed = {"layer_launch_ms", "tensor_launch_factor"}
        assert older.model_dump(exclude=changed) == others.model_dump(exclude=changed)

    def test_a_grace_host_launches_as_much_slower_as_was_measured(self) -> None:
        """NVIDIA/TransformerEngine, issue 2053: a linear layer of PyTorch, beside GB200 and beside H100."""
        factor = 37.08 / 13.48
        for beside_x86, beside_grace in (("b200-192g", "gb200-192g"), ("b300-288g", "gb300-288g")):
            x86, grace = (assume_calibration(name, "megatron-bridge").figures for name in (beside_x86, beside_grace))
            for name in ("layer_launch_ms", "expert_host_ms", "vision_launch_ms", "rotary_vision_launch_ms"):
                assert getattr(grace, name) / getattr(x86, name) == pytest.approx(factor, rel=0.001)
            others = set(Figures.model_fields) - {*HOST_FIGURES, "expert_host_ms"}
            assert all(getattr(grace, name) == getattr(x86, name) for name in others)


class TestReached:
    LEVELS = (
        Level(
            name="node", num_devices=8, bandwidth_bytes_per_s=100e9, latency_ms=0.01, pair_bandwidth_bytes_per_s=20e9
        ),
        Level(name="cluster", num_devices=32, bandwidth_bytes_per_s=25e9, latency_ms=0.02),
    )

    def reached(self, **figures: float) -> tuple[Level, ...]:
        assumed = assume_calibration("a100-80g")
        changed = assumed.model_copy(update={"figures": assumed.figures.model_copy(update=figures)})
        cluster = Cluster(num_nodes=4, devices_per_node=8, device=DEVICES["a100-80g"], levels=self.LEVELS)
        return changed.reached(cluster).levels

    def test_each_level_by_its_own_fraction(self) -> None:
        node, network = self.reached(node_fraction=0.5, network_fraction=0.8)
        assert (node.bandwidth_bytes_per_s, node.pair_bandwidth_bytes_per_s) == (50e9, 10e9)
        assert (network.bandwidth_bytes_per_s, network.pair_bandwidth_bytes_per_s) == (20e9, None)
        assert (node.latency_ms, network.latency_ms) == (0.02, 0.02)

    def test_latencies_where_they_are_known(self) -> None:
        node, network = self.reached(node_latency_ms=0.2, network_latency_ms=0.0)
        assert (node.latency_ms, network.latency_ms) == (0.2, 0.0)


class TestOfAJob:
    def test_it_is_that_of_the_device_unless_named(self, tmp_path: Path) -> None:
        assert calibration_of(job_of(tmp_path)).name == "a100-80g"
        named = job_of(tmp_path, calibration="a100-80g.megatron-core")
        assert calibration_of(named).software == "megatron-core"

    def test_a_file_lies_beside_the_job(self, tmp_path: Path) -> None:
        write_copy(tmp_path / "mine.json", name="mine")
        assert calibration_of(job_of(tmp_path, calibration="mine.json")).name == "mine"

    def test_neither_a_name_nor_a_file(self, tmp_path: Path) -> None:
        with pytest.raises(
            ProfileError, match=r"job\.yaml: calibration is 'a100-80', which is neither .*a100-80g.* nor"
        ):
            calibration_of(job_of(tmp_path, calibration="a100-80"))

    def test_of_another_device(self, tmp_path: Path) -> None:
        with pytest.raises(ProfileError, match="'b200-192g' is of b200-192g, and the device is a100-80g"):
            calibration_of(job_of(tmp_path, calibration="b200-192g"))

    def test_it_changes_no_fingerprint_of_the_job(self, tmp_path: Path) -> None:
        """Plans name it in their provenance; the job is the same."""
        assert job_of(tmp_path).sha256 == job_of(tmp_path, calibration="a100-80g.megatron-core").sha256


def write_copy(path: Path, **changed: Any) -> Calibration:
    document = json.loads((SHIPPED / "a100-80g.json").read_text(encoding="utf-8")) | changed
    path.write_text(json.dumps(document), encoding="utf-8")
    return read_calibration(path)


BREAK: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a fraction above 1": (lambda d: d["figures"].update(matrix_fraction=1.5), "figures.matrix_fraction is 1.5"),
    "a fraction that nothing can be divided by": (
        lambda d: d["figures"].update(matrix_fraction=5e-324),
        "figures.matrix_fraction is 5e-324; a number from 1e-06 to 1 is expected",
    ),
    "an interval without an end": (
        lambda d: d["interval"].update(high_factor=1e300),
        "interval.high_factor is 1e+300; it must be at most",
    ),
    "a figure nobody knows": (lambda d: d["figures"].update(matrix=0.5), "figures.matrix is not a key known here"),
    "a source of no figure": (lambda d: d["sources"].update(memory="x"), "memory, which is no figure"),
    "another schema": (lambda d: d.update(schema="mm-autoparallel/calibration/9"), "schema is"),
    "no interval": (lambda d: d.pop("interval"), "interval is missing"),
}


@pytest.mark.parametrize("what", sorted(BREAK))
def test_what_is_wrong_with_a_file_is_named(tmp_path: Path, what: str) -> None:
    change, expected = BREAK[what]
    document = json.loads((SHIPPED / "a100-80g.json").read_text(encoding="utf-8"))
    change(document)
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(ProfileError) as failure:
        read_calibration(path)
    assert str(path) in str(failure.value)
    assert expected in str(failure.value)
