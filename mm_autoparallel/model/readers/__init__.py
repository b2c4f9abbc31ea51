"""Other people's model files and flags, read into a job's model."""
