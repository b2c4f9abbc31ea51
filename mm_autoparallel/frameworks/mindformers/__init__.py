"""MindFormers: its pretrain YAML read, and offset and recompute written back into it."""
