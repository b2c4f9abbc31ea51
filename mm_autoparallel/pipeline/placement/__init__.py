"""Placement: layers and recompute of every stage, with a proof. `place` is the way in."""

from mm_autoparallel.pipeline.placement.compiling import compile_kernels
from mm_autoparallel.pipeline.placement.place import place
from mm_autoparallel.pipeline.placement.result import PlacementResult

__all__ = ["PlacementResult", "compile_kernels", "place"]
