"""`mm-autoparallel VERB …`: find the verb, run it, and turn errors into one paragraph and an exit code.

Exit codes: 0 done, 2 the input is wrong, 3 nothing feasible, 1 a crash, 130 interrupted before there was a result.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from mm_autoparallel import __version__
from mm_autoparallel.cli import (
    calibrate,
    explain,
    nd_search,
    pipeline_search,
    place,
    plan,
    profile,
    rank,
    simulate,
    trace,
    validate,
    verify,
)
from mm_autoparallel.errors import PlannerError
from mm_autoparallel.reports.terminal import say

VERBS = {
    "plan": plan,
    "simulate": simulate,
    "explain": explain,
    "place": place,
    "verify": verify,
    "profile": profile,
    "trace": trace,
    "validate": validate,
    "calibrate": calibrate,
    "nd-search": nd_search,
    "pipeline-search": pipeline_search,
    "rank": rank,
}
"""Each is a module with HELP, DESCRIPTION, `add_arguments(parser)` and `run(arguments) -> exit code`."""

NO_READER, INTERRUPTED = 1, 130


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        """One line instead of the whole usage text: the mistake stays in sight."""
        self.exit(PlannerError.exit_code, f"{self.prog}: {message}; `{self.prog} --help` tells what is accepted\n")


def build_parser() -> argparse.ArgumentParser:
    """The whole command line. Long options are not abbreviated, so that a new one never changes an old script."""
    parser = _Parser(
        prog="mm-autoparallel",
        description="Plans the distributed training of large multimodal models, and proves how good the plan is.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, module in VERBS.items():
        verb = verbs.add_parser(name, help=module.HELP, description=module.DESCRIPTION, allow_abbrev=False)
        module.add_arguments(verb)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (by default the process's own); its exit code. A bug leaves as it is raised."""
    try:
        arguments = build_parser().parse_args(argv)
        code: int = VERBS[arguments.verb].run(arguments)
        sys.stdout.flush()
    except SystemExit as end:  # --help, --version and mistyped options
        return int(end.code or 0)
    except PlannerError as error:
        say(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        say("interrupted before there was a result")
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has left; the interpreter must not fail again while it closes
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NO_READER
    return code


if __name__ == "__main__":
    sys.exit(main())
