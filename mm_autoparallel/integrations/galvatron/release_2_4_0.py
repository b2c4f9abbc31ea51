"""Galvatron 2.4.0: its space, searched exactly under its own cost model.

Source: package galvatron.core.search_engine of hetu-galvatron 2.4.0. It searches lowest and highest degrees of layers
and vocabulary besides. The lowest one changes figures (`release_2_4_0_cost.py`), so that here too a space has one; the
highest one is the buffer's.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator

from mm_autoparallel.errors import PlanError
from mm_autoparallel.integrations.galvatron.configuration import Search
from mm_autoparallel.integrations.galvatron.cost import Batch
from mm_autoparallel.integrations.galvatron.mixes import Mixing
from mm_autoparallel.integrations.galvatron.release_2_4_0_cost import CostModel, micro_samples, rank_samples
from mm_autoparallel.integrations.galvatron.release_2_4_0_flags import ONE_STRATEGY, Flags
from mm_autoparallel.integrations.galvatron.score import (
    MIB_PER_GB,
    UPSTREAM,
    Extensions,
    Score,
    Tally,
    check_devices,
    even_division,
    reserve_of,
    reshard,
    training_of,
)
from mm_autoparallel.integrations.galvatron.search import Found, Part, Space, assign, search_spaces
from mm_autoparallel.integrations.galvatron.strategies import DpType, FlaggedEnds, LayerStrategy, dp_type_of, powers
from mm_autoparallel.integrations.galvatron.strategy_file import Assignment


class OlderPlanner:
    """Its cost model and memory rule. Raises JobError where a profile is missing or spoilt."""

    def __init__(self, flags: Flags, search: Search, extensions: Extensions = UPSTREAM) -> None:
        self.flags, self.search, self.extensions = flags, search, extensions
        self.cost = CostModel(search.profile, search.hardware, training_of(search), flags.sp_space == "tp+sp")
        self.num_devices = search.configuration.hardware_info.num_devices
        self.reserve_mib = reserve_of(flags.memory_constraint, extensions.reserve_fraction)
        self.limit_mib = flags.memory_constraint * MIB_PER_GB - self.reserve_mib
        self.default_dp_type: DpType = "zero2" if flags.default_dp_type == "zero2" else "ddp"
        self.layers = list_layers(flags, self.num_devices, self.default_dp_type)

    @property
    def has_buffer(self) -> bool:
        """Whether gathered activations are counted; with one strategy for all layers it does not ask."""
        return self.flags.sequence_parallel and (
            not self.flags.no_global_memory_buffer or not self.flags.fine_grained_mode
        )

    def score(self, plan: Assignment) -> Score:
        """Its step and memory of any plan: those of the lowest degree with which its search would take it.

        Raises JobError where a profile lacks what the plan uses, PlanError where it is for other devices, or its batch
        is cut as this search does not.
        """
        check_devices(plan, self.num_devices)
        pp, degrees = plan.ends.pp, [plan.ends.degree, *(layer.degree for layer in plan.layers)]
        kinds, devices = [*dict.fromkeys(plan.layers)], self.num_devices // plan.ends.pp
        is_buffered = self.has_buffer and not (
            self.flags.fine_grained_mode and plan.ends.uses_ulysses and all(layer.tp == 1 for layer in plan.layers)
        )
        scores = []
        for lowest in powers(min(degrees)):
            batch = Batch(plan.num_samples, plan.chunks, lowest)
            if is_cut(batch, devices):
                buffer_mib = self.cost.buffer_mib(batch, devices, max(degrees)) if is_buffered else 0
                costs = {kind: self.cost.layer(kind, batch) for kind in kinds}
                moved = reshard(kinds, batch, self.search.hardware, self.cost.sample_mib, self.flags.time_factor)
                tally = Tally(plan, costs, self.cost.ends(plan.ends, batch), moved, buffer_mib, counts_parts=True)
                scores.append(tally.score(self.limit_mib, self.reserve_mib))
        if not scores:
            raise PlanError(
                f"a batch of {plan.num_samples} in {plan.chunks} micro-batches is not cut so by Galvatron 2.4.0 on "
                f"{self.num_devices} devices with PP {pp} and degrees from {min(degrees)}"
            )
        return min(scores, key=lambda score: (max(0, -min(score.remaining_mib)), score.step_s))


def is_cut(batch: Batch, devices: int) -> bool:
    """Whether its search takes this many micro-batches at this lowest degree; devices: of a stage."""
    if devices % batch.lowest or batch.samples % (devices // batch.lowest):
        return False
    whole = rank_samples(batch, devices)
    return batch.chunks <= whole and math.ceil(whole / micro_samples(batch, devices)) == batch.chunks


# ------------------------------------------------------------------------------------------------------------- search


def list_layers(flags: Flags, num_devices: int, default: DpType) -> list[LayerStrategy]:
    """Of all numbers of stages, in the order of preference among equals."""
    listed: list[LayerStrategy] = []
    is_one = flags.search_space in ONE_STRATEGY
    for pp, degree in itertools.product(powers(num_devices), powers(num_devices)):
        if num_devices % (pp * degree):
            continue
        dp = num_devices // pp // degree
        ways = [(degree, 1, False)]
        if degree > 1 and dp > 1 and not is_one and not flags.disable_tp_consec:
            ways.append((degree, 1, True))
        if degree > 1 and flags.sp_space == "tp+sp":
            ways.append((1, degree, False))
        for (tp, sp, strided), fully in itertools.product(ways, (False, True) if dp > 1 else (False,)):
            if is_searched(flags, pp, degree, dp, fully):
                kind = dp_type_of(dp, fully, default)
                listed += [
                    LayerStrategy(pp, tp, sp, dp, kind, again, strided)
                    for again in ((False,) if is_one or flags.disable_ckpt else (False, True))
                ]
    return listed


def is_searched(flags: Flags, pp: int, degree: int, dp: int, fully: bool) -> bool:
    """Whether a layer of these sizes is of the space that the flags name. fully: ZeRO 3."""
    if flags.search_space in ONE_STRATEGY:
        one = {"3d": (2, 2), "tp": (1, flags.max_tp_deg), "pp": (flags.max_pp_deg, 1)}
        return (pp, degree) == one.get(flags.search_space, (1, 1)) and fully == (flags.search_space == "sdp")
    if flags.disable_dp and dp > 1 and not fully:
        return False
    return (
        not (fully and flags.is_sharding_off)
        and not (degree > 1 and (flags.disable_tp or flags.search_space == "dp+pp"))
        and not (pp > 1 and (flags.disable_pp or flags.search_space == "dp+tp"))
        and degree <= flags.max_tp_deg
        and pp <= flags.max_pp_deg
    )


def search_older(planner: OlderPlanner, should_stop: Callable[[], bool] = lambda: False) -> Found:
    """The best plan of its space. Raises JobError where a profile lacks what a strategy needs, Unfinished as
    `search_spaces`."""
    return search_spaces(
        list_spaces(planner),
        lambda space, left_out: list_parts(planner, space, left_out),
        lambda part, mix: planner.score(assign(part, mix, planner.flags.pipeline_type, planner.default_dp_type)),
        should_stop,
    )


def list_spaces(planner: OlderPlanner) -> Iterator[Space]:
    """Where no buffer is counted, one of the highest degree holds all."""
    flags, sizes = planner.flags, planner.search.configuration.batch_size_info
    stages = sorted({layer.pp for layer in planner.layers if layer.pp <= planner.search.num_layers})
    for samples in sizes.batches:
        cuts = [flags.settle_chunk] if flags.settle_chunk != -1 else range(1, samples + 1)
        for chunks, pp in itertools.product((each for each in cuts if samples % each == 0), stages):
            devices = planner.num_devices // pp
            degrees = powers(1 if flags.disable_vtp else min(devices, flags.max_tp_deg))
            for lowest in degrees:
                batch = Batch(samples, chunks, lowest)
                if not is_cut(batch, devices):
                    continue
                for highest in [each for each in degrees if each >= lowest] if planner.has_buffer else degrees[-1:]:
                    yield Space(batch, pp, False, highest)
                if planner.has_buffer and flags.sp_space == "tp+sp" and flags.fine_grained_mode:
                    yield Space(batch, pp, True, degrees[-1])


def list_parts(planner: OlderPlanner, space: Space, left_out: Counter[str]) -> Iterator[Part]:
    """What fits of a space by the ways to hold its ends; left_out: counts what does not stand there, by reason."""
    layers, batch = [], space.batch
    for layer in planner.layers:
        is_within = layer.pp == space.pp and batch.lowest <= layer.degree <= space.buffer
        if not is_within or (space.is_ulysses and layer.tp > 1):
            continue
        if layer.degree not in planner.search.profile.layer_degrees:
            left_out[f"layers were not measured at degree {layer.degree}"] += 1
        elif planner.extensions.needs_whole_samples and batch.samples % (batch.chunks * layer.dp):
            left_out[f"a micro-batch is no multiple of DP {layer.dp}"] += 1
        else:
            layers.append(layer)
    ends = list_ends(planner, space, left_out)
    if planner.flags.fine_grained_mode:
        yield from _parts_with(planner, space, layers, ends)
        return
    for layer in layers:  # one strategy for all of them, and ends of its degree
        same = [each for each in ends if each.degree == layer.degree]
        yield from _parts_with(planner, space, [layer], same)


def list_ends(planner: OlderPlanner, space: Space, left_out: Counter[str]) -> list[FlaggedEnds]:
    """Ways to hold embedding and head in a space."""
    flags, devices = planner.flags, planner.num_devices // space.pp
    states, activations = planner.search.profile.ends_degrees(space.pp)
    ends = []
    for degree in powers(space.buffer):
        if degree < space.batch.lowest or devices % degree:
            continue
        for is_sp in (True,) if space.is_ulysses else (False, True) if flags.sp_space == "tp+sp" else (False,):
            tp, sp = (1, degree) if is_sp else (degree, 1)
            if tp not in states or degree not in activations:
                left_out[f"embedding and head were not measured at degree {degree} with PP {space.pp}"] += 1
                continue
            default = planner.default_dp_type
            kinds: tuple[DpType, ...] = (default,) if flags.is_sharding_off else (default, "zero3")
            ends += [FlaggedEnds(space.pp, tp, sp, devices // degree, kind, is_sp) for kind in kinds]
    return ends


def _parts_with(
    planner: OlderPlanner, space: Space, layers: list[LayerStrategy], ends: list[FlaggedEnds]
) -> Iterator[Part]:
    if not layers or not ends:
        return
    batch, extensions, search = space.batch, planner.extensions, planner.search
    mixing = Mixing(
        [planner.cost.layer(layer, batch) for layer in layers],
        even_division(search.num_layers, space.pp),
        batch.chunks,
        extensions.spread,
        extensions.counts_every_stage or extensions.spread > 0,
        reshard(layers, batch, search.hardware, planner.cost.sample_mib, planner.flags.time_factor)
        if extensions.counts_resharding
        else None,
    )
    limit = planner.limit_mib
    if planner.has_buffer and not space.is_ulysses:
        limit -= planner.cost.buffer_mib(batch, planner.num_devices // space.pp, space.buffer)
    for each in ends:
        cost = planner.cost.ends(each, batch)
        bound_s = mixing.quick_bound_s(cost, [limit] * space.pp)
        if bound_s < math.inf:
            yield Part(space, mixing, layers, each, cost, limit, bound_s)
