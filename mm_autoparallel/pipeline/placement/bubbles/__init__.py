"""Encoder work in the time a decoder's pipeline leaves: orders of both on their devices, with a bound on all others."""
