"""`edit JOB --config PLAN.json --move … --out NEW.json`: change a plan by words, and say what that does."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from mm_autoparallel.cli.job_words import add_set_argument, parse_changes
from mm_autoparallel.cli.output import print_line
from mm_autoparallel.errors import JobError
from mm_autoparallel.reports.terminal import check_writable, say, warn, write_file

HELP = "change a plan: move layers, set their modes, take other sizes or another order"
DESCRIPTION = (
    "Change a plan of JOB and write the new one: layers that move to another stage, layers that run in a mode, other "
    "parallel sizes, another order of a stage. Changes are made in turn: sizes, moves, modes, orders. What the new "
    "plan takes is printed, signed against the old one."
)


_EXAMPLES = {"--move": "text:3:4:1", "--mode": "text:2:recompute=4", "--order": "2:0F0 1F0 0B0 1B0"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's options."""
    parser.add_argument("job", type=Path, metavar="JOB")
    add_set_argument(parser)
    parser.add_argument("--config", type=Path, required=True, metavar="PLAN.json", help="the plan to change")
    parser.add_argument(
        "--sizes",
        metavar="PP=8,TP=4",
        help="take the strategy with these sizes that is most like the plan's, and place it at once",
    )
    parser.add_argument(
        "--move",
        action="append",
        default=[],
        metavar="MODALITY:FROM:TO:COUNT",
        help="move so many layers from one stage to another (with chunks: chunk x PP + stage); may stand again",
    )
    parser.add_argument(
        "--mode",
        action="append",
        default=[],
        metavar="MODALITY:STAGE:MODE=COUNT",
        help="run so many of a stage's layers in a mode, such as text:2:recompute=4; may stand again",
    )
    parser.add_argument(
        "--order",
        action="append",
        default=[],
        metavar="STAGE:WORDS",
        help="what a stage runs, such as '2:0F0 1F0 0B0 1B0', where the plan has an order of its own; may stand again",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="NEW.json", help="where to write the new plan")


def run(arguments: argparse.Namespace) -> int:
    """Read, change, simulate both, write."""
    from mm_autoparallel.api import read_plan, simulate
    from mm_autoparallel.api.jobs import read_job
    from mm_autoparallel.planner.edits import move_layers, set_mode, set_order
    from mm_autoparallel.planner.explain.nearest import change_sizes
    from mm_autoparallel.planner.explain.why_not import parse_wish
    from mm_autoparallel.planner.plan import format_document
    from mm_autoparallel.reports.estimates import describe_change, describe_strategy

    if not (arguments.sizes or arguments.move or arguments.mode or arguments.order):
        raise JobError("nothing to change: give --sizes, --move, --mode or --order")
    moves = [_parse("--move", r"([^:]+):(\d{1,6}):(\d{1,6}):(\d{1,6})", word) for word in arguments.move]
    modes = [_parse("--mode", r"([^:]+):(\d{1,6}):([^=:]+)=(\d{1,6})", word) for word in arguments.mode]
    orders = [_parse("--order", r"(\d{1,6}):(.+)", word) for word in arguments.order]
    check_writable(arguments.out)
    job = read_job(arguments.job, parse_changes(arguments.set))
    plan = before = read_plan(arguments.config, job)
    if arguments.sizes:
        plan = change_sizes(job, plan, parse_wish(arguments.sizes, "--sizes"))
    for modality, source, target, count in moves:
        plan = move_layers(plan, modality, int(source), int(target), int(count))
    for modality, stage, mode, count in modes:
        plan = set_mode(job, plan, modality, int(stage), mode, int(count))
    for stage, words in orders:
        plan = set_order(plan, int(stage), words)
    old, new = simulate(job, before, name=str(arguments.config)), simulate(job, plan)
    write_file(arguments.out, format_document(new.estimate.plan_document()))
    warn(new.warnings)
    print_line(f"{describe_strategy(plan)}: {describe_change(old.estimate, new.estimate)}")
    say(f"wrote {arguments.out}")
    return 0


def _parse(flag: str, pattern: str, word: str) -> tuple[str, ...]:
    match = re.fullmatch(pattern, word)
    if match is None:
        example = _EXAMPLES[flag]
        raise JobError(f"{flag} {word!r} is not understood; it is such as {example}")
    return match.groups()
