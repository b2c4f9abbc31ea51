"""Operators of a running model: their forms, as traces have them too, their times, and runs of a form by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.nn import functional  # noqa: E402

from mm_autoparallel.model.profiles.operators.base import Sampled  # noqa: E402
from mm_autoparallel.model.profiles.operators.form import OperatorForm  # noqa: E402
from mm_autoparallel.profilers.clock import Effort  # noqa: E402
from mm_autoparallel.profilers.operators.benchmark import (  # noqa: E402
    Unrepeatable,
    measure_forms,
    prepare,
)
from mm_autoparallel.profilers.operators.clock import OperatorClock  # noqa: E402
from mm_autoparallel.profilers.operators.forms import form_of  # noqa: E402
from mm_autoparallel.profilers.trace.recorder import Recorder  # noqa: E402

CPU = torch.device("cpu")


def layer(state: Tensor, weight: Tensor, table: Tensor) -> None:
    rows = functional.linear(state, weight) * 0.5
    heads = rows.view(1, 6, 2, 4).transpose(1, 2)
    mixed = functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    looked_up = functional.embedding(torch.zeros(1, 6, dtype=torch.int64), table)
    joined = torch.cat([mixed.transpose(1, 2).reshape(1, 6, 8), looked_up.to(torch.bfloat16).float()], dim=-1)
    joined.pow(2).mean(-1).sum().backward()


def operands() -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.ones(shape, requires_grad=True) for shape in ((1, 6, 8), (8, 8), (10, 8)))


def run_timed(run: Callable[[], object]) -> dict[bytes, Sampled]:
    with OperatorClock() as clock:
        run()
    return {one.form.digest: one for one in clock.found}


@pytest.fixture(scope="module")
def timed() -> dict[bytes, Sampled]:
    given = operands()
    layer(*given)  # from here on gradients are there
    return run_timed(lambda: layer(*given))


def test_a_run_and_a_trace_of_it_have_the_same_forms(timed: dict[bytes, Sampled]) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        given = operands()
        layer(*given)
        with Recorder() as recorder:
            recorder.open("all")
            layer(*given)
            recorder.close()
    traced = [calls for one in recorder.tally("all").operators("forward") for calls in one.forms]
    assert {calls.form.digest for calls in traced} == timed.keys()
    counts = {calls.form.digest: calls.num_calls for calls in traced}
    assert counts == {digest: len(one.samples_us) for digest, one in timed.items()}
    assert all(sample > 0 for one in timed.values() for sample in one.samples_us)


def test_every_form_of_a_layer_runs_by_itself_as_itself(timed: dict[bytes, Sampled]) -> None:
    told: list[Any] = []
    effort = Effort(budget_s=0.0, min_rounds=2, max_rounds=2, max_warm_up=1)
    measured, failed = measure_forms([one.form for one in timed.values()], CPU, effort, told.append)
    assert not failed
    assert {one.form.digest for one in measured} == timed.keys()
    assert [len(one.samples_us) for one in measured] == [2] * len(timed)
    assert told == measured
    names = {one.form.kind for one in measured}
    assert {"mm", "cat", "embedding", "pow", "scaled_dot_product_attention_backward"} <= names


def plain(operator: str, arguments: str) -> OperatorForm:
    tensor = [[4, 4], "fp32"]
    return OperatorForm.model_validate([operator, [tensor, tensor], [tensor], arguments, 0, 192])


@pytest.mark.parametrize(
    ("form", "told"),
    [
        (plain("MatMulV2", ""), "no operator of this PyTorch"),
        (plain("aten::no_such", ""), "no operator of this PyTorch"),
        (plain("aten::from_file", '{"filename": "/etc/passwd"}'), "it opens files"),
        (plain("aten::mm", '{"self": "$0", "mat2": "$7"}'), "name what is not there"),
        (plain("aten::mm", '{"self": "$0"}'), "mat2"),
        (plain("aten::add.Tensor", '{"self": "$0", "other": 2}'), "or on other shapes"),
    ],
)
def test_what_a_file_cannot_make_run_is_told(form: OperatorForm, told: str) -> None:
    with pytest.raises(Unrepeatable, match=told):
        prepare(form, CPU)


def test_endless_arguments_are_told_apart() -> None:
    given, func = torch.ones(2), torch.ops.aten.sum.dim_IntList
    first, second = (form_of(func, (given,), {"dim": [*range(count)]}, [given], 0, 8) for count in (5000, 5001))
    assert first.digest != second.digest
    assert len(first.arguments) < 100
