"""The model of a log that tells no sizes: by a name that tables know, or from a file of a person."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mm_autoparallel.errors import PlannerError
from mm_autoparallel.measurements.logs.facts import Facts
from mm_autoparallel.measurements.logs.log import Log
from mm_autoparallel.measurements.models import find_model
from mm_autoparallel.measurements.table import Unrepresentable
from mm_autoparallel.model.readers.model_file import read_model


def read_named_model(log: Log, facts: Facts, name: str | None) -> Mapping[str, Any]:
    """What --fact model names, else the model that tables call `name`. Raises TableError where there is neither."""
    given = facts.optional(log, "model")
    if given is not None and Path(given).suffix == ".json":
        try:
            return read_model(Path(given)).model_dump(mode="json")
        except PlannerError as failure:
            raise log.error(f"--fact model={given}: {failure}") from None
    try:
        return find_model(given or name or "", None)
    except Unrepresentable as reason:
        told = f"it names the model {name}, " if name else "it does not tell its model, "
        why = f"--fact model={given}: {reason}" if given else f"{told}whose sizes are not known"
        raise log.error(f"{why}; give --fact model=NAME or the path of a model file (.json)") from None
