"""Writes what no person should write into the documentation.

    python docs/tools/renew.py            the generated parts of every page
    python docs/tools/renew.py --check    exit 1 where one is stale, and name it
    python docs/tools/renew.py --outputs  run the commands whose output a page shows, and write what they print

A generated part stands between `<!-- generated: NAME -->` and `<!-- end of NAME -->`; doc_parts.py makes it.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path

from doc_blocks import REPOSITORY, excerpt, list_outputs, list_pages, run_block, without_times
from doc_parts import PARTS

_PART = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end of \2 -->)", re.DOTALL)


def renew(text: str) -> str:
    """`text` of a page with its generated parts made anew. Raises KeyError at a part that nobody makes."""
    return _PART.sub(lambda part: f"{part[1]}\n{PARTS[part[2]]()}\n\n{part[3]}", text)


def renew_outputs(page: Path, folder: Path) -> str:
    """The text of `page` with the outputs of its commands as they are now; runs these, one after the other."""
    lines = page.read_text(encoding="utf-8").splitlines()
    pairs = list_outputs(page)
    printed: dict[int, str] = {}
    for command, _ in pairs:
        if command.line not in printed:
            printed[command.line] = run_block(command, folder)
    for command, output in reversed(pairs):
        now = excerpt(printed[command.line], output.mark)
        if without_times(now) != without_times(output.text):
            lines[output.line : output.line + len(output.text.splitlines())] = now.splitlines()
    return "\n".join(lines) + "\n"


def main() -> int:
    """Renew, or say what is stale; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a generated part is stale")
    parser.add_argument("--outputs", action="store_true", help="run commands and renew what they printed, too")
    arguments = parser.parse_args()
    stale = 0
    for page in list_pages():
        old = page.read_text(encoding="utf-8")
        new = renew(old)
        if arguments.outputs and not arguments.check and list_outputs(page):
            page.write_text(new, encoding="utf-8")
            with tempfile.TemporaryDirectory() as folder:
                new = renew_outputs(page, Path(folder))
        if new != old:
            stale += 1
            print(f"{page.relative_to(REPOSITORY)}: {'stale' if arguments.check else 'renewed'}")
            if not arguments.check:
                page.write_text(new, encoding="utf-8")
    return 1 if stale and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
