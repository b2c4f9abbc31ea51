"""What can be told of the MindSpeed-MM checkout that a process will import, from its sources, which are not run.

Its package has no version of its own (pyproject.toml says 0.1 in every release), so features are looked for.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from mm_autoparallel.files import is_there, read_text

PACKAGE = "mindspeed_mm"
_VISION = Path("models/vision/vision_encoders/vision_transformer_block.py")
_COUNTS_CHUNKS = re.compile(r"sum\(\s*self\.config\.pipeline_num_layers\[0\]\[:\s*pp_rank\]\s*\)")
"""How 26.1 counts the layers before a stage of chunk 0 where pipeline_num_layers holds a list for each chunk."""


def find_package() -> Path | None:
    """The folder of the package that an import would take; None where there is none. Nothing is imported."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return Path(folders[0]) if folders else None


def counts_chunks(package: Path | None) -> bool:
    """Whether the package at `package` counts layers before a stage of chunk 0 rightly, so that a tower with window
    attention may lie on several stages there (26.1 on). Where that cannot be told it is taken for an older one.
    """
    if package is None or not is_there(package / _VISION):
        return False
    return _COUNTS_CHUNKS.search(read_text(package / _VISION, "source", "Python file", max_bytes=1_000_000)) is not None
