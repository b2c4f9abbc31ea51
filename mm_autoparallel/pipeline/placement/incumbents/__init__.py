"""Good placements fast: balanced starts, annealing, moves, repair."""
