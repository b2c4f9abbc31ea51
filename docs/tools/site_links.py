"""What the site shows otherwise than the pages read in the repository; a hook of mkdocs.yml.

Links to files outside docs/ lead there where the repository is browsed; the site has no such files, so it shows their
paths. `{{ include FILE }}` becomes the text of that file of the repository.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_DOCS = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(((?:\.\./)+[^)\s#]+)(#[\w-]+)?\)")
_INCLUDE = re.compile(r"^\{\{ include (\S+) \}\}$", re.MULTILINE)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The text of `page` as the site shows it."""
    folder = (_DOCS / page.file.src_path).parent

    def follow(link: re.Match[str]) -> str:
        target = (folder / link[2]).resolve()
        if target.is_relative_to(_DOCS) and not target.is_relative_to(_DOCS / "tools"):
            return link[0]
        path = str(target.relative_to(_DOCS.parent))
        return f"`{path}`" if path.endswith(link[1].strip("`")) else f"{link[1]} (`{path}`)"

    included = _INCLUDE.sub(lambda found: (_DOCS.parent / found[1]).read_text(encoding="utf-8"), markdown)
    return _LINK.sub(follow, included)
