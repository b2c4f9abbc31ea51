"""Collectives are recorded with the bytes that costs count them by."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.tensor import Shard  # noqa: E402
from torch.distributed.tensor.parallel import (  # noqa: E402
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from mm_autoparallel.profilers.shard import Collective, fake_mesh, record_collectives  # noqa: E402

TP, SAMPLES, TOKENS, WIDTH, INNER = 4, 2, 16, 8, 32
WHOLE = SAMPLES * TOKENS * WIDTH * 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        return state + self.down(torch.relu(self.up(self.norm(state))))


def step(block: nn.Module, num_tokens: int) -> None:
    state = torch.randn(SAMPLES, num_tokens, WIDTH, requires_grad=True)
    block(state).sum().backward()


def test_tensor_parallel_sums_what_rows_give_and_what_columns_take() -> None:
    with fake_mesh(TP, "cpu") as mesh:
        block = parallelize_module(Block(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        _, found = record_collectives(lambda: step(block, TOKENS))
    assert found == (Collective("all_reduce", WHOLE),) * 2


def test_sequence_parallel_gathers_and_scatters_whole_sequences() -> None:
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    with fake_mesh(TP, "cpu") as mesh:
        block = parallelize_module(Block(), mesh, plan)
        _, found = record_collectives(lambda: step(block, TOKENS // TP))
    assert [one.size_bytes for one in found] == [WHOLE] * 4
    assert [one.operation for one in found] == ["all_gather", "reduce_scatter"] * 2


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_collectives_that_are_called_by_name_are_seen_too() -> None:
    part = torch.zeros(6)

    def call() -> None:
        dist.all_reduce(part)
        dist.all_gather_into_tensor(torch.zeros(TP * 6), part)
        dist.all_gather([torch.zeros(6) for _ in range(TP)], part)
        dist.reduce_scatter_tensor(torch.zeros(6), torch.zeros(TP * 6))
        dist.all_to_all_single(torch.zeros(8), torch.zeros(8))

    with fake_mesh(TP, "cpu"):
        _, found = record_collectives(call)
    assert found == (
        Collective("all_reduce", 24),
        Collective("all_gather", 96),
        Collective("all_gather", 96),
        Collective("reduce_scatter", 96),
        Collective("all_to_all", 32),
    )


def test_the_group_is_gone_afterwards() -> None:
    with pytest.raises(ValueError, match="own failure"), fake_mesh(2, "cpu"):
        raise ValueError("own failure")
    assert not dist.is_initialized()
