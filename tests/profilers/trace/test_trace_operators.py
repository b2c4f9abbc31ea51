"""What the recorder sees: operators of each kind with their FLOPs and bytes, and the storages alive."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.nn import functional  # noqa: E402

from mm_autoparallel.profilers.trace.recorder import Recorder  # noqa: E402
from mm_autoparallel.profilers.trace.tally import Calls, Key, Tally  # noqa: E402


def fake(*shape: int, dtype: torch.dtype = torch.bfloat16, requires_grad: bool = False) -> Tensor:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return torch.empty(shape, dtype=dtype, requires_grad=requires_grad)


def only(tally: Tally) -> tuple[Key, Calls]:
    ((key, calls),) = tally.items()
    return key, calls


def test_a_product_counts_its_flops_and_operands_once() -> None:
    rows, weight = fake(6, 4), fake(5, 4)
    with Recorder() as recorder:
        recorder.open("product")
        functional.linear(rows, weight)
        functional.linear(rows, weight)
        recorder.close()
    key, calls = only(recorder.tally("product"))  # the transposed view of the weight is no operator
    assert (key.name, key.kind, key.dtype) == ("mm", "matrix_product", "bf16")
    assert calls == Calls(2, 2 * 2 * 6 * 4 * 5, 2 * 2 * (6 * 4 + 4 * 5 + 6 * 5))


def test_what_is_repeated_by_a_stride_is_read_once() -> None:
    with Recorder() as recorder:
        recorder.open("sum")
        fake(8, 4) + fake(1, 4).expand(8, 4)
        recorder.close()
    key, calls = only(recorder.tally("sum"))
    assert (key.name, key.kind) == ("add", "memory_bound")
    assert calls == Calls(1, 0, 2 * (8 * 4 + 4 + 8 * 4))


def test_a_table_is_read_where_it_is_looked_up() -> None:
    table, numbers = fake(1000, 4), torch.zeros(6, dtype=torch.int64)
    with Recorder() as recorder:
        recorder.open("look-up")
        functional.embedding(numbers, table)
        recorder.close()
    assert only(recorder.tally("look-up"))[1].moved_bytes == 2 * 2 * 6 * 4 + 8 * 6


@pytest.mark.parametrize(("causal", "part"), [(False, 1), (True, 2)])
@pytest.mark.parametrize("num_groups", [4, 2])
def test_attention_counts_the_scores_that_it_works_out(causal: bool, part: int, num_groups: int) -> None:
    query, key, value = (fake(1, heads, 16, 8, requires_grad=True) for heads in (4, num_groups, num_groups))
    with Recorder() as recorder:
        recorder.open("forward")
        found = functional.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=num_groups != 4)
        recorder.close()
        recorder.open("backward")
        found.backward(torch.empty_like(found))
        recorder.close()
    flops = 4 * 4 * 16 * 16 * 8 // part
    forward, backward = (
        [(key.name, calls.flops) for key, calls in recorder.tally(name).items() if key.kind == "attention"]
        for name in ("forward", "backward")
    )
    assert forward == [("_scaled_dot_product_flash_attention", flops)]
    assert backward == [("_scaled_dot_product_flash_attention_backward", 5 * flops // 2)]


def test_grouped_products_are_products() -> None:
    with Recorder() as recorder:
        recorder.open("experts")
        torch._grouped_mm(fake(32, 16), fake(4, 16, 24), torch.tensor([8, 16, 24, 32], dtype=torch.int32))
        recorder.close()
    key, calls = only(recorder.tally("experts"))
    assert (key.kind, calls.flops) == ("matrix_product", 2 * 32 * 16 * 24)


def test_the_peak_is_what_was_alive_beyond_what_stays() -> None:
    start = fake(100, dtype=torch.float32)
    with Recorder() as recorder:
        recorder.open("work")
        first = start + 1  # 400 bytes
        second = first * 2  # 800
        del first
        third = second.view(10, 10) + 1  # 800: a view has no storage of its own
        del second
        recorder.close()
        assert recorder.segments["work"][0].peak_bytes == 800
        assert recorder.segments["work"][0].end_bytes == 400
        assert recorder.passing_bytes("work") == 400
        recorder.open("release")
        del third
        recorder.close()
    assert recorder.segments["release"][0].end_bytes == -400
    assert recorder.passing_bytes("release") == 0
    assert recorder.passing_bytes("nothing") == 0


def test_what_was_there_before_does_not_count() -> None:
    parameter = fake(100, dtype=torch.float32)
    with Recorder() as recorder:
        recorder.open("in place")
        parameter.add_(1)
        recorder.close()
        del parameter
        recorder.open("after")
        recorder.close()
    assert [segment.end_bytes for name in ("in place", "after") for segment in recorder.segments[name]] == [0, 0]


def test_the_difference_of_two_runs_is_what_one_did_more() -> None:
    same, more = Key("mm", "matrix_product", ((2, 2),), "bf16"), Key("sum", "memory_bound", ((2,),), "bf16")
    whole = Tally({same: Calls(3, 30, 300), more: Calls(1, 0, 8)})
    assert whole.beyond(Tally({same: Calls(2, 20, 200)})) == {same: Calls(1, 10, 100), more: Calls(1, 0, 8)}
    # one call that works out another gradient besides
    assert whole.beyond(Tally({same: Calls(3, 20, 200), more: Calls(1, 0, 8)})) == {same: Calls(1, 10, 100)}
