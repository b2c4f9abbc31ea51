"""Pipelines of MindFormers YAMLs: the best layout of one, the ranking of several, their memory from sizes."""
