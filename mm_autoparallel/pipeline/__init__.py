"""Numbers only: a pipeline's problem, schedules, simulator, placement and proofs. No model, no job, no framework."""
