"""What one stage may hold, enumerated: intervals of layers, mode choices, stage patterns, the tree over them."""
