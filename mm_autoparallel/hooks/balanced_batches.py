"""RankExchange: how replicas of torch.distributed meet for `BatchBalancer.wrap`: lengths to all, samples to ranks.

Samples are mappings from names to tensors, of the same names, types and numbers of dimensions on all ranks; shapes may
differ. Whole numbers and tensors cross the network and nothing else, so nothing has to be unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any

from mm_autoparallel.errors import PlanError
from mm_autoparallel.samples.sample import Sample

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor


class RankExchange:
    """The replicas of a process group; its default is the whole world. All of them call each method together."""

    def __init__(self, group: dist.ProcessGroup | None = None, device: str = "cpu") -> None:
        """device: where the group's tensors lie (`cpu` with gloo, this process's own with nccl or hccl)."""
        import torch.distributed as dist

        self._group, self._device = group, device
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def gather(self, samples: Sequence[Sample]) -> list[list[Sample]]:
        """The samples that every replica gives, by rank. Raises PlanError, on all alike, where one is malformed."""
        from mm_autoparallel.planner.balanced_checks import read_samples

        told: list[list[Any]] = []
        problem = ""
        try:
            table = read_samples(samples)
            read = map(table.sample, range(len(table)))
            told = [[one.patches, one.text_tokens, one.tokens, one.audio_s] for one in read]
        except PlanError as error:  # the others wait for what this rank says
            problem = str(error)
        return [
            [
                Sample(tuple(patches), text_tokens, tokens, tuple(audio_s))
                for patches, text_tokens, tokens, audio_s in of
            ]
            for of in self._tell(told, problem)
        ]

    def swap(
        self, outgoing: Sequence[Sequence[Mapping[str, Tensor]]], incoming: Sequence[int]
    ) -> list[list[Mapping[str, Tensor]]]:
        """Send outgoing[r] to each replica r, and return what each has sent; incoming: how many that is, by rank.

        Raises PlanError, on all ranks alike, where samples hold what is no tensor, or have other names, types or
        numbers of dimensions.
        """
        import torch

        form = self._agree(list(chain.from_iterable(outgoing)))
        num_sizes = sum(num_dimensions for _, num_dimensions in form.values())
        sizes = [size for of_rank in outgoing for sample in of_rank for name in form for size in sample[name].shape]
        arrived_sizes = self._send(
            torch.tensor(sizes, dtype=torch.int64, device=self._device),
            [len(of_rank) * num_sizes for of_rank in outgoing],
            [count * num_sizes for count in incoming],
        ).tolist()
        arrived: list[list[dict[str, Tensor]]] = [[{} for _ in range(count)] for count in incoming]
        at = 0  # the sizes of this name, in the row of each sample
        for name, (dtype, num_dimensions) in form.items():
            shapes = iter(
                [
                    tuple(arrived_sizes[row * num_sizes + at : row * num_sizes + at + num_dimensions])
                    for row in range(sum(incoming))
                ]
            )
            at += num_dimensions
            of_name = [[next(shapes) for _ in range(count)] for count in incoming]
            flat = [sample[name].to(self._device).flatten() for of_rank in outgoing for sample in of_rank]
            values = self._send(
                torch.cat(flat) if flat else torch.empty(0, dtype=getattr(torch, dtype), device=self._device),
                [sum(sample[name].numel() for sample in of_rank) for of_rank in outgoing],
                [sum(map(prod, of_rank)) for of_rank in of_name],
            )
            begin = 0
            for samples, of_rank in zip(arrived, of_name, strict=True):
                for sample, shape in zip(samples, of_rank, strict=True):
                    end = begin + prod(shape)
                    sample[name] = values[begin:end].reshape(shape)
                    begin = end
        return [list(samples) for samples in arrived]

    def _agree(self, samples: Sequence[Mapping[str, Tensor]]) -> dict[str, tuple[str, int]]:
        """Name → type and number of dimensions of all samples on all ranks, names ascending."""
        forms: set[str] = set()
        problem = next(filter(None, map(_find_fault, samples)), "")
        if not problem:
            for one in samples:
                kinds = {name: (str(one[name].dtype).removeprefix("torch."), one[name].dim()) for name in sorted(one)}
                forms.add(json.dumps(kinds))
        everywhere = sorted({form for told in self._tell(sorted(forms), problem) for form in told})
        if len(everywhere) > 1:
            raise PlanError(
                f"samples have different forms, {everywhere[0]} and {everywhere[1]}; all need the same names, types "
                "and numbers of dimensions"
            )
        document = json.loads(everywhere[0]) if everywhere else {}
        return {name: (str(dtype), int(num_dimensions)) for name, (dtype, num_dimensions) in document.items()}

    def _tell(self, told: Any, problem: str) -> list[Any]:
        """What every replica tells, by rank. Raises PlanError, on all ranks alike, where one has a problem."""
        text = json.dumps([problem, told], separators=(",", ":"))
        answers = [json.loads(bytes(row)) for row in self._gather(list(text.encode()))]
        for rank, (of_rank, _) in enumerate(answers):
            if of_rank:
                raise PlanError(f"on rank {rank}, {of_rank}")
        return [answer for _, answer in answers]

    def _gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """The whole numbers that every replica gives, by rank."""
        import torch
        import torch.distributed as dist

        length = torch.tensor([len(numbers)], dtype=torch.int64, device=self._device)
        lengths = [torch.empty_like(length) for _ in range(self.size)]
        dist.all_gather(lengths, length, group=self._group)
        counts = [int(each) for each in lengths]
        mine = torch.zeros(max(counts), dtype=torch.int64, device=self._device)
        mine[: len(numbers)] = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(everyone, mine, group=self._group)
        return [row[:count].tolist() for row, count in zip(everyone, counts, strict=True)]

    def _send(self, values: Tensor, counts_out: list[int], counts_in: list[int]) -> Tensor:
        """The next counts_out[r] of `values` to each replica r; what came, by rank."""
        import torch.distributed as dist

        arrived = values.new_empty(sum(counts_in))
        dist.all_to_all_single(arrived, values, counts_in, counts_out, group=self._group)
        return arrived


def _find_fault(sample: Any) -> str:
    """What of a sample's payload cannot be sent; empty where all of it can."""
    import torch

    if not hasattr(sample, "keys"):
        return f"a sample holds a {type(sample).__name__}; a mapping from names to tensors is expected"
    for name, value in sample.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            return f"a sample has {name!r}: a {type(value).__name__}; tensors by name are expected, and those alone"
    return ""
