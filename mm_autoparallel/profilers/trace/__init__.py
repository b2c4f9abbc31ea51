"""The user's real model at full width without a device: what it keeps, what it runs, what it sends."""
