"""DistributedBalancedBatchSampler: the batch sampler of one replica, by PyTorch's protocol and without PyTorch.

Every replica computes the same dealing from what is known of all samples, so nothing is sent. Samples are shuffled once
an epoch; the balancer reorders them inside a global batch and never across, so each step sees the samples that it would
see without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mm_autoparallel.errors import PlanError
from mm_autoparallel.files import describe_value
from mm_autoparallel.planner.balanced_checks import whole_number
from mm_autoparallel.planner.balancer import BatchBalancer
from mm_autoparallel.samples.sample import Sample

_STATE = ("seed", "epoch", "step", "micro_batch")
_SIZES = ("global_batch_size", "replicas", "micro_batches")


@dataclass
class _Place:
    """Of one iterator: samples of whole steps, and micro-batches of the step behind them."""

    passed: int = 0
    micro_batch: int = 0


class DistributedBalancedBatchSampler:
    """Yields the numbers of each micro-batch's samples, in running order: `DataLoader(data, batch_sampler=...)`.

    Each `iter` begins the epoch anew, but for the first that is read after `load_state_dict`. The last samples of an
    epoch that fill no global batch are left out. `state_dict` tells where the next micro-batch of the latest iterator
    stands: the seed, the epoch, the global batch and the micro-batch in it, the samples of the epoch before that batch,
    and the sizes it was taken under. It counts what the sampler has yielded, which workers of a DataLoader fetch ahead
    of training; a loader that fetches ahead keeps the state of its own.
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
        None for the plan's own. Raises PlanError where a number is malformed, a size does not fit, or a sample is
        above the token cap.
        """
        balancer.check_replica(rank, balancer.dp)
        given = balancer.plan.global_batch_size if global_batch_size is None else global_batch_size
        size = whole_number("global_batch_size", given, least=1)
        balancer.check_samples(samples)
        least = balancer.dp * balancer.micro_batches
        if not least <= size <= len(samples):
            raise PlanError(
                f"a global batch has {size} samples; between {least}, one for each of {balancer.micro_batches} "
                f"micro-batches of {balancer.dp} replicas, and the {len(samples)} of the data set are expected"
            )
        self._samples, self._balancer, self._rank, self._size = samples, balancer, rank, size
        self._seed, self._epoch = whole_number("seed", seed), whole_number("epoch", epoch)
        self._shuffle = bool(shuffle)
        self._place = _Place()
        self._is_loaded = False  # _place was loaded, and no iterator has been read since

    @property
    def steps_per_epoch(self) -> int:
        """Whole global batches of the data set."""
        return len(self._samples) // self._size

    def __len__(self) -> int:
        """Micro-batches of an epoch on this replica, from its beginning."""
        return self.steps_per_epoch * self._balancer.micro_batches

    def __iter__(self) -> Iterator[list[int]]:
        if not self._is_loaded:
            self._place = _Place()
        return self._walk()

    def _walk(self) -> Iterator[list[int]]:
        """What is loaded goes to who reads first: a DataLoader with workers calls `iter` twice and reads one."""
        place = self._place = self._place if self._is_loaded else _Place()
        self._is_loaded = False
        order = self._order()
        while place.passed + self._size <= len(order):
            batch = order[place.passed : place.passed + self._size]
            dealt = self._balancer.assign([self._samples[i] for i in batch]).ranks[self._rank]
            while place.micro_batch < len(dealt):
                place.micro_batch += 1
                yield [batch[i] for i in dealt[place.micro_batch - 1]]
            place.passed, place.micro_batch = place.passed + self._size, 0

    def _order(self) -> list[int]:
        """The samples of the epoch; RandomState's stream is the one that numpy keeps from release to release."""
        if not self._shuffle:
            return list(range(len(self._samples)))
        draws = np.random.RandomState(np.random.MT19937(np.random.SeedSequence([self._seed, self._epoch])))
        numbers: list[int] = draws.permutation(len(self._samples)).tolist()
        return numbers

    def set_epoch(self, epoch: int) -> None:
        """Begin epoch number `epoch`, where that is another: with another order. Raises PlanError where it is none."""
        if whole_number("epoch", epoch) != self._epoch:
            self._epoch, self._place, self._is_loaded = int(epoch), _Place(), False

    def state_dict(self) -> dict[str, int]:
        """Where the next micro-batch stands; `load_state_dict` goes on there. Behind an epoch's last one, that is its
        end: nothing is left of it."""
        passed, micro_batch = self._place.passed, self._place.micro_batch
        if micro_batch == self._balancer.micro_batches:
            passed, micro_batch = passed + self._size, 0
        place = dict(zip(_STATE, (self._seed, self._epoch, passed // self._size, micro_batch), strict=True))
        return place | {"passed_samples": passed, "shuffle": self._shuffle} | self._sizes()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where `state` was taken: inside a step under the same plan and sizes, at the beginning of a step under
        any, at the same sample. A state without sizes, as they were written once, counts as one of these sizes.

        Raises PlanError where it is no such state, is of samples that were shuffled or not as these are not, stands
        where this data set ends, or inside a step of other sizes.
        """
        if not isinstance(state, Mapping):
            raise PlanError(f"state of the sampler is {describe_value(state)}; what state_dict gave is expected")
        if (was_shuffled := state.get("shuffle", self._shuffle)) != self._shuffle:
            raise PlanError(
                f"state of the sampler: taken with shuffle={bool(was_shuffled)}, and this one has "
                f"shuffle={self._shuffle}; it would pass over other samples: give it the same"
            )
        sizes = self._sizes()
        is_whole = any(name in state for name in ("passed_samples", *_SIZES))
        for name in (*_STATE, "passed_samples", *_SIZES) if is_whole else _STATE:
            whole_number(f"state of the sampler: {name}", state.get(name))
        step, micro_batch = state["step"], state["micro_batch"]
        taken = {name: state[name] for name in _SIZES} if is_whole else sizes
        size = taken["global_batch_size"]
        passed = state["passed_samples"] if is_whole else step * size
        if micro_batch and taken != sizes:
            raise PlanError(
                f"state of the sampler: taken inside a step of {_describe(taken)}, behind micro-batch {micro_batch}; "
                f"this sampler has {_describe(sizes)}; other sizes go on at the beginning of a step alone"
            )
        if (size == self._size and step > self.steps_per_epoch) or micro_batch > self._balancer.micro_batches:
            raise PlanError(
                f"state of the sampler: step {step}, micro-batch {micro_batch}; an epoch has {self.steps_per_epoch} "
                f"steps of {self._balancer.micro_batches} micro-batches"
            )
        if passed > len(self._samples) or not step * size <= passed < (step + 1) * size:
            raise PlanError(
                f"state of the sampler: {passed} samples passed by step {step} of {size} samples each; "
                f"the data set has {len(self._samples)}"
            )
        self._seed, self._epoch = int(state["seed"]), int(state["epoch"])
        self._place, self._is_loaded = _Place(int(passed), int(micro_batch)), True

    def _sizes(self) -> dict[str, int]:
        return dict(zip(_SIZES, (self._size, self._balancer.dp, self._balancer.micro_batches), strict=True))


def _describe(sizes: Mapping[str, int]) -> str:
    batch, replicas, micro_batches = (sizes[name] for name in _SIZES)
    return f"{batch} samples over {replicas} replicas of {micro_batches} micro-batches"
