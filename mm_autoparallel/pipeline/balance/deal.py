"""Deal: samples of a global batch over replicas and micro-batches, so that the step of the plan's pipeline is short.

Samples are packed into equally many bins for every replica under a cap of tokens, the packing is refined on the vector
of encoder and decoder (their sum would hide which stage waits), bins go to replicas and into a hill, and then the
slowest replica is changed as the simulator says. Effort is counted, never timed, and chance has a fixed seed, so that
every process finds the same dealing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mm_autoparallel.pipeline.balance.improving import improve
from mm_autoparallel.pipeline.balance.law import Law
from mm_autoparallel.pipeline.balance.ordering import Floats, Ints, spread
from mm_autoparallel.pipeline.balance.packing import Load, fill_bins, pack, refine

CHECKS = 100_000
"""Changes that refining a packing looks at. Assumed: 2 ms; four times as many were no better in the end."""

EFFORT = 1_500_000
"""Tasks that are played, and what else `improve` counts in such. Assumed: 7 ms on an idle core."""

PLAY_EFFORT = 160
"""What a change costs beside the play, in tasks; 100 and as many as a micro-batch has samples, where those are more."""

HEAT_FRACTION, COOL_PLAYS = 0.02, 400
"""The margin of `improve` where there are COOL_PLAYS plays or more for each bin; less where there are fewer. Assumed,
of a trial of margins from 0 to 0.1: of 24 samples the best, and larger batches end worse with a margin that stays."""


@dataclass(frozen=True)
class Bounds:
    """Into what samples are dealt: replicas, micro-batches of each, and tokens of a micro-batch at most."""

    num_replicas: int
    num_microbatches: int
    token_cap: int

    @property
    def num_bins(self) -> int:
        return self.num_replicas * self.num_microbatches


def deal(law: Law, ms: Floats, tokens: Ints, bounds: Bounds) -> Ints | None:
    """Of each sample the bin it goes to, r · M + m of replica r's micro-batch m; None where no packing was found.

    ms: [n, 2], load of encoder and decoder; tokens: [n]; n is num_bins or more, and no bin stays empty. Raises JobError
    or PlanError where the schedule has no order for so many micro-batches.
    """
    tasks = law.tasks(bounds.num_microbatches)
    stage_shares = _undominated(law.of_stage)
    load = Load(ms, tokens, bounds.token_cap, stage_shares)
    bin_of = _pack(load, bounds.num_bins)
    if bin_of is None:
        return None
    bins = fill_bins(bin_of, load, bounds.num_bins)
    refine(bins, load, CHECKS)
    heaviest_first = np.argsort(-_busiest(bins.ms, stage_shares), kind="stable")
    dealt: Ints = spread(heaviest_first, bins.ms, stage_shares, bounds.num_replicas)[bins.of]
    play_effort = len(tasks.stage) + max(PLAY_EFFORT, 100 + len(tokens) // bounds.num_bins)
    heat_fraction = HEAT_FRACTION * min(1.0, EFFORT / play_effort / (COOL_PLAYS * bounds.num_bins))
    improve(dealt, load, tasks, bounds.num_replicas, EFFORT, play_effort, heat_fraction)
    return dealt


def _undominated(of_stage: Floats) -> Floats:
    """Load.stage_shares: stages that may be the busiest, and the largest of each column."""
    rows = np.unique(of_stage, axis=0)
    kept = [row for row in rows if not np.any(np.all(rows >= row, axis=1) & np.any(rows > row, axis=1))]
    return np.vstack([*kept, of_stage.max(axis=0)])


def _busiest(ms: Floats, stage_shares: Floats) -> Floats:
    """[n] what the busiest stage takes of each load [n, 2]."""
    of_stage = ms[:, :1] * stage_shares[:-1, 0] + ms[:, 1:] * stage_shares[:-1, 1]
    most: Floats = of_stage.max(axis=1)
    return most


def _pack(load: Load, num_bins: int) -> Ints | None:
    """Longest first by load; where that leaves no room, by tokens into the least full bin, then into the fullest."""
    of_tokens = load._replace(ms=np.column_stack([load.tokens, np.zeros(len(load.tokens))]).astype(np.float64))
    of_tokens = of_tokens._replace(stage_shares=np.ones((2, 2)))
    for one, fills_up in ((load, False), (of_tokens, False), (of_tokens, True)):
        order = np.argsort(-_busiest(one.ms, one.stage_shares), kind="stable")
        bin_of: Ints = pack(order, one, num_bins, fills_up)
        if bin_of.min() >= 0:
            return bin_of
    return None
