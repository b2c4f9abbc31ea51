"""The measured network: fits of known lines, groups that were and were not measured, and the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm_autoparallel.errors import ProfileError
from mm_autoparallel.model.job.cluster import Level
from mm_autoparallel.model.profiles.collectives import OPERATIONS, exposed_ms, form_group, hop_line
from mm_autoparallel.model.profiles.network import (
    MOST_BYTES_PER_S,
    Fit,
    NetworkProfile,
    Operation,
    Overlap,
    SizeTiming,
    fit_line,
    hidden_part,
    moved_bytes,
    network_path,
    read_network,
    write_network,
)
from mm_autoparallel.model.profiles.store import Origin, Timing

NODE = Level(name="node", num_devices=8, bandwidth_bytes_per_s=200e9, latency_ms=0.01)
NETWORK = Level(name="cluster", num_devices=64, bandwidth_bytes_per_s=25e9, latency_ms=0.02)
LEVELS = (NODE, NETWORK)
ORIGIN = Origin(device="h200-141g", software={"torch": "2.13.0"}, date="2025-11-21", command="python pretrain_vlm.py")
SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 24)


def timing(median_ms: float) -> Timing:
    return Timing(median_ms=median_ms, mad_ms=0.0, num_samples=5)


def samples_of(
    operation: Operation,
    num_ranks: int,
    latency_ms: float,
    bandwidth_bytes_per_s: float,
    sizes: tuple[int, ...] = SIZES,
) -> list[SizeTiming]:
    return [
        SizeTiming(
            size_bytes=size,
            time_ms=timing(latency_ms + moved_bytes(operation, num_ranks, size) / bandwidth_bytes_per_s * 1e3),
        )
        for size in sizes
    ]


def fit(operation: Operation = "all_gather", num_ranks: int = 2, level: str = "node", **changed: Any) -> Fit:
    figures = {"latency_ms": 0.05, "bandwidth_bytes_per_s": 100e9, "residual_fraction": 0.0}
    return Fit(operation=operation, num_ranks=num_ranks, level=level, **(figures | changed))


def network_of(*fits: Fit, overlap: Overlap | None = None) -> NetworkProfile:
    return NetworkProfile(schema="mm-autoparallel/network/1", fits=fits, overlap=overlap, **ORIGIN.model_dump())


class TestFitting:
    @given(
        operation=st.sampled_from(OPERATIONS),
        num_ranks=st.integers(2, 64),
        latency_ms=st.floats(1e-3, 10),
        bandwidth_bytes_per_s=st.floats(1e8, 1e12),
    )
    def test_a_true_line_is_found_again(
        self, operation: Operation, num_ranks: int, latency_ms: float, bandwidth_bytes_per_s: float
    ) -> None:
        found = fit_line(
            operation, num_ranks, "node", samples_of(operation, num_ranks, latency_ms, bandwidth_bytes_per_s)
        )
        assert found.latency_ms == pytest.approx(latency_ms, rel=1e-6)
        # a bandwidth that no size shows cannot be found; the times can
        for sample in found.samples:
            time_ms = found.latency_ms + moved_bytes(operation, num_ranks, sample.size_bytes) / (
                found.bandwidth_bytes_per_s / 1e3
            )
            assert time_ms == pytest.approx(sample.time_ms.median_ms, rel=1e-6)
        assert found.residual_fraction < 1e-6

    def test_latency_and_bandwidth_to_the_digit(self) -> None:
        found = fit_line("all_reduce", 4, "cluster", samples_of("all_reduce", 4, 0.25, 5e9), inside=2)
        assert found.latency_ms == pytest.approx(0.25, rel=1e-9)
        assert found.bandwidth_bytes_per_s == pytest.approx(5e9, rel=1e-9)
        assert (found.num_ranks, found.level, found.inside) == (4, "cluster", 2)

    @given(times_ms=st.lists(st.just(0.0) | st.floats(1e-9, 1e4), min_size=4, max_size=4))
    def test_no_noise_makes_a_negative_figure(self, times_ms: list[float]) -> None:
        noisy = [SizeTiming(size_bytes=s, time_ms=timing(t)) for s, t in zip(SIZES, times_ms, strict=True)]
        found = fit_line("all_gather", 2, "node", noisy)
        assert found.latency_ms >= 0
        assert 0 < found.bandwidth_bytes_per_s <= MOST_BYTES_PER_S * (1 + 1e-9)
        assert found.residual_fraction >= 0

    def test_times_that_fall_with_size_are_latency(self) -> None:
        falling = [SizeTiming(size_bytes=s, time_ms=timing(t)) for s, t in zip(SIZES, (4.0, 3, 2, 1), strict=True)]
        found = fit_line("all_gather", 2, "node", falling)
        assert found.bandwidth_bytes_per_s == pytest.approx(MOST_BYTES_PER_S)
        assert 1 < found.latency_ms < 4
        assert found.residual_fraction > 0.1

    def test_a_line_below_the_origin_is_bandwidth(self) -> None:
        rising = [SizeTiming(size_bytes=s, time_ms=timing(t)) for s, t in ((100, 1.0), (1000, 20.0), (10000, 300.0))]
        assert fit_line("send_recv", 2, "node", rising).latency_ms == 0

    def test_one_size_is_bandwidth(self) -> None:
        found = fit_line("send_recv", 2, "node", [SizeTiming(size_bytes=10**6, time_ms=timing(1.0))])
        assert (found.latency_ms, found.bandwidth_bytes_per_s) == (0, pytest.approx(1e9))

    def test_empty_messages_are_latency(self) -> None:
        found = fit_line("send_recv", 2, "node", [SizeTiming(size_bytes=0, time_ms=timing(2.0))])
        assert found.latency_ms == pytest.approx(2.0)

    def test_nothing_is_no_line(self) -> None:
        with pytest.raises(ProfileError, match="all_reduce among 8 ranks of level node: there are no times"):
            fit_line("all_reduce", 8, "node", [])


class TestGroups:
    def test_what_was_measured_counts_as_it_is(self) -> None:
        network = network_of(fit("all_reduce", 4, latency_ms=0.3, bandwidth_bytes_per_s=1e9))
        group = form_group(LEVELS, 4, 1, network)
        assert group.all_reduce_ms(4e6) == pytest.approx(0.3 + 2 * 3 / 4 * 4)
        assert group.source("all_reduce") == "measured"
        assert group.source("all_gather") == "analytic"
        assert group.all_gather_ms(4e6) == form_group(LEVELS, 4, 1).all_gather_ms(4e6)

    def test_a_transport_that_changes_with_size_is_met_at_every_size(self) -> None:
        """No one line goes through these; beyond them time grows with bytes, before them it does not shrink."""
        medians_ms = {1000: 0.5, 10_000: 0.6, 100_000: 6.0}
        samples = tuple(SizeTiming(size_bytes=size, time_ms=timing(ms)) for size, ms in reversed(medians_ms.items()))
        group = form_group(LEVELS, 2, 1, network_of(fit("all_reduce", 2, samples=samples)))
        for size, time_ms in medians_ms.items():
            assert group.all_reduce_ms(size) == pytest.approx(time_ms)
        assert group.all_reduce_ms(55_000) == pytest.approx(3.3)
        assert group.all_reduce_ms(1_000_000) == pytest.approx(60)
        assert group.all_reduce_ms(10) == pytest.approx(0.5)
        wider = form_group(LEVELS, 4, 1, network_of(fit("all_reduce", 2, samples=samples)))
        assert wider.lines["all_reduce"].sampled_bytes == ()

    def test_every_operation_has_its_own_line(self) -> None:
        fits = [fit(op, 2, latency_ms=index, bandwidth_bytes_per_s=1e9) for index, op in enumerate(OPERATIONS)]
        group = form_group(LEVELS, 2, 1, network_of(*fits))
        assert group.all_reduce_ms(2e6) == pytest.approx(0 + 2)
        assert group.all_gather_ms(2e6) == pytest.approx(1 + 1)
        assert group.reduce_scatter_ms(2e6) == pytest.approx(2 + 1)
        assert group.all_to_all_ms(2e6) == pytest.approx(3 + 1)
        assert group.pass_on_ms(2e6) == pytest.approx(4 + 2)
        assert group.all_reduce_ms(0) == group.pass_on_ms(0) == 0

    def test_another_size_keeps_the_ring_rules(self) -> None:
        network = network_of(fit(num_ranks=2, latency_ms=0.1, bandwidth_bytes_per_s=1e9))
        group = form_group(LEVELS, 8, 1, network)
        assert group.all_gather_ms(8e6) == pytest.approx(0.1 * 7 + 7)
        assert group.source("all_gather") == "interpolated"

    def test_between_two_sizes_lies_between(self) -> None:
        network = network_of(
            fit(num_ranks=2, latency_ms=0.1, bandwidth_bytes_per_s=1e9),
            fit(num_ranks=8, latency_ms=0.4, bandwidth_bytes_per_s=4e9),
        )
        line = network.line("all_gather", 4, NODE)
        assert line
        assert (line.latency_ms, line.bandwidth_bytes_per_s) == (pytest.approx(0.2), pytest.approx(2e9))

    def test_pairwise_links_add_up(self) -> None:
        mesh = Level(
            name="node", num_devices=8, bandwidth_bytes_per_s=196e9, latency_ms=0.01, pair_bandwidth_bytes_per_s=28e9
        )
        network = network_of(fit(num_ranks=2, bandwidth_bytes_per_s=20e9))
        line = network.line("all_gather", 8, mesh)
        assert line
        assert line.bandwidth_bytes_per_s == pytest.approx(7 * 20e9)

    def test_a_ring_scatters_as_it_gathers(self) -> None:
        group = form_group(LEVELS, 2, 1, network_of(fit("all_gather", 2)))
        assert group.reduce_scatter_ms(1e6) == group.all_gather_ms(1e6)
        assert (group.source("all_gather"), group.source("reduce_scatter")) == ("measured", "interpolated")
        assert group.source("all_reduce") == "interpolated"
        assert group.all_reduce_ms(1e6) == 2 * group.all_gather_ms(1e6)

    def test_a_level_that_was_not_measured_keeps_its_figures(self) -> None:
        network = network_of(fit("all_gather", 8), fit("send_recv", 2))
        outside = form_group(LEVELS, 4, 8, network)
        assert outside == form_group(LEVELS, 4, 8)
        assert outside.source("all_gather") == "analytic"
        assert hop_line(NETWORK, network).source == "analytic"
        assert hop_line(NODE, network).source == "measured"
        assert hop_line(NODE, network).bandwidth_bytes_per_s == 100e9

    def test_across_levels_the_slowest_decides(self) -> None:
        """Four ranks in each of two nodes: four links leave a node together."""
        node = fit(num_ranks=4, latency_ms=0.1, bandwidth_bytes_per_s=100e9)
        between = fit(num_ranks=2, level="cluster", latency_ms=0.2, bandwidth_bytes_per_s=10e9)
        line = form_group(LEVELS, 8, 2, network_of(node, between)).lines["all_gather"]
        assert (line.latency_ms, line.bandwidth_bytes_per_s) == (pytest.approx(0.3), pytest.approx(40e9))
        assert line.source == "interpolated"
        half = form_group(LEVELS, 8, 2, network_of(node)).lines["all_gather"]
        assert half.latency_ms == pytest.approx(0.1 + NETWORK.latency_ms)
        assert half.bandwidth_bytes_per_s == pytest.approx(4 * 25e9)
        assert half.source == "analytic"

    def test_the_very_group_is_better_than_its_parts(self) -> None:
        between = fit(num_ranks=2, level="cluster")
        whole = fit(num_ranks=8, level="cluster", inside=4, latency_ms=0.7, bandwidth_bytes_per_s=33e9)
        line = form_group(LEVELS, 8, 2, network_of(between, whole)).lines["all_gather"]
        assert (line.latency_ms, line.bandwidth_bytes_per_s, line.source) == (0.7, 33e9, "measured")

    def test_no_profile_changes_nothing(self) -> None:
        assert form_group(LEVELS, 8, 1).lines == {}


class TestOverlap:
    @pytest.mark.parametrize(
        ("traffic_ms", "compute_ms", "together_ms", "expected"),
        [(10, 10, 10, 1), (10, 10, 20, 0), (10, 10, 15, 0.5), (4, 10, 12, 0.5), (10, 10, 5, 1), (10, 10, 25, -0.5)],
    )
    def test_what_is_hidden(self, traffic_ms: float, compute_ms: float, together_ms: float, expected: float) -> None:
        assert hidden_part(traffic_ms, compute_ms, together_ms) == expected
        assert hidden_part(0, compute_ms, together_ms) == 0

    def test_what_stays_exposed(self) -> None:
        assert exposed_ms(10, 4, 1.0) == 6
        assert exposed_ms(4, 10, 1.0) == 0
        assert exposed_ms(4, 10, 0.25) == 3
        assert exposed_ms(10, 4, 0.5) == 8
        assert exposed_ms(10, 4, 0.0) == 10

    def test_all_is_hidden_where_nothing_was_measured(self) -> None:
        assert network_of(fit()).overlaps == ()


class TestFile:
    OVERLAP = Overlap(
        hidden_fraction=0.25,
        operation="all_reduce",
        num_ranks=2,
        level="node",
        traffic_ms=timing(10),
        compute_ms=timing(10),
        together_ms=timing(17.5),
    )

    def test_what_is_written_is_read(self, tmp_path: Path) -> None:
        path = network_path(tmp_path, "h200-141g")
        fits = [fit_line("all_reduce", 2, "node", samples_of("all_reduce", 2, 0.1, 1e9)), fit(num_ranks=8)]
        write_network(path, ORIGIN, fits, [self.OVERLAP])
        found = read_network([path], "h200-141g")
        assert found
        assert found[0] == path
        assert found[1].fits == tuple(fits)
        assert found[1].overlaps == (self.OVERLAP,)
        assert found[1].command == "python pretrain_vlm.py"

    def test_an_older_file_has_one_overlap_for_all(self, tmp_path: Path) -> None:
        path = network_path(tmp_path, "h200-141g")
        write_network(path, ORIGIN, [fit()], [self.OVERLAP])
        document = json.loads(path.read_text())
        (document["overlap"],) = document.pop("overlaps")
        for overlap, known in ((document["overlap"], (self.OVERLAP,)), (None, ())):
            path.write_text(json.dumps(document | {"overlap": overlap}))
            found = read_network([path], "h200-141g")
            assert found
            assert found[1].overlaps == known

    def test_a_folder_may_hold_it_beside_other_profiles(self, tmp_path: Path) -> None:
        write_network(tmp_path / "network.json", ORIGIN, [fit()], [])
        assert read_network([tmp_path], "h200-141g")
        assert read_network([], "h200-141g") is None

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            ({"device": "a100-80g"}, "device is a100-80g and the job's cluster has h200-141g"),
            ({"fits": []}, "fits is empty"),
            ({"extra": 1}, "extra is not a key known here"),
            ({"schema": "mm-autoparallel/network/2"}, None),
        ],
    )
    def test_bad_files_name_file_and_key(self, tmp_path: Path, changed: dict[str, Any], message: str | None) -> None:
        path = tmp_path / "network.json"
        write_network(path, ORIGIN, [fit()], [])
        path.write_text(json.dumps(json.loads(path.read_text()) | changed))
        if message is None:
            assert read_network([path], "h200-141g") is None  # the profile reader refuses it
            return
        with pytest.raises(ProfileError, match=rf"network file {path}: {message}"):
            read_network([path], "h200-141g")

    @pytest.mark.parametrize("field", ["bandwidth_bytes_per_s", "latency_ms"])
    def test_a_negative_figure_is_refused(self, tmp_path: Path, field: str) -> None:
        path = tmp_path / "network.json"
        write_network(path, ORIGIN, [fit()], [])
        document = json.loads(path.read_text())
        document["fits"][0][field] = -1.0
        path.write_text(json.dumps(document))
        with pytest.raises(ProfileError, match=rf"fits\[0\]\.{field} is -1\.0"):
            read_network([path], "h200-141g")

    def test_two_are_one_too_many(self, tmp_path: Path) -> None:
        for name in ("a.json", "b.json"):
            write_network(tmp_path / name, ORIGIN, [fit()], [])
        with pytest.raises(ProfileError, match=r"b\.json: .*a\.json is one already"):
            read_network([tmp_path], "h200-141g")
