"""Placement: layers and recompute of every stage, with a proof. `place` is the way in."""

from mm_autoparallel.placement.place import PlacementResult, place

__all__ = ["PlacementResult", "place"]
