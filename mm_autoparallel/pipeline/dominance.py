"""Dominance: what each field of a problem says of two that differ in it, declared beside the field's type.

Where every field of one problem is no better than another's, no placement of it can be better (pipeline/solve). A field
without a declaration is an error, so that none is compared by what its type happens to be.
"""

from __future__ import annotations

from dataclasses import fields
from enum import Enum
from functools import lru_cache
from typing import Any, get_type_hints


class Dominance(Enum):
    """What a field says.

    SAME: problems are compared only where it is equal; nested records are compared field by field.

    LESS, MORE: less, or more, is never worse. LESS_ON_HOST: less is never worse, and it decides something only where
    hosts have limits. FILL: it decides no placement, and a device's fill is counted from it, less of which is never
    worse.
    """

    SAME = "same"
    LESS = "less"
    MORE = "more"
    LESS_ON_HOST = "less on host"
    FILL = "fill"


@lru_cache
def declared(kind: type[Any]) -> dict[str, Dominance]:
    """Field → what is declared of it, in the order of the dataclass `kind`. Raises TypeError where nothing is."""
    hints = get_type_hints(kind, include_extras=True)
    found = {}
    for field in fields(kind):
        said = [each for each in getattr(hints[field.name], "__metadata__", ()) if isinstance(each, Dominance)]
        if len(said) != 1:
            raise TypeError(f"{kind.__name__}.{field.name} declares no Dominance; annotate its type with one")
        found[field.name] = said[0]
    return found
