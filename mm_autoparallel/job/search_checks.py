"""What a job's search asks for and no strategy of it could be."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from mm_autoparallel.errors import JobError
from mm_autoparallel.job.cluster import Device
from mm_autoparallel.job.layer_modes import mode_reason
from mm_autoparallel.job.sharding import offload_reason, zero_reason
from mm_autoparallel.job.workload import Workload

if TYPE_CHECKING:
    from mm_autoparallel.job.job import SearchSpace


def check_search(limits: SearchSpace, workload: Workload, device: Device, path: Path, has_experts: bool) -> None:
    """Raises JobError where no strategy within `limits` could meet one of them: a choice that was asked for by name is
    not left out silently."""
    for key, sizes, usual in (("ep", limits.ep, 1), ("etp", limits.etp, 0)):
        if not has_experts and any(size > usual for size in sizes):
            raise JobError(
                f"job file {path}: search.{key} is {list(sizes)}, and the model has no experts; leave it out"
            )
    for key, named in (("dispatcher", limits.dispatcher), ("overlap_all_to_all", limits.overlap_all_to_all)):
        if named and not has_experts:
            raise JobError(
                f"job file {path}: search.{key} is {list(named)}, and the model has no experts; leave it out"
            )
    if False in limits.reshard and 3 not in limits.zero:
        raise JobError(
            f"job file {path}: search.reshard names false, which is a choice of ZeRO 3, and search.zero is "
            f"{list(limits.zero)}; add 3 there or leave reshard out"
        )
    if any(limits.shard) and 3 not in limits.zero:
        raise JobError(
            f"job file {path}: search.shard is {list(limits.shard)}, which is a choice of ZeRO 3, and search.zero is "
            f"{list(limits.zero)}; add 3 there or leave shard out"
        )
    for zero in limits.zero:
        ways = limits.reshard if zero == 3 else (True,)
        tried = product(limits.pp or (1,), limits.ep, ways)
        reasons = [zero_reason(workload.stack, zero, *sizes, has_experts) for sizes in tried]
        if all(reasons):
            raise JobError(
                f"job file {path}: search.zero {zero} cannot be run within the limits of search: {reasons[0]}"
            )
    for mode in limits.modes:
        reason = mode_reason(mode, workload, device)
        if reason:
            raise JobError(f"job file {path}: search.modes names {mode}, and no layer can run so: {reason}")
    if True in limits.optimizer_offload:
        reasons = [offload_reason(workload.stack, zero, device) for zero in limits.zero]
        if all(reasons):
            raise JobError(f"job file {path}: search.optimizer_offload is true and cannot be run: {reasons[0]}")
