"""The CP-SAT model and the cuts of critical paths that it is given."""
