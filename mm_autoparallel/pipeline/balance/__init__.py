"""Samples dealt over replicas and micro-batches: packed by loads of encoder and decoder, ordered by the simulator."""
