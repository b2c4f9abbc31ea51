"""What rows of the neutral format say of network, precision, sharding and first steps, and what cannot have been."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mm_autoparallel.errors import TableError
from mm_autoparallel.measurements.case import MeasuredCase
from mm_autoparallel.measurements.catalog import read_table
from mm_autoparallel.measurements.impossible import count_step_flops
from mm_autoparallel.measurements.predict import predict, predict_all

WriteTable = Callable[..., Path]

ROW = {
    "model": "llama2-7b", "device": "a100-80g", "global_batch_size": "64", "seq_length": "4096", "pp": "1", "tp": "2",
    "dp": "8", "mbs": "1",
}  # fmt: skip


def read_one(path: Path) -> MeasuredCase:
    cases, refused = read_table(path)
    assert not refused, refused
    (case,) = cases
    return case


def reason(path: Path) -> str:
    _, (refused,) = read_table(path)
    return refused.reason


def test_the_network_of_a_row(write_table: WriteTable) -> None:
    plain = read_one(write_table([ROW]))
    catalogued = plain.job.cluster.levels
    stated = read_one(write_table([ROW | {"network_bytes_per_s": "6.25e9", "node_bytes_per_s": "200e9"}]))
    node, network = stated.job.cluster.levels
    assert (node.bandwidth_bytes_per_s, network.bandwidth_bytes_per_s) == (200e9, 6.25e9)
    assert (node.num_devices, network.num_devices) == (8, 16)
    assert network.latency_ms == catalogued[1].latency_ms
    assert network.source == "table.csv: network_bytes_per_s"
    assert predict(stated).step_ms > predict(plain).step_ms
    same = {
        "network_bytes_per_s": str(catalogued[1].bandwidth_bytes_per_s),
        "node_bytes_per_s": str(catalogued[0].bandwidth_bytes_per_s),
    }
    assert predict(read_one(write_table([ROW | same]))) == predict(plain)


def test_pairs_of_devices_keep_their_part_of_a_nodes_bandwidth(write_table: WriteTable) -> None:
    row = ROW | {"device": "ascend-910b-64g", "node_bytes_per_s": "392e9"}
    assert read_one(write_table([row])).job.cluster.levels[0].pair_bandwidth_bytes_per_s == 56e9


def test_tensor_parallelism_beyond_a_node(write_table: WriteTable) -> None:
    case = read_one(write_table([ROW | {"tp": "16", "dp": "1"}]))
    assert case.job.cluster.levels[1].tensor_parallel
    small = ROW | {"devices_per_node": "4", "tp": "8", "dp": "2"}
    assert [level.num_devices for level in read_one(write_table([small])).job.cluster.levels] == [4, 16]


def test_precisions(write_table: WriteTable) -> None:
    assert read_one(write_table([ROW | {"precision": "BF16"}])).job.sha256 == read_one(write_table([ROW])).job.sha256
    half = ROW | {"precision": "fp16"}
    assert read_one(write_table([half])).job.workload.gradient_bytes == 2.0
    assert read_one(write_table([half | {"gradient_bytes": "4"}])).job.workload.gradient_bytes == 4.0
    assert read_one(write_table([half | {"stack": "mindspeed"}])).job.workload.gradient_bytes == 4.0
    low = read_one(write_table([ROW | {"device": "b200-192g", "precision": "mxfp8"}]))
    assert (low.job.workload.precision, low.job.workload.gradient_bytes) == ("mxfp8", 4.0)
    assert reason(write_table([ROW | {"precision": "fp9"}])).startswith("the precision 'fp9' is not represented")


def test_sharding_and_offload(write_table: WriteTable) -> None:
    fsdp = ROW | {"tp": "1", "dp": "16", "stack": "transformers", "implementation": "transformers", "zero": "3"}
    case = read_one(write_table([fsdp | {"reshard": "false", "shard": "8"}]))
    assert (case.plan.strategy.zero, case.plan.strategy.reshard, case.plan.strategy.shard) == (3, False, 8)
    assert "shards of 5 ranks" in reason(write_table([fsdp | {"shard": "5"}]))
    assert read_one(write_table([ROW | {"optimizer_offload": "true"}])).plan.strategy.optimizer_offload
    assert "ZeRO is 0" in reason(write_table([ROW | {"optimizer_offload": "true", "zero": "0"}]))
    dealt = read_one(write_table([ROW | {"tp": "1", "cp": "2", "cp_kind": "all_to_all"}]))
    assert dealt.plan.strategy.cp_kind == "all_to_all"
    with pytest.raises(TableError, match="column cp_kind: 'hops' is no kind of context parallelism"):
        read_table(write_table([ROW | {"cp_kind": "hops"}]))


@pytest.mark.parametrize("word", ["inf", "-Infinity", "nan"])
def test_what_is_no_number_is_told_as_it_stands(word: str, write_table: WriteTable) -> None:
    told = reason(write_table([ROW | {"overlap_grad_reduce": word}]))
    assert f'overlap_grad_reduce is "{word}"; true or false is expected' in told


def test_peaks_after_one_step_lack_what_comes_later(write_table: WriteTable) -> None:
    row = ROW | {"measured_bytes": "60e9"}
    first = predict(read_one(write_table([row | {"first_step": "true"}])))
    later = predict(read_one(write_table([row])))
    assert max(first.peak_allocated_bytes) < max(later.peak_allocated_bytes)


def test_steps_that_cannot_have_been_measured_are_refused_alone(write_table: WriteTable) -> None:
    good = ROW | {"measured_ms": "15000"}
    case = read_one(write_table([good]))
    # six operations a weight and token, of layers and head
    weights = 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 4096 * 32000
    assert count_step_flops(case.job) == pytest.approx(6 * weights * 64 * 4096, rel=1e-12)
    rows = [good, good | {"measured_ms": "2000"}, good | {"measured_ms": "0"}, good | {"measured_ms": "-1"}]
    cases, refused = read_table(write_table(rows))
    assert [one.reason for one in refused] == [
        f'measured_ms "{cell}" cannot have been measured' for cell in ("0", "-1")
    ]
    predicted, (impossible,) = predict_all(cases)
    assert [case.row for case, _ in predicted] == [0]
    flops_per_s = 6 * weights * 64 * 4096 / 2 / 16
    slow = good | {"measured_ms": "15000000", "measured_bytes": ""}  # us
    full = good | {"measured_bytes": "86e9"}  # of 85.0e9
    _, (of_another_unit, too_full) = predict_all(read_table(write_table([slow, full]))[0])
    assert "a step of 1.5e+07 ms is of something else: each of 16 devices would reach 0.0" in of_another_unit.reason
    assert too_full.reason.startswith("a peak of 86 GB is impossible: a100-80g has 8")
    assert impossible.reason.startswith(
        f"a step of 2000 ms is impossible: by matrix products alone each of 16 devices would reach "
        f"{flops_per_s / 1e12:.4g} TFLOP/s, 1.04 times the peak of a100-80g"
    )
