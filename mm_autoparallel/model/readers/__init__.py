"""Model files and flags, read into a job's model: our own form, Megatron's flags, and what frameworks register."""
