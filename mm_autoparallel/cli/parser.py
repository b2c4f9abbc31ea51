"""The whole command line: its verbs, and what is said of a mistyped one."""

from __future__ import annotations

import argparse
import os
import re
from functools import cache
from typing import TYPE_CHECKING, Any

from mm_autoparallel import __version__
from mm_autoparallel.cli import (
    calibrate,
    data,
    doctor,
    edit,
    explain,
    export,
    galvatron_profiles,
    galvatron_score,
    galvatron_search,
    import_,
    init,
    lint,
    mcp,
    nd_search,
    operators,
    pipeline_search,
    place,
    plan,
    profile,
    rank,
    report,
    schedules,
    simulate,
    studio,
    tinker,
    trace,
    validate,
    verify,
)
from mm_autoparallel.errors import PlannerError
from mm_autoparallel.streams import write_error, write_output

if TYPE_CHECKING:
    from collections.abc import Sequence

    from _typeshed import SupportsWrite

VERBS = {
    "plan": plan,
    "init": init,
    "simulate": simulate,
    "edit": edit,
    "explain": explain,
    "export": export,
    "import": import_,
    "lint": lint,
    "report": report,
    "studio": studio,
    "place": place,
    "verify": verify,
    "schedules": schedules,
    "profile": profile,
    "trace": trace,
    "operators": operators,
    "validate": validate,
    "calibrate": calibrate,
    "nd-search": nd_search,
    "pipeline-search": pipeline_search,
    "rank": rank,
    "tinker": tinker,
    "galvatron-search": galvatron_search,
    "galvatron-score": galvatron_score,
    "galvatron-profiles": galvatron_profiles,
    "data": data,
    "doctor": doctor,
    "mcp": mcp,
}
"""Each is a module with HELP, DESCRIPTION, `add_arguments(parser)` and `run(arguments) -> exit code`."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        """One line instead of the whole usage text: the mistake stays in sight, with the nearest known word."""
        write_error(f"{self.prog}: {message}{self._hint(message)}; `{self.prog} --help` tells what is accepted\n")
        self.exit(PlannerError.exit_code)

    def parse_args(self, args: Sequence[str], namespace: Any = None) -> Any:  # type: ignore[override]
        """As argparse does it; an option that nobody knows is the verb's to tell."""
        known, unknown = self.parse_known_args(args, namespace)
        if unknown:
            of_verb = self._verbs().get(getattr(known, "verb", ""), self)
            of_verb.error(f"unrecognized arguments: {' '.join(unknown)}")
        return known

    def _verbs(self) -> dict[str, _Parser]:
        found = [action.choices for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        return dict(found[0]) if found else {}

    def _hint(self, message: str) -> str:
        """` (did you mean "--time-limit"?)`, for an option or a verb that is not known."""
        import difflib

        def nearest(word: str, known: Sequence[str]) -> str:
            near = difflib.get_close_matches(word, known, n=1)
            return f' (did you mean "{near[0]}"?)' if near else ""

        match = re.match(r"unrecognized arguments: (--?[^ =]+)|argument VERB: invalid choice: '([^']+)'", message)
        if match is None:
            return ""
        option, verb = match.groups()
        options = [spelling for action in self._actions for spelling in action.option_strings]
        return nearest(option, options) if option else nearest(verb, list(self._verbs()))

    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:  # noqa: ARG002
        """Help and the version, which are results."""
        write_output(message)


@cache
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


def complete(parser: argparse.ArgumentParser) -> None:
    """Answer the shell where it asks for completions (argcomplete, if it is installed), and end the process then."""
    if "_ARGCOMPLETE" not in os.environ:
        return
    try:
        import argcomplete
    except ImportError:  # the shell's own argcomplete is another environment's
        return
    argcomplete.autocomplete(parser)
