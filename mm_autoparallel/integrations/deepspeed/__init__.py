"""DeepSpeed 0.19: its configuration, and layers that a pipeline or checkpoints take beside it."""
