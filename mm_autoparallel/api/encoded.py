"""What `place` of the face returns for a problem with encoders, as results.py has it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm_autoparallel.api.placed import Found, describe_placement

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mm_autoparallel.pipeline.encoders import EncodedProblem
    from mm_autoparallel.pipeline.placement.bubbles.compare import Comparison
    from mm_autoparallel.pipeline.placement.bubbles.run import EncodedResult


@dataclass(frozen=True, eq=False)
class EncodedPlaceResult(Found):
    """What is known of `problem`. result: all of that (pipeline/placement/bubbles/run.py)."""

    problem: EncodedProblem
    result: EncodedResult

    def write_certificate(self, path: str | Path) -> None:
        """Write the proof for `verify` to `path` in one step. Raises OSError, PlanError where nothing was placed,
        JobError where no problem file deals the encoders' passes so."""
        from mm_autoparallel.errors import PlanError
        from mm_autoparallel.pipeline.certify.beside import write_beside

        if self.result.placement is None:
            raise PlanError(f"there is no placement to prove anything of: {self.reason}")
        write_beside(Path(path), self.result)

    def renderables(self) -> list[RenderableType]:
        """What devices hold and run, and how other ways compare, for rich's consoles; nothing without an order."""
        from mm_autoparallel.reports.encoded import device_table

        found = self.result
        if found.placement is None:
            return []
        told = self._compared()
        phases = f"{told.phases_ms:.3f} ms" if told.phases_ms is not None else "cannot run, as most_ahead is less"
        return [
            device_table(found),
            f"the decoder alone takes {told.decoder_ms:.3f} ms, encoders in phases before and after it "
            f"{phases}, an even chain at least {told.chain_ms:.3f} ms",
            self.describe_end(),
        ]

    def _compared(self) -> Comparison:
        from mm_autoparallel.pipeline.placement.bubbles.compare import compare

        assert self.result.placement is not None
        return compare(self.problem, self.result.placement)

    def document(self) -> dict[str, Any]:
        """What `place --json` prints. Without an order its figures are null and `reason` says why there is none."""
        from mm_autoparallel.pipeline.placement.bubbles.compare import features_bytes
        from mm_autoparallel.pipeline.simulate.encoders.orders import write_orders

        found = self.result
        document = self.describe_search(found.decoder)
        if found.placement is None or found.tasks is None or found.words is None:
            return document
        features = math.ceil(features_bytes(self.problem))
        hosts = [math.ceil(peak) for peak in found.decoder.peak_host_bytes]
        return (
            document
            | describe_placement(self.problem.decoder, found.placement)
            | {"order": [order.split() for order in write_orders(found.tasks, found.words)]}
            | {"placed_bound_ms": found.placed_bound_ms}
            | {"other_ways": asdict(self._compared())}
            | {"peak_memory_bytes": [math.ceil(peak) for peak in found.peak_bytes]}
            | ({"features_bytes": features} if features else {})
            | ({"host_bytes": hosts} if any(hosts) else {})
        )

    def _repr_html_(self) -> str:
        from mm_autoparallel.reports.encoded import device_table
        from mm_autoparallel.reports.html import render_heading, render_paragraph, render_table

        found = self.result
        if found.placement is None:
            return render_paragraph(self.describe_failure())
        title = f"{found.status}: step {found.step_ms:.3f} ms, no order is below {found.lower_bound_ms:.3f} ms"
        return render_heading(title) + render_table(device_table(found))
