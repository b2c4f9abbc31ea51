"""Units, and how a person reads them. Inside, time is `_ms` and memory is `_bytes`, always."""

from __future__ import annotations

KIB = 1024
MIB = 1024**2
GIB = 1024**3
GB = 10**9


def format_bytes(value_bytes: float) -> str:
    """`69256347648` → `64.5 GiB`; binary units, for tables that people read."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(value_bytes) >= unit:
            return f"{value_bytes / unit:.1f} {name}"
    return f"{value_bytes:.0f} B"


def format_ms(value_ms: float) -> str:
    """`8992.04` → `8.99 s`, `12.3456` → `12.35 ms`."""
    if abs(value_ms) >= 1000:
        return f"{value_ms / 1000:.2f} s"
    return f"{value_ms:.2f} ms"


def format_percent(fraction: float) -> str:
    """`0.0312` → `3.1 %`; what rounds to nothing has no sign."""
    return f"{round(fraction * 100, 1) + 0.0:.1f} %"


def format_signed(value: float, digits: int) -> str:
    """`-12.5` of two digits → `-12.50`; what rounds to nothing has no minus."""
    return f"{round(value, digits) + 0.0:+.{digits}f}"


def describe_range(smallest: float, largest: float) -> str:
    """`a number from 1e-09 to 1e+12`: what a figure of a unit may be."""
    return f"a number from {smallest:g} to {largest:g}"
