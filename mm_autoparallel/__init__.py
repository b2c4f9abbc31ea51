"""mm_autoparallel plans the distributed training of large multimodal models.

A job (model, cluster, workload) goes in; a plan comes out: the parallel strategy, the layers each pipeline stage holds
and recomputes, the step it will take, and a bound that says how far from the best it can be. Nothing is imported here,
so that `import mm_autoparallel` costs nothing and needs neither torch nor a solver.
"""

__version__ = "0.1.0"
