"""What `place` and `verify` of the face return, as results.py has it."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm_autoparallel.api.results import Result, draw, draw_stages

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mm_autoparallel.pipeline.certify.verify import Verification
    from mm_autoparallel.pipeline.encoders import EncodedProblem
    from mm_autoparallel.pipeline.placement.bubbles.run import EncodedResult
    from mm_autoparallel.pipeline.placement.result import PlacementResult
    from mm_autoparallel.pipeline.problem import Placement, Problem

PLACEMENT_SCHEMA = "mm-autoparallel/placement/1"
VERIFICATION_SCHEMA = "mm-autoparallel/verification/1"


def read_problem(path: str | Path) -> Problem | EncodedProblem:
    """The placement problem in the file at `path`, with its encoders where it has some. Raises JobError naming file,
    key and value."""
    from mm_autoparallel.pipeline.encoders_file import read_any_problem

    return read_any_problem(Path(path))


@dataclass(frozen=True, eq=False)
class Found(Result):
    """What is known of `problem`, of either kind. result: all of that."""

    problem: Problem | EncodedProblem
    result: PlacementResult | EncodedResult

    @property
    def status(self) -> str:
        """optimal, feasible (stopped early), infeasible, or unknown (stopped before anything was found)."""
        return self.result.status

    @property
    def placement(self) -> Placement | None:
        """Of the decoder alone, where the problem has encoders."""
        return self.result.placement

    @property
    def step_ms(self) -> float:
        """Infinite where nothing was found."""
        return self.result.step_ms

    @property
    def lower_bound_ms(self) -> float:
        return self.result.lower_bound_ms

    @property
    def gap_fraction(self) -> float:
        return self.result.gap_fraction

    @property
    def reason(self) -> str:
        """Why there is no placement; nothing where there is one."""
        if self.result.placement is not None:
            return ""
        return self.result.reason or "stopped before a placement was found, which does not mean that there is none"

    @abstractmethod
    def renderables(self) -> list[RenderableType]:
        """What rich's consoles show; nothing without a placement."""

    def describe_end(self) -> str:
        """Step, bound and time, in a line."""
        found = self.result
        return (
            f"{found.status}: {found.step_ms:.3f} ms a step; no placement is below {found.lower_bound_ms:.3f} ms "
            f"(gap {found.gap_fraction * 100:.3f} %), found in {found.solve_s:.2f} s"
        )

    def describe_failure(self) -> str:
        """Why there is no placement, in words."""
        return f"{'nothing feasible' if self.status == 'infeasible' else 'nothing found'}: {self.reason}"

    def table(self) -> str:
        """What `renderables` has, as plain text; or why there is no placement."""
        return draw(*(self.renderables() or [self.describe_failure()]))

    def describe_search(self, placed: PlacementResult) -> dict[str, Any]:
        """The keys that `place --json` begins with. placed: the search of layers. Without a placement their figures are
        null and `reason` says why there is none."""
        found = self.result
        document: dict[str, Any] = {
            "schema": PLACEMENT_SCHEMA,
            "status": found.status,
            "step_ms": finite(found.step_ms),
            "lower_bound_ms": finite(found.lower_bound_ms),
            "gap_fraction": found.gap_fraction if found.placement is not None else None,
            "solve_s": round(found.solve_s, 3),
            "num_cuts": placed.num_cuts,
            "num_bounds": placed.num_bounds,
            "proof": placed.proof,
        }
        if found.placement is not None:
            return document
        return document | {"layers": None, "recompute": None, "peak_memory_bytes": None, "reason": self.reason}


