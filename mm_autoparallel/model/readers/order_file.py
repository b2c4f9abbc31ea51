"""The order of every stage that a job's search names: read from torch's CSV, and refused where no strategy has its
sizes."""

from __future__ import annotations

from pathlib import Path

from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.files import is_there, read_text
from mm_autoparallel.model.job.job import SearchSpace
from mm_autoparallel.model.job.schedule_law import is_order_file
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.pipeline.schedules.torch_csv import Orders, read_csv


def read_orders_beside(search: SearchSpace, workload: Workload, path: Path) -> tuple[str, ...]:
    """A text for each stage of the order whose file, beside the job file at `path`, search.schedule names; nothing
    where it names none. Raises JobError where the file is missing or wrong, or the search has no such sizes."""
    name = next(filter(is_order_file, search.schedule or ()), None)
    if name is None:
        return ()
    where = f"job file {path}: search.schedule names {name}"
    if not is_there(path.parent / name):
        raise JobError("there is no file so called beside it", where=where)
    try:
        orders = read_csv(read_text(path.parent / name, "schedule", "CSV", PlanError))
    except PlanError as error:
        raise JobError(str(error), where=where) from None
    if reason := _size_reason(orders, search, workload):
        raise JobError(reason, where=where)
    return orders.texts


def _size_reason(orders: Orders, search: SearchSpace, workload: Workload) -> str:
    """Why no strategy of the search can run these orders; empty where one may."""
    pp, vpp, batch = len(orders.stages), orders.num_chunks, workload.global_batch_size
    if orders.v_shaped:
        return "it runs through the stages and back, and a V-shaped order is planned by its schedule's name alone"
    if search.pp is not None and pp not in search.pp:
        return f"it has {pp} rows, one for each stage, and search.pp is {list(search.pp)}"
    if vpp > search.max_vpp:
        return f"it runs {vpp} chunks a stage, and search.max_vpp is {search.max_vpp}"
    if batch % orders.num_microbatches:
        return f"it runs {orders.num_microbatches} micro-batches, which do not divide global_batch_size {batch}"
    return ""
