"""Kept and passing bytes of operators whose saved tensors are known."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from mm_autoparallel.profilers.meter import (  # noqa: E402
    AllocationTrace,
    KeptActivations,
    count_bytes,
    count_numbers,
)
from mm_autoparallel.profilers.shard import fake_mesh  # noqa: E402

ROWS, WIDTH, INNER, FLOAT = 8, 16, 64, 4
CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(state * self.scale)))


KEPT = (ROWS * WIDTH + ROWS * INNER) * FLOAT
"""What `Block` keeps: the scaled input of `up`, and relu's result, which `down` saves again; no weight, no scale."""


@pytest.fixture
def block() -> Block:
    return Block()


def given() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, requires_grad=True)


def test_storages_count_once_and_weights_and_buffers_do_not(block: Block) -> None:
    kept = KeptActivations(block)
    with kept:
        output = block(given())
    assert kept.kept_bytes == KEPT
    output.sum().backward()
    assert kept.kept_bytes == 0
    assert kept.peak_bytes == KEPT


def test_without_naming_the_module_its_weights_count(block: Block) -> None:
    with KeptActivations() as kept:
        output = block(given())
    weights = count_bytes([block.up.weight, block.down.weight, block.scale])
    assert kept.kept_bytes == KEPT + weights
    del output


def test_forwards_in_flight_add_up_and_views_do_not(block: Block) -> None:
    kept = KeptActivations(block)
    outputs = []
    for number in range(1, 4):
        with kept:
            outputs.append(block(given()))
        assert kept.kept_bytes == number * KEPT
    outputs.pop().sum().backward()
    assert kept.kept_bytes == 2 * KEPT
    with kept:
        state = given()
        halves = state[: ROWS // 2].exp(), torch.sigmoid(state.T).T.cos()
    assert kept.kept_bytes == 2 * KEPT + ROWS // 2 * WIDTH * FLOAT + ROWS * WIDTH * FLOAT
    del halves


def test_a_graph_that_is_dropped_is_forgotten(block: Block) -> None:
    with KeptActivations(block) as kept:
        output = block(given())
    del output
    assert kept.kept_bytes == 0


def test_a_checkpoint_counts_its_input_alone(block: Block) -> None:
    with KeptActivations(block) as kept:
        output = checkpoint(block, given(), use_reentrant=False)
        assert kept.kept_bytes == ROWS * WIDTH * FLOAT
        output.sum().backward()
    assert kept.kept_bytes == 0
    assert kept.peak_bytes == ROWS * WIDTH * FLOAT


def test_gradients_are_those_without_it(block: Block) -> None:
    state = given()
    block(state).sum().backward()
    expected = block.up.weight.grad.clone()
    block.zero_grad()
    with KeptActivations(block):
        block(state).sum().backward()
    assert torch.equal(block.up.weight.grad, expected)


def test_of_a_distributed_tensor_this_rank_s_part_counts() -> None:
    with fake_mesh(4, "cpu") as mesh:
        block = parallelize_module(Block(), mesh, {"up": ColwiseParallel()})
        assert count_numbers([block.up.weight]) == WIDTH * INNER // 4
        with KeptActivations(block) as kept:
            output = torch.relu(block.up(given()))
        assert kept.kept_bytes == (ROWS * WIDTH + ROWS * INNER // 4) * FLOAT
        del output


def test_passing_bytes_are_those_beyond_what_stays() -> None:
    state = torch.randn(256, 1024)
    size = 256 * 1024 * FLOAT
    with AllocationTrace(CPU) as trace:
        trace.mark("sum")
        kept = (state + 1).exp_().sum(dim=1)
        trace.mark("copy")
        copied = state.clone()
    assert trace.segments["sum"].passing_bytes == size
    assert trace.segments["copy"].passing_bytes == 0
    del kept, copied


def test_segments_are_counted_from_their_own_mark() -> None:
    kept = []
    with AllocationTrace(CPU) as trace:
        trace.mark("one")
        kept.append(torch.empty(1000, dtype=torch.uint8))
        trace.mark("two")
        kept.append(torch.empty(500, dtype=torch.uint8))
        kept.clear()
        trace.mark("three")
    assert (trace.segments["one"].peak_bytes, trace.segments["one"].end_bytes) == (1000, 1000)
    assert (trace.segments["two"].peak_bytes, trace.segments["two"].end_bytes) == (500, -1000)
    assert trace.segments["two"].passing_bytes == 500
    assert trace.segments["three"].peak_bytes == 0
