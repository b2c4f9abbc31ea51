"""`galvatron-score STRATEGY.json CONFIG.yaml [KEY=VALUE…]`: upstream's step and memory of any strategy."""

from __future__ import annotations

import argparse
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm_autoparallel.cli.galvatron_options import add_space, read_space
from mm_autoparallel.cli.output import print_document, print_line
from mm_autoparallel.errors import PlanError

if TYPE_CHECKING:
    from mm_autoparallel.integrations.galvatron.score import Score
    from mm_autoparallel.integrations.galvatron.strategy_file import Assignment

HELP = "tell Galvatron's step and memory of a strategy"
DESCRIPTION = (
    "Read a strategy that Galvatron's runtime trains under, and the configuration that it is searched with; tell the "
    "step and the memory that its cost model gives, and the step with what that model leaves out."
)
SCHEMA = "mm-autoparallel/galvatron-score/1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("strategy", type=Path, metavar="STRATEGY.json", help="galvatron_config_….json")
    add_space(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document on standard output")


def run(arguments: argparse.Namespace) -> int:
    """Read both, tell the figures. Exit code 0 where it does not fit too: the figures say that."""
    from mm_autoparallel.integrations.galvatron.score import Extensions

    space = read_space(arguments, Extensions(arguments.reserve_fraction))
    plan = space.read(arguments.strategy)
    if len(plan.layers) != space.num_layers:
        raise PlanError(
            f"it is of {len(plan.layers)} layers, and what it is scored with of {space.num_layers}",
            where=f"Galvatron strategy {arguments.strategy}",
            key="tp_sizes_enc",
        )
    score = space.score(plan)
    if arguments.json:
        print_document({"schema": SCHEMA, **document_score(score)})
        return 0
    for line in (*describe_plan(plan), *describe_score(score)):
        print_line(line)
    space.tell(plan)
    return 0


# ------------------------------------------------------------------------------------------------------------- telling


def describe_plan(plan: Assignment) -> list[str]:
    """A line of the whole, then one for each stage."""
    stages = "1 stage" if plan.ends.pp == 1 else f"{plan.ends.pp} stages"
    chunks = "1 micro-batch" if plan.chunks == 1 else f"{plan.chunks} micro-batches"
    lines = [
        f"{plan.num_devices} devices, {stages}; a batch of {plan.num_samples} in {chunks}; "
        f"embedding and head {plan.ends}"
    ]
    start = 0
    for stage, held in enumerate(plan.division):
        runs = [(name, len([*same])) for name, same in groupby(map(str, plan.layers[start : start + held]))]
        lines.append(f"stage {stage}: {', '.join(f'{number} x {name}' for name, number in runs)}")
        start += held
    return lines


def describe_score(score: Score) -> list[str]:
    """Upstream's figures, and what they leave out."""
    lines = [f"step {score.step_s:.6f} s, {score.samples_per_s:.4f} samples/s by Galvatron's cost model"]
    if score.whole_step_s > score.step_s:
        lines.append(
            f"step {score.whole_step_s:.6f} s with what that leaves out: changes of degree within a stage, and a "
            "slowest stage that is neither the first nor the last"
        )
    if score.counted_fraction < 1:
        lines.append(
            f"that counts {score.counted_fraction:.1%} of the samples: a micro-batch is no multiple of a data parallel "
            "size (galvatron-search --whole-samples leaves such sizes out)"
        )
    for stage, (mib, left) in enumerate(zip(score.stage_mib, score.remaining_mib, strict=True)):
        verdict = f"{left} MiB remain" if left >= 0 else f"{-left} MiB too many"
        lines.append(f"stage {stage}: {mib} of {score.limit_mib} MiB; {verdict}")
    if score.reserve_mib:
        lines.append(f"{score.reserve_mib} MiB of each device are kept free (--reserve-fraction)")
    return lines


def document_score(score: Score) -> dict[str, Any]:
    """The same for programs."""
    plan = score.plan
    return {
        "step_s": score.step_s,
        "samples_per_s": score.samples_per_s,
        "whole_step_s": score.whole_step_s,
        "stage_mib": [*score.stage_mib],
        "counted_fraction": score.counted_fraction,
        "limit_mib": score.limit_mib,
        "reserve_mib": score.reserve_mib,
        "remaining_mib": [*score.remaining_mib],
        "layers": [str(layer) for layer in plan.layers],
        "ends": str(plan.ends),
        "division": [*plan.division],
        "batch": plan.num_samples,
        "micro_batches": plan.chunks,
    }
