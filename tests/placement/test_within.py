"""Blocks that keep to stages: `place` against brute force, certificates, and what is refused."""

from __future__ import annotations
