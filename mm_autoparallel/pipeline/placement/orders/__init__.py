"""Placement and order together: which layers a stage holds, and when it runs their forwards and split backwards."""
