"""Traced figures at a point: exact, between two token counts, or refused; and times made of operators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mm_autoparallel.errors import ProfileError
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.model.operators.analytic import Rates
from mm_autoparallel.model.operators.traced_table import TracedTable, build_traced_table, operator_ms
from mm_autoparallel.model.profiles.collectives import ALONE, Group
from mm_autoparallel.model.profiles.table import Point
from mm_autoparallel.model.profiles.traced import TRACE_SCHEMA, TracedEntry, TracedFile, TracedOperator, trace_origin

RATES = Rates(
    matrix_flops_per_s=1e12,
    grouped_flops_per_s=0.5e12,
    attention_forward_flops_per_s=0.8e12,
    attention_backward_flops_per_s=0.4e12,
    unfused_flops_per_s=0.1e12,
    memory_bytes_per_s=1e9,
    tp_group=Group(2, 1e9, 1e9, latency_ms=0.5),
    cp_group=ALONE,
    ep_group=ALONE,
)
LAYERS = {"num_layers": 2, "hidden_size": 64, "ffn_size": 128, "num_heads": 4, "norm": "rms"}
MODEL = Model.model_validate({"text": {"vocab_size": 128, "layers": LAYERS}})
WORKLOAD = Workload(global_batch_size=8, seq_length=1024)


def operator(phase: str, name: str, kind: str, num_calls: int, flops: int, moved_bytes: int) -> list[Any]:
    return [phase, name, kind, [[8, 8]], "bf16", num_calls, flops, moved_bytes]


def entry(tokens: int = 1024, **changed: Any) -> TracedEntry:
    """Products that are linear in tokens, attention that is quadratic."""
    where = {"kind": "text_layer", "tp": 2, "sequence_parallel": True, "mbs": 1, "tokens": tokens}
    sizes = {
        "parameter_count": 100,
        "parameter_bytes": 200,
        "gradient_bytes": 200,
        "activation_bytes": 50 * tokens,
        "checkpoint_bytes": 2 * tokens,
        "output_bytes": 2 * tokens,
        "forward_transient_bytes": 10 * tokens,
        "backward_transient_bytes": 8 * tokens,
    }
    operators = [
        operator("forward", "mm", "matrix_product", 2, 10**6 * tokens, 10),
        operator("forward", "_scaled_dot_product_flash_attention", "attention", 1, 10**3 * tokens**2, 10),
        operator("backward_input", "mm", "matrix_product", 2, 10**6 * tokens, 10),
        operator("backward_weight", "mm", "matrix_product", 1, 10**6 * tokens, 10),
        operator("recompute", "mm", "matrix_product", 1, 10**6 * tokens, 10),
    ]
    return TracedEntry.model_validate(where | sizes | {"operators": operators} | changed)


def table(*entries: TracedEntry) -> TracedTable:
    origin = trace_origin(MODEL, WORKLOAD, "a test", {}, "mm-autoparallel trace job.yaml --tp 2")
    files = [
        (Path(f"{index}.json"), TracedFile.model_validate({"schema": TRACE_SCHEMA, **vars(origin), "entries": (one,)}))
        for index, one in enumerate(entries)
    ]
    return build_traced_table(files, ["text_pre", "text_layer", "text_post"])


def point(**changed: Any) -> Point:
    return Point(**({"kind": "text_layer", "tp": 2, "cp": 1, "mbs": 1, "tokens": 1024, "spans": 1} | changed))


@pytest.mark.parametrize(
    ("row", "expected_ms"),
    [
        (operator("forward", "mm", "matrix_product", 1, 4 * 10**9, 10), 4.0),
        (operator("forward", "mm", "matrix_product", 1, 10, 3 * 10**6), 3.0),
        (operator("forward", "_grouped_mm", "matrix_product", 1, 4 * 10**9, 10), 8.0),
        (operator("backward_input", "bmm", "matrix_product", 1, 4 * 10**9, 10), 40.0),
        (operator("forward", "_flash", "attention", 1, 4 * 10**9, 10), 5.0),
        (operator("recompute", "_flash", "attention", 1, 4 * 10**9, 10), 5.0),
        (operator("backward_input", "_flash_backward", "attention", 1, 4 * 10**9, 10), 10.0),
        (operator("forward", "add", "memory_bound", 1, 0, 2 * 10**6), 2.0),
        (operator("forward", "add", "memory_bound", 1, 0, 10), 1e-5),
        (operator("forward", "all_gather", "collective", 1, 0, 4 * 10**6), 2.5),
        (operator("forward", "reduce_scatter", "collective", 1, 0, 4 * 10**6), 2.5),
        (operator("forward", "all_reduce", "collective", 1, 0, 4 * 10**6), 5.0),
        (operator("forward", "all_to_all", "collective", 1, 0, 4 * 10**6), RATES.tp_group.all_to_all_ms(4e6)),
    ],
)
def test_an_operator_takes_what_the_rates_say(row: list[Any], expected_ms: float) -> None:
    assert operator_ms(TracedOperator.model_validate(row), RATES) == pytest.approx(expected_ms)


def test_an_exact_hit_is_traced_and_its_times_are_analytic() -> None:
    found = table(entry()).look_up(point(), True, RATES)
    assert found
    assert (found.time_source, found.memory_source) == ("analytic", "traced")
    assert found.forward_ms == pytest.approx(2 * 1.024 + 1024**2 * 1e3 / 0.8e12 * 1e3)
    assert (found.backward_input_ms, found.backward_weight_ms) == pytest.approx((2.048, 1.024))
    assert found.recompute_ms == pytest.approx(1.024)
    assert (found.activation_bytes, found.checkpoint_bytes, found.transient_bytes) == (51200, 2048, 10240)
    assert (found.parameter_count, found.output_bytes, found.optimizer_ms) == (100, 2048, None)


def test_without_a_recomputed_run_nothing_is_said_of_it() -> None:
    kept = [row for row in entry().model_dump(mode="json")["operators"] if row[0] != "recompute"]
    found = table(entry(operators=kept)).look_up(point(), True, RATES)
    assert found
    assert found.recompute_ms is None


def test_between_two_token_counts_linear_and_quadratic_terms_are_exact() -> None:
    found = table(entry(1024), entry(4096)).look_up(point(tokens=2000), True, RATES)
    exact = table(entry(2000)).look_up(point(tokens=2000), True, RATES)
    assert found
    assert exact
    assert (found.time_source, found.memory_source) == ("analytic", "interpolated")
    assert found.forward_ms == pytest.approx(exact.forward_ms)
    assert found.activation_bytes == pytest.approx(exact.activation_bytes)
    assert found.parameter_count == 100


def test_a_kind_that_was_never_traced_is_left_to_the_sizes() -> None:
    assert table(entry()).look_up(point(kind="text_pre"), True, RATES) is None
    assert TracedTable().look_up(point(), True, RATES) is None


@pytest.mark.parametrize(
    "asked", [{"tokens": 512}, {"tokens": 2048}, {"tp": 1}, {"tp": 4}, {"cp": 2}, {"mbs": 2}, {"spans": 2}]
)
def test_what_was_not_traced_is_refused(asked: dict[str, int]) -> None:
    told = r"text_layer was traced, but not at TP .*there is: TP 2.*`mm-autoparallel trace job\.yaml --tp 2`"
    with pytest.raises(ProfileError, match=told):
        table(entry()).look_up(point(**asked), True, RATES)


def test_divided_sequences_are_another_division() -> None:
    with pytest.raises(ProfileError, match="without sequence parallel"):
        table(entry()).look_up(point(), False, RATES)
    whole = table(entry(), entry(tp=1, sequence_parallel=False))
    assert whole.look_up(point(tp=1), True, RATES)  # one rank has nothing to divide


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(
        ProfileError, match=r"0\.json: entries\[0\]\.kind is audio_layer, which the model does not have"
    ):
        table(entry(kind="audio_layer"))


def test_of_two_files_the_first_counts() -> None:
    found = table(entry(), entry(activation_bytes=1)).look_up(point(), True, RATES)
    assert found
    assert found.activation_bytes == 51200
