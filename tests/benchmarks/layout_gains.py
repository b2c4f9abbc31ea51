"""What each kind of layout gains over the chain: the best step of every kind by itself, and of all together.

    python tests/benchmarks/layout_gains.py examples/qwen2vl_72b/job.yaml --set cluster.num_nodes=64

Prints a row for each kind: the step and its gap, what ranks first against the chain's, strategies and branches that
were told, and the processor seconds of the search, which runs in this process alone and ends after --time-limit.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence

import mm_autoparallel as mmap
from mm_autoparallel.cli.job_words import parse_changes
from mm_autoparallel.errors import NoFeasiblePlan, Unfinished
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.planner.search.planner import search
from mm_autoparallel.planner.search.result import SearchResult
from mm_autoparallel.planner.search.space import describe_strategy
from mm_autoparallel.planner.search.watched import compile_search

KINDS: dict[str, object] = {
    "chain": ["chain"],
    "colocated": ["colocated"],
    "disaggregated": ["disaggregated"],
    "all": "all",
}


def best_of(job: Job, time_limit_s: float) -> SearchResult | None:
    """None where nothing fits, or nothing was found in time."""
    try:
        return search(job, time_limit_s, num_workers=1)
    except (NoFeasiblePlan, Unfinished):
        return None


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job")
    parser.add_argument("--set", action="append", default=[], dest="changes", metavar="KEY=VALUE")
    parser.add_argument("--kinds", nargs="+", choices=tuple(KINDS), default=tuple(KINDS))
    parser.add_argument("--time-limit", type=float, default=60.0)
    given = parser.parse_args(words)
    changes, chain_ms = parse_changes(given.changes), math.nan
    for kind in given.kinds:
        job = mmap.read_job(given.job, changes | {"search.layouts": KINDS[kind]})
        compile_search(job.schedules, job.search.max_vpp)
        began_s = time.process_time()
        result = best_of(job, given.time_limit)
        spent_s = time.process_time() - began_s
        if result is None:
            print(f"{kind:13} no plan ({spent_s:.1f} s)", flush=True)
            continue
        rank_ms, number = result.objective.rank_ms, len(result.candidates)
        chain_ms = rank_ms if kind == "chain" else chain_ms
        gain = f"{(1.0 - rank_ms / chain_ms) * 100.0:+.2f} %" if math.isfinite(chain_ms) else "?"
        told = f"{result.objective.step_ms:.1f} ms, gap {result.gap_fraction * 100.0:.3f} %, gain {gain}"
        name = describe_strategy(result.plan.strategy)
        print(f"{kind:13} {told}: {name} ({number} told, {spent_s:.1f} s)", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
