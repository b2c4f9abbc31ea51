"""Values that options take, checked while the command line is read."""

from __future__ import annotations

import argparse
import math
import re

from mm_autoparallel.units import MIB

_LONGEST_S = 1e9
"""Thirty years; what waits for a time is told it in whole nanoseconds."""

_LARGEST_MB = 1e9
"""A petabyte. Assumed."""


def seconds(text: str) -> float:
    """A time limit: a number of seconds above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= _LONGEST_S:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0, at most {_LONGEST_S:g}")
    return value


def count(text: str) -> int:
    """A whole number of at least 1."""
    if not re.fullmatch("0*[1-9][0-9]{0,14}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1 and at most 15 digits")
    return int(text)


def megabytes(text: str) -> float:
    """Bytes of so many MB, as MindFormers counts them (2^20 bytes), from 0 on."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= _LARGEST_MB:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of MB from 0 to {_LARGEST_MB:g}")
    return value * MIB
