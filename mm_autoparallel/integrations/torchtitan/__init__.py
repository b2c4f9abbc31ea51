"""torchtitan: configurations of 0.2 (TOML) and 0.3 (Python), read and written."""
