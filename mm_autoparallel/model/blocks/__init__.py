"""The model as a chain of blocks: what each computes, on how many tokens, with how many parameters."""
