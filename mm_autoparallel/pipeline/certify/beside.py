"""The certificate of a decoder with encoders beside it: placement and orders, and the decoder's own certificate.

The bound claimed is the search's, or what `verify` can confirm where that is less: see confirm_beside.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from mm_autoparallel.errors import JobError, PlanError
from mm_autoparallel.files import read_document, write_text_atomically
from mm_autoparallel.pipeline.certify.certificate import (
    SCHEMA,
    Certificate,
    CertificateEntry,
    PlacementEntry,
    certificate_document,
    certificate_from_entry,
    placement_document,
    placement_from_entry,
    read_certificate,
)
from mm_autoparallel.pipeline.certify.confirm_beside import find_confirmable_ms
from mm_autoparallel.pipeline.certify.digest import document_sha256
from mm_autoparallel.pipeline.encoders import EncodedProblem
from mm_autoparallel.pipeline.encoders_file import EncodedProblemEntry, problem_from_any
from mm_autoparallel.pipeline.placement.bubbles.bounds import decoder_beside
from mm_autoparallel.pipeline.problem import Placement
from mm_autoparallel.pipeline.problem_file import problem_document
from mm_autoparallel.pipeline.simulate.encoders.orders import write_orders
from mm_autoparallel.planner.plan import format_document
from mm_autoparallel.records import Computed, Noun
from mm_autoparallel.validation import parse_record

if TYPE_CHECKING:
    from mm_autoparallel.pipeline.placement.bubbles.run import EncodedResult

_WHAT = "certificate"


@dataclass(frozen=True, eq=False)
class EncodedCertificate:
    """placement: of the decoder. orders: what each device runs, those of encoders of their own behind the decoder's.
    lower_bound_ms: no placement and order takes less. decoder: what is claimed of the decoder alone."""

    problem: EncodedProblem
    placement: Placement
    orders: tuple[str, ...]
    step_ms: float
    lower_bound_ms: float
    gap_fraction: float
    decoder: Certificate


class BesideEntry(Noun):
    """How the bound is confirmed: from that of the decoder alone."""

    method: Literal["beside"]
    decoder: CertificateEntry


class EncodedCertificateEntry(Noun):
    """The whole file; otherwise as CertificateEntry has it."""

    schema_name: Literal["mm-autoparallel/certificate/1"] = Field(alias="schema")
    problem: EncodedProblemEntry
    problem_sha256: str = Field(strict=True, min_length=64, max_length=64)
    placement: PlacementEntry
    step_ms: Computed
    lower_bound_ms: Computed
    gap_fraction: Computed
    proof: BesideEntry


def write_beside(path: Path, result: EncodedResult) -> None:
    """Write what `place` found of `result.problem`, which must have an order. Raises OSError, JobError where a problem
    file cannot hold the problem, or the decoder by itself was not placed."""
    problem, found = result.problem, result.decoder
    assert result.placement is not None
    assert result.tasks is not None
    assert result.words is not None
    document = encoded_document(problem)
    decoder = decoder_beside(problem)
    bound_ms = min(result.lower_bound_ms, find_confirmable_ms(problem, found.lower_bound_ms))
    placed = placement_document(problem.decoder, replace(result.placement, orders=()))
    content = {
        "schema": SCHEMA,
        "step_ms": result.step_ms,
        "lower_bound_ms": bound_ms,
        "gap_fraction": max(0.0, 1.0 - bound_ms / result.step_ms) if result.step_ms > 0 else 0.0,
        "placement": placed | {"order": [order.split() for order in write_orders(result.tasks, result.words)]},
        "problem": document,
        "problem_sha256": document_sha256(document),
        "proof": {"method": "beside", "decoder": certificate_document(decoder, found)},
    }
    write_text_atomically(path, format_document(content))


def read_any_certificate(path: Path) -> Certificate | EncodedCertificate:
    """The certificate in the file at `path`, of either kind of problem. Raises PlanError where it is unreadable or
    contradicts itself."""
    document = read_document(path, _WHAT, PlanError)
    proof = document.get("proof")
    if not isinstance(proof, dict) or proof.get("method") != "beside":
        return read_certificate(path)
    entry = parse_record(EncodedCertificateEntry, document, _WHAT, path, PlanError)
    where = f"{_WHAT} {path}"
    try:
        problem = problem_from_any(entry.problem)
        if not isinstance(problem, EncodedProblem):
            raise PlanError("proof.method is beside, and the problem has no encoders")
        if entry.problem_sha256 != document_sha256(encoded_document(problem)):
            raise PlanError(
                "problem_sha256 is not that of the problem beside it: one of the two was changed after `place` wrote "
                "them, so nothing it claims is about this problem"
            )
        placed = entry.placement.model_copy(update={"order": ()})
        return EncodedCertificate(
            problem=problem,
            placement=placement_from_entry(problem.decoder, placed, "placement"),
            orders=tuple(" ".join(words) for words in entry.placement.order),
            step_ms=entry.step_ms,
            lower_bound_ms=entry.lower_bound_ms,
            gap_fraction=entry.gap_fraction,
            decoder=certificate_from_entry(entry.proof.decoder, "proof.decoder"),
        )
    except (JobError, PlanError) as error:
        raise PlanError(f"{where}: {error}") from None


def encoded_document(problem: EncodedProblem) -> dict[str, Any]:
    """What a problem file that reads back as exactly `problem` holds. Raises JobError where none does: its encoders'
    passes are dealt to devices in another way than problem files deal them."""
    document = problem_document(replace(problem.decoder, encoders=problem.encoders))
    read = problem_from_any(parse_record(EncodedProblemEntry, document, "problem", Path("problem"), JobError))
    if read != problem:
        raise JobError(
            "a certificate holds its problem as a problem file does, and no such file deals passes of these encoders "
            "to devices in this way"
        )
    return document
