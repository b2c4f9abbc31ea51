"""Where the wings meet: plans and their evaluation, the search over all lawful strategies, and what explains it."""
