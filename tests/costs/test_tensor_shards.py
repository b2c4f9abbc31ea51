"""DeepSpeed's ZeRO 3, which moves tensor after tensor in the open: published throughputs, what one row tells."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mm_autoparallel.measurements.calibrate import Target, calibrate
from mm_autoparallel.measurements.catalog import read_table
from mm_autoparallel.measurements.gpt import gpt_model
from mm_autoparallel.measurements.predict import predict
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.costs.stage import build_problem
from mm_autoparallel.model.job.cluster import Level
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.profiles.assumed import TENSOR_NETWORK_FRACTION
from mm_autoparallel.model.profiles.calibration import Calibration, assume_calibration
from mm_autoparallel.model.profiles.collectives import form_group
from mm_autoparallel.model.readers.job_file import parse_job

DEEPSPEED = assume_calibration("a100-80g", "deepspeed")
COUNT, COMPUTE_FLOPS_PER_S = 138e9, 55e12
PUBLISHED = Path(__file__).parents[2] / "examples" / "published_measurements" / "deepspeed_zero3_a100.csv"


@pytest.mark.parametrize(
    ("num_ports", "num_tokens", "tera_flops"),
    [(4, 1024, 23), (4, 2048, 36), (1, 1024, 11), (1, 2048, 20), (2, 2048, 32), (8, 2048, 48)],
)
def test_published_throughputs_on_v100(num_ports: int, num_tokens: int, tera_flops: int) -> None:
    # DeepSpeed's blog on ZeRO++, figures 6 to 8, "baseline": 384 V100 in nodes of 16 with ports of 100 Gb/s
    port_bytes_per_s = TENSOR_NETWORK_FRACTION * num_ports * 12.5e9 / 16  # what each of a node's devices has
    levels = [
        Level(name="node", num_devices=16, bandwidth_bytes_per_s=150e9, latency_ms=0.01),
        Level(name="network", num_devices=384, bandwidth_bytes_per_s=port_bytes_per_s, latency_ms=0.02),
    ]
    # the constant of A100, which tells nothing of V100
    group = replace(form_group(levels, 384, 1), rank_ms_per_byte=DEEPSPEED.figures.shard_gigabyte_ms / 1e9)
    compute_ms = 8 * COUNT * num_tokens / COMPUTE_FLOPS_PER_S * 1e3
    traffic_ms = 2 * group.all_gather_ms(2 * COUNT) + group.reduce_scatter_ms(2 * COUNT)
    measured_ms = 8 * COUNT * num_tokens / (tera_flops * 1e12) * 1e3
    assert compute_ms + traffic_ms == pytest.approx(measured_ms, rel=0.20)


def make_job(num_nodes: int, **workload: Any) -> Job:
    model = gpt_model("GPT", 10240, 80, 80, 2048, 51200)
    document = {
        "model": model,
        "cluster": {"num_nodes": num_nodes, "devices_per_node": 8, "device": "a100-80g"},
        "workload": {"global_batch_size": 1024, "seq_length": 2048, "gradient_bytes": 2.0} | workload,
    }
    return parse_job(document, Path("job.yaml"))


def layer_ms(job: Job, strategy: Strategy, calibration: Calibration = DEEPSPEED) -> float:
    layer = build_problem(CostModel(job, calibration), strategy).chain[1]
    return layer.forward_ms + layer.backward_ms


SHARDED = Strategy(pp=1, tp=1, dp=128, mbs=1, zero=3)


@pytest.mark.parametrize("software", ["deepspeed", "megatron-deepspeed"])
def test_nothing_of_it_hides_unless_the_job_says_so(software: str) -> None:
    """Also where that stack hides reductions of ZeRO 1, which stay hidden."""
    calibration = assume_calibration("a100-80g", software)
    said = [make_job(16, overlap_grad_reduce=hides, overlap_param_gather=hides) for hides in (False, True)]
    open_ms, hidden_ms = (layer_ms(job, SHARDED, calibration) for job in said)
    assert hidden_ms < 0.95 * open_ms
    assert layer_ms(make_job(16), SHARDED, calibration) == open_ms
    whole = replace(SHARDED, zero=1)
    tails_ms = [
        build_problem(CostModel(job, calibration), whole).chain[1].tail_ms for job in (make_job(16), said[0], said[1])
    ]
    assert tails_ms[0] == tails_ms[2 if software == "megatron-deepspeed" else 1]


def test_more_ranks_are_further_round_and_not_slower_as_reductions_are() -> None:
    """Four matrices of a layer are gathered twice and reduced once: 784 hops more past NVLink, 112 past the network."""
    few_ms = layer_ms(make_job(16), SHARDED)
    many_ms = layer_ms(make_job(128), replace(SHARDED, dp=1024))
    hops_ms = 784 * 0.0034 + 112 * 0.0096
    shares_ms = many_ms - few_ms - 12 * hops_ms  # 1023/1024 of the bytes leave a rank, not 127/128
    assert 0 < shares_ms < 0.01 * few_ms
    unit = assume_calibration("a100-80g", "fsdp")
    assert layer_ms(make_job(128), replace(SHARDED, dp=1024), unit) > 1.5 * layer_ms(make_job(16), SHARDED, unit)


def row_of(dp: int, mbs: int, measured_ms: float = 1.0) -> dict[str, str]:
    sizes = {"num_layers": 80, "hidden_size": 10240, "num_heads": 80, "vocab_size": 51200}
    cells = {
        "model": "gpt",
        "device": "a100-80g",
        "software": "deepspeed",
        "global_batch_size": 1024,
        "seq_length": 2048,
        "pp": 1,
        "tp": 1,
        "dp": dp,
        "mbs": mbs,
        "zero": 3,
        "recompute": "full",
        "attention": "unfused",
        "gradient_bytes": 2,
        "measured_ms": measured_ms,
        "source": "made by these tests",
    }
    return {key: str(cell) for key, cell in (cells | sizes).items()}


def write(path: Path, rows: list[dict[str, str]]) -> Path:
    path.write_text("\n".join([",".join(rows[0]), *(",".join(row.values()) for row in rows)]) + "\n", encoding="utf-8")
    return path


def test_one_row_tells_its_constant(tmp_path: Path) -> None:
    figures = DEEPSPEED.figures.model_copy(update={"shard_gigabyte_ms": 90.0})
    slower = DEEPSPEED.model_copy(update={"figures": figures})
    layouts = [(256, 4), (512, 2), (1024, 1)]
    unknown, _ = read_table(write(tmp_path / "unknown.csv", [row_of(*layout) for layout in layouts]))
    steps_ms = [predict(case, slower).step_ms for case in unknown]
    assert steps_ms[2] > 0.75 * steps_ms[1]  # traffic alone is left, and twice as many devices gain little
    rows = [row_of(*layout, step_ms) for layout, step_ms in zip(layouts, steps_ms, strict=True)]
    cases, _ = read_table(write(tmp_path / "measured.csv", rows))
    found = calibrate(cases[2:], cases[:2], Target("x", "a100-80g", "deepspeed", free=["shard"]))
    assert found.calibration.figures.shard_gigabyte_ms == pytest.approx(90.0, rel=0.02)
    assert max(abs(row.error_fraction) for row in found.held_out) < 0.01


def test_the_more_devices_share_a_batch_the_better_pipeline_and_tensor_parallelism(tmp_path: Path) -> None:
    divided = {"pp": "8", "tp": "8", "zero": "0", "mbs": "1", "software": "megatron-lm-2021"}
    rows = [row_of(256, 4), row_of(1024, 1), row_of(4, 1) | divided, row_of(16, 1) | divided]
    cases, refused = read_table(write(tmp_path / "both.csv", rows))
    assert not refused
    few_ms, many_ms, few_divided_ms, many_divided_ms = (predict(case).step_ms for case in cases)
    assert many_divided_ms < many_ms
    assert many_divided_ms / few_divided_ms < 0.3 < many_ms / few_ms


def test_published_steps_on_a100() -> None:
    cases, _ = read_table(PUBLISHED)
    errors = [predict(case, DEEPSPEED).step_ms / (case.measured_ms or 1.0) - 1 for case in cases]
    assert sum(map(abs, errors)) / len(errors) < 0.08
    # where compute alone decides, and where traffic does
    assert abs(errors[31]) < 0.06
    assert abs(errors[22]) < 0.07
