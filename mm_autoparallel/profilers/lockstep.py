"""Lockstep: the ranks of a profile run go from sample to sample together, and decide together.

A group of its own (gloo, on CPU, whatever joins the devices), so that its messages never mix with those of the model
that is measured. Every message has one form and says whether its sender goes on, so that a rank that cannot is heard
by the others wherever they wait.
"""

from __future__ import annotations

import atexit
import itertools
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from mm_autoparallel.errors import ProfileError

TIMEOUT_S = 600
"""Assumed: longer than one rank ever waits for another."""

_WIDTH = 4
"""Numbers of one message: whether the sender goes on, then what is told."""


class PeerFailed(ProfileError):
    """This rank ends only because another one failed, which says why."""


class PeersStopped(Exception):
    """Ranks do not go on, this one or others. reasons: rank → the number it gave."""

    def __init__(self, reasons: dict[int, int]) -> None:
        super().__init__(f"ranks {', '.join(map(str, reasons))} stopped")
        self.reasons = reasons


class Lockstep:
    """The ranks that measure side by side; without a group, one rank by itself."""

    def __init__(self, group: dist.ProcessGroupGloo | None = None, rank: int = 0, num_ranks: int = 1) -> None:
        self._group = group
        self.rank = rank
        self.num_ranks = num_ranks

    def wait(self) -> None:
        """Returns when all ranks have come here. Raises PeersStopped, as all methods but `stop`, where one did not."""
        self._exchange([])

    def largest(self, number: float) -> float:
        """The largest of the ranks' numbers; waits for all of them."""
        return max(row[0] for row in self._exchange([number]))

    def average(self, numbers: Sequence[float]) -> list[float]:
        """The mean over the ranks of each of up to three numbers."""
        rows = self._exchange(numbers)
        return [sum(row[at] for row in rows) / self.num_ranks for at in range(len(numbers))]

    def stop(self, reason: int) -> dict[int, int]:
        """Tells the others that this rank does not go on, wherever they wait; reasons of all that do not, by rank."""
        try:
            self._exchange([], reason)
        except PeersStopped as stopped:
            return stopped.reasons
        return {}

    def close(self) -> None:
        """Ends the group's threads; at the end of the process, before the interpreter is taken apart around them."""
        self._group = None

    def _exchange(self, numbers: Sequence[float], reason: int = 0) -> list[list[float]]:
        row = [float(reason), *numbers]
        row += [0.0] * (_WIDTH - len(row))
        if self._group is None:
            rows = [row]
        else:
            mine = torch.tensor(row, dtype=torch.float64)
            all_rows = [torch.empty_like(mine) for _ in range(self.num_ranks)]
            self._group.allgather([all_rows], [mine]).wait()  # type: ignore[attr-defined]
            rows = [one.tolist() for one in all_rows]
        reasons = {rank: int(one[0]) for rank, one in enumerate(rows) if one[0]}
        if reasons:
            raise PeersStopped(reasons)
        return [one[1:] for one in rows]


_RENDEZVOUS = itertools.count()
"""Every lockstep that a process joins has keys of its own in the store; all ranks join in the same order."""

ALONE = Lockstep()
"""One rank, which waits for nobody."""


def join_ranks() -> Lockstep:
    """The lockstep of all ranks of the default process group; ALONE where there is none, or one rank.

    It outlives the default group: it is joined through the group's store, not through the group.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return ALONE
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    store = PrefixStore(f"mm_autoparallel/lockstep/{next(_RENDEZVOUS)}", _get_default_store())
    group = dist.ProcessGroupGloo(store, rank, num_ranks, timedelta(seconds=TIMEOUT_S))
    lockstep = Lockstep(group, rank, num_ranks)
    atexit.register(lockstep.close)
    return lockstep
