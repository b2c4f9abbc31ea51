"""Profilers: split a live model into blocks, measure them and the network on the devices at hand. Needs torch."""

import numpy as np  # noqa: F401  (before torch, whose own import of it loses Ctrl-C)

from mm_autoparallel.signals import interrupted_at_safe_points


def load_torch() -> None:
    """Import torch where it is not. Its machine code imports parts of it, and aborts where an interrupt comes through.
    Raises ModuleNotFoundError."""
    with interrupted_at_safe_points():
        import torch  # noqa: F401
