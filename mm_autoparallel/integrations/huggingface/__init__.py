"""Hugging Face: config.json read as a model, described here or taken apart, and what its processor's file says."""
