"""DistributedBalancedBatchSampler: the batch sampler of one replica, by PyTorch's protocol and without PyTorch.

Every replica computes the same dealing from what is known of all samples, so nothing is sent. Samples are shuffled once
an epoch; the balancer reorders them inside a global batch and never across, so each step sees the samples that it would
see without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from mm_autoparallel.errors import PlanError
from mm_autoparallel.files import describe_value
from mm_autoparallel.planner.balancer import BatchBalancer
from mm_autoparallel.samples.sample import Sample

_STATE = ("seed", "epoch", "step", "micro_batch")
_SIZES = ("global_batch_size", "replicas", "micro_batches")


class DistributedBalancedBatchSampler:
    """Yields the numbers of each micro-batch's samples, in running order: `DataLoader(data, batch_sampler=...)`.

    The last samples of an epoch that fill no global batch are left out. `state_dict` tells where the next micro-batch
    stands: the seed, the epoch, the global batch and the micro-batch in it, and under which sizes. It counts what the
    sampler has yielded, which workers of a DataLoader fetch ahead of training; a loader that fetches ahead keeps the
    state of its own.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        balancer: BatchBalancer,
        *,
        rank: int,
        global_batch_size: int | None = None,
        seed: int = 0,
        epoch: int = 0,
        shuffle: bool = True,
    ) -> None:
        """samples: of the whole data set, alike on all replicas. rank: of this replica, from 0. global_batch_size:
        None for the plan's own. Raises PlanError where a size does not fit, or a sample is above the token cap.
        """
        balancer.check_replica(rank, balancer.dp)
        size = balancer.plan.global_batch_size if global_batch_size is None else global_batch_size
        least = balancer.dp * balancer.micro_batches
        if not least <= size <= len(samples):
            raise PlanError(
                f"a global batch has {size} samples; between {least}, one for each of {balancer.micro_batches} "
                f"micro-batches of {balancer.dp} replicas, and the {len(samples)} of the data set are expected"
            )
        balancer.check_samples(samples)
        self._samples, self._balancer, self._rank, self._size = samples, balancer, rank, size
        self._seed, self._epoch, self._shuffle = seed, epoch, shuffle
        self._step = self._micro_batch = self._passed = 0

    @property
    def steps_per_epoch(self) -> int:
        """Whole global batches of the data set."""
        return len(self._samples) // self._size

    def __len__(self) -> int:
        """Micro-batches of an epoch on this replica, from its beginning."""
        return self.steps_per_epoch * self._balancer.micro_batches

    def __iter__(self) -> Iterator[list[int]]:
        order = self._order()
        while self._passed + self._size <= len(self._samples):
            batch = order[self._passed : self._passed + self._size]
            dealt = self._balancer.assign([self._samples[i] for i in batch]).ranks[self._rank]
            while self._micro_batch < len(dealt):
                self._micro_batch += 1
                yield [batch[i] for i in dealt[self._micro_batch - 1]]
            self._step, self._micro_batch, self._passed = self._step + 1, 0, self._passed + self._size
        self._step = self._passed = 0

    def _order(self) -> list[int]:
        """The samples of the epoch; RandomState's stream is the one that numpy keeps from release to release."""
        if not self._shuffle:
            return list(range(len(self._samples)))
        draws = np.random.RandomState(np.random.MT19937(np.random.SeedSequence([self._seed, self._epoch])))
        numbers: list[int] = draws.permutation(len(self._samples)).tolist()
        return numbers

    def set_epoch(self, epoch: int) -> None:
        """Begin epoch number `epoch`, where that is another: with another order."""
        if epoch != self._epoch:
            self._epoch, self._step, self._micro_batch, self._passed = epoch, 0, 0, 0

    @property
    def _sizes(self) -> dict[str, int]:
        own = self._balancer
        return dict(zip(_SIZES, (self._size, own.dp, own.micro_batches), strict=True))

    def state_dict(self) -> dict[str, int]:
        """Where the next micro-batch stands; `load_state_dict` goes on there."""
        values = (self._seed, self._epoch, self._step, self._micro_batch)
        return dict(zip(_STATE, values, strict=True)) | {"samples": self._passed} | self._sizes

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where `state` was taken: inside a step under the same sizes, at its beginning under others too, with
        the next sample of the epoch. A state without sizes is taken to be of these.

        Raises PlanError where it is no such state, or stands where this data set ends.
        """
        sizes = {name: state.get(name, size) for name, size in self._sizes.items()}
        passed = state.get("samples", state.get("step", 0) * self._size)
        for name, value in ({name: state.get(name) for name in _STATE} | sizes | {"samples": passed}).items():
            if not isinstance(value, int) or value < 0:
                raise PlanError(f"state of the sampler: {name} is {describe_value(value)}; a whole number is expected")
        step, micro_batch = state["step"], state["micro_batch"]
        if micro_batch and sizes != self._sizes:
            told, own = (", ".join(f"{name} {size}" for name, size in each.items()) for each in (sizes, self._sizes))
            raise PlanError(
                f"state of the sampler: it stands in micro-batch {micro_batch} of a step with {told}, and this is "
                f"{own}; other sizes go on at the beginning of a step"
            )
        if not step <= passed <= len(self._samples) or micro_batch > self._balancer.micro_batches:
            raise PlanError(
                f"state of the sampler: step {step}, micro-batch {micro_batch}, after {passed} samples; an epoch of "
                f"{len(self._samples)} has {self.steps_per_epoch} steps of {self._balancer.micro_batches} micro-batches"
            )
        self._seed, self._epoch, self._passed = state["seed"], state["epoch"], passed
        self._step, self._micro_batch = step, micro_batch
