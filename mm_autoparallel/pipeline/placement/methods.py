"""The methods of `place`, in the order in which a round tries them: which problems each can work on, and its work.

A method that proves raises the bound; the others look for placements, or say that there is none. What a method began it
goes on with in the next round. Leaving one out of the table leaves it out of the call.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mm_autoparallel.pipeline.placement.cuts.path_cuts import stage_cuts
from mm_autoparallel.pipeline.placement.incumbents.anneal import NOTHING_FITS
from mm_autoparallel.pipeline.placement.incumbents.balanced import balanced_starts
from mm_autoparallel.pipeline.placement.infeasible import least_overflow
from mm_autoparallel.pipeline.placement.paths.branch_and_bound import BranchAndBound
from mm_autoparallel.pipeline.placement.patterns.layout_patterns import list_mixed_patterns, list_small_patterns
from mm_autoparallel.pipeline.placement.patterns.mode_choices import TooManyPatterns
from mm_autoparallel.pipeline.placement.patterns.stage_patterns import StagePatterns, list_patterns, load_limits
from mm_autoparallel.pipeline.placement.patterns.state_graph import Layers, build_layers
from mm_autoparallel.pipeline.placement.patterns.tree import PatternTree
from mm_autoparallel.pipeline.placement.relaxation.duals import Proof
from mm_autoparallel.pipeline.placement.result import OPTIMAL_GAP_FRACTION, infeasible_result
from mm_autoparallel.pipeline.placement.run import MIXTURES, REBUILD_FRACTION, SPLIT_TASKS, THINNED, TREE, Run, Work
from mm_autoparallel.pipeline.placement.segments import Segments

Floats = NDArray[np.float64]

#: Fractions of the best step below which nothing is shown to be, in turn; the last one is proof enough. Each begins
#: anew, with the mixtures of those before, and takes longer.
BOUND_FRACTIONS = (0.9, 0.93, 0.95, 0.97, 0.98, 0.99, 0.994, 0.997, 0.9985, 0.9995, 1.0 - 0.5 * OPTIMAL_GAP_FRACTION)
#: Those without light blocks: what is left out of patterns lets lower levels be closer.
THINNED_FRACTIONS = (0.9, 0.93, 0.95, 0.96, 0.97, 0.98, 0.985, 0.99, 0.994, 0.997, 0.9985, 1.0)
#: Of one chunk, the most stages whose paths are mixed before CP-SAT cuts. Measured: 16 stages take half as long as by
#: cuts alone, and 64 no less.
MOST_MIXED_STAGES = 32
#: The linear program's share of its work where mixtures work without light blocks, and layers have one mode (assumed).
BESIDE_THINNED_FRACTION = 0.1
#: Tasks of the first look where others found the step that is to be beaten: some tenths of a second (assumed).
FIRST_TASKS = 50_000_000
#: The mixtures begin again, at a lower level, once theirs lies this far above the one that the best step asks for.
STALE_FRACTION = 5e-4
#: Of what lies between bound and best step: so much below the best, a second search beside the mixtures looks for
#: better placements. On p8_v4_m240_n96, from 8405.142, it so found 8389.038 in 5 CPU s; below 0.9995 of the best step
#: 8392.311 in 4 CPU s and nothing better in 9 more, below 0.9998 nothing in 7.
DIVE_GAP_FRACTION = 0.25
#: And at least so much of the best step below it: what gains less is not worth a second thread (assumed).
LEAST_DIVE_FRACTION = 1e-3


class Method(NamedTuple):
    """name. proof: what shows its bounds; `none` of one that looks for placements. able: whether it can work on a run
    as it stands. advance: the work of one round; raises TooManyPatterns where a stage could hold too much to be listed.
    """

    name: str
    proof: Proof
    able: Callable[[Run], bool]
    advance: Callable[[Run, Work], None]


# ----------------------------------------------------------------------------------------------------- good placements


def _start_balanced(run: Run, _: Work) -> None:
    """Placements of least work for each load that the slowest stage may have."""
    balanced_starts(run.segments, run.full, run.offer, run.should_stop)


def _anneal(run: Run, work: Work) -> None:
    """One annealing run: on from the best placement with one chunk, where the starts are good; afresh, and one in each
    thread with a seed of its own, with more.
    """
    num_moves = min(work.moves * run.segments.problem.num_virtual_stages, work.move_tasks // run.short.num_tasks)
    annealers = run.annealers
    if not run.has_chunks:
        annealers = annealers[:1]
        if run.best is not None:
            annealers[0].adopt(run.best, run.upper_ms)
        annealers[0].run(num_moves, False, run.should_stop)
    else:
        with ThreadPoolExecutor(len(annealers)) as threads:
            for started in [threads.submit(a.run, num_moves, True, run.should_stop) for a in annealers]:
                started.result()
    for annealer in annealers:
        if annealer.best_ms < min(run.upper_ms, NOTHING_FITS):
            run.offer(run.segments.placement(*annealer.best_boundaries()))


def _fit(run: Run, _: Work) -> None:
    """Nothing that fits was found: the placement that exceeds the limits least, or the proof that all exceed them."""
    overflow = least_overflow(run.segments, run.should_stop, run.left_s)
    if overflow.reason and overflow.proven:
        run.infeasible = infeasible_result(overflow.reason, overflow.overflow_bytes)
    elif overflow.placement is not None:
        run.offer(overflow.placement)
    run.ended = run.infeasible is not None or overflow.placement is None


def _fit_mixes(run: Run, _: Work) -> None:
    """Layouts: no mixes within the limits were found for a moderate load; look for them whatever their load."""
    segments = run.segments
    patterns = []
    for stage in range(segments.problem.num_stages):
        if run.should_stop():
            return
        patterns.append(list_small_patterns(segments, run.full, stage))
    built = build_layers(segments, patterns)
    if built is None:
        run.infeasible = infeasible_result("memory: no mix of layouts and modes keeps every stage within its limit")
        run.ended = True
        return
    layers, patterns = built
    run.offer_patterns(_any_path(layers, patterns), np.inf)
    run.ended = not run.has_step  # what fits by rounding alone


def _any_path(layers: Layers, patterns: list[StagePatterns]) -> list[tuple[StagePatterns, int]]:
    """The fastest pattern of each stage along one way from nothing to the whole chain."""
    chosen, target = [], int(layers.state_offset[len(patterns)])
    for stage in range(len(patterns) - 1, -1, -1):
        edge = int(layers.into[target])
        group = int(layers.edge_group[edge])
        first, end = int(layers.group_begin[group]), int(layers.group_begin[group + 1])
        best = first + int(np.argmin(layers.times_ms[first:end, :2].sum(axis=1)))
        chosen.append((patterns[stage], best - sum(len(p) for p in patterns[:stage])))
        target = int(layers.edge_from[edge])
    return chosen[::-1]


def _polish(run: Run, work: Work) -> None:
    """The tree alone did not settle it: search those of placements with boundaries near the best one's."""
    for radius in (0, 1):
        if run.best is None or run.should_stop():
            return
        boundaries = np.array(run.segments.boundaries(run.best)[0])
        near = replace(
            run.segments,
            first=np.maximum(run.segments.first, boundaries - radius),
            last=np.minimum(run.segments.last, boundaries + radius),
        )
        with suppress(TooManyPatterns):
            _grow(run, _plant(run, near, run.upper_ms, run.gap_fraction), work.tree_tasks // 4)


# -------------------------------------------------------------------------------------------------------------- bounds


def _relax(run: Run, work: Work) -> None:
    """Raise the bound by parts of layers, in so many iterations for each virtual stage and segment."""
    from mm_autoparallel.pipeline.placement.relaxation.linear_program import Unrelaxable
    from mm_autoparallel.pipeline.placement.relaxation.tree import FractionalTree

    with suppress(Unrelaxable):
        ceiling_ms = run.most_fraction * run.upper_ms
        tree = run.fractions = run.fractions or FractionalTree(run.segments.problem, ceiling_ms)
        size = run.segments.problem.num_virtual_stages * run.segments.num_segments
        num_iterations = int(
            work.iterations * (BESIDE_THINNED_FRACTION if run.segments.is_plain and run.can_thin else 1.0) * size
        )
        if run.best is None:  # a cutoff alone, that others reached: a bound below it is of little use
            tree.advance(ceiling_ms, ceiling_ms, num_iterations, run.should_stop)
        else:
            tree.raise_bound(ceiling_ms, num_iterations, run.should_stop)
        run.raise_bound(tree.lower_bound_ms, "prices")


def _search_tree(run: Run, work: Work) -> None:
    """Go on with the pattern tree; with a new one, of fewer patterns, where the best step has fallen."""
    if run.tree is None or run.upper_ms < run.tree_began_ms * REBUILD_FRACTION:
        run.tree, run.tree_began_ms = None, run.upper_ms
        run.tree = _plant(run, run.segments, run.upper_ms, run.gap_fraction)
    _grow(run, run.tree, work.tree_tasks)
    run.num_bounds = run.tree.num_nodes
    run.raise_bound(run.tree.lower_bound_ms, "tree")


def _plant(run: Run, segments: Segments, upper_ms: float, gap_fraction: float) -> PatternTree:
    """A tree over everything in `segments` that a step below upper_ms can use; it may end that close to it.

    Raises TooManyPatterns.
    """
    patterns = _list_below(run, segments, upper_ms)
    return PatternTree(segments, patterns, run.short, run.full, upper_ms, gap_fraction, run.should_stop)


def _list_below(run: Run, segments: Segments, upper_ms: float) -> list[StagePatterns]:
    """Of each stage, everything in `segments` that a step below upper_ms can use. Raises TooManyPatterns."""
    if segments.has_layouts:
        if run.mixed is None or run.mixed_ms < upper_ms:
            run.mixed = list_mixed_patterns(segments, run.full, upper_ms, run.should_stop)
            run.mixed_ms = upper_ms
        return run.mixed
    problem, patterns = segments.problem, []
    for stage in range(problem.num_stages):
        if run.should_stop():
            raise TooManyPatterns
        patterns.append(list_patterns(segments, run.full, stage, *load_limits(problem, segments, stage, upper_ms)))
    return patterns


def _grow(run: Run, tree: PatternTree, num_tasks: int) -> None:
    """Advance the tree by about num_tasks simulated tasks."""
    some = max(50, 20_000_000 // tree.tasks_per_bound)
    stop_at = tree.num_nodes + num_tasks // tree.tasks_per_bound
    while not tree.exhausted and tree.num_nodes < stop_at and not run.should_stop():
        tree.advance(some, run.upper_ms)
        if tree.best is not None and tree.best_ms < run.upper_ms:
            run.offer_patterns(tree.best, tree.best_ms)


def _next_level(run: Run, fractions: tuple[float, ...]) -> float:
    """The least fraction of the best step that the bound is still below, in ms."""
    levels = (min(fraction, run.most_fraction) * run.upper_ms for fraction in fractions)
    return next(level for level in levels if level > run.lower_ms * (1.0 + 1e-9))


def _mix(run: Run, work: Work) -> None:
    """Prove that nothing is below some fraction of the best step, then a larger one, for about work.split_tasks.

    A search that need only refute much better placements has few patterns; what it refutes is a bound. One that is not
    done goes on in the next round. From the second round on another one beside it looks for better placements.
    """
    num_tasks = work.split_tasks
    while num_tasks > 0 and not run.done and not run.should_stop():
        level_ms = _next_level(run, BOUND_FRACTIONS)
        splits, run.splits = run.splits, None  # what holds placements that fit by rounding only is not gone on with
        if splits is None or splits.target_ms > level_ms * (1.0 + STALE_FRACTION):
            tree = _plant(run, run.segments, level_ms, 0.0)
            if tree.layers is None:
                run.raise_bound(tree.lower_bound_ms, "tree")
                continue
            splits = BranchAndBound(
                run.segments.problem, tree.layers, tree.patterns, run.full, level_ms, mixtures=run.mixture_count
            )
        splits.target_ms = min(splits.target_ms, level_ms)
        before, some = splits.num_tasks, min(num_tasks, SPLIT_TASKS)
        dive, run.dive = run.dive, None
        with ThreadPoolExecutor(1) as threads:
            dive_ms = run.upper_ms - DIVE_GAP_FRACTION * (run.upper_ms - run.lower_ms)
            is_worthwhile = level_ms < dive_ms < run.upper_ms * (1.0 - LEAST_DIVE_FRACTION)
            dives = run.dives and run.round_number > 0 and is_worthwhile
            other = threads.submit(_dive, run, dive, dive_ms, some, run.mixture_count) if dives else None
            splits.advance(some, run.should_stop)
            dive = other.result() if other is not None else None
        run.mixture_count = splits.mixtures
        num_tasks -= splits.num_tasks - before
        for each in filter(None, (splits, dive)):
            if each.best is not None and each.best_ms < run.upper_ms:
                run.offer_patterns(each.best, each.best_ms)
            if each.exhausted:
                run.raise_bound(each.lower_bound_ms, "mixtures")
        run.splits, run.dive = (None if each is None or each.exhausted else each for each in (splits, dive))


def _mix_thinned(run: Run, work: Work) -> None:
    """The same without light blocks, where with them a stage could hold too much: up to a part that mixtures do not
    refute, or the best step."""
    num_tasks = work.split_tasks
    while run.light is not None and num_tasks > 0 and not run.done and not run.should_stop():
        level_ms = _next_level(run, THINNED_FRACTIONS)
        splits = run.thinned
        if splits is None or splits.target_ms > level_ms * (1.0 + STALE_FRACTION):
            segments, spread = run.light
            linked = build_layers(segments, _list_below(run, segments, level_ms))
            if linked is None:
                run.raise_bound(level_ms, "mixtures")
                continue
            splits = BranchAndBound(
                segments.problem, *linked, run.full, level_ms, spread=spread, mixtures=run.mixture_count
            )
        splits.target_ms = min(splits.target_ms, level_ms)
        before = splits.num_tasks
        splits.advance(min(num_tasks, SPLIT_TASKS), run.should_stop)
        run.mixture_count = splits.mixtures
        num_tasks -= splits.num_tasks - before
        run.thinned = None if splits.exhausted else splits
        if splits.exhausted:
            run.raise_bound(splits.lower_bound_ms, "mixtures")
            if splits.lower_bound_ms < splits.target_ms:
                raise TooManyPatterns  # mixtures say no more of what is left


def _look_first(run: Run, work: Work) -> None:
    """The same for a while, before anything is looked for: what is refuted below the best of others needs no search."""
    _mix_thinned(run, work._replace(split_tasks=FIRST_TASKS))


def _dive(
    run: Run, dive: BranchAndBound | None, target_ms: float, num_tasks: int, mixtures: Floats | None
) -> BranchAndBound | None:
    """The search beside the mixtures, or a new one that begins with some, after so many tasks more; None where stages
    could hold too much."""
    if dive is None:
        try:
            tree = _plant(run, run.segments, target_ms, 0.0)
        except TooManyPatterns:
            tree = None
        if tree is None or tree.layers is None:
            run.dives = False
            return None
        dive = BranchAndBound(
            run.segments.problem, tree.layers, tree.patterns, run.full, target_ms, heavy_first=True, mixtures=mixtures
        )
    dive.target_ms = min(dive.target_ms, target_ms)
    dive.advance(num_tasks, run.should_stop)
    return dive


def _cut(run: Run, work: Work) -> None:
    """Let CP-SAT with path cuts work for some deterministic time."""
    from mm_autoparallel.pipeline.placement.cuts import solve as cpsat

    result = cpsat.solve_with_cuts(
        run.segments,
        run.upper_ms,
        run.cuts or stage_cuts(run.segments.problem),
        work.solver_s,
        run.gap_fraction,
        run.should_stop,
        run.left_s,
        run.offer,
    )
    run.cuts = result.cuts
    run.num_cuts = len(result.cuts)
    run.raise_bound(result.lower_bound_ms, "cuts")


METHODS = (
    Method(
        "balanced starts",
        "none",
        lambda run: run.round_number == 0 and run.is_whole and run.is_equal and not run.has_chunks,
        _start_balanced,
    ),
    # most of the bound at little cost, where layers have several modes or nobody mixes paths
    Method(
        "linear program",
        "prices",
        lambda run: run.is_whole and run.has_chunks and run.has_step and not (run.segments.is_plain and run.mixes),
        _relax,
    ),
    Method(
        "first look",
        "mixtures",
        lambda run: run.round_number == 0 and run.best is None and run.has_step and run.can_thin and not run.done,
        _look_first,
    ),
    Method("annealing", "none", lambda run: not run.segments.has_layouts, _anneal),
    Method("least overflow", "none", lambda run: not run.has_step and not run.segments.has_layouts, _fit),
    Method("mixes that fit", "none", lambda run: not run.has_step and run.segments.has_layouts, _fit_mixes),
    # most of the bound where light blocks multiply what stages could hold
    Method(THINNED, "mixtures", lambda run: run.has_step and run.can_thin and not run.done, _mix_thinned),
    Method(
        "polish",
        "none",
        lambda run: run.has_chunks and run.has_step and run.can_list(TREE) and run.tree is not None,
        _polish,
    ),
    # settles most chunked and all moderate problems
    Method(TREE, "tree", lambda run: run.has_step and run.can_list(TREE), _search_tree),
    # settles what the tree leaves open, or leaves a small gap
    Method(
        MIXTURES,
        "mixtures",
        lambda run: (
            (run.has_chunks or run.segments.has_layouts or run.segments.problem.num_stages <= MOST_MIXED_STAGES)
            and run.has_step
            and run.can_list(MIXTURES)
            and not run.done
        ),
        _mix,
    ),
    # settles the longest pipelines of one chunk, and whatever the others cannot list: parted backwards, given orders
    Method(
        "path cuts",
        "cuts",
        lambda run: run.has_step and not (run.mixes or run.can_thin) and not run.done and not run.segments.has_layouts,
        _cut,
    ),
)
"""All methods, in the order of a round."""
