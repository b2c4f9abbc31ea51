"""Single operators of live models: the form of a call, its time inside its block, and micro-benchmarks of forms."""
