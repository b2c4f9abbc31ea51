"""What can be told of the MindSpeed-MM checkout that a process will import, from its sources, which are not run.

Its package has no version of its own (pyproject.toml says 0.1 in every release), so features are looked for.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from mm_autoparallel.files import is_there, read_text

PACKAGE = "mindspeed_mm"
MINDSPEED = "mindspeed"
_VISION = Path("models/vision/vision_encoders/vision_transformer_block.py")
_CONTEXT = Path("features_manager/context_parallel/context_parallel_feature.py")
_PARTS = Path("utils/transformer_model_config.py")
_COUNTS_CHUNKS = re.compile(r"sum\(\s*self\.config\.pipeline_num_layers\[0\]\[:\s*pp_rank\]\s*\)")
"""How 26.1 counts the layers before a stage of chunk 0 where pipeline_num_layers holds a list for each chunk."""


def find_package(name: str = PACKAGE) -> Path | None:
    """The folder of the package that an import would take; None where there is none. Nothing is imported."""
    spec = importlib.util.find_spec(name)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return Path(folders[0]) if folders else None


def counts_chunks(package: Path | None) -> bool:
    """Whether the package at `package` counts layers before a stage of chunk 0 rightly, so that a tower with window
    attention may lie on several stages there (26.1 on). Where that cannot be told it is taken for an older one.
    """
    source = _read(package, _VISION)
    return source is not None and _COUNTS_CHUNKS.search(source) is not None


def tells_parts(package: Path | None) -> bool:
    """Whether the parts of a model are told what the command line says (2.2 on). In 2.0 and 2.1 model.json alone tells
    them. Where that cannot be told it is taken for a newer one.
    """
    source = _read(package, _PARTS)
    return source is None or "get_args" in source


def divides_any_attention(mindspeed: Path | None) -> bool:
    """Whether the MindSpeed at `mindspeed` divides heads for Ulysses whatever --transformer-impl says (up to 2.3).

    Newer ones do only with `local`, and else leave MindSpeed-MM's attention to each rank's own tokens, without a word.
    Where that cannot be told it is taken for a newer one.
    """
    source = _read(mindspeed, _CONTEXT)
    return source is not None and "transformer_impl" not in source


def _read(package: Path | None, file: Path) -> str | None:
    if package is None or not is_there(package / file):
        return None
    return read_text(package / file, "source", "Python file", max_bytes=1_000_000)
