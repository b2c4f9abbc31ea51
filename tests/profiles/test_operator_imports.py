"""Files of CANN's profiler and of MindSpeed's Auto Tuning: what is read, what is refused, and no pickle opened."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sqlite3
from pathlib import Path

import pytest

from mm_autoparallel.errors import ProfileError
from mm_autoparallel.model.profiles.operators.base import OperatorBase
from mm_autoparallel.model.profiles.operators.form import TensorForm
from mm_autoparallel.model.profiles.operators.imports.found import Found
from mm_autoparallel.model.profiles.operators.imports.kernels import kernel_form
from mm_autoparallel.model.profiles.operators.imports.work_directory import read_given
from mm_autoparallel.model.profiles.operators.platform import CONSTANT, Platform

FIXTURES = Path(__file__).parents[1] / "fixtures" / "auto_tuning"
HERE = Platform("ascend-910b-64g", {"cann": "8.1.RC1"})


def read_one(path: Path) -> Found:
    (found,), pickles = read_given(path, HERE)
    assert not pickles
    return found


@pytest.mark.parametrize(
    ("name", "rows", "distinct", "forms", "total_us"),
    [("kernel_details_mstt_1.csv", 591, 138, 136, 396807.04), ("kernel_details_mstt_2.csv", 29, 8, 8, 10061.159)],
)
def test_public_kernel_details(
    name: str, rows: int, distinct: int, forms: int, total_us: float, tmp_path: Path
) -> None:
    found = read_one(FIXTURES / name)
    assert (found.num_rows, found.num_distinct, found.num_forms) == (rows, distinct, forms)
    assert found.total_us == pytest.approx(total_us)
    with OperatorBase.open_to_add(tmp_path / "operators.sqlite") as base:
        found.add_to(base)
        assert base.count() == (forms, forms)


def test_absent_operands_and_types_of_a_kernel() -> None:
    (samples,) = read_one(FIXTURES / "kernel_details_mstt_2.csv").samples.values()
    attention = next(one.form for one in samples if one.form.operator == "FlashAttentionScore")
    assert attention.inputs[0] == TensorForm(shape=(4096, 2, 512), dtype="bf16")
    assert attention.inputs[3] == TensorForm(shape=(), dtype="bf16")
    assert attention.inputs[6] == TensorForm(shape=(4096, 4096), dtype="bool")
    assert len(attention.inputs) == 12
    assert json.loads(attention.arguments)["state"] == "dynamic"
    assert (attention.flops, attention.moved_bytes) == (0, 0)  # not from shapes alone: nothing is regressed


def test_the_flops_of_a_product_follow_from_its_shapes() -> None:
    def product(left: tuple[int, ...], right: tuple[int, ...], result: tuple[int, ...]) -> int:
        tensors = [TensorForm(shape=shape, dtype="bf16") for shape in (left, right, result)]
        return kernel_form("MatMulV2", tensors[:2], tensors[2:], {}).flops

    assert product((6, 4), (4, 5), (6, 5)) == product((4, 6), (5, 4), (6, 5)) == 2 * 6 * 4 * 5
    assert product((3, 6, 4), (3, 4, 5), (3, 6, 5)) == 3 * 2 * 6 * 4 * 5
    assert product((8, 4), (9, 5), (4, 5)) == 0  # no such product


def test_a_history_keeps_its_device_and_no_version() -> None:
    ((platform, samples),) = read_one(FIXTURES / "operator_history.db").samples.items()
    assert platform == Platform("Ascend910B1", {"cann": CONSTANT, "driver": CONSTANT})
    assert {one.form.operator: one.samples_us for one in samples}["MatMulV2"] == [406.5]
    assert not platform.holds_for("Ascend910B1", {"cann": CONSTANT})
    assert read_one(FIXTURES / "operator_different.db").num_rows == 0


class Touches:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return os.mkdir, (str(self.path),)


CALL = {
    "Communication Time Info": {"Elapse Time(ms)": 3.0, "Wait Time(ms)": 1.0},
    "Communication Bandwidth Info": {"HCCS": {"Transit Size(MB)": 12.5}, "RDMA": {"Transit Size(MB)": 0}},
}


def test_a_work_directory_is_read_and_no_pickle_of_it(tmp_path: Path) -> None:
    touched, folder = tmp_path / "touched", tmp_path / "auto_tuning_dir"
    output = folder / "auto_tuning_profiling_4tp_4dp" / "host_ascend_pt" / "ASCEND_PROFILER_OUTPUT"
    output.mkdir(parents=True)
    shutil.copy(FIXTURES / "kernel_details_mstt_2.csv", output / "kernel_details.csv")
    calls = {f"hcom_allGather__123_{number}@77": CALL for number in range(2)}
    (output / "communication.json").write_text(json.dumps({"step8": {"collective": calls, "p2p": {}}}))
    shutil.copy(FIXTURES / "operator_history.db", folder / "operator_history.db")
    for name, protocol in (("auto_tuning_model_args.json", 4), ("auto_settings_hardware.json", 0), ("ootb_0.pkl", 2)):
        (folder / name).write_bytes(pickle.dumps(Touches(touched), protocol))
    found, pickles = read_given(folder, HERE)
    assert sorted(one.path.name for one in pickles) == [
        "auto_settings_hardware.json",
        "auto_tuning_model_args.json",
        "ootb_0.pkl",
    ]
    assert not touched.exists()
    told = {one.path.name: one for one in found}
    assert told.keys() == {"operator_history.db", "communication.json", "kernel_details.csv"}
    (gathered,) = told["communication.json"].collectives
    assert gathered == {"operation": "allGather", "num_calls": 2, "transfer_ms": 4.0, "sent_mb": 25.0}
    with pytest.raises(ProfileError, match="is a pickle"):
        read_given(folder / "auto_tuning_model_args.json", HERE)


def without_column(path: Path) -> None:
    path.write_text((FIXTURES / "kernel_details_mstt_2.csv").read_text().replace("Duration(us)", "Took(us)"))


def with_text_for_time(path: Path) -> None:
    path.write_text((FIXTURES / "kernel_details_mstt_2.csv").read_text().replace(",185.504,", ",soon,", 1))


def with_text_for_size(path: Path) -> None:
    path.write_text((FIXTURES / "kernel_details_mstt_2.csv").read_text().replace("81920,4096;", "wide,4096;", 1))


def with_text_for_duration(path: Path) -> None:
    shutil.copy(FIXTURES / "operator_history.db", path)
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE operator_history SET duration = 'soon' WHERE id = 2")
    connection.close()


def truncated(path: Path) -> None:
    path.write_bytes((FIXTURES / "operator_history.db").read_bytes()[:5000])


def of_another_program(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE accounts (id INTEGER)")
    connection.close()


def without_elapsed_time(path: Path) -> None:
    path.write_text(json.dumps({"step8": {"p2p": {"hcom_send__1": CALL | {"Communication Time Info": {}}}}}))


@pytest.mark.parametrize(
    ("name", "damage", "key", "told"),
    [
        ("kernel_details.csv", without_column, "Duration(us)", "there is no such column"),
        ("kernel_details.csv", with_text_for_time, "Duration(us)", 'line 2 is "soon"'),
        ("kernel_details.csv", with_text_for_size, "Input Shapes", "sizes between commas"),
        ("operator_history.db", with_text_for_duration, "duration", 'duration of row 2 is "soon"'),
        ("operator_history.db", truncated, "", "damaged"),
        ("operator_history.db", of_another_program, "operator_history", "its tables: accounts"),
        (
            "communication.json",
            without_elapsed_time,
            "step8.p2p.hcom_send__1.Elapse Time(ms)",
            "a number of at least 0",
        ),
        ("notes.txt", lambda path: path.write_text("no"), "", "none of the files that are read"),
    ],
)
def test_what_is_malformed_is_refused_by_file_and_key(
    name: str, damage: object, key: str, told: str, tmp_path: Path
) -> None:
    assert callable(damage)
    damage(tmp_path / name)
    with pytest.raises(ProfileError) as caught:
        read_given(tmp_path / name, HERE)
    assert caught.value.key == key
    assert str(tmp_path / name) in str(caught.value)
    assert told in str(caught.value)
