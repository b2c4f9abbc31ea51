"""OR-Tools' linear solvers (GLOP, SCIP), imported so that it never ends the process.

SWIG types of ortools 9.14 warn when they are made, and where warnings are errors the import crashes.
"""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from ortools.linear_solver import pywraplp

__all__ = ["pywraplp"]
