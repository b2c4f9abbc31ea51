"""The result of a verb as one document on standard output; what is said on the way is reports/terminal.py's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def print_document(document: Mapping[str, Any]) -> None:
    """The one JSON document that `--json` promises on standard output."""
    from mm_autoparallel.plan import format_document

    print(format_document(document), end="")
