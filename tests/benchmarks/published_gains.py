"""Published hand-made and tuned plans of MindSpeed-MM, and ours, scored by one simulator; nothing is asserted here.

    python tests/benchmarks/published_gains.py

Jobs, plans and what is assumed about them are in examples/published_gains. `layers` is our best placement under the
tuned plan's own sizes, `sizes` our best plan over PP, TP, DP and MBS too, `orders` the same in any order that a job can
name or that is found, `wide` over all that the planner knows.
Gains are in throughput: a step of 100 ms in place of 110 gains 10 %.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mm_autoparallel.model.job.job import SearchSpace
from mm_autoparallel.model.readers.job_file import read_job
from mm_autoparallel.planner.evaluate import evaluate
from mm_autoparallel.planner.plan import Plan, read_plan
from mm_autoparallel.planner.search.planner import search
from mm_autoparallel.planner.search.space import describe_strategy

FOLDER = Path(__file__).parents[2] / "examples" / "published_gains"
ROWS = (
    ("internvl2_8b", "baseline", "tuned", 3.2),
    ("internvl2_76b", "baseline", "tuned", 6.0),
    ("qwen2vl_72b", "baseline", "tuned", 6.8),
    ("qwen2vl_72b", "tuned", "tuned_pp8", 9.2),
)
"""Job, the plan compared with, the tuned plan, and the gain in % that was published for it (MindSpeed-MM,
documentation of automatic parallelism, 2025; read from its figure)."""

WIDE = {"max_vpp": 4, "zero": (0, 1, 2, 3), "modes": ("selective", "activation", "offload", "recompute")}
WIDE_TIME_LIMIT_S = 60.0
ANY_ORDER = {"schedule": ("all",)}


def main() -> None:
    heads = f"{'gain':>7} {'published':>9} {'layers':>8} {'sizes':>8} {'orders':>8} {'wide':>8}"
    print(f"{'job':14} {'before, s':>10} {'tuned, s':>10} {heads}")
    for name, before, tuned, published_percent in ROWS:
        job = read_job(FOLDER / f"{name}.yaml")
        plans = [read_plan(FOLDER / f"{name}.{which}.json", job) for which in (before, tuned)]
        before_ms, tuned_ms = (evaluate(job, plan).step_ms for plan in plans)
        found = [
            search(replace(job, search=space), time_limit_s=WIDE_TIME_LIMIT_S)
            for space in (
                own_sizes(plans[1]),
                job.search,
                job.search.model_copy(update=ANY_ORDER),
                SearchSpace(**WIDE),
            )
        ]
        gains = [before_ms / result.figures.step_ms - 1.0 for result in found]
        print(
            f"{name:14} {before_ms / 1e3:10.3f} {tuned_ms / 1e3:10.3f} {before_ms / tuned_ms - 1.0:+7.1%} "
            f"{published_percent:+8.1f}% {gains[0]:+8.1%} {gains[1]:+8.1%} {gains[2]:+8.1%} {gains[3]:+8.1%}"
        )
        for label, result in zip(("sizes", "orders", "wide"), found[1:], strict=True):
            print(
                f"{'':14} {label}: {describe_strategy(result.plan.strategy)} {result.figures.step_ms / 1e3:.3f} s, "
                f"layers in {describe_modes(result.plan)}, gap {result.gap_fraction:.3%}, {result.elapsed_s:.0f} s",
                flush=True,
            )


def describe_modes(plan: Plan) -> str:
    """`recompute 12, offload 40`, or `no mode`."""
    counts = {"recompute": sum(map(sum, plan.recompute.values()))}
    for of_mode in plan.modes.values():
        for mode, layers in of_mode.items():
            counts[mode] = counts.get(mode, 0) + sum(layers)
    return ", ".join(f"{mode} {count}" for mode, count in counts.items() if count) or "no mode"


def own_sizes(plan: Plan) -> SearchSpace:
    """The space of the plan's own sizes alone."""
    own = plan.strategy
    return SearchSpace(pp=(own.pp,), tp=(own.tp,), cp=(own.cp,), dp=(own.dp,), mbs=(own.mbs,))


if __name__ == "__main__":
    main()
