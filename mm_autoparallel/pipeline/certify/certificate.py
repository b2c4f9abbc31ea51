"""Certificate: a placement, what is claimed of it, and what `verify` needs to confirm the claim; and its file.

The claim is a step, and a lower bound on the step of every placement of the same problem. The proof of the bound is
named by its method: `cuts` keeps times for each path, whose longest path through the schedule is the cut again;
`prices` keeps paths likewise, how the space is divided, and the prices that bound each part; `tree`, `mixtures` and
`orders` need no data, since the bound alone tells a search what to leave out, by plays of single stages, by means of
paths, or, where orders are free, by models of them; `none` claims no bound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.files import read_document, write_text_atomically
from mm_autoparallel.pipeline.certify.digest import problem_sha256
from mm_autoparallel.pipeline.placement.relaxation.duals import Division, Prices, Proof
from mm_autoparallel.pipeline.problem import RECOMPUTE, ChainBlock, Placement, Problem, place_in_modes, recomputed
from mm_autoparallel.pipeline.problem_file import ProblemEntry, problem_document, problem_from_entry
from mm_autoparallel.pipeline.schedules.catalog import find_schedule
from mm_autoparallel.pipeline.schedules.orders import read_orders
from mm_autoparallel.pipeline.simulate.loads import graph_of, microbatch_classes
from mm_autoparallel.planner.plan import format_document
from mm_autoparallel.records import Computed, Noun, Number, PositiveComputed, Signed
from mm_autoparallel.validation import parse_record

if TYPE_CHECKING:
    from mm_autoparallel.pipeline.placement.cuts.path_cuts import Cut
    from mm_autoparallel.pipeline.placement.result import PlacementResult

Floats = NDArray[np.float64]

SCHEMA = "mm-autoparallel/certificate/1"
_DIVIDED = ("least", "fewer", "more")
_WHAT = "certificate"


class Unconfirmed(Exception):
    """A claim could be neither confirmed nor refuted; says why."""


@dataclass(frozen=True, eq=False)
class Times:
    """Times under which a path is the longest: durations_ms as Loads has them, hops_ms [2·(K-1) + 1], tails_ms [P]."""

    durations_ms: Floats
    hops_ms: Floats
    tails_ms: Floats


Witness = Placement | Times
"""What tells a cut: its path is the longest under these times, or under those of this placement."""


@dataclass(frozen=True, eq=False)
class Certificate:
    """lower_bound_ms: no placement of `problem` takes less; gap_fraction: how far it is below step_ms; both None with

    method `none`. cuts: with methods `cuts` and `prices`; main, prices, parts: with `prices`, as in PriceProof.
    """

    problem: Problem
    placement: Placement
    step_ms: float
    lower_bound_ms: float | None
    gap_fraction: float | None
    method: Proof
    cuts: tuple[Witness, ...] = ()
    main: int = 0
    prices: tuple[Prices, ...] = ()
    parts: tuple[Division | int | None, ...] = ()


class PlacementEntry(Noun):
    """Of each chain block by name, how many every virtual stage holds and recomputes, in the order data flows; and of
    blocks with other modes how many run in each of those, by its name. order: where that is free, the actions of each
    stage, as `place --json` has them."""

    layers: dict[str, tuple[Number, ...]]
    recompute: dict[str, tuple[Number, ...]]
    modes: dict[str, dict[str, tuple[Number, ...]]] = Field(default_factory=dict)
    order: tuple[tuple[str, ...], ...] = ()


class TimesEntry(Noun):
    """See Times; durations_ms has [2·K] entries where passes are whole and equal in all classes of micro-batches."""

    durations_ms: tuple[Computed, ...]
    hops_ms: tuple[Computed, ...]
    tails_ms: tuple[Computed, ...]


class CutEntry(Noun):
    """The witness of one cut: exactly one of the two."""

    placement: PlacementEntry | None = None
    times: TimesEntry | None = None


class PricesEntry(Noun):
    """See Prices; pairs of an index and what it has."""

    path_fraction: Annotated[tuple[tuple[Number, PositiveComputed], ...], Field(min_length=1)]
    moved_count: tuple[tuple[Number, Computed], ...] = ()
    memory_ms: tuple[tuple[Number, Computed], ...] = ()
    layers_ms: tuple[tuple[Number, Signed], ...] = ()
    stages_ms: tuple[tuple[Number, Signed], ...] = ()
    virtual_stages_ms: tuple[tuple[Number, Signed], ...] = ()


class PartEntry(Noun):
    """See PriceProof: divided at a stage or a virtual stage, or bounded by `prices`, or nothing of all that."""

    stage: Number | None = None
    virtual_stage: Number | None = None
    least: Number | None = None
    fewer: Number | None = None
    more: Number | None = None
    prices: Number | None = None


class ProofEntry(Noun):
    """How the bound is confirmed. block: the one whose counts divide the parts."""

    method: Proof
    cuts: tuple[CutEntry, ...] = ()
    block: str | None = None
    prices: tuple[PricesEntry, ...] = ()
    parts: tuple[PartEntry, ...] = ()


class CertificateEntry(Noun):
    """The whole file."""

    schema_name: Literal["mm-autoparallel/certificate/1"] = Field(alias="schema")
    problem: ProblemEntry
    problem_sha256: Annotated[str, Field(strict=True, min_length=64, max_length=64)]
    placement: PlacementEntry
    step_ms: Computed
    lower_bound_ms: Computed | None
    gap_fraction: Computed | None
    proof: ProofEntry


def write_certificate(path: Path, problem: Problem, result: PlacementResult) -> None:
    """Write what `place` found and how its bound is confirmed. The result must have a placement. Raises OSError."""
    write_text_atomically(path, format_document(certificate_document(problem, result)))


def certificate_document(problem: Problem, result: PlacementResult) -> dict[str, Any]:
    """The file's content."""
    assert result.placement is not None
    method: Proof = result.proof if result.lower_bound_ms > 0 else "none"
    proof: dict[str, Any] = {"method": method}
    if method == "cuts":
        proof["cuts"] = [_cut_document(problem, cut) for cut in result.cuts]
    if method == "prices" and result.prices is not None:
        proof["block"] = problem.chain[result.prices.main].name
        proof["cuts"] = [_cut_document(problem, cut) for cut in result.prices.cuts]
        proof["prices"] = [
            {field.name: sorted(getattr(prices, field.name).items()) for field in fields(Prices)}
            for prices in result.prices.prices
        ]
        proof["parts"] = [_part_document(part) for part in result.prices.parts]
    return {
        "schema": SCHEMA,
        "step_ms": result.step_ms,
        "lower_bound_ms": result.lower_bound_ms if method != "none" else None,
        "gap_fraction": result.gap_fraction if method != "none" else None,
        "placement": placement_document(problem, result.placement),
        "problem": problem_document(problem),
        "problem_sha256": problem_sha256(problem),
        "proof": proof,
    }


