"""What a job is and what it costs: nouns, readers of model files, blocks, operators, profiles, costs."""
