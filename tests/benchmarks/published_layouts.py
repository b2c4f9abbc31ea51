"""Published gains of module layouts, and what the simulator gives for the same jobs; nothing is asserted here.

    python tests/benchmarks/published_layouts.py [--row NAME...] [--limit S] [--json]

Prints a table in Markdown, a row for each published figure: what was published over which baseline, what the same kind
of layout gains here in the sizes that were published, what the whole space would choose, and why they differ. Gains are
in throughput: a step of 100 ms in place of 110 gains 10 %. Jobs, and what is assumed about them, are in
published_layout_rows.py. Limits count this process's own CPU time.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from published_layout_rows import (
    IMAGE_RANKS,
    IMAGE_RANKS_SOURCE,
    IMAGE_RANKS_WHY,
    ROWS,
    Baseline,
    Published,
)

from mm_autoparallel.errors import JobError, NoFeasiblePlan, Unfinished
from mm_autoparallel.measurements.image_rank import predict_gain
from mm_autoparallel.measurements.table import Row as TableRow
from mm_autoparallel.model.costs.cost_model import CostModel
from mm_autoparallel.model.costs.stage import build_problem
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.model.job.strategy_law import unlawful_reason
from mm_autoparallel.model.readers.job_file import parse_job
from mm_autoparallel.pipeline.placement import place
from mm_autoparallel.planner.search.planner import examine, search
from mm_autoparallel.planner.search.space import describe_strategy, list_entries
from mm_autoparallel.planner.search.watched import compile_search

LIMIT_S = 60.0
"""Of one row, in CPU seconds; its parts have these shares of it (passes whole and in pieces that of the kind each), and
what is left, but a quarter at least, goes to the whole space: this share of that to chains alone, which may have more
chunks."""
KIND_SHARE_FRACTION, BASELINE_SHARE_FRACTION, CHAIN_SHARE_FRACTION = 1 / 3, 0.1, 0.75
LEAST_SHARE_FRACTION = 0.25
NOTHING = (math.inf, "nothing fits")
Step = tuple[float, str]
"""A step in ms, and the plan in words."""
MEASURED = Path(__file__).parents[2] / "examples" / "published_measurements" / "multimodal_published.csv"
HEADER = """\
| paper | job | over | published | the same kind here | decoder alone | of the whole space | why they differ |
|---|---|---|---|---|---|---|---|"""


@dataclass(frozen=True)
class Result:
    """What became of a published row over one baseline; None where it is not planned, and `plan` says why.

    published: as it was told. gain_percent: of the paper's kind of layout; best_gain_percent: of what would be chosen.
    alone_gain_percent: of the decoder by itself in the most chunks of the row, as if all of the encoder were hidden.
    """

    paper: str
    row: str
    over: str
    published: str
    gain_percent: float | None
    plan: str
    best_gain_percent: float | None
    best_plan: str
    why: str
    source: str
    alone_gain_percent: float | None = None
    baseline_ms: float | None = None
    baseline_plan: str = ""
    spent_s: float = 0.0


def judge(published: Published, limit_s: float = LIMIT_S) -> Iterator[Result]:
    """The results of a row, one for each of its baselines. limit_s: of all its searches together."""
    about = (published.paper, published.name)
    if published.job is None:
        for base in published.baselines:
            told = f"not planned: {published.cannot}"
            yield Result(*about, base.name, base.told, None, told, None, "", published.why, published.source)
        return
    began_s = time.process_time()
    job = parse_job(dict(published.job), Path("job.yaml"))
    costs, share_s = CostModel(job), BASELINE_SHARE_FRACTION * limit_s / len(published.baselines)
    steps = [step_of(costs, published, base, share_s) for base in published.baselines]
    own = best_of_kind(costs, published, KIND_SHARE_FRACTION * limit_s)
    alone = decoder_alone(published, share_s)
    left_s = max(LEAST_SHARE_FRACTION * limit_s, limit_s - (time.process_time() - began_s))
    best = min([best_of_all(job, max(published.chunks), left_s), own, *steps])
    spent_s = time.process_time() - began_s
    for base, step in zip(published.baselines, steps, strict=True):
        gain_percent, best_percent = (gain(step, other) for other in (own, best))
        found = Result(
            *about, base.name, base.told, gain_percent, own[1], best_percent, best[1], base.why, published.source
        )
        steps_too: dict[str, Any] = {
            "alone_gain_percent": gain(step, alone),
            "baseline_ms": step[0],
            "baseline_plan": step[1],
        }
        yield replace(found, **steps_too, spent_s=spent_s)


def gain(base: Step, other: Step) -> float | None:
    """In percent of throughput; None where either fits nowhere."""
    return (base[0] / other[0] - 1.0) * 100.0 if math.isfinite(base[0] + other[0]) else None


def step_of(costs: CostModel, published: Published, base: Baseline, limit_s: float) -> Step:
    """The least step of a baseline in its sizes: where the row does not say them, in any of several stages."""
    found = NOTHING
    if base.encoder_tp:
        return best_of_kind(costs, replace(published, encoder_tp=base.encoder_tp), limit_s)
    strategies = [base.strategy] if base.strategy else list(several_stages(costs.job, base.num_chunks))
    ends_s = time.process_time() + limit_s
    for number, strategy in enumerate(strategies):
        share_s = max(0.1, ends_s - time.process_time()) / (len(strategies) - number)
        step_ms = place_chain(costs, strategy, base.encoder_first, share_s, found[0])
        found = min(found, (step_ms, describe_strategy(strategy)))
    return found


def several_stages(job: Job, num_chunks: int) -> Iterator[Strategy]:
    """Every lawful chain of two stages or more and so many chunks, within the limits of the job's search."""
    limits = job.search.model_copy(update={"layouts": "chain", "max_vpp": num_chunks})
    for entry in list_entries(replace(job, search=limits)):
        if entry.reason is None and entry.strategy.pp > 1 and entry.strategy.vpp == num_chunks:
            yield entry.strategy


