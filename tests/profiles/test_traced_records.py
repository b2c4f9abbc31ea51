"""Files of traces: whole circles, rows that are wrong, other models, other precisions, and those that are shipped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mm_autoparallel.errors import ProfileError
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.model.profiles.store import hash_model, read_profile_files
from mm_autoparallel.model.profiles.traced import (
    TracedEntry,
    TracedOperator,
    read_trace,
    read_traces,
    trace_folder,
    trace_origin,
    trace_path,
    write_trace,
)

LAYERS = {"num_layers": 2, "hidden_size": 64, "ffn_size": 128, "num_heads": 4, "norm": "rms"}
MODEL = Model.model_validate({"name": "toy", "text": {"vocab_size": 128, "layers": LAYERS}})
WORKLOAD = Workload(global_batch_size=8, seq_length=64)
ROW: list[Any] = ["forward", "mm", "matrix_product", [[64, 64], [64, 192]], "bf16", 2, 1_572_864, 57_344]


def entry(**changed: Any) -> TracedEntry:
    sizes = {
        "parameter_count": 10,
        "parameter_bytes": 20,
        "gradient_bytes": 20,
        "activation_bytes": 4000,
        "checkpoint_bytes": 400,
        "forward_transient_bytes": 100,
        "backward_transient_bytes": 300,
    }
    where = {"kind": "text_layer", "tp": 2, "sequence_parallel": True, "mbs": 1, "tokens": 64}
    return TracedEntry.model_validate(where | sizes | {"operators": [ROW]} | changed)


def write(folder: Path, *entries: TracedEntry, model: Model = MODEL, workload: Workload = WORKLOAD) -> Path:
    path = trace_path(folder, 2, 1, True, workload)
    origin = trace_origin(model, workload, "a test", {"torch": "2.13.0"}, "mm-autoparallel trace job.yaml")
    write_trace(path, origin, entries or [entry()])
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = write(trace_folder(tmp_path, MODEL), entry(), entry(kind="text_post", recompute_transient_bytes=7))
    assert path == tmp_path / "traced" / f"toy-{hash_model(MODEL)[:8]}" / "tp2-cp1-mbs1-seq64-sp.json"
    found = read_trace(path)
    assert found.entries == (entry(), entry(kind="text_post", recompute_transient_bytes=7))
    assert (found.model.name, found.implementation, found.software) == ("toy", "a test", {"torch": "2.13.0"})
    assert found.workload.weight_bytes == 2.0
    assert found.entries[0].transient_bytes == 300


def test_a_file_has_an_operator_a_line(tmp_path: Path) -> None:
    lines = write(tmp_path, entry(operators=[ROW, ["recompute", *ROW[1:]]])).read_text(encoding="utf-8").splitlines()
    assert [line[:13] for line in lines[2:]] == ['["forward","m', '["recompute",']


def test_operators_are_rows() -> None:
    operator = TracedOperator.model_validate(ROW)
    assert operator.shapes == ((64, 64), (64, 192))
    assert operator.model_dump(mode="json") == ROW
    assert entry().flops("forward", "matrix_product") == 2 * 1_572_864
    assert entry().flops("recompute", "matrix_product") == 0


@pytest.mark.parametrize(
    ("row", "told"),
    [
        (ROW[:-1], "has the columns phase, name, kind.*has 7"),
        (["sideways", *ROW[1:]], 'is "sideways"; one of .forward'),
        ([*ROW[:5], 0, *ROW[6:]], "is 0; it must be at least 1"),
        ([*ROW[:6], -1, ROW[7]], "is -1; it must be at least 0"),
    ],
)
def test_a_wrong_row_is_named(tmp_path: Path, row: list[Any], told: str) -> None:
    path = write(tmp_path)
    document = json.loads(path.read_text(encoding="utf-8"))
    document["entries"][0]["operators"] = [ROW, row]
    path.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(ProfileError, match=rf"trace file .*sp\.json: entries\[0\]\.operators\[1\].*{told}"):
        read_trace(path)


def test_traces_of_another_model_are_refused(tmp_path: Path) -> None:
    write(tmp_path)
    other = MODEL.model_copy(update={"text": MODEL.text.model_copy(update={"vocab_size": 256})})
    with pytest.raises(ProfileError, match=r"a trace of another model.*renew it \(mm-autoparallel trace job\.yaml\)"):
        read_traces([tmp_path], other, WORKLOAD)
    renamed = MODEL.model_copy(update={"name": "else"})
    assert len(read_traces([tmp_path], renamed, WORKLOAD)) == 1


def test_traces_of_another_precision_are_left_out(tmp_path: Path) -> None:
    write(tmp_path)
    fp32 = WORKLOAD.model_copy(update={"weight_bytes": 4.0})
    with pytest.raises(ProfileError, match=r"traced with 2 bytes a weight and flash attention, and the job's .* 4 and"):
        read_traces([tmp_path], MODEL, fp32)
    write(tmp_path, workload=fp32)
    assert [trace.workload.weight_bytes for _, trace in read_traces([tmp_path], MODEL, fp32)] == [4.0]
    # what the optimizer keeps is counted apart
    assert read_traces([tmp_path], MODEL, WORKLOAD.model_copy(update={"optimizer_bytes": 8.0}))


def test_profiles_and_traces_may_lie_in_one_folder(tmp_path: Path) -> None:
    write(tmp_path)
    assert read_profile_files([tmp_path], MODEL, "h200-141g") == []
    assert len(read_traces([tmp_path], MODEL, WORKLOAD)) == 1
