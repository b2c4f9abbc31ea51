"""MindSpeed-MM for the profilers: its own model, batches and forward step, through a checkout that is installed."""
