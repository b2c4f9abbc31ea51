"""The base on disk: what is kept of samples, several writers, a writer that is killed, and files that are no base."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from timed_products import HERE, product, read_all

from mm_autoparallel.errors import ProfileError
from mm_autoparallel.model.profiles.operators.base import MAX_SAMPLES, OperatorBase, Sampled
from mm_autoparallel.model.profiles.operators.form import OperatorForm, TensorForm
from mm_autoparallel.model.profiles.operators.platform import UNKNOWN, Platform


def scaled(factor: float | int, operator: str = "aten::mul.Tensor") -> OperatorForm:
    tensor = TensorForm(shape=(4, 8), dtype="fp32")
    return OperatorForm(operator=operator, inputs=(tensor,), outputs=(tensor,), arguments=f'{{"other": {factor}}}')


def test_the_key_has_all_that_changes_time() -> None:
    forms = [product(), product(5), product(transposed=True), product(dtype="fp32"), scaled(2), scaled(3)]
    assert len({form.digest for form in forms}) == len(forms)
    assert scaled(0.5).digest == scaled(0.25).digest  # the value of a fraction changes no time
    assert scaled(0.5, "aten::pow.Tensor").digest != scaled(2.0, "aten::pow.Tensor").digest  # but of an exponent
    assert product().family == product(5).family != product(transposed=True).family
    assert OperatorForm.model_validate(product(transposed=True).row) == product(transposed=True)


def test_the_median_of_the_last_samples_is_kept(tmp_path: Path) -> None:
    with OperatorBase.open_to_add(tmp_path / "operators.sqlite") as base:
        base.add(HERE, "micro-benchmark", [Sampled(product(), [10.0, 30.0, 20.0])])
        base.add(HERE, "micro-benchmark", [Sampled(product(), [100.0])])
        (place,) = base.list_platforms()
        (timed,) = base.list_timed(place)
        assert (timed.median_us, timed.mad_us, timed.num_samples) == (25.0, 10.0, 4)
        base.add(HERE, "micro-benchmark", [Sampled(product(), [7.0] * (MAX_SAMPLES - 1))])
        (timed,) = base.list_timed(place)
        assert (timed.median_us, timed.num_samples) == (7.0, MAX_SAMPLES)
        base.add(HERE, "block profile", [Sampled(product(), [9.0])])
        assert base.median_us(product().digest, place) == 9.0  # inside its block it runs as in training
        base.note([product(6)])
        assert list(base.list_untimed()) == [product(6)]
        assert base.count() == (2, 2)


def test_a_time_holds_for_its_device_and_versions() -> None:
    assert HERE.holds_for("cpu-a", {"torch": "2.6.1+cpu", "transformers": "5.0"})
    assert not HERE.holds_for("cpu-b", {"torch": "2.6.0"})
    assert not HERE.holds_for("cpu-a", {"torch": "2.7.0"})
    assert not HERE.holds_for("cpu-a", {})
    assert not HERE.holds_for("cpu-a", {"torch": "2.6.0"}, deterministic=True)
    assert not Platform("cpu-a", {"torch": "2.6.0", "cann": UNKNOWN}).holds_for("cpu-a", {"torch": "2.6.0"})


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from timed_products import HERE, OperatorBase, Sampled, product
first = int(sys.argv[2])
with OperatorBase.open_to_add(Path(sys.argv[1])) as base:
    for number in range(first, first + 40):
        base.add(HERE, "micro-benchmark", [Sampled(product(number), [float(number)]), Sampled(product(1), [1.0])])
        print(number, flush=True)
    if len(sys.argv) > 4:
        cursor = base._connection.execute("BEGIN IMMEDIATE")
        base._connection.execute("DELETE FROM timing")
        print("in the midst", flush=True)
        sys.stdin.read()
"""


def start_writer(path: Path, first: int, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(path), str(first), str(Path(__file__).parent), *more]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_two_writers_lose_nothing_and_a_killed_one_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "operators.sqlite"
    writers = [start_writer(path, 100), start_writer(path, 200, "killed")]
    said = writers[1].stdout
    assert said is not None
    assert "in the midst" in iter(lambda: said.readline().strip(), "")
    os.kill(writers[1].pid, signal.SIGKILL)
    for writer in writers:
        writer.communicate()
    assert writers[0].returncode == 0
    with OperatorBase.open(path) as base:
        (place,) = base.list_platforms()
        found = {timed.form.inputs[0].shape[0]: timed for timed in base.list_timed(place)}
    assert sorted(found) == [1, *range(100, 140), *range(200, 240)]
    assert found[1].num_samples == MAX_SAMPLES


def other_database(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE operator_history (id INTEGER)")
    connection.close()


def newer_base(path: Path) -> None:
    OperatorBase.open_to_add(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 2")
    connection.close()


def truncated_base(path: Path) -> None:
    with OperatorBase.open_to_add(path) as base:
        base.add(HERE, "micro-benchmark", [Sampled(product(number), [1.0]) for number in range(200)])
    os.truncate(path, path.stat().st_size // 3)


def damaged_base(path: Path) -> None:
    truncated_base(path)
    with path.open("r+b") as stream:
        stream.seek(100)
        stream.write(b"\xff" * 4000)


def text_file(path: Path) -> None:
    path.write_text("no database")


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (other_database, "tables: operator_history"),
        (newer_base, "user_version is 2"),
        (truncated_base, "it is damaged"),
        (damaged_base, "it is damaged"),
        (text_file, "it is no SQLite database"),
        (Path.mkdir, "it is a folder"),
        (lambda path: None, "there is no such file"),
    ],
)
def test_what_is_no_base_is_refused_by_name(make: object, told: str, tmp_path: Path) -> None:
    path = tmp_path / "operators.sqlite"
    assert callable(make)
    make(path)
    with pytest.raises(ProfileError, match=told) as caught:
        read_all(path)
    assert caught.value.where == f"operator base {path}"
