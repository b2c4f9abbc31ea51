"""MindFormers: its pretrain YAML read and written back, and what its users' programs leave beside it."""
