"""Encoders beside a decoder's pipeline: their passes as tasks, words that say what every device runs, and the play."""
