"""The whole command line: its verbs, and what is said of a mistyped one."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

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
from mm_autoparallel.streams import write_error, write_output

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

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


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        """One line instead of the whole usage text: the mistake stays in sight."""
        write_error(f"{self.prog}: {message}; `{self.prog} --help` tells what is accepted\n")
        self.exit(PlannerError.exit_code)

    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:  # noqa: ARG002
        """Help and the version, which are results."""
        write_output(message)


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
