"""Orders of a named schedule, of a problem and of a placement, as files of frameworks, and such files read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm_autoparallel.errors import JobError, PlanError, PlannerError

if TYPE_CHECKING:
    from mm_autoparallel.pipeline.problem import Problem
    from mm_autoparallel.pipeline.schedules.torch_csv import Orders

ORDERS_SCHEMA = "mm-autoparallel/orders/1"


@dataclass(frozen=True)
class Sizes:
    """What a name does not say of its order; None: not said."""

    num_stages: int | None = None
    num_chunks: int | None = None
    num_microbatches: int | None = None


def export_schedule(
    source: str | Path,
    sizes: Sizes = Sizes(),
    placed: Path | None = None,
    num_frozen: int | None = None,
) -> tuple[str, list[str]]:
    """An order as torch's CSV, and what was changed for torch, in words.

    source: a schedule's name, which needs `sizes`; or the path of a PROBLEM.json, or of what `place --json` printed of
    an order that it found. placed: of a problem, that result. num_frozen: virtual stages in front that train nothing
    (None: those of a problem whose blocks have no backward; else none). Raises JobError and PlanError.
    """
    from mm_autoparallel.integrations.torch.schedule_csv import join_untrained
    from mm_autoparallel.pipeline.schedules.torch_csv import write_rows

    path = Path(source)
    if path.suffix != ".json":
        if placed is not None:
            raise JobError(f"a placement goes with its problem, and {source} is a schedule's name; leave one out")
        orders = _order_named(str(source), sizes)
    else:
        for key, value in vars(sizes).items():
            if value is not None:
                what = key.removeprefix("num_").replace("micro", "micro-")
                raise JobError(f"the number of {what} goes with a schedule's name; {source} says its own")
        orders, num_frozen = _order_in(path, placed, num_frozen)
    num_virtual = len(orders.stages) * orders.num_chunks
    if (num_frozen or 0) >= num_virtual:
        raise JobError(f"{num_frozen} virtual stages that train nothing are all {num_virtual}, so nothing trains")
    orders, told = join_untrained(orders, num_frozen or 0)
    notes = [told] if told else []
    if any("(" in text for text in orders.texts):
        notes.append("forwards and backwards that run together are written so, and torch runs one after the other")
    return write_rows(orders.stages, orders.v_shaped), notes


def import_schedule(path: str | Path) -> dict[str, Any]:
    """The orders in torch's CSV at `path`, as `schedules import --json` prints them. Raises PlanError naming the line
    and cell that is wrong, and who waits for whom where the order never ends."""
    from mm_autoparallel.files import read_text
    from mm_autoparallel.pipeline.schedules.torch_csv import read_csv

    try:
        orders = read_csv(read_text(Path(path), "schedule", "CSV", PlanError))
    except PlanError as error:
        raise error if error.where else PlanError(str(error), where=f"schedule {path}") from None
    return {
        "schema": ORDERS_SCHEMA,
        "num_stages": len(orders.stages),
        "num_chunks": orders.num_chunks,
        "num_microbatches": orders.num_microbatches,
        "v_shaped": orders.v_shaped,
        "orders": list(orders.texts),
    }


def _order_named(name: str, sizes: Sizes) -> Orders:
    for what, value in (("stages", sizes.num_stages), ("micro-batches", sizes.num_microbatches)):
        if value is None:
            raise JobError(f"schedule {name}: the number of {what} is missing (--{what}), and its order depends on it")
    return _make(name, sizes.num_stages or 1, sizes.num_chunks or _least_chunks(name), sizes.num_microbatches or 1)


def _least_chunks(name: str) -> int:
    from mm_autoparallel.pipeline.schedules.catalog import SCHEDULES, V_CHUNKS

    return V_CHUNKS if name in SCHEDULES and SCHEDULES[name].v_shaped else 1


def _make(name: str, num_stages: int, num_chunks: int, num_microbatches: int) -> Orders:
    from mm_autoparallel.pipeline.schedules.catalog import check_rounds, find_schedule
    from mm_autoparallel.pipeline.schedules.torch_csv import Orders, check_number

    schedule = find_schedule(name, num_chunks)
    check_rounds(schedule, num_stages, num_microbatches)
    check_number(num_stages, num_chunks, num_microbatches, "take fewer")
    if schedule.num_pieces > 1:
        raise JobError(f"schedule {name} runs pieces of sequences, and torch runs whole ones; take another schedule")
    order_of = schedule.order
    stages = tuple(order_of(num_stages, num_chunks, num_microbatches, stage) for stage in range(num_stages))
    return Orders(stages, num_chunks, num_microbatches, schedule.v_shaped)


def _order_in(path: Path, placed: Path | None, num_frozen: int | None) -> tuple[Orders, int]:
    """The order that the file at `path` has, and how many virtual stages in front train nothing, where not said."""
    from mm_autoparallel.api.placed import PLACEMENT_SCHEMA
    from mm_autoparallel.files import read_document
    from mm_autoparallel.integrations.torch.schedule_csv import find_frozen
    from mm_autoparallel.pipeline.problem_file import read_problem

    if read_document(path, "problem file").get("schema") == PLACEMENT_SCHEMA:
        if placed is not None:
            raise JobError(f"{path} is a placement already; name its problem file first, or leave {placed} out")
        return _order_placed(read_document(path, "placement", PlanError), f"placement {path}"), num_frozen or 0
    problem = read_problem(path)
    untrained = [not block.backward_ms for block in problem.chain]
    document = None if placed is None else read_document(placed, "placement", PlanError)
    if document is not None and document.get("schema") != PLACEMENT_SCHEMA:
        raise PlanError(f"placement {placed}: schema is {document.get('schema')!r}, not {PLACEMENT_SCHEMA!r}")
    orders = _order_of(problem, document, f"problem file {path}", f"placement {placed}")
    if num_frozen is not None:
        return orders, num_frozen
    if document is None:
        if untrained[0]:
            raise JobError(
                f"problem file {path}: {problem.chain[0].name!r} has no backward, and which virtual stages hold such "
                "blocks alone is the placement's to say; give it, or the number of these stages"
            )
        return orders, 0
    return orders, find_frozen(_layers(problem, document, f"placement {placed}"), untrained)


def _order_of(problem: Problem, document: dict[str, Any] | None, where: str, placed: str) -> Orders:
    from mm_autoparallel.pipeline.schedules.catalog import find_schedule
    from mm_autoparallel.pipeline.schedules.orders import read_orders
    from mm_autoparallel.pipeline.schedules.torch_csv import Orders

    given_by = find_schedule(problem.schedule, problem.num_chunks).given_by
    sizes = (problem.num_stages, problem.num_chunks, problem.num_microbatches)
    if given_by == "rule":
        return _make(problem.schedule, *sizes)
    if given_by == "problem":
        return Orders(read_orders(problem.orders, *sizes), *sizes[1:], problem.v_shaped)
    if document is None:
        raise JobError(f"{where}: schedule {problem.schedule} is found by place; give what `place --json` printed too")
    orders = _order_placed(document, placed)
    if (len(orders.stages), orders.num_chunks, orders.num_microbatches) != sizes:
        raise PlanError(f"{placed}: its order is of other stages or micro-batches than {where} has")
    return orders


def _order_placed(document: dict[str, Any], where: str) -> Orders:
    """`order` of what `place --json` printed: words of each stage; of one chunk, or of two there and back."""
    from mm_autoparallel.pipeline.schedules.catalog import V_CHUNKS
    from mm_autoparallel.pipeline.schedules.orders import find_deadlock, read_orders
    from mm_autoparallel.pipeline.schedules.torch_csv import Orders

    words = document.get("order")
    if words is None:
        raise PlanError(f"{where}: it has no order: its schedule has one by name, which export takes with its sizes")
    if not isinstance(words, list) or not words or not all(_are_words(row) for row in words):
        raise PlanError(f"{where}: order is no list with a list of actions such as 2F0 for each stage")
    try:
        num_microbatches = sum(word.endswith("F0") for word in words[0])
        num_chunks = V_CHUNKS if any(word.endswith("F1") for word in words[0]) else 1
        stages = read_orders([" ".join(row) for row in words], len(words), num_chunks, num_microbatches)
    except PlannerError as error:
        raise PlanError(f"{where}: {error}") from None
    v_shaped = num_chunks == V_CHUNKS
    waiting = find_deadlock(stages, num_chunks, v_shaped)
    if waiting:
        raise PlanError(f"{where}: its order never ends: {waiting}")
    return Orders(stages, num_chunks, num_microbatches, v_shaped)


def _are_words(row: object) -> bool:
    return isinstance(row, list) and bool(row) and all(isinstance(word, str) for word in row)


def _layers(problem: Problem, document: dict[str, Any], where: str) -> list[Sequence[int]]:
    """[virtual stages][blocks] of a placement's `layers`."""
    layers = document.get("layers")
    rows = []
    for block in problem.chain:
        counts = layers.get(block.name) if isinstance(layers, dict) else None
        chunks = [counts] if problem.num_chunks == 1 else counts
        if (
            not isinstance(chunks, list)
            or len(chunks) != problem.num_chunks
            or not all(isinstance(each, list) and len(each) == problem.num_stages for each in chunks)
        ):
            raise PlanError(f"{where}: layers does not say how many of {block.name!r} each virtual stage holds")
        rows.append([chunks[k // problem.num_stages][stage] for k, stage in enumerate(problem.stage_of)])
    return [list(held) for held in zip(*rows, strict=True)]
