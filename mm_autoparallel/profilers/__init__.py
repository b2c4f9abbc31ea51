"""Profilers: split a live model into blocks, measure them and the network on the devices at hand. Needs torch."""