def read_certificate(path: Path) -> Certificate:
    """The certificate in the file at `path`. Raises PlanError where it is unreadable or contradicts itself."""
    entry = parse_record(CertificateEntry, read_document(path, _WHAT, PlanError), _WHAT, path, PlanError)
    return certificate_from_entry(entry, f"{_WHAT} {path}")


def certificate_from_entry(entry: CertificateEntry, where: str) -> Certificate:
    """What `entry` says. Raises PlanError, which says `where`, as read_certificate does."""
    try:
        problem = problem_from_entry(entry.problem)
        if entry.problem_sha256 != problem_sha256(problem):
            raise PlanError(
                "problem_sha256 is not that of the problem beside it: one of the two was changed after `place` wrote "
                "them, so nothing it claims is about this problem"
            )
        method = entry.proof.method
        check_method(problem, method)
        for key in ("lower_bound_ms", "gap_fraction"):
            if (getattr(entry, key) is None) != (method == "none"):
                raise PlanError(f"proof.method is {method}, which does not go with {key} = {getattr(entry, key)}")
        if bool(entry.proof.cuts) != (method == "cuts") and method != "prices":
            raise PlanError(f"proof.method is {method}, which does not go with {len(entry.proof.cuts)} cuts")
        main, prices, parts = _read_prices(problem, entry.proof) if method == "prices" else (0, (), ())
        return Certificate(
            problem=problem,
            placement=placement_from_entry(problem, entry.placement, "placement"),
            step_ms=entry.step_ms,
            lower_bound_ms=entry.lower_bound_ms,
            gap_fraction=entry.gap_fraction,
            method=method,
            cuts=tuple(_witness(problem, cut, f"proof.cuts[{i}]") for i, cut in enumerate(entry.proof.cuts)),
            main=main,
            prices=prices,
            parts=parts,
        )
    except (JobError, PlanError) as error:
        raise PlanError(f"{where}: {error}") from None


