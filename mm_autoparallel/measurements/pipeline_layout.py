"""Pipeline layouts as Megatron-LM writes them (--pipeline-model-parallel-layout): chunks with `|` between them.

E embedding, t layer, m module that predicts one token more, L loss; `(t*4|)*14` repeats.
"""

from __future__ import annotations

import re

_GROUP, _LETTER = re.compile(r"\(([^()]*)\)\*(\d{1,3})"), re.compile(r"([Etm])\*(\d{1,3})")


def read_layout(text: str) -> tuple[int, ...] | None:
    """Layers of each chunk: `Et*2|(t*2|)*3tmL` makes 2, 2, 2, 2, 1. None where it is no layout."""
    for pattern in (_LETTER, _GROUP):
        text = pattern.sub(lambda found: found[1] * int(found[2]), text)
    if not re.fullmatch(r"E[t|]*m*L", text):
        return None
    return tuple(chunk.count("t") for chunk in text.split("|"))