def place_chain(
    costs: CostModel, strategy: Strategy, encoder_first: bool, limit_s: float, cutoff_ms: float = math.inf
) -> float:
    """The least step of a chain in ms, infinite where none was found. encoder_first: all of it on the first stage.
    cutoff_ms: what is not below it is of no interest.

    Of many micro-batches it begins with what is best for a few: in so many chunks `place` by itself ended up to 3.6 %
    above that.
    """
    job = costs.job
    if reason := unlawful_reason(job.model, job.cluster, job.workload, strategy):
        raise JobError(f"a baseline is unlawful: {reason}")
    problem = build_problem(costs, strategy)
    if encoder_first:
        names = {encoder.name for encoder in job.model.encoders}
        blocks = (replace(one, within=(0, 1)) if one.modality in names else one for one in problem.chain)
        problem = replace(problem, chain=tuple(blocks))
    few, hint = min(problem.num_microbatches, 2 * strategy.pp), None
    if few < problem.num_microbatches:
        hint = place(replace(problem, num_microbatches=few), 0.7 * limit_s).placement
        limit_s *= 0.3
    found = place(problem, limit_s, cutoff_ms=cutoff_ms, hint=hint)
    return found.step_ms if found.placement else math.inf


def decoder_alone(published: Published, limit_s: float) -> Step:
    """The decoder without its encoders, in the sizes of a baseline of several stages and in the row's most chunks."""
    found = next((base.strategy for base in published.baselines if base.strategy), None)
    if found is None or found.pp == 1:
        return NOTHING
    strategy = replace(found, vpp=max(published.chunks), schedule="")
    document: dict[str, Any] = json.loads(json.dumps(published.job))
    document["model"]["encoders"] = []
    del document["workload"]["image_tokens_per_sample"]
    del document["search"]["layouts"]
    job = parse_job(document, Path("job.yaml"))
    return place_chain(CostModel(job), strategy, False, limit_s), describe_strategy(strategy)


