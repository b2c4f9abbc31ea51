"""RankExchange: how replicas of torch.distributed meet for `BatchBalancer.wrap`: lengths to all, samples to ranks.

Samples are mappings from names to tensors, of the same names, types and numbers of dimensions on all ranks; shapes may
differ. Whole numbers and tensors cross the network and nothing else, so nothing has to be unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from math import prod
from typing import TYPE_CHECKING

from mm_autoparallel.errors import PlanError
from mm_autoparallel.samples.sample import Sample

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor

_NOT_SAID = -1
"""In the place of `Sample.tokens` that are None."""


class RankExchange:
    """The replicas of a process group; its default is the whole world. All of them call each method together."""

    def __init__(self, group: dist.ProcessGroup | None = None, device: str = "cpu") -> None:
        """device: where the group's tensors lie (`cpu` with gloo, this process's own with nccl or hccl)."""
        import torch.distributed as dist

        self._group, self._device = group, device
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def gather(self, samples: Sequence[Sample]) -> list[list[Sample]]:
        """The samples that every replica gives, by rank."""
        numbers: list[int] = []
        for sample in samples:
            told = _NOT_SAID if sample.tokens is None else sample.tokens
            numbers += [told, sample.text_tokens, len(sample.patches), *sample.patches]
        return [list(_read_samples(row)) for row in self._gather(numbers)]

    def swap(
        self, outgoing: Sequence[Sequence[Mapping[str, Tensor]]], incoming: Sequence[int]
    ) -> list[list[Mapping[str, Tensor]]]:
        """Send outgoing[r] to each replica r, and return what each has sent; incoming: how many that is, by rank.

        Raises PlanError, on all ranks alike, where samples have other names, types or numbers of dimensions.
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
                    tuple(arrived_sizes[row + at : row + at + num_dimensions])
                    for row in range(0, len(arrived_sizes), num_sizes)
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
        forms = sorted(
            {
                json.dumps(
                    {name: (str(one[name].dtype).removeprefix("torch."), one[name].dim()) for name in sorted(one)}
                )
                for one in samples
            }
        )
        told = [bytes(row).decode() for row in self._gather(list(json.dumps(forms).encode()))]
        everywhere = sorted({form for text in told for form in json.loads(text)})
        if len(everywhere) > 1:
            raise PlanError(
                f"samples have different forms, {everywhere[0]} and {everywhere[1]}; all need the same names, types "
                "and numbers of dimensions"
            )
        document = json.loads(everywhere[0]) if everywhere else {}
        return {name: (str(dtype), int(num_dimensions)) for name, (dtype, num_dimensions) in document.items()}

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


def _read_samples(row: Sequence[int]) -> Iterator[Sample]:
    at = 0
    while at < len(row):
        told, text_tokens, num_images = row[at : at + 3]
        at += 3 + num_images
        yield Sample(tuple(row[at - num_images : at]), text_tokens, None if told == _NOT_SAID else told)
