"""Reads profiles in the form of Galvatron's, and refuses them: they are of single layers and collectives, not of steps.

Each row is one figure of a profile (`kind`: layer compute, memory, collective). A step of training is what is predicted
here, so a row is refused with what it is of, and where its device is not stated, with that.
"""

from __future__ import annotations

from mm_autoparallel.measurements.case import MeasuredCase
from mm_autoparallel.measurements.devices import find_device
from mm_autoparallel.measurements.table import Row, Unrepresentable

REQUIRED = "kind key value unit model gpu source"

_KINDS = {
    "layer compute": "the time of some layers of a model",
    "memory": "the memory of some layers of a model under one strategy",
    "collective": "the time or bandwidth of a collective",
}
_UNITS = ("ms", "s", "MB", "GB", "GB/s", "")


def read_row(row: Row) -> MeasuredCase:
    """Never a case: raises TableError where the row is malformed, else Unrepresentable with what it is of."""
    row.number("value")
    if row.cells["unit"] not in _UNITS:
        raise row.error(
            "unit", f"{row.cells['unit']!r} is no unit known here; known are {', '.join(filter(None, _UNITS))}"
        )
    kind = row.text("kind")
    if kind not in _KINDS:
        raise Unrepresentable(f"the kind {kind!r} is not understood; known are {', '.join(_KINDS)}")
    if row.text("gpu").startswith("not stated"):
        raise Unrepresentable(f"its device is not stated, and it is {_KINDS[kind]}, not a step of training")
    find_device(row.text("gpu"))
    raise Unrepresentable(f"it is {_KINDS[kind]}, not a step of training")
