"""Profilers: split a live model into blocks, measure them and the network on the devices at hand. Needs torch."""

import numpy as np  # noqa: F401  (before torch, whose own import of it loses Ctrl-C)
