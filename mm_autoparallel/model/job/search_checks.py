"""What a job's search asks for and no strategy of it could be."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from mm_autoparallel.errors import JobError
from mm_autoparallel.files import describe_value
from mm_autoparallel.model.job.arrangement_law import model_reason, stack_reason
from mm_autoparallel.model.job.cached_law import cached_reasons
from mm_autoparallel.model.job.cluster import Cluster, Device
from mm_autoparallel.model.job.expert_law import dispatcher_reason, graphs_reason
from mm_autoparallel.model.job.fact_law import overlap_reason
from mm_autoparallel.model.job.layer_layout import layer_wise_reasons
from mm_autoparallel.model.job.layer_modes import mode_reason
from mm_autoparallel.model.job.model import Model
from mm_autoparallel.model.job.overlaps import overlap_limit_reasons
from mm_autoparallel.model.job.precision import precision_reason
from mm_autoparallel.model.job.schedule_law import ALL, is_order_file, workload_reasons
from mm_autoparallel.model.job.sharding import offload_reason, zero_reason
from mm_autoparallel.model.job.step_end import step_end_limit_reasons
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.pipeline.schedules.catalog import GIVEN, SCHEDULES, V_CHUNKS

if TYPE_CHECKING:
    from mm_autoparallel.model.job.job import SearchSpace


def check_search(limits: SearchSpace, workload: Workload, cluster: Cluster, path: Path, has_experts: bool) -> None:
    """Raises JobError where no strategy within `limits` could meet one of them: a choice that was asked for by name is
    not left out silently."""
    device, number = cluster.device, cluster.num_devices
    if any(asked > number for asked in limits.devices or ()):
        raise JobError(
            f"search.devices is {list(limits.devices or ())}, and the cluster has {number} devices; a plan uses at "
            "most as many",
            where=f"job file {path}",
        )
    for key, sizes, usual in (("ep", limits.ep, 1), ("etp", limits.etp, 0)):
        if not has_experts and any(size > usual for size in sizes):
            raise JobError(
                f"search.{key} is {list(sizes)}, and the model has no experts; leave it out", where=f"job file {path}"
            )
    for key, named in (("dispatcher", limits.dispatcher), ("overlap_all_to_all", limits.overlap_all_to_all)):
        if named and not has_experts:
            raise JobError(
                f"search.{key} is {list(named)}, and the model has no experts; leave it out", where=f"job file {path}"
            )
    if False in limits.reshard and 3 not in limits.zero:
        raise JobError(
            f"search.reshard names false, which is a choice of ZeRO 3, and search.zero is "
            f"{list(limits.zero)}; add 3 there or leave reshard out",
            where=f"job file {path}",
        )
    if any(limits.shard) and 3 not in limits.zero:
        raise JobError(
            f"search.shard is {list(limits.shard)}, which is a choice of ZeRO 3, and search.zero is "
            f"{list(limits.zero)}; add 3 there or leave shard out",
            where=f"job file {path}",
        )
    for zero in limits.zero:
        ways = limits.reshard if zero == 3 else (True,)
        tried = product(limits.pp or (1,), limits.ep, ways)
        reasons = [zero_reason(workload.stack, zero, *sizes, has_experts) for sizes in tried]
        if all(reasons):
            raise JobError(
                f"search.zero {zero} cannot be run within the limits of search: {reasons[0]}", where=f"job file {path}"
            )
    if limits.layer_strategies and (refused := next(layer_wise_reasons(workload, limits.modes), None)):
        raise JobError(f"search.layer_strategies is true and cannot be run: {refused}", where=f"job file {path}")
    _check_layouts(limits, workload, path)
    _check_precision(limits, workload, device, path)
    _check_schedules(limits, workload, path)
    found = [("dispatcher", dispatcher_reason(workload.stack, name)) for name in limits.dispatcher or ()]
    found += [("graphs", graphs_reason(workload.stack, name)) for name in limits.graphs or ()]
    found += [("tp_overlap", overlap_reason(workload.stack, name)) for name in limits.tp_overlap or ()]
    found += overlap_limit_reasons(limits, workload)
    found += [("step_end is post_validation", reason) for reason in step_end_limit_reasons(limits, workload)]
    if limits.tp_overlap and workload.fused_matmul_fraction:
        both = "workload.fused_matmul_fraction says what products hide of the same traffic"
        found.append(("tp_overlap", f"{both}; give one of them"))
    for key, reason in found:
        if reason:
            raise JobError(f"search.{key}: {reason}; leave it out", where=f"job file {path}")
    for mode in limits.modes:
        reason = mode_reason(mode, workload, device)
        if reason:
            raise JobError(f"search.modes names {mode}, and no layer can run so: {reason}", where=f"job file {path}")
    if True in limits.optimizer_offload:
        reasons = [offload_reason(workload.stack, zero, device) for zero in limits.zero]
        if all(reasons):
            raise JobError(
                f"search.optimizer_offload is true and cannot be run: {reasons[0]}", where=f"job file {path}"
            )


def check_cached(model: Model, cluster: Cluster, workload: Workload, path: Path) -> None:
    """Raises JobError where the encoders of workload.cached_features are none of the model, or must run."""
    named = workload.cached_features
    if named and (why := model_reason(model, cluster, workload)):
        raise JobError(
            f"workload.cached_features is {list(named)}, and no layout may leave an encoder out: {why}",
            where=f"job file {path}",
        )
    for reason in cached_reasons(model, workload):
        raise JobError(f"workload.{reason}", where=f"job file {path}")


def _check_layouts(limits: SearchSpace, workload: Workload, path: Path) -> None:
    """What is said of encoders with sizes of their own goes with layouts that are searched, and can be run."""
    if limits.encoder_cp != (1,) and limits.kinds == ("chain",):
        raise JobError(
            f"search.encoder_cp is {list(limits.encoder_cp)}, of encoders with sizes of their own, and search.layouts "
            "has the chain alone, whose encoders have the decoder's CP; name other layouts, or leave it out",
            where=f"job file {path}",
        )
    if limits.encoder_pieces != (1,) and "colocated" not in limits.kinds:
        raise JobError(
            f"search.encoder_pieces is {list(limits.encoder_pieces)}, of passes in bubbles and as prefetch, which are "
            "colocated layouts, and search.layouts has none; name colocated, or leave it out",
            where=f"job file {path}",
        )
    if workload.cached_features and "colocated" not in limits.kinds:
        raise JobError(
            f"workload.cached_features is {list(workload.cached_features)}, of encoders that do not run, which are "
            "colocated layouts, and search.layouts has none; name colocated, or leave it out",
            where=f"job file {path}",
        )
    if workload.cached_features and (reason := stack_reason(workload, "colocated", "cached")):
        raise JobError(
            f"workload.cached_features is {list(workload.cached_features)}, and they cannot be used: {reason}",
            where=f"job file {path}",
        )
    if limits.layouts != "all":
        for kind in limits.layouts:
            reason = stack_reason(workload, kind)
            if reason:
                raise JobError(f"search.layouts names {kind}, and it cannot be run: {reason}", where=f"job file {path}")


def _check_precision(limits: SearchSpace, workload: Workload, device: Device, path: Path) -> None:
    """A precision that is named must be run by the device and the stack; what is said of low products needs some."""
    for precision in limits.precision or ():
        reason = precision_reason(precision, device, workload.stack, workload.implementation)
        if reason:
            raise JobError(
                f"search.precision names {precision}, and it cannot be run: {reason}", where=f"job file {path}"
            )
    asked = limits.precision or (workload.precision,)
    if any(precision != "bf16" for precision in asked):
        return
    facts = workload.facts
    for key, value in (
        ("tower_precision", workload.tower_precision if workload.tower_precision != "bf16" else None),
        ("facts.fp8_attention", True if facts and facts.fp8_attention else None),
        ("facts.low_parameters", True if facts and facts.low_parameters else None),
    ):
        if value is not None:
            raise JobError(
                f"workload.{key} is {describe_value(value)}, and products of the decoder run in bf16 "
                "alone; give workload.precision or search.precision, or leave it out",
                where=f"job file {path}",
            )


def _check_schedules(limits: SearchSpace, workload: Workload, path: Path) -> None:
    """A schedule that is named must be one that some strategy can run."""
    for name in limits.schedule or ():
        if name == ALL:
            continue
        schedule = SCHEDULES[GIVEN if is_order_file(name) else name]
        reason = next(workload_reasons(workload, schedule), None)
        if reason is None and schedule.v_shaped and limits.max_vpp < V_CHUNKS:
            reason = f"it runs {V_CHUNKS} chunks a stage, there and back, and search.max_vpp is {limits.max_vpp}"
        if reason:
            raise JobError(
                f"search.schedule names {name}, and no strategy can run it: {reason}", where=f"job file {path}"
            )
