"""Bounds over mixtures of critical paths, and branch and bound over them."""
