"""`mm-autoparallel VERB …`: find the verb, run it, and turn errors into one paragraph and an exit code.

Exit codes: 0 done; 1 a crash, or the reader of standard output has left; 2 the input is wrong, or a file or standard
output cannot be written; 3 nothing feasible; 124 the time limit came before a result; 130 interrupted before there was
a result. Signals are heeded from the first line on, so little is imported before.
"""

from __future__ import annotations

import sys

from mm_autoparallel.signals import INTERRUPTED, ignore_signals, interrupt_on_signal, interrupted_by_signals

TYPE_CHECKING = False  # as typing's, whose import would keep the first signals waiting
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

NO_READER = 1


def start() -> NoReturn:
    """The process's own command line, to its end: signals neither break its start nor its last words."""
    try:
        interrupt_on_signal()
        code = main()
        ignore_signals()
    except KeyboardInterrupt:  # between two lines here
        code = INTERRUPTED
        ignore_signals()
    exec("")  # where an interrupt came in the midst of another, `python -m` would end by the signal and not by `code`
    sys.exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (by default the process's own); its exit code. A bug leaves as it is raised."""
    try:
        with interrupted_by_signals():
            return _run(argv)
    except KeyboardInterrupt:
        from mm_autoparallel.streams import say, telling

        with telling():
            say("interrupted before there was a result")
        return INTERRUPTED


def _run(argv: Sequence[str] | None) -> int:
    from mm_autoparallel.garbage import collection_is_rare
    from mm_autoparallel.streams import hold_descriptors, telling

    hold_descriptors()
    with telling(), collection_is_rare():
        return _run_verb(argv)


def _run_verb(argv: Sequence[str] | None) -> int:
    from mm_autoparallel.cli.arguments import check_written
    from mm_autoparallel.cli.parser import VERBS, build_parser, complete
    from mm_autoparallel.cli.spellings import translate_options
    from mm_autoparallel.errors import PlannerError
    from mm_autoparallel.streams import say

    try:
        parser = build_parser()
        complete(parser)
        arguments = parser.parse_args(translate_options(sys.argv[1:] if argv is None else argv))
        check_written(arguments)
        code: int = VERBS[arguments.verb].run(arguments)
    except SystemExit as end:  # --help, --version and mistyped options
        return int(end.code or 0)
    except PlannerError as error:
        say(str(error))
        return error.exit_code
    except BrokenPipeError:  # the reader of our output has left: nothing to say, and nobody to say it to
        return NO_READER
    return code


if __name__ == "__main__":
    start()
