"""torch.distributed.pipelining: a plan, its schedule and the code that trains under them."""