def check_method(problem: Problem, method: Proof) -> None:
    """Raise PlanError where `method` shows no bounds of such a problem: `orders` does of free orders, and no other."""
    is_free = find_schedule(problem.schedule, problem.num_chunks).given_by == "placement"
    if method != "none" and is_free != (method == "orders"):
        raise PlanError(
            f"proof.method is {method}, which does not go with schedule {problem.schedule}: orders is the method of "
            f"schedule free, and its only one"
        )


def placement_document(problem: Problem, placement: Placement) -> dict[str, Any]:
    """`placement` of a certificate, as PlacementEntry has it."""

    def by_name(counts: tuple[tuple[int, ...], ...]) -> dict[str, list[int]]:
        return {block.name: [row[e] for row in counts] for e, block in enumerate(problem.chain)}

    modes = {
        block.name: {
            mode.name: [row[e][m] for row in placement.modes]
            for m, mode in enumerate(block.modes)
            if mode.name != RECOMPUTE
        }
        for e, block in enumerate(problem.chain)
        if _other_modes(block)
    }
    document = {"layers": by_name(placement.layers), "recompute": by_name(recomputed(problem, placement))}
    order = {"order": [text.split() for text in placement.orders]} if placement.orders else {}
    return document | ({"modes": modes} if modes else {}) | order


