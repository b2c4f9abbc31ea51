"""Traced operators priced from a base: measured, regressed, analytic, each counted, and never another device's time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_traced_table import MODEL, RATES, WORKLOAD, entry
from timed_products import HERE, product, read_all

from mm_autoparallel.errors import ProfileError
from mm_autoparallel.model.operators.traced_table import (
    TracedTable,
    build_traced_table,
    cover,
    operator_ms,
    price_entry,
)
from mm_autoparallel.model.profiles.operators.base import OperatorBase, Sampled
from mm_autoparallel.model.profiles.operators.platform import Platform
from mm_autoparallel.model.profiles.operators.times import OperatorTimes, open_base
from mm_autoparallel.model.profiles.traced import (
    TRACE_SCHEMA,
    TracedEntry,
    TracedFile,
    TracedOperator,
    list_forms,
    trace_origin,
)

ELSEWHERE = (Platform("cpu-b", {"torch": "2.6.0"}), Platform("cpu-a", {"torch": "2.7.0"}))


def calls(rows: int, num_calls: int = 1, phase: str = "forward") -> list[Any]:
    form = product(rows)
    shapes = [list(tensor.shape) for tensor in form.inputs]
    known = ["mm", "matrix_product", shapes, "bf16", num_calls, form.flops, form.moved_bytes]
    return [phase, *known, [[num_calls, form.row]]]


def one_call(rows: int) -> TracedOperator:
    return TracedOperator.model_validate(calls(rows))


@pytest.fixture
def base(tmp_path: Path) -> Iterator[OperatorBase]:
    with OperatorBase.open_to_add(tmp_path / "operators.sqlite") as opened:
        for platform in ELSEWHERE:
            opened.add(platform, "micro-benchmark", [Sampled(product(rows), [1e6]) for rows in range(1, 200)])
        opened.add(HERE, "micro-benchmark", [Sampled(product(rows), [10.0 * rows]) for rows in (10, 20, 40)])
        yield opened


def here(base: OperatorBase) -> OperatorTimes:
    times = OperatorTimes.of(base, "cpu-a", {"torch": "2.6.1", "transformers": "5.0"})
    assert times
    return times


def test_measured_then_regressed_then_nothing(base: OperatorBase) -> None:
    times = here(base)
    assert times.find_us(product(20)) == (200.0, "measured")
    found = times.find_us(product(30))
    assert found
    assert found[1] == "regressed"
    assert 200.0 < found[0] < 400.0
    assert times.find_us(product(50)) is None  # outside what was measured here, though timed elsewhere
    assert times.find_us(product(20, transposed=True)) is None
    assert OperatorTimes.of(base, "cpu-c", {"torch": "2.6.0"}) is None
    assert OperatorTimes.of(base, "cpu-a", {"torch": "2.8.0"}) is None


def test_a_block_is_priced_by_what_is_known_of_it(base: OperatorBase) -> None:
    rows = [calls(20, 3), calls(50), calls(30, 2, "backward_input"), calls(10, 1, "recompute")]
    found = price_entry(entry(operators=rows), RATES, here(base))
    assert found.time_source == "analytic"  # one of them is
    assert found.forward_ms == pytest.approx(3 * 0.2 + operator_ms(one_call(50), RATES))
    assert found.recompute_ms == pytest.approx(0.1)
    assert found.coverage
    told = found.coverage.document()
    assert (told["hits"], told["regressed"], told["misses"]) == (3, 2, 1)
    assert told["coverage"] == pytest.approx(0.6 / (found.forward_ms + found.backward_input_ms), abs=1e-6)
    assert told["coverage"] + told["regressed_share"] + told["analytic_share"] == pytest.approx(1.0, abs=1e-5)
    known = price_entry(entry(operators=rows[:1]), RATES, here(base))
    assert (known.time_source, known.forward_ms) == ("interpolated", pytest.approx(0.6))
    without = price_entry(entry(operators=rows), RATES)
    assert without.coverage is None
    assert without.forward_ms == pytest.approx(sum(n * operator_ms(one_call(r), RATES) for r, n in ((20, 3), (50, 1))))


def test_a_collective_is_the_networks(base: OperatorBase) -> None:
    gathered = ["forward", "all_gather", "collective", [[8, 8]], "bf16", 2, 0, 4_000_000]
    traced = entry(operators=[calls(20), gathered])
    assert price_entry(traced, RATES, here(base)).time_source == "analytic"
    assert cover(traced.operators, RATES, here(base)).num_analytic == 0


def test_times_hold_for_every_trace_of_a_table(base: OperatorBase) -> None:
    def table(*versions: str) -> TracedTable:
        origins = [trace_origin(MODEL, WORKLOAD, "a test", {"torch": version}, "trace it") for version in versions]
        documents = [{"schema": TRACE_SCHEMA, **vars(origin), "entries": (entry(),)} for origin in origins]
        files = [(Path("one.json"), TracedFile.model_validate(document)) for document in documents]
        return build_traced_table(files, ["text_layer"], lambda software: OperatorTimes.of(base, "cpu-a", software))

    assert table("2.6.0", "2.6.1").times == here(base)
    assert table("2.6.0", "2.8.0").times is None
    assert table("2.7.0", "2.6.0").times is None  # of either there are times, and they are not each other's
    assert table().times is None


def test_an_older_trace_is_regressed_by_kind(base: OperatorBase) -> None:
    (bare,) = entry(operators=[calls(30)[:-1]]).operators
    told = cover([bare], RATES, here(base))
    assert (told.num_measured, told.num_regressed, told.num_analytic) == (0, 1, 0)


def test_forms_come_back_from_a_file() -> None:
    written = entry(operators=[calls(20, 3), calls(30)[:-1]])
    again = TracedEntry.model_validate(written.model_dump(mode="json", exclude_none=True))
    assert again == written
    assert list_forms([again]) == [product(20)]


def test_a_job_names_one_base_that_is_there(base: OperatorBase, tmp_path: Path) -> None:
    assert open_base([tmp_path]) is None
    found = open_base([tmp_path / "traces", base.path])
    assert found
    assert found.count() == base.count()
    found.close()
    with pytest.raises(ProfileError, match="is one already"):
        open_base([base.path, tmp_path / "other.sqlite"])
    with pytest.raises(ProfileError, match="there is no such file"):
        open_base([tmp_path / "none.sqlite"])
    read_all(base.path)
