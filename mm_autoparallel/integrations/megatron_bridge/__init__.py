"""Megatron-Bridge: its recipes and overrides, and a plan as overrides of them."""
