"""How sure a plan is, and why it is this one: causes of a step, cost sources, its memory, why not another."""
