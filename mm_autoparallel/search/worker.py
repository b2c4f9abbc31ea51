"""A process that places problems: reads one task a line from standard input, writes one answer a line to its output.

While it works, anything that arrives (the word to stop) or the end of its input (the parent is gone) stops it with the
best so far. It is started as a module, never imported by the parent's main script, so a script without a guard is safe.
"""

from __future__ import annotations

import os
import select
import signal

STOP = b"stop\n"


def main() -> None:
    """Serve until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides what it means
    answers = os.dup(1)
    os.dup2(2, 1)  # whatever else prints must not mix with the answers

    from mm_autoparallel.search.task import decode_task, encode, solve

    def should_stop() -> bool:
        return bool(select.select([0], [], [], 0.0)[0])

    pending = b""
    while chunk := os.read(0, 1 << 20):
        pending += chunk
        while b"\n" in pending:
            line, pending = pending.split(b"\n", 1)
            if line + b"\n" == STOP:
                continue  # for a task that had ended by then
            view = memoryview(encode(solve(decode_task(line), should_stop)))
            try:
                while view:
                    view = view[os.write(answers, view) :]
            except BrokenPipeError:  # the parent left without a word
                return


if __name__ == "__main__":
    main()
