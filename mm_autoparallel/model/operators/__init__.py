"""The analytic model of operators: what a layer computes, moves and keeps, one file a kind."""
