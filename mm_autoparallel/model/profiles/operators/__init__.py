"""The operator base: times of single operators by shapes, types, attributes and device, in one SQLite file."""
