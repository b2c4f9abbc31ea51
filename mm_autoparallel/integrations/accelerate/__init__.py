"""Hugging Face accelerate 1.x: its configuration file, read and written."""
