"""One HTML file of a Report: the built page, and the document and its block of bytes, packed, inside it.

The file asks for nothing: its policy (Content-Security-Policy) allows the one script and the one style in it by their
hashes. Names and texts are data that the script writes as text, never as markup.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from importlib.resources import files

from mm_autoparallel.records import Noun
from mm_autoparallel.reports.html import text
from mm_autoparallel.reports.page.report import Report

_NEEDS_SCRIPT = "This report draws itself with JavaScript, which is off in this browser: allow it for this file."
_LEVEL = 6
"""Of gzip: the highest takes three times as long for a hundredth less."""


def pack_report(report: Noun, block: bytes) -> bytes:
    """A Report, or what holds one: the document's length in 4 bytes (little-endian), the document (JSON, padded to a
    multiple of 4), the block."""
    document = json.dumps(report.model_dump(mode="json"), separators=(",", ":"), allow_nan=False).encode()
    document += b" " * (-len(document) % 4)
    return len(document).to_bytes(4, "little") + document + block


def render_page(report: Report, block: bytes) -> str:
    """The whole file; the same report gives the same bytes."""
    folder = files("mm_autoparallel.reports.page") / "web"
    script, style = (folder / "page.js").read_text("utf-8"), (folder / "page.css").read_text("utf-8")
    packed = base64.b64encode(gzip.compress(pack_report(report, block), _LEVEL, mtime=0)).decode()
    policy = f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; base-uri 'none'"
    title = text(f"{report.job.name}: {report.plans[0].strategy}")
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title}</title>",
            f"<style>{style}</style></head>",
            f'<body><div id="root"></div><noscript>{_NEEDS_SCRIPT}</noscript>',
            f'<script type="text/plain" id="report">{packed}</script>',
            f'<script type="module">{script}</script>',
            "</body></html>",
            "",
        ]
    )


def _hash(source: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"