def placement_from_entry(problem: Problem, entry: PlacementEntry, where: str) -> Placement:
    """What `entry` says. Raises PlanError, which says `where`, where it does not go with the problem."""

    def check(key: str, what: str, names: list[str], counts: Mapping[str, Sequence[int]]) -> None:
        if sorted(counts) != sorted(names):
            wrong = sorted(set(counts) ^ set(names))
            raise PlanError(f"{where}.{key} and the chain differ in {', '.join(wrong)}; both must name the same {what}")
        for name, row in counts.items():
            if len(row) != problem.num_virtual_stages:
                raise PlanError(
                    f"{where}.{key}.{name} has {len(row)} entries; num_stages · num_chunks is "
                    f"{problem.num_virtual_stages}"
                )

    def by_virtual_stage(key: str, counts: dict[str, tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        names = [block.name for block in problem.chain]
        check(key, "blocks", names, counts)
        return tuple(zip(*(counts[name] for name in names), strict=True))

    layers, recompute = by_virtual_stage("layers", entry.layers), by_virtual_stage("recompute", entry.recompute)
    others = {block.name: _other_modes(block) for block in problem.chain if _other_modes(block)}
    if sorted(entry.modes) != sorted(others):
        wrong = sorted(set(entry.modes) ^ set(others))
        raise PlanError(f"{where}.modes and the chain differ in {', '.join(wrong)}: blocks with modes beside recompute")
    nothing = (0,) * problem.num_virtual_stages
    in_modes = {RECOMPUTE: recompute}
    for name, names in others.items():
        check(f"modes.{name}", "modes", names, entry.modes[name])
    for mode in dict.fromkeys(mode for names in others.values() for mode in names):
        rows = [entry.modes.get(block.name, {}).get(mode, nothing) for block in problem.chain]
        in_modes[mode] = tuple(zip(*rows, strict=True))
    orders = tuple(" ".join(actions) for actions in entry.order)
    if orders:
        try:
            read_orders(orders, problem.num_stages, problem.num_chunks, problem.num_microbatches)
        except PlanError as error:
            raise PlanError(f"{where}.order: {error}") from None
    return replace(place_in_modes(problem, layers, in_modes), orders=orders)


def _other_modes(block: ChainBlock) -> list[str]:
    return [mode.name for mode in block.modes if mode.name != RECOMPUTE]


def _cut_document(problem: Problem, cut: Cut) -> dict[str, Any]:
    if cut.placement is not None:
        return {"placement": placement_document(problem, cut.placement)}
    durations_ms = cut.durations_ms
    if not problem.splits and not len(graph_of(problem).pairs):
        durations_ms = durations_ms.reshape(2 * problem.num_virtual_stages, -1)
        if np.all(durations_ms == durations_ms[:, :1]):
            durations_ms = durations_ms[:, :1]
    return {
        "times": {
            "durations_ms": durations_ms.ravel().tolist(),
            "hops_ms": cut.hops_ms.tolist(),
            "tails_ms": cut.tails_ms.tolist(),
        }
    }


def _part_document(part: Division | int | None) -> dict[str, int]:
    if isinstance(part, Division):
        where = "virtual_stage" if part.of_virtual_stage else "stage"
        return {where: part.at, "least": part.least, "fewer": part.fewer, "more": part.more}
    return {} if part is None else {"prices": part}


def _read_prices(
    problem: Problem, proof: ProofEntry
) -> tuple[int, tuple[Prices, ...], tuple[Division | int | None, ...]]:
    """Main block, prices and parts. Raises PlanError where an index names nothing, or a part is part of two."""
    names = [block.name for block in problem.chain]
    if proof.block not in names:
        raise PlanError(f"proof.block is {proof.block}, which the chain does not have")
    num_virtual, graph = problem.num_virtual_stages, graph_of(problem)
    num_rows = sum(len(rows) for rows in graph.in_flight) * (2 if problem.host_limit_bytes else 1)
    sizes = {
        "path_fraction": len(proof.cuts),
        "moved_count": 2 * num_virtual * graph.num_classes,
        "memory_ms": num_rows,
        "layers_ms": num_virtual,
        "stages_ms": problem.num_stages,
        "virtual_stages_ms": num_virtual,
    }

    def named(i: int, key: str) -> dict[int, float]:
        pairs = getattr(proof.prices[i], key)
        for at, _ in pairs:
            if at >= sizes[key]:
                raise PlanError(f"proof.prices[{i}].{key} names {at}; there are {sizes[key]}")
        return dict(pairs)

    prices = tuple(Prices(**{key: named(i, key) for key in sizes}) for i in range(len(proof.prices)))
    parts: list[Division | int | None] = []
    waiting = {0}
    for i, part in enumerate(proof.parts):
        where, told = f"proof.parts[{i}]", part.model_dump(exclude_none=True)
        if i not in waiting:
            raise PlanError(f"{where} is part of none before it, or of two")
        waiting.remove(i)
        if not told:
            parts.append(None)
        elif part.prices is not None and len(told) == 1:
            if part.prices >= len(prices):
                raise PlanError(f"{where}.prices is {part.prices}; there are {len(prices)}")
            parts.append(part.prices)
        elif told.keys() in ({"stage", *_DIVIDED}, {"virtual_stage", *_DIVIDED}):
            at = told.get("stage", told.get("virtual_stage", 0))
            if at >= (problem.num_stages if "stage" in told else num_virtual):
                raise PlanError(f"{where} divides at {at}, which the problem does not have")
            for child in (told["fewer"], told["more"]):
                if child <= i or child >= len(proof.parts) or child in waiting:
                    raise PlanError(f"{where} names part {child}, which is none after it, or of another already")
                waiting.add(child)
            parts.append(Division("virtual_stage" in told, at, told["least"], told["fewer"], told["more"]))
        else:
            raise PlanError(f"{where} must be divided, or name its prices, or be empty")
    if not parts:
        raise PlanError("proof.parts is empty")
    return names.index(proof.block), prices, tuple(parts)


def _witness(problem: Problem, entry: CutEntry, where: str) -> Witness:
    if entry.placement is not None and entry.times is None:
        return placement_from_entry(problem, entry.placement, f"{where}.placement")
    if entry.times is None or entry.placement is not None:
        raise PlanError(f"{where} must hold either a placement or times")
    durations, num_virtual = len(entry.times.durations_ms), problem.num_virtual_stages
    num_durations = graph_of(problem).num_durations
    is_short = durations == 2 * num_virtual and num_durations == durations * microbatch_classes(problem)[1].shape[1]
    for key, found, needed in (
        ("durations_ms", durations, durations if is_short else num_durations),
        ("hops_ms", len(entry.times.hops_ms), 2 * num_virtual - 1),
        ("tails_ms", len(entry.times.tails_ms), problem.num_stages),
    ):
        if found != needed:
            raise PlanError(f"{where}.times.{key} has {found} entries; the problem needs {needed}")
    return Times(
        durations_ms=np.repeat(entry.times.durations_ms, num_durations // durations),
        hops_ms=np.array(entry.times.hops_ms, dtype=np.float64),
        tails_ms=np.array(entry.times.tails_ms, dtype=np.float64),
    )
