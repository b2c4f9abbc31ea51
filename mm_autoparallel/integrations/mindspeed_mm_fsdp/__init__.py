"""MindSpeed-MM's FSDP trainer: its launch script and its one YAML, read into a job and written with a plan."""
