"""Tinker's search: every measured configuration and pipeline, and for each up to five ways to cut the layers.

The first way has the shortest slowest stage under the memory limit; each further one must hold less than the one
before. Layers are alike, so that a stage's time and memory go by its number of layers alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from mm_autoparallel.errors import PlanError
from mm_autoparallel.integrations.tinker.cost import Chain, Choice, Cluster, Score
from mm_autoparallel.integrations.tinker.profiles import Folder

ROUNDS = 5
_LESS_MIB = 1e-7
"""By how much a further way must hold less."""


def search(
    folder: Folder,
    cluster: Cluster,
    global_batch_size: int,
    memory_limit_mib: float,
    look: Callable[[], None] = lambda: None,
) -> tuple[Score, ...]:
    """All ways that fit, the fastest first. look: called for each configuration, to raise what should end it.

    Raises PlanError where the folder does not say how many layers the model has.
    """
    if folder.num_layers is None:
        raise PlanError(f"{folder.path} does not say how many layers the model has; give it model_info_seq*.json")
    found: list[Score] = []
    for choice in list_choices(folder, cluster, global_batch_size):
        look()
        chain, limit = Chain(folder, cluster, choice), memory_limit_mib
        for _ in range(ROUNDS):
            layers = cut(chain, folder.num_layers, limit)
            if layers is None:
                break
            found.append(chain.score(layers))
            limit = found[-1].peak_mib - _LESS_MIB
    return tuple(sorted(found, key=lambda score: (-score.tokens_per_device_s, score.step_us, score.peak_mib)))


def list_choices(folder: Folder, cluster: Cluster, global_batch_size: int) -> Iterator[Choice]:
    """What Tinker tries of a folder on a cluster, with a batch that divides."""
    devices = cluster.num_devices
    for config in sorted(folder.blocks):
        if devices % config.tp:
            continue
        for pp in range(1, min(folder.num_layers or 1, devices) + 1):
            ranks = config.tp * pp
            if devices % (ranks * config.ep) or devices // ranks < config.ep:
                continue
            dp = devices // ranks
            if global_batch_size % (dp * config.mbs):
                continue
            for dist_opt in (False,) if config.ep > 1 or dp == 1 else (False, True):
                for recompute in (False, True):
                    yield Choice(config, pp, dist_opt, recompute, global_batch_size)


def cut(chain: Chain, num_layers: int, limit_mib: float) -> tuple[int, ...] | None:
    """Layers of each stage, at least one, so that the slowest stage is as fast as can be and every stage holds less
    than the limit; of equal ones, the latest cut that Tinker meets first. None where no cut does."""
    pp = chain.choice.pp
    most = num_layers - pp + 1
    kinds = [{n: chain.stage_us(stage, n) for n in range(1, most + 1)} for stage in range(pp)]
    fits = [
        {n: kinds[stage][n] for n in range(1, most + 1) if chain.stage_mib(stage, n) < limit_mib} for stage in range(pp)
    ]
    best: list[dict[int, tuple[float, int]]] = [{n: (us, n) for n, us in fits[0].items()}]
    for stage in range(1, pp):
        row: dict[int, tuple[float, int]] = {}
        for total in range(stage + 1, num_layers + 1):
            slowest, own = math.inf, 0
            for count in range(1, total - stage + 1):  # ends of the stages before descend
                us = fits[stage].get(count)
                before = best[-1].get(total - count)
                if us is not None and before is not None and max(us, before[0]) < slowest:
                    slowest, own = max(us, before[0]), count
            if own:
                row[total] = (slowest, own)
        best.append(row)
    counts, total = [], num_layers
    for row in reversed(best):
        if total not in row:
            return None
        counts.append(row[total][1])
        total -= counts[-1]
    return tuple(reversed(counts))
