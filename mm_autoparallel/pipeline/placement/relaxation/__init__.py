"""The linear program over parts of layers, its tree, and its duals."""
