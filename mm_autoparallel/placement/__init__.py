"""Placement: layers and recompute of every stage, with a proof. `place` is the way in."""

from mm_autoparallel.placement.place import PlacementResult, compile_kernels, place

__all__ = ["PlacementResult", "compile_kernels", "place"]
