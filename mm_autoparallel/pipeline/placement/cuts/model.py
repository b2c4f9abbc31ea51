"""The CP-SAT master: the integer model of a placement, bounded below by paths through its schedule.

K virtual stages, R runs of equal segments (a segment is a block, or blocks that must stay together):

    before[k, r]      segments of run r in virtual stages 0 … k-1          (monotone in k; run r + 1 waits for run r)
    n[k, r]           = before[k + 1, r] - before[k, r]
    x[k, r, i, m]     blocks at position i of the run's segments in mode m; Σ_m x ≤ n (along a group modes only go up)
    memory[s, row]    Σ static n + Σ_chunk row · (activation n - saved x) + restored x + transient [r present] ≤ limit
    step[s]           Σ (static + step) n + min(step once [r present], Σ shard n) ≤ limit
    host[s, row]      Σ host static n + Σ_chunk row · moved x ≤ limit, where there is one
    cut(path)         T ≥ Σ_k (path forward · F_k + path backward · B_k) + path hops · H + tail of the path's last stage
                      and where backwards are parted path input · I_k + path weight · W_k, where some run in pairs path
                      pairs · max(F + (1 - overlap) · B, (1 - overlap) · F + B)

F, B, I, W, H are linear in n, x and in which run ends a chunk, but where blocks move bytes to the host: there path · F
is a variable at least path · compute and at least path · host link. Every cut is a path of the schedule's graph, so T
never exceeds the simulated step.

Integers are scaled so that T stays below 2^27 (ortools 9.15 answers OPTIMAL wrongly on sums beyond about 2^31) and are
rounded to the relaxing side: times and bytes held down, limits up. So every bound is valid, and a placement that slips
through the rounding of memory is cut off by itself (`forbid`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product

import numpy as np
from ortools.sat.python import cp_model

from mm_autoparallel.pipeline.passes import Counts, Way, block_ms, extra_ms
from mm_autoparallel.pipeline.placement.segments import Segments
from mm_autoparallel.pipeline.problem import Mode, Placement
from mm_autoparallel.pipeline.simulate.loads import hop_ms, microbatch_classes, never_fits
from mm_autoparallel.pipeline.simulate.step import CriticalPath, list_pairs, list_passes

#: The best step known, in scaled integers; sums over loads that a better step allows stay below 2^30.
STEP_UNITS = 2**27


@dataclass
class Master:
    """The growing integer model. in_mode: [K][R] the x of (i, m). step_unit_ms: ms of one unit of T.
    passes: see
    `_host_passes`; pairs: see `_paired`."""

    segments: Segments
    upper_ms: float
    model: cp_model.CpModel
    step: cp_model.IntVar
    before: list[list[cp_model.IntVar]]
    count: list[list[cp_model.IntVar]]
    in_mode: list[list[dict[tuple[int, int], cp_model.IntVar]]]
    reached: list[list[cp_model.IntVar | int]]
    step_unit_ms: float
    passes: dict[tuple[int, str, int, int], cp_model.IntVar] = field(default_factory=dict)
    pairs: dict[tuple[int, int], cp_model.IntVar] = field(default_factory=dict)
    num_cuts: int = 0

    def round_down(self, time_ms: float) -> int:
        """Units of a time; of one that no step below the best has, one more than those have."""
        return min(math.floor(time_ms / self.step_unit_ms), STEP_UNITS + 1)


def run_blocks(segments: Segments, run: int) -> list[int]:
    """Chain indices of the blocks in one segment of `run`."""
    segment = int(np.flatnonzero(segments.run == run)[0])
    return [int(e) for e in segments.flat[segments.start[segment] : segments.start[segment + 1]]]


def build_master(segments: Segments, upper_ms: float) -> Master:
    """The model without cuts; loads that alone reach `upper_ms` are left out of its domains."""
    problem, num_virtual = segments.problem, segments.problem.num_virtual_stages
    model = cp_model.CpModel()
    blocks = [run_blocks(segments, r) for r in range(len(segments.run_size))]
    before, reached = _add_boundaries(model, segments)
    count: list[list[cp_model.IntVar]] = []
    in_mode: list[list[dict[tuple[int, int], cp_model.IntVar]]] = []
    for k in range(num_virtual):
        held, chosen = _add_counts(model, segments, blocks, before[k : k + 2], problem.stage_of[k], upper_ms)
        _first_layers_first(model, segments, blocks, held, chosen)
        num_layers = sum(held[r] * sum(problem.chain[e].layer for e in members) for r, members in enumerate(blocks))
        model.add(num_layers >= 1)
        if problem.max_layers_per_chunk is not None:
            model.add(num_layers <= problem.max_layers_per_chunk)
        count.append(held)
        in_mode.append(chosen)
    step_unit = upper_ms / STEP_UNITS if math.isfinite(upper_ms) else 1.0
    step = model.new_int_var(0, STEP_UNITS, "step")
    model.minimize(step)
    return Master(segments, upper_ms, model, step, before, count, in_mode, reached, step_unit)


def _add_boundaries(
    model: cp_model.CpModel, segments: Segments
) -> tuple[list[list[cp_model.IntVar]], list[list[cp_model.IntVar | int]]]:
    """before [K + 1][R], and whether each is above 0."""
    run_start, num_runs = np.concatenate([[0], np.cumsum(segments.run_size)]), len(segments.run_size)

    def clip(value: int, run: int) -> int:
        return int(min(max(value - run_start[run], 0), segments.run_size[run]))

    before: list[list[cp_model.IntVar]] = []
    reached: list[list[cp_model.IntVar | int]] = []
    for k in range(segments.problem.num_virtual_stages + 1):
        row: list[cp_model.IntVar] = []
        flags: list[cp_model.IntVar | int] = []
        for r in range(num_runs):
            low, high = clip(int(segments.first[k]), r), clip(int(segments.last[k]), r)
            row.append(model.new_int_var(low, high, f"before_{k}_{r}"))
            if low > 0:
                flags.append(1)
            elif high == 0:
                flags.append(0)
            else:
                flag = model.new_bool_var(f"reached_{k}_{r}")
                model.add(row[r] >= 1).only_enforce_if(flag)
                model.add(row[r] == 0).only_enforce_if(flag.negated())
                flags.append(flag)
        for r in range(num_runs - 1):  # run r + 1 begins only once run r is whole
            later = flags[r + 1]
            size = int(segments.run_size[r])
            if isinstance(later, int):
                if later:
                    model.add(row[r] == size)
            else:
                model.add(row[r] == size).only_enforce_if(later)
        before.append(row)
        reached.append(flags)
    return before, reached


def _add_counts(
    model: cp_model.CpModel,
    segments: Segments,
    blocks: list[list[int]],
    before: list[list[cp_model.IntVar]],
    stage: int,
    upper_ms: float,
) -> tuple[list[cp_model.IntVar], list[dict[tuple[int, int], cp_model.IntVar]]]:
    """n and x of one virtual stage of `stage`, by run. before: of it and of the next one."""
    problem, chain = segments.problem, segments.problem.chain
    classes, scales = microbatch_classes(problem)
    mean_scale = scales @ np.bincount(classes or (0,) * problem.num_microbatches) / problem.num_microbatches

    def most_segments(run: int) -> int:
        load = (
            sum((chain[e].forward_ms + chain[e].backward_ms) * mean_scale[e] for e in blocks[run])
            * problem.num_microbatches
            * problem.time_factors[stage]
            * problem.least_load_fraction
        )
        fits = math.floor(upper_ms / load) if load > 0 and math.isfinite(upper_ms) else int(segments.run_size[run])
        layers = sum(chain[e].layer for e in blocks[run])
        if problem.max_layers_per_chunk is not None and layers:
            fits = min(fits, problem.max_layers_per_chunk // layers)
        return min(int(segments.run_size[run]), fits)

    def most_in_mode(most: int, e: int, mode: Mode) -> int:
        """Of `most` blocks like e those in a mode whose traffic, there and back, fills no step of upper_ms alone."""
        if not mode.host_bytes or not math.isfinite(upper_ms):
            return most
        link_ms = 2 * problem.host_ms_per_byte[stage] * mode.host_bytes * mean_scale[e] * problem.num_microbatches
        link_ms *= problem.least_load_fraction
        return math.floor(min(upper_ms / link_ms, most)) if link_ms > 0 else most

    held: list[cp_model.IntVar] = []
    chosen: list[dict[tuple[int, int], cp_model.IntVar]] = []
    for r, members in enumerate(blocks):
        most = most_segments(r)
        n = model.new_int_var(0, most, "")
        model.add(n == before[1][r] - before[0][r])
        held.append(n)
        chosen.append({})
        for i, e in enumerate(members):
            of_block = [model.new_int_var(0, most_in_mode(most, e, mode), "") for mode in chain[e].modes]
            if of_block:
                model.add(sum(of_block) <= n)
            chosen[r] |= {(i, m): x for m, x in enumerate(of_block)}
    return held, chosen


def _first_layers_first(
    model: cp_model.CpModel,
    segments: Segments,
    blocks: list[list[int]],
    held: list[cp_model.IntVar],
    chosen: list[dict[tuple[int, int], cp_model.IntVar]],
) -> None:
    """In each group a layer takes one of the first m modes only once every layer before it in the chunk does.

    Along a run the members of a group at positions i1 < i2 < … of its segments take turns: of those in one of the first
    m modes there are as many at i1 as at i2, or one more, and so on round. So the last position has the fewest, and a
    later run begins once that has all.
    """
    chain = segments.problem.chain
    last: dict[tuple[str, str], tuple[int, int]] = {}  # group → run and position of its latest members
    for r, block in enumerate(blocks):
        positions: dict[tuple[str, str], list[int]] = {}
        for i, e in enumerate(block):
            if chain[e].modes:
                positions.setdefault(chain[e].group, []).append(i)
        for group, mine in positions.items():
            for m in range(1, len(chain[block[mine[0]]].modes) + 1):
                taken = [sum(chosen[r][i, j] for j in range(m)) for i in mine]
                for before, after in pairwise(taken):
                    model.add(before >= after)
                if len(mine) > 1:
                    model.add(taken[-1] >= taken[0] - 1)
                if group in last:
                    earlier, at = last[group]
                    full = model.new_bool_var("")
                    model.add(sum(chosen[earlier][at, j] for j in range(m)) == held[earlier]).only_enforce_if(full)
                    model.add(taken[0] == 0).only_enforce_if(full.negated())
            last[group] = (r, mine[-1])


def add_cut(master: Master, path: CriticalPath) -> None:
    """Require T to be at least the length of `path` under the placement."""
    segments, problem = master.segments, master.segments.problem
    chain, num_virtual, stage_of = problem.chain, problem.num_virtual_stages, problem.stage_of
    down = master.round_down
    terms: list[cp_model.LinearExprT] = [down(problem.stage_tail_ms[path.end_stage]), *_paired(master, path)]
    moves = any(mode.host_bytes for block in chain for mode in block.modes)
    for k in range(num_virtual):
        passes = list_passes(path, k)
        if moves and problem.host_ms_per_byte[stage_of[k]] > 0:
            terms += _host_passes(master, k, passes)
            passes = [(way, counts) for way, counts in passes if way == "weight"]
        tails_ms = [block.tail_ms if stage_of[k] == path.end_stage else 0.0 for block in chain]
        terms += _linear(master, k, passes, tails_ms)
        if k < num_virtual - 1 and (path.hop_forward[k] or path.hop_backward[k]):
            # the hop's time is that of the run the chunk ends with: the last one reached
            lengths = []
            for r in range(len(segments.run_size)):
                forward_ms, backward_ms = hop_ms(problem, k, chain[run_blocks(segments, r)[-1]])
                lengths.append(down(float(path.hop_forward[k] * forward_ms + path.hop_backward[k] * backward_ms)))
            for r, length_units in enumerate(lengths):
                earlier = lengths[r - 1] if r else 0
                terms.append((length_units - earlier) * master.reached[k + 1][r])
    master.model.add(master.step >= sum(terms))
    master.num_cuts += 1


def _linear(
    master: Master, virtual_stage: int, passes: Sequence[tuple[Way, Counts]], tails_ms: Sequence[float] = ()
) -> list[cp_model.LinearExprT]:
    """What these passes through a virtual stage compute, and once the tails [E] of its blocks, in units of T."""
    segments, problem, k = master.segments, master.segments.problem, virtual_stage
    _, scales = microbatch_classes(problem)
    factor = problem.time_factors[problem.stage_of[k]]
    terms: list[cp_model.LinearExprT] = []
    for r in range(len(segments.run_size)):
        members = run_blocks(segments, r)
        blocks = [problem.chain[e] for e in members]
        scaled = [(way, (counts @ scales[members].T).tolist()) for way, counts in passes]
        length = sum(
            sum(times[i] * block_ms(way, block) for way, times in scaled) * factor + (tails_ms[e] if tails_ms else 0.0)
            for i, (e, block) in enumerate(zip(members, blocks, strict=True))
        )
        if length:
            terms.append(master.round_down(length) * master.count[k][r])
        for (i, m), x in master.in_mode[k][r].items():
            extra = sum(times[i] * extra_ms(way, blocks[i].modes[m]) for way, times in scaled)
            if extra:
                terms.append(master.round_down(extra * factor) * x)
    return terms


def _moved(master: Master, virtual_stage: int, counts: Counts) -> list[cp_model.LinearExprT]:
    """What so many passes of each class take on the host link of a virtual stage, in units of T."""
    segments, problem, k = master.segments, master.segments.problem, virtual_stage
    _, scales = microbatch_classes(problem)
    link = problem.host_ms_per_byte[problem.stage_of[k]]
    terms: list[cp_model.LinearExprT] = []
    for r in range(len(segments.run_size)):
        members = run_blocks(segments, r)
        for (i, m), x in master.in_mode[k][r].items():
            moved_ms = float(counts @ scales[members[i]]) * link * problem.chain[members[i]].modes[m].host_bytes
            terms.append(master.round_down(moved_ms) * x)
    return terms


def _host_passes(
    master: Master, virtual_stage: int, passes: Sequence[tuple[Way, Counts]]
) -> list[cp_model.LinearExprT]:
    """What the passes of a path through a virtual stage take whose blocks may move bytes: for each class of
    micro-batches and direction a variable, at least as long as they compute and as their host link needs.
    """
    segments, problem, k = master.segments, master.segments.problem, virtual_stage
    chain, stage = problem.chain, problem.stage_of[k]
    _, scales = microbatch_classes(problem)
    factor, link = problem.time_factors[stage], problem.host_ms_per_byte[stage]
    down = master.round_down
    found: list[cp_model.LinearExprT] = []
    for way, counts in passes:
        for c, times in enumerate(counts.tolist() if way != "weight" else ()):
            if not times:
                continue
            key = (k, way, c, times)
            if key not in master.passes:
                load = master.passes[key] = master.model.new_int_var(0, STEP_UNITS, "")
                compute: list[cp_model.LinearExprT] = []
                moved: list[cp_model.LinearExprT] = []
                for r in range(len(segments.run_size)):
                    members = run_blocks(segments, r)
                    each_ms = sum(scales[e, c] * block_ms(way, chain[e]) for e in members)
                    compute.append(down(times * factor * each_ms) * master.count[k][r])
                    for (i, m), x in master.in_mode[k][r].items():
                        e, mode = members[i], chain[members[i]].modes[m]
                        compute.append(down(times * factor * (scales[e, c] * extra_ms(way, mode))) * x)
                        moved.append(down(times * link * scales[e, c] * mode.host_bytes) * x)
                master.model.add(load >= sum(compute))
                master.model.add(load >= sum(moved))
            found.append(master.passes[key])
    return found


def _paired(master: Master, path: CriticalPath) -> list[cp_model.LinearExprT]:
    """What the pairs on a path take: of each a variable, at least as long as either sum of one pass whole and of the
    other what the overlap leaves, whether the passes compute or wait for their host link.
    """
    problem = master.segments.problem
    left = 1.0 - problem.pair_overlap_fraction
    found: list[cp_model.LinearExprT] = []
    for index, times in enumerate(path.pairs.tolist()):
        if not times:
            continue
        if (index, times) not in master.pairs:
            load = master.pairs[index, times] = master.model.new_int_var(0, STEP_UNITS, "")
            for shares in dict.fromkeys(((1.0, left), (left, 1.0))):
                ways = [
                    _both_ways(master, place, "forward" if is_forward else "backward", times * share)
                    for place, is_forward, share in zip(list_pairs(problem)[index], (True, False), shares, strict=True)
                ]
                for forward, backward in product(*ways):
                    master.model.add(load >= sum([*forward, *backward]))
        found.append(master.pairs[index, times])
    return found


def _both_ways(master: Master, place: int, way: Way, times: float) -> list[list[cp_model.LinearExprT]]:
    """`times` passes of a place (see TaskGraph) as they compute and, where bytes may move, as their host link needs."""
    problem = master.segments.problem
    num_classes = microbatch_classes(problem)[1].shape[1]
    k, c = divmod(place, num_classes)
    counts = np.where(np.arange(num_classes) == c, times, 0.0)
    moves = any(mode.host_bytes for block in problem.chain for mode in block.modes)
    return [_linear(master, k, [(way, counts)]), *([_moved(master, k, counts)] if moves else [])]


def read_placement(master: Master, solver: cp_model.CpSolver) -> Placement:
    """The placement of the solver's last solution."""
    segments, chain = master.segments, master.segments.problem.chain
    boundaries = [sum(solver.value(b) for b in row) for row in master.before]
    group_of = {name: g for g, name in enumerate(segments.groups)}
    lanes = []
    for runs in master.in_mode:
        row = [0] * segments.num_lanes
        for r, chosen in enumerate(runs):
            for (i, m), x in chosen.items():
                group = group_of[chain[run_blocks(segments, r)[i]].group]
                row[int(segments.lane_offset[group]) + m] += solver.value(x)
        lanes.append(row)
    return segments.placement(boundaries, lanes)


def forbid(master: Master, solver: cp_model.CpSolver, stage: int) -> None:
    """Cut off what `stage` holds now and all that holds as much or more, in the same modes or, where no mode helps, in
    any: it exceeds the limit."""
    problem, model = master.segments.problem, master.model
    whatever_modes = never_fits(problem, read_placement(master, solver), stage)
    escapes = []
    for k in problem.virtual_stages[stage]:
        for r in range(len(master.segments.run_size)):
            held = solver.value(master.count[k][r])
            if held:
                fewer = model.new_bool_var("")
                model.add(master.count[k][r] <= held - 1).only_enforce_if(fewer)
                escapes.append(fewer)
            for x in () if whatever_modes else master.in_mode[k][r].values():
                for bound, sign in ((solver.value(x) + 1, 1), (solver.value(x) - 1, -1)):
                    other = model.new_bool_var("")
                    model.add(sign * x >= sign * bound).only_enforce_if(other)
                    escapes.append(other)
    model.add_bool_or(escapes)
