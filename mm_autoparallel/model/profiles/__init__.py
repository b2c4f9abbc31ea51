"""What one block costs: measured where a profile is given, analytic where none is."""
