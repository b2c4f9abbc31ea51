"""Branches for what older releases of PyTorch lack: each is taken here by taking the newer name away.

older_torch.py beside the hooks' tests runs the releases themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from mm_autoparallel.profilers import torch_releases  # noqa: E402


@pytest.fixture
def without_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before 2.6."""
    if hasattr(torch, "accelerator"):
        monkeypatch.delattr(torch, "accelerator")


def test_an_accelerator_is_found_by_its_own_module(without_accelerator: None, monkeypatch: pytest.MonkeyPatch) -> None:
    there, not_there = SimpleNamespace(is_available=lambda: True), SimpleNamespace(is_available=lambda: False)
    monkeypatch.setattr(torch, "cuda", not_there)
    assert torch_releases.accelerator_type() is None
    monkeypatch.setattr(torch, "cuda", there)
    assert torch_releases.accelerator_type() == "cuda"
    monkeypatch.setattr(torch, "npu", there, raising=False)  # torch_npu may make torch.cuda say the same
    assert torch_releases.accelerator_type() == "npu"


def test_torchs_own_word_on_accelerators_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    word = SimpleNamespace(is_available=lambda: True, current_accelerator=lambda: SimpleNamespace(type="npu"))
    monkeypatch.setattr(torch, "accelerator", word, raising=False)
    assert torch_releases.accelerator_type() == "npu"
    monkeypatch.setattr(torch, "accelerator", SimpleNamespace(is_available=lambda: False))
    assert torch_releases.accelerator_type() is None


def test_a_device_is_reached_through_its_module() -> None:
    assert torch_releases.device_module("cuda") is torch.cuda
    assert torch_releases.is_out_of_device_memory(torch.cuda.OutOfMemoryError("no"))
    assert not torch_releases.is_out_of_device_memory(RuntimeError("no"))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_autocast_is_seen_by_either_name(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        assert torch_releases.autocast_type("cpu") == dtype
        if hasattr(torch, "get_autocast_dtype"):
            monkeypatch.delattr(torch, "get_autocast_dtype")
        monkeypatch.setattr(torch, "is_autocast_cpu_enabled", lambda: dtype is not None, raising=False)
        monkeypatch.setattr(torch, "get_autocast_cpu_dtype", lambda: dtype, raising=False)
        assert torch_releases.autocast_type("cpu") == dtype
    assert torch_releases.autocast_type("cuda") is None
    npu = SimpleNamespace(is_autocast_enabled=lambda: True, get_autocast_dtype=lambda: torch.float16)
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    assert torch_releases.autocast_type("npu") == torch.float16


class Alone:
    """A process group of this process alone, by a stand-in for the operations that two releases name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.called: list[str] = []
        monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
        for name in ("all_gather_single", "reduce_scatter_single"):
            monkeypatch.delattr(dist, name, raising=False)
        for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
            monkeypatch.setattr(dist, name, self.note(name))

    def note(self, name: str) -> Callable[..., None]:
        return lambda out, given, group=None: self.called.append(name) or out.copy_(given)


def test_collectives_have_older_names(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Alone(monkeypatch)
    whole, part = torch.zeros(3), torch.ones(3)
    torch_releases.all_gather(whole, part, None)
    torch_releases.reduce_scatter(part, whole, None)
    assert alone.called == ["all_gather_into_tensor", "reduce_scatter_tensor"]


def test_older_gloo_has_other_operations(without_accelerator: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks, of which this is the second; the other one's numbers are ten times its own."""
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "get_rank", lambda group: 1)

    def all_gather(parts: list[Any], part: Any, group: Any) -> None:
        for each, factor in zip(parts, (10, 1), strict=True):
            each.copy_(part * factor)

    monkeypatch.setattr(dist, "all_gather", all_gather)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: tensor.mul_(11))
    whole, part = torch.zeros(4, 2), torch.ones(2, 2)
    torch_releases.all_gather(whole, part, None)
    assert whole.tolist() == [[10, 10], [10, 10], [1, 1], [1, 1]]
    torch_releases.reduce_scatter(part, whole, None)
    assert part.tolist() == [[11, 11], [11, 11]]
    assert whole[0, 0] == 10, "what is given stays"


def test_a_mesh_of_2_1_has_what_newer_ones_have(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mesh:
        def __init__(self, sizes: tuple[int, ...], names: tuple[str, ...]) -> None:
            self.sizes, self.names = sizes, names

        def __getitem__(self, name: str) -> Mesh:
            return Mesh((self.sizes[self.names.index(name)],), (name,))

        def get_dim_groups(self, dimension: int) -> str:
            return f"group of {self.sizes[dimension]}"

    old = SimpleNamespace(init_device_mesh=lambda kind, sizes, mesh_dim_names: Mesh(sizes, mesh_dim_names))
    monkeypatch.setattr(torch_releases, "find_spec", lambda name: None)
    monkeypatch.setattr(torch_releases, "import_module", lambda name: old)
    for num_ranks in (2, 4):
        monkeypatch.setattr(dist, "get_world_size", lambda num_ranks=num_ranks: num_ranks)
        assert torch_releases.tensor_mesh("cpu", 2).get_group() == "group of 2"


def test_events_of_the_profiler_have_one_unit() -> None:
    assert torch_releases.start_ns(SimpleNamespace(start_ns=lambda: 5000)) == 5000
    assert torch_releases.start_ns(SimpleNamespace(start_us=lambda: 5)) == 5000


def test_the_profiler_is_asked_for_what_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_releases, "profile", lambda *, activities, profile_memory: (activities, profile_memory))
    assert torch_releases.memory_profile()[1] is True
    monkeypatch.setattr(torch_releases, "profile", lambda *, activities, profile_memory, acc_events: acc_events)
    assert torch_releases.memory_profile() is True


def test_trees_are_flattened_in_order() -> None:
    assert torch_releases.tree_leaves(({"b": 1, "a": [2]}, 3)) == [1, 2, 3]