def best_of_kind(costs: CostModel, published: Published, limit_s: float) -> Step:
    """The paper's kind of layout beside the decoder's published sizes, in any sizes of the encoder that it leaves.
    limit_s: with passes whole, and again with passes in each number of pieces."""
    job, found = costs.job, NOTHING
    for pieces, num_chunks in product(published.pieces, reversed(published.chunks)):
        update = {**published.decoder, "layouts": (published.kind,), "max_vpp": num_chunks, "encoder_pieces": (pieces,)}
        narrow = replace(job, search=job.search.model_copy(update=update))
        entries = tuple(
            entry
            for entry in list_entries(narrow)
            if entry.reason is None
            and entry.strategy.vpp == num_chunks
            and entry.strategy.arrangement
            and published.encoder_tp in (0, entry.strategy.arrangement.encoder.tp)
            and all(one.encoder_run in published.runs for one in entry.strategy.arrangement.each)
            and pieces == max(one.encoder.pieces for one in entry.strategy.arrangement.each)
        )
        estimate, _ = examine(CostModel(narrow), entries, limit_s / len(published.chunks)) if entries else (None, ())
        if estimate:
            found = min(found, (estimate.step_ms, describe_strategy(estimate.plan.strategy)))
    return found


def best_of_all(job: Job, most_chunks: int, limit_s: float) -> Step:
    """What is found over chains of up to so many chunks a stage, and over all kinds within the limits of the job."""
    chains = replace(job, search=job.search.model_copy(update={"layouts": ("chain",), "max_vpp": most_chunks}))
    shares = ((chains, CHAIN_SHARE_FRACTION), (job, 1.0 - CHAIN_SHARE_FRACTION))
    found = NOTHING
    for space, share_fraction in shares:
        try:
            result = search(space, share_fraction * limit_s, num_workers=1)
        except (NoFeasiblePlan, Unfinished):
            continue
        found = min(found, (result.estimates[0].step_ms, describe_strategy(result.plan.strategy)))
    return found


def judge_image_ranks(table: Path, source: str, why: str) -> Iterator[Result]:
    """Megatron-Bridge's image rank of its own, a result for each sequence and batch, over the mean of its data sets."""
    cells: dict[tuple[str, str], list[dict[str, str]]] = {}
    with table.open(newline="", encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            if row["figure"] == "ratio":
                cells.setdefault((row["tokens_per_sample"], row["gbs"]), []).append(row)
    for (length, batch), rows in cells.items():
        less_fraction = sum(float(row["value"]) for row in rows) / len(rows) / 100.0
        told = f"{(1.0 / (1.0 - less_fraction) - 1.0) * 100.0:+.1f} %"
        own_percent = (1.0 / (1.0 - predict_gain(TableRow(table, 0, 1, rows[0]))) - 1.0) * 100.0
        plan = "PP 2 TP 4 DP 2 MBS 1, one image rank behind it"
        about = ("Megatron MIMO", f"Qwen3.5-VL-27B, 17 devices for 16, sequence {length}, batch {batch}")
        yield Result(*about, "16 devices", told, own_percent, plan, own_percent, plan, why, source)


def all_results(names: Sequence[str], limit_s: float) -> Iterator[Result]:
    """Of the rows of these names, in the order of the table."""
    for published in ROWS:
        if published.name in names:
            yield from judge(published, limit_s)
    if IMAGE_RANKS in names:
        yield from judge_image_ranks(MEASURED, IMAGE_RANKS_SOURCE, IMAGE_RANKS_WHY)


def table_line(result: Result) -> str:
    """A row of the table, in Markdown."""
    own = result.plan if result.gain_percent is None else f"{result.gain_percent:+.1f} %: {result.plan}"
    best = "" if result.best_gain_percent is None else f"{result.best_gain_percent:+.1f} %: {result.best_plan}"
    best = "the same" if result.best_plan == result.plan and best else best
    alone = "" if result.alone_gain_percent is None else f"{result.alone_gain_percent:+.1f} %"
    cells = (result.paper, result.row, result.over, result.published, own, alone, best, result.why)
    return f"| {' | '.join(cells)} |"


def main(words: Sequence[str] | None = None) -> int:
    names = [*(published.name for published in ROWS), IMAGE_RANKS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", nargs="+", choices=names, default=names, dest="rows")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="S", help="CPU seconds of each row")
    parser.add_argument("--json", action="store_true", help="a list with every figure, in place of the table")
    given = parser.parse_args(words)
    compile_search(("1f1b", "interleaved_1f1b"))
    time.monotonic = time.process_time  # the clock that a search ends by
    if given.json:
        rows: list[dict[str, Any]] = [asdict(result) for result in all_results(given.rows, given.limit)]
        print(json.dumps(rows, indent=2, allow_nan=False))
        return 0
    print(HEADER)
    for result in all_results(given.rows, given.limit):
        print(table_line(result), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
