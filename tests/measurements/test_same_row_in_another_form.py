"""The same run told in two formats predicts the same; a table's name and the order of its cells say nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mm_autoparallel.errors import TableError
from mm_autoparallel.measurements.case import MeasuredCase
from mm_autoparallel.measurements.catalog import read_table
from mm_autoparallel.measurements.predict import predict
from mm_autoparallel.model.readers.job_file import read_job
from mm_autoparallel.planner.evaluate import evaluate
from mm_autoparallel.planner.plan import read_plan

Rows = list[dict[str, str]]
Published = Callable[[str], Rows]
WriteTable = Callable[..., Path]

LLAMA = {
    "name": "one of ours",
    "model": "llama3-70b",
    "num_layers": "12",
    "device": "b200-192g",
    "global_batch_size": "32",
    "seq_length": "4096",
    "pp": "2",
    "tp": "1",
    "dp": "4",
    "mbs": "1",
}


def read_one(path: Path) -> MeasuredCase:
    (case,), refused = read_table(path)
    assert not refused
    return case


def test_korthikantis_row_in_the_neutral_format(published: Published, write_table: WriteTable) -> None:
    row = published("korthikanti2022")[3]
    neutral = {
        "model": "gpt",
        "device": "a100-80g",
        "num_layers": row["layers"],
        "hidden_size": row["hidden"],
        "num_heads": row["heads"],
        "vocab_size": "51200",
        "global_batch_size": row["gbs"],
        "seq_length": row["seq"],
        **{size: row[size] for size in ("pp", "tp", "dp", "mbs", "vpp")},
        "zero": "0",
        "recompute": "selective",
        "attention": "unfused",
        "hidden_dropout": "true",
        "attention_dropout": "true",
        "scatter_gather_p2p": "true",
        "overlap_p2p": "false",
        "overlap_grad_reduce": "false",
        "overlap_param_gather": "false",
        "stack": "megatron-local",
        "software": "megatron-lm",
        "measured_ms": "13750",
    }
    first, second = read_one(write_table([row])), read_one(write_table([neutral], "neutral.csv"))
    assert first.job.sha256 == second.job.sha256
    assert first.plan == second.plan
    assert predict(first) == predict(second)
    assert first.measured_ms == second.measured_ms


def test_sc21s_run_as_a_row_of_korthikantis(published: Published, write_table: WriteTable) -> None:
    row = published("sc21")[3]
    same = {
        **{
            key: row[key]
            for key in [
                "model",
                "hidden",
                "heads",
                "layers",
                "seq",
                "tp",
                "pp",
                "vpp",
                "dp",
                "gbs",
                "mbs",
                "n_gpus",
                "gpu",
                "source",
            ]
        },
        "precision": "fp16",
        "recompute": "full",
        "sequence_parallel": "False",
        "metric": "iteration_time",
        "unit": "s",
        "value": row["derived_iter_s"],
        "kind": "measured",
    }
    first, second = read_one(write_table([row])), read_one(write_table([same], "same.csv"))
    assert (first.job.model, first.job.cluster, first.plan) == (second.job.model, second.job.cluster, second.plan)
    in_fp16 = {"gradient_bytes": first.job.workload.gradient_bytes}  # a year earlier, gradients were summed in fp16
    assert first.job.workload == second.job.workload.model_copy(update=in_fp16)
    assert first.measured_ms == second.measured_ms


def test_names_and_orders_say_nothing(published: Published, write_table: WriteTable) -> None:
    rows = published("simumax_b200")[:4]
    turned = [dict(reversed(row.items())) for row in reversed(rows)]
    found = [predict(case) for case in read_table(write_table(rows, "a.csv"))[0]]
    again = [predict(case) for case in read_table(write_table(turned, "korthikanti2022.csv"))[0]]
    assert found == again[::-1]


def test_a_model_file_beside_the_table(repository: Path, tmp_path: Path, write_table: WriteTable) -> None:
    sizes = {
        "num_layers": 12,
        "hidden_size": 8192,
        "ffn_size": 28672,
        "num_heads": 64,
        "num_kv_groups": 8,
        "norm": "rms",
    }
    model: dict[str, Any] = {"text": {"vocab_size": 128256, "layers": sizes}}
    (tmp_path / "model.json").write_text(json.dumps(model), encoding="utf-8")
    named = read_one(write_table([LLAMA]))
    from_file = read_one(write_table([LLAMA | {"model": "model.json", "num_layers": ""}], "b.csv"))
    columns = {key: str(value) for key, value in sizes.items() if key != "norm"} | {"vocab_size": "128256"}
    inline = read_one(write_table([LLAMA | columns | {"model": "llama"}], "c.csv"))
    assert predict(named) == predict(from_file) == predict(inline)


def test_layers_as_the_row_lays_them(write_table: WriteTable) -> None:
    even = read_one(write_table([LLAMA]))
    laid = read_one(write_table([LLAMA | {"layers_per_stage": "6;6"}]))
    uneven = read_one(write_table([LLAMA | {"layers_per_stage": "7;5", "recompute": "full"}]))
    assert even.plan == laid.plan
    assert uneven.plan.layers == {"text": (7, 5)} == uneven.plan.recompute
    with pytest.raises(TableError, match=r"column layers_per_stage: 2 numbers that make 11; PP 2 x VPP 1 = 2 numbers"):
        read_table(write_table([LLAMA | {"layers_per_stage": "6;5"}]))


@pytest.mark.parametrize(
    ("column", "cell", "words"),
    [
        ("measured_bytes", "0:7e10;1:x", "column measured_bytes: '1:x' is no `stage:bytes`"),
        ("measured_bytes", "2:7e10", "column measured_bytes: '2:7e10': stages are 0 to 1"),
        ("layers_per_stage", "a;b", "column layers_per_stage: 'a;b' is no list"),
        ("ffn_size", "100", "column ffn_size: the model is 'llama3-70b', which has its sizes"),
        ("model", "missing.json", "column model: model file"),
        ("out_of_memory", "perhaps", 'column out_of_memory: "perhaps" is neither true nor false'),
    ],
)
def test_a_malformed_cell_of_the_neutral_format(column: str, cell: str, words: str, write_table: WriteTable) -> None:
    row = LLAMA | {column: cell}
    if column == "model":
        row["num_layers"] = ""
    with pytest.raises(TableError) as raised:
        read_table(write_table([row]))
    assert "row 0 (line 2), " in str(raised.value)
    assert words in str(raised.value)


def test_a_model_with_encoders_needs_a_plan(repository: Path, tmp_path: Path, write_table: WriteTable) -> None:
    folder = repository / "examples" / "qwen2vl_72b"
    (tmp_path / "model.json").write_text((folder / "model_72b.json").read_text(encoding="utf-8"), encoding="utf-8")
    _, refused = read_table(write_table([LLAMA | {"model": "model.json", "num_layers": ""}]))
    assert refused[0].reason.startswith("the model has vision layers too")


def test_what_was_measured_in_the_neutral_format(write_table: WriteTable) -> None:
    measured = {"measured_ms": "843", "measured_bytes": "0:7.1e10;1:6.7e10", "out_of_memory": "false", "source": "here"}
    case = read_one(write_table([LLAMA | measured]))
    assert (case.measured_ms, case.measured_bytes, case.out_of_memory) == (843.0, {0: 7.1e10, 1: 6.7e10}, False)
    failed = read_one(write_table([LLAMA | measured | {"out_of_memory": "true"}]))
    assert (failed.measured_ms, failed.measured_bytes, failed.out_of_memory) == (None, None, True)


def test_a_key_of_the_workload_is_a_column(write_table: WriteTable) -> None:
    case = read_one(write_table([LLAMA | {"gradient_bytes": "2", "overlap_grad_reduce": "false"}]))
    assert case.job.workload.gradient_bytes == 2.0
    assert not case.job.workload.overlap_grad_reduce
    _, refused = read_table(write_table([LLAMA | {"attention": "eager"}]))
    assert 'workload.attention is "eager"' in refused[0].reason


def test_a_job_and_the_plan_it_ran_under(repository: Path, write_table: WriteTable, tmp_path: Path) -> None:
    folder = repository / "examples" / "qwen2vl_72b"
    for name in ("job.yaml", "model_72b.json"):
        (tmp_path / name).write_text((folder / name).read_text(encoding="utf-8"), encoding="utf-8")
    strategy = {"PP": 8, "TP": 2, "DP": 4, "MBS": 1}
    plan: dict[str, Any] = {
        "parallel_config": strategy,
        "layer_placement": {
            "vit_layer_placement": [32, 0, 0, 0, 0, 0, 0, 0],
            "llm_layer_placement": [5, 11, 11, 11, 11, 11, 11, 9],
        },
        "layer_recompute": {"vit_layer_recompute": [0] * 8, "llm_layer_recompute": [0, 10, 9, 9, 9, 7, 4, 0]},
    }
    (tmp_path / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    row = {"job": "job.yaml", "plan": "plan.json", "measured_ms": "8992", "software": "mindspeed-mm"}
    case = read_one(write_table([row]))
    job = read_job(tmp_path / "job.yaml")
    assert predict(case).step_ms == pytest.approx(
        evaluate(job, read_plan(tmp_path / "plan.json", job)).step_ms, rel=0.2
    )
    assert case.plan.layers["vision"] == (32, 0, 0, 0, 0, 0, 0, 0)
    plan["layer_placement"]["llm_layer_placement"][0] = 4
    (tmp_path / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    with pytest.raises(TableError, match=r"row 0 \(line 2\), column plan: plan .* sums to 79"):
        read_table(write_table([row]))
    with pytest.raises(TableError, match=r"row 0 \(line 2\), column job: job file .* there is no such file"):
        read_table(write_table([row | {"job": "none.yaml"}]))


def test_the_table_in_the_documentation(repository: Path, tmp_path: Path) -> None:
    page = repository / "docs" / "reference" / "measurement-tables.md"
    (text,) = re.findall(r"```csv\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "table.csv").write_text(text, encoding="utf-8")
    case = read_one(tmp_path / "table.csv")
    assert (case.measured_ms, case.measured_bytes, case.source) == (1476.8, 71.46e9, "somebody")
    assert predict(case).peak_allocated_bytes[0] == pytest.approx(71.46e9, rel=0.05)
