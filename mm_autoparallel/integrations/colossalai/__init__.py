"""Colossal-AI 0.5: the keywords of its HybridParallelPlugin, read and written."""