@dataclass(frozen=True, eq=False)
class PlaceResult(Found):
    """What is known of `problem`. result: all of that (pipeline/placement/result.py)."""

    problem: Problem
    result: PlacementResult

    def write_certificate(self, path: str | Path) -> None:
        """Write the proof for `verify` to `path` in one step. Raises OSError, PlanError where nothing was placed."""
        from mm_autoparallel.errors import PlanError
        from mm_autoparallel.pipeline.certify.certificate import write_certificate

        if self.result.placement is None:
            raise PlanError(f"there is no placement to prove anything of: {self.reason}")
        write_certificate(Path(path), self.problem, self.result)

    def renderables(self) -> list[RenderableType]:
        """Where the step goes and what stages hold, for rich's consoles; nothing without a placement."""
        from mm_autoparallel.reports.tables import stage_table, time_table

        found = self.result
        if found.placement is None or found.timeline is None:
            return []
        return [
            time_table(found.timeline),
            stage_table(self.problem, found.placement, found.timeline, rows="name"),
            self.describe_end(),
        ]

    def document(self) -> dict[str, Any]:
        """What `place --json` prints. Without a placement its figures are null and `reason` says why there is none."""
        problem, result, placement = self.problem, self.result, self.result.placement
        document = self.describe_search(result)
        if placement is None:
            return document

        hosts = {"host_bytes": [math.ceil(peak) for peak in result.peak_host_bytes]}
        return (
            document
            | describe_placement(problem, placement)
            | ({"order": [order.split() for order in placement.orders]} if placement.orders else {})
            | {"peak_memory_bytes": [math.ceil(peak) for peak in result.peak_memory_bytes]}
            | (hosts if any(result.peak_host_bytes) else {})
        )

    def _repr_html_(self) -> str:
        from mm_autoparallel.reports.html import render_paragraph

        found = self.result
        if found.placement is None or found.timeline is None:
            return render_paragraph(self.describe_failure())
        title = f"{found.status}: step {found.step_ms:.3f} ms, no placement is below {found.lower_bound_ms:.3f} ms"
        return draw_stages(title, self.problem, found.placement, found.timeline, "name")


def finite(value: float) -> float | None:
    """The value, or none where JSON has no number for it."""
    return value if math.isfinite(value) else None


def describe_placement(problem: Problem, placement: Placement) -> dict[str, Any]:
    """`layers`, `recompute` and, where there are others, `modes`: by block, what every stage holds, by chunk if any."""
    from mm_autoparallel.pipeline.problem import RECOMPUTE, counts_in_mode

    def nested(of_virtual_stage: tuple[tuple[int, ...], ...], block: int) -> list[Any]:
        of_chunks = zip(*problem.virtual_stages, strict=True)
        chunks = [[of_virtual_stage[k][block] for k in of_stages] for of_stages in of_chunks]
        return chunks[0] if problem.num_chunks == 1 else chunks

    def of_mode(name: str, e: int) -> list[Any]:
        return nested(counts_in_mode(problem, placement, name), e)

    others = {
        block.name: {mode.name: of_mode(mode.name, e) for mode in block.modes}
        for e, block in enumerate(problem.chain)
        if any(mode.name != RECOMPUTE for mode in block.modes)
    }
    return (
        {"layers": {block.name: nested(placement.layers, e) for e, block in enumerate(problem.chain)}}
        | {"recompute": {block.name: of_mode(RECOMPUTE, e) for e, block in enumerate(problem.chain)}}
        | ({"modes": others} if others else {})
    )


@dataclass(frozen=True, eq=False)
class VerifyResult(Result):
    """What was confirmed of a certificate: all that it claims (pipeline/certify/verify.py)."""

    verification: Verification

    @property
    def step_ms(self) -> float:
        return self.verification.step_ms

    @property
    def lower_bound_ms(self) -> float | None:
        """None where no bound is claimed."""
        return self.verification.lower_bound_ms

    def table(self) -> str:
        """What was confirmed, and how, as plain text."""
        found = self.verification
        head = f"placement confirmed: it fits its memory and takes {found.step_ms:.3f} ms a step\n"
        if found.lower_bound_ms is None or found.gap_fraction is None:
            return f"{head}no bound is claimed\n"
        how = {
            "cuts": f"a second solver finds none that keeps {found.num_cuts} paths shorter",
            "tree": "a search of its own finds none",
            "mixtures": "mean paths of its own pass it on every placement",
            "prices": "the prices of its parts show that of every placement",
            "orders": "bounds and models of orders of its own leave none",
            "beside": "the decoder's own bound, so confirmed, and what its encoders need beside it show that",
        }[found.method]
        return (
            f"{head}bound confirmed: no placement is below {found.lower_bound_ms:.3f} ms "
            f"(gap {found.gap_fraction * 100:.3f} %); {how} ({found.verify_s:.2f} s)\n"
        )

    def document(self) -> dict[str, Any]:
        """What `verify --json` prints."""
        found = self.verification
        return {
            "schema": VERIFICATION_SCHEMA,
            "verified": True,
            "step_ms": found.step_ms,
            "lower_bound_ms": found.lower_bound_ms,
            "gap_fraction": found.gap_fraction,
            "method": found.method,
            "num_cuts": found.num_cuts,
            "seconds": round(found.verify_s, 3),
        }

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON values, with units in the names."""
        document = self.document()
        return document | {"verify_s": document.pop("seconds")}

    def _repr_html_(self) -> str:
        from mm_autoparallel.reports.html import render_paragraph

        return render_paragraph(self.table())
