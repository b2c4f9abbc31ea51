"""Layers and the order of every stage found together where a stage holds two chunks, of a V there and back."""
