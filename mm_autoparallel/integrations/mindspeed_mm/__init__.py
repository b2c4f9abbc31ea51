"""MindSpeed-MM 2.x: a plan in its model.json and launch script, and on its live configuration objects."""
