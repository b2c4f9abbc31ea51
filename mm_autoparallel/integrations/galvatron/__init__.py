"""Galvatron: profiles and configurations that its users have, its cost model, and an exact search of its space."""
