"""Writes what no person should write into the documentation.

    python docs/tools/renew.py            the generated parts of every page
    python docs/tools/renew.py --check    exit 1 where one is stale, and name it
    python docs/tools/renew.py --outputs  run the commands whose output a page shows, and write what they print
    python docs/tools/renew.py PAGE...    these pages alone

A generated part stands between `<!-- generated: NAME -->` and `<!-- end of NAME -->`; doc_parts.py makes it.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path

from doc_blocks import NIGHTLY, REPOSITORY, RUN, list_outputs, list_pages, run_page, without_times
from doc_parts import PARTS

_PART = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end of \2 -->)", re.DOTALL)


def renew(text: str) -> str:
    """`text` of a page with its generated parts made anew. Raises KeyError at a part that nobody makes."""
    return _PART.sub(lambda part: f"{part[1]}\n{PARTS[part[2]]()}\n\n{part[3]}", text)


def renew_outputs(page: Path) -> str:
    """The text of `page` with the outputs of its commands as they are now; runs these, one after the other."""
    lines = page.read_text(encoding="utf-8").splitlines()
    with tempfile.TemporaryDirectory() as folder:
        outputs = list(run_page(page, (RUN, NIGHTLY), Path(folder)))
    for output, now in reversed(outputs):
        if without_times(now) != without_times(output.text):
            lines[output.line : output.line + len(output.text.splitlines())] = now.splitlines()
    return "\n".join(lines) + "\n"


def main() -> int:
    """Renew, or say what is stale; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a generated part is stale")
    parser.add_argument("--outputs", action="store_true", help="run commands and renew what they printed, too")
    parser.add_argument("pages", type=Path, nargs="*", metavar="PAGE", help="these alone (default: all)")
    arguments = parser.parse_args()
    stale = 0
    for page in [page.resolve() for page in arguments.pages] or list_pages():
        old = page.read_text(encoding="utf-8")
        new = renew(old)
        if arguments.outputs and not arguments.check and list_outputs(page):
            page.write_text(new, encoding="utf-8")
            new = renew_outputs(page)
        if new != old:
            stale += 1
            print(f"{page.relative_to(REPOSITORY)}: {'stale' if arguments.check else 'renewed'}")
            if not arguments.check:
                page.write_text(new, encoding="utf-8")
    return 1 if stale and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
