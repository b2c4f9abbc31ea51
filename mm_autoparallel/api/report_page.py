"""`report` of the face: what is known of a job's plans, gathered into one page (reports/page)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mm_autoparallel import __version__
from mm_autoparallel.api.explained import describe_flips, describe_sources
from mm_autoparallel.api.results import PlanResult, Result, Simulation, draw
from mm_autoparallel.errors import PlannerError
from mm_autoparallel.files import read_text, write_text_atomically
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.planner.explain.sensitivity import Sensitivity
from mm_autoparallel.planner.plan import format_document, plan_document
from mm_autoparallel.planner.search.candidate import Candidate
from mm_autoparallel.planner.search.watched import describe_end
from mm_autoparallel.reports.critical_path import describe_path, share_path
from mm_autoparallel.reports.estimates import describe_chance, describe_strategy, estimate_document
from mm_autoparallel.reports.page import report as pages
from mm_autoparallel.reports.page.html import render_page
from mm_autoparallel.reports.page.pictures import map_layout, share_modules, spread_steps
from mm_autoparallel.reports.page.provenance import describe_bounds, describe_figures, describe_group
from mm_autoparallel.reports.page.timelines import Block, pack_devices, pack_timeline
from mm_autoparallel.units import format_ms

if TYPE_CHECKING:
    from mm_autoparallel.model.job.strategy import Strategy
    from mm_autoparallel.planner.evaluate import Estimate

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class ReportResult(Result):
    """A page. report: what it shows; block: the numbers behind it (reports/page/report.py)."""

    report: pages.Report
    block: bytes

    def table(self) -> str:
        """The plans of the page, a line each, as plain text."""
        from rich.table import Table

        table = Table("plan", "strategy", "step", "memory")
        for one in self.report.plans:
            table.add_row(one.name, one.strategy, format_ms(one.step_ms), "fits" if one.fits else "does not fit")
        return draw(table)

    def document(self) -> dict[str, Any]:
        """What the page shows, as JSON values, without the single tasks."""
        document: dict[str, Any] = self.report.model_dump(mode="json")
        return document

    def to_dict(self) -> dict[str, Any]:
        """The same: its names are its own, and have their units."""
        return self.document()

    def html(self) -> str:
        """The page as one HTML file."""
        return render_page(self.report, self.block)

    def write(self, path: str | Path) -> None:
        """Write `html()` to `path` in one step. Raises OSError."""
        write_text_atomically(Path(path), self.html())

    def _repr_html_(self) -> str:
        style = "width:100%;height:800px;border:0"
        return (
            f'<iframe sandbox="allow-scripts allow-downloads" style="{style}" srcdoc="{escape(self.html())}"></iframe>'
        )


def build_report(
    job: Job,
    plans: Mapping[str, Simulation],
    found: PlanResult | None,
    sensitivity: Sensitivity | None,
    texts: Mapping[str, str],
    command: str,
) -> ReportResult:
    """The page of `plans`, by name, the first of which the others are held against.

    found: the search that is shown with them. sensitivity: of the same plans in their order. texts: of plans that were
    read from files, by name. command: what makes the page again.
    """
    block = Block()
    report = pages.Report(
        schema_name=pages.SCHEMA,
        version=__version__,
        command=command,
        job=_job_page(job, plans),
        plans=tuple(_plan_page(name, one, texts.get(name), found, block) for name, one in plans.items()),
        search=_search_page(found) if found else None,
        sources=sources_page(sensitivity) if sensitivity else None,
        warnings=tuple(dict.fromkeys((*job.warnings, *(found.warnings if found else ())))),
    )
    return ReportResult(report, block.bytes())


def _job_page(job: Job, plans: Mapping[str, Simulation]) -> pages.JobPage:
    """What a reader wants to know first; where samples differ, what plans take over drawn batches, too."""
    try:
        text = read_text(job.path, "job file", "YAML or JSON file")
    except PlannerError:
        text = None  # a job that never was a file
    cluster, workload = job.cluster, job.workload
    over_batches = {name: one.estimate.over_batches for name, one in plans.items()}
    return pages.JobPage(
        name=job.path.name if text is not None else "job",
        text=text,
        sha256=job.sha256,
        facts=(
            f"{cluster.num_nodes} nodes, {cluster.num_devices} devices: "
            + ", ".join(dict.fromkeys(kind.device.name for kind in cluster.kinds)),
            f"{workload.global_batch_size} samples a step, {workload.seq_length} tokens each",
            *(f"{name} {over.words}" for name, over in over_batches.items() if over),
        ),
    )


def _plan_page(
    name: str, simulation: Simulation, text: str | None, found: PlanResult | None, block: Block
) -> pages.PlanPage:
    estimate, cluster = simulation.estimate, simulation.job.cluster
    document = estimate_document(estimate)
    is_answer = found is not None and estimate is found.search.estimates[0]
    figures = found.search.figures if found and is_answer else estimate.figures(lower_bound_ms=0.0)
    return pages.PlanPage(
        name=name,
        strategy=describe_strategy(estimate.plan),
        sizes=document["parallel_config"],
        schedule=estimate.plan.strategy.schedule,
        num_microbatches=estimate.plan.num_microbatches,
        step_ms=estimate.step_ms,
        low_step_ms=estimate.step_ms_low,
        high_step_ms=estimate.step_ms_high,
        throughput_tokens_per_s=estimate.throughput_tokens_per_s,
        bubble_fraction=estimate.bubble_fraction,
        fits=estimate.fits,
        oom_probability=estimate.oom_probability,
        chance=describe_chance(estimate),
        longest_path=describe_path(estimate.timeline),
        calibration=document["calibration"],
        warnings=estimate.warnings,
        unstated=tuple(pages.Unstated(key=answer.key, words=answer.words) for answer in simulation.unstated),
        stages=tuple(_stage_pages(estimate, document["stages"])),
        provenance=describe_figures(estimate, cluster),
        groups=tuple(
            pages.Group(**group, source=describe_group(estimate, cluster, group))
            for group in estimate.provenance["groups"]
        ),
        devices=pack_devices(cluster, estimate.plan.strategy, block),
        layout=map_layout(estimate, simulation.job.model),
        modules=share_modules(estimate),
        spread=spread_steps(estimate.over_batches),
        sources=tuple(
            pages.BlockSource(block=one, time=source["time"], memory=source["memory"])
            for one, source in estimate.provenance["blocks"].items()
        ),
        timeline=pack_timeline(estimate.timeline, block),
        file=text or format_document(plan_document(estimate.plan, figures)),
    )


def _stage_pages(estimate: Estimate, stages: Sequence[Mapping[str, Any]]) -> list[pages.Stage]:
    shares = share_path(estimate.timeline).stages
    hosts = estimate.host_bytes or (0.0,) * len(stages)
    return [
        pages.Stage(
            layers=stage["layers"],
            modes=_modes(stage),
            time_ms={key.removesuffix("_ms"): value for key, value in stage.items() if key.endswith("_ms")},
            memory_bytes={key.removesuffix("_bytes"): value for key, value in stage["memory"].items()},
            peak_bytes=stage["peak_memory_bytes"],
            limit_bytes=stage["memory_limit_bytes"],
            device_peak_bytes=estimate.device_peak_bytes[number],
            device_bytes=estimate.device_memory_bytes[number],
            host_bytes=hosts[number],
            host_limit_bytes=stage.get("host_limit_bytes"),
            path_ms=shares[number].time_ms,
        )
        for number, stage in enumerate(stages)
    ]


def _modes(stage: Mapping[str, Any]) -> dict[str, dict[str, tuple[int, ...]]]:
    """Counts of layers by modality and mode, of those modes that some layer runs in."""
    named = {
        modality: {"recompute": counts, **stage.get("modes", {}).get(modality, {})}
        for modality, counts in stage["recompute"].items()
    }
    return {
        modality: {mode: tuple(counts) for mode, counts in of_mode.items() if any(counts)}
        for modality, of_mode in named.items()
    }


def _search_page(found: PlanResult) -> pages.Search:
    return pages.Search(
        step_ms=found.step_ms,
        lower_bound_ms=found.lower_bound_ms,
        gap_fraction=found.gap_fraction,
        proven=found.proven,
        stopped=found.search.stopped,
        elapsed_s=found.search.elapsed_s,
        verdict=tuple(describe_end(found.search).splitlines()),
        provenance=describe_bounds(len(found.search.candidates)),
        strategies=strategies_page(found.search.candidates, found.search.estimates[0].problem.memory_limit_bytes),
    )


def strategies_page(candidates: Sequence[Candidate], limits_bytes: Sequence[float]) -> pages.Strategies:
    """Every strategy of a search, a column each. limits_bytes: of each stage of the best plan."""
    from mm_autoparallel.planner.search.candidate import candidate_rows

    rows = candidate_rows(candidates)
    every = [row["parallel_config"] | own for row, own in zip(rows, _list_modules(candidates), strict=True)]
    keys = dict.fromkeys(key for sizes in every for key in sizes)
    statuses, status = _number([row["status"] for row in rows])
    causes, cause = _number([row["bounded_by"] or "" for row in rows])
    reasons, reason = _number([row["reason"] for row in rows])
    return pages.Strategies(
        sizes={key: tuple(sizes.get(key, "") for sizes in every) for key in keys},
        schedule=tuple(row["schedule"] for row in rows),
        statuses=statuses,
        causes=causes,
        reasons=reasons,
        status=status,
        cause=cause,
        reason=reason,
        bound_ms=tuple(row["lower_bound_ms"] for row in rows),
        step_ms=tuple(row["e2e_time"] for row in rows),
        rank_ms=tuple(row["rank_ms"] for row in rows),
        peak_bytes=tuple(row["peak_memory_bytes"] for row in rows),
        overflow_bytes=tuple(row["overflow_bytes"] for row in rows),
        limit_bytes=tuple(sorted({math.floor(limit_bytes) for limit_bytes in limits_bytes})),
    )


def _list_modules(candidates: Sequence[Candidate]) -> list[dict[str, int | str]]:
    """Of each strategy how every encoder runs, and its sizes where they are its own; nothing where all are chains."""
    from mm_autoparallel.planner.explain.modules import LAYOUT, SIZES, Own, format_key

    arranged = [one.strategy.arrangement for one in candidates if one.strategy.arrangement]
    names = dict.fromkeys(name for arrangement in arranged for one in arrangement.each for name in one.encoder.parts)

    def describe(strategy: Strategy) -> dict[str, int | str]:
        told: dict[str, int | str] = {}
        for name in names:
            own = Own.of(strategy, name)
            told[format_key(f"{name}.{LAYOUT}")] = own.layout
            sizes = SIZES if own.layout != "chain" else ()
            shown = (size for size in sizes if size != "pieces" or own.pieces > 1)
            told |= {format_key(f"{name}.{size}"): getattr(own, size) for size in shown}
        return told

    return [describe(one.strategy) for one in candidates]


def _number(values: Sequence[str]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Each value once, and the place of each among them."""
    place = {value: number for number, value in enumerate(dict.fromkeys(values))}
    return tuple(place), tuple(place[value] for value in values)


def sources_page(found: Sensitivity) -> pages.Sources:
    """What the plans' order hangs on."""
    return pages.Sources(
        change_fraction=found.change_fraction,
        rows=tuple(
            pages.CostSource(
                name=one.source.name,
                source=one.source.time_source,
                error_fraction=one.source.error_fraction,
                plans=tuple(
                    pages.Share(
                        low_step_ms=response.low_ms,
                        high_step_ms=response.high_ms,
                        share_fraction=response.elasticity_fraction,
                    )
                    for response in one.responses
                ),
                flips=describe_flips(one) if one.flips else "",
            )
            for one in found.sources
        ),
        notes=tuple(describe_sources(found)),
    )
