"""ND search: every division of a MindFormers model with its memory or the reason it is removed, and what to profile.

Memory is the white-box model's (sized_memory.py); where a dry run of a candidate is at hand, its peak counts for the
division with the YAML's own op, mbs and vp, or the one closest to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from mm_autoparallel.errors import Interrupted, JobError, NoFeasiblePlan
from mm_autoparallel.integrations.mindformers.layout import Layout
from mm_autoparallel.integrations.mindformers.model_job import build_job
from mm_autoparallel.integrations.mindformers.pretrain_yaml import Pretrain
from mm_autoparallel.integrations.mindformers.profile_table import Candidate, name_candidate
from mm_autoparallel.integrations.mindformers.search.design import choose_to_profile
from mm_autoparallel.integrations.mindformers.search.division import Division, Scope, divide, list_divisions
from mm_autoparallel.integrations.mindformers.search.measuring import Measured, measure_divisions
from mm_autoparallel.integrations.mindformers.search.trial import Trial, shrink
from mm_autoparallel.units import format_bytes

NUM_TO_PROFILE = 20
"""About as many YAMLs as Taylor's ND search makes for profiling."""

SIZES, DRY_RUN = "sizes", "dry run"


@dataclass(frozen=True)
class Searched:
    """A division and what became of it: `unlawful`, `out of memory` or `fits`.

    peak_bytes, limit_bytes: of its fullest stage, None where it is unlawful. layout: the one that needs least memory.
    source: where the peak is from. reason: why it was removed.
    """

    division: Division
    status: str
    reason: str = ""
    peak_bytes: float | None = None
    limit_bytes: float | None = None
    layout: Layout | None = None
    source: str = ""


@dataclass(frozen=True)
class ToProfile:
    """A candidate by the division that stands for it, and how it is profiled, or why it is not."""

    searched: Searched
    trial: Trial | None
    reason: str = ""


def search_divisions(
    pretrain: Pretrain,
    global_batch_size: int,
    scope: Scope,
    dry_runs: Mapping[Candidate, float],
    num_processes: int,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[Searched]:
    """Every division of `pretrain`'s devices.

    num_processes: that work memory out. Raises JobError where sizes are missing, or a dry run is of no lawful division.
    """
    if pretrain.max_memory_bytes is None:
        raise pretrain.error("context.max_device_memory", "is missing; it is the limit that stages must fit in")
    divisions = list(list_divisions(pretrain, build_job(pretrain, global_batch_size), scope))
    lawful = [division for division, reason in divisions if reason is None]
    if not lawful:
        sizes = pretrain.dp, pretrain.tp, pretrain.pp, pretrain.cp
        told = next(
            reason for division, reason in divisions if (division.dp, division.tp, division.pp, division.cp) == sizes
        )
        raise JobError(
            f"{pretrain.path}: none of {len(divisions)} divisions is lawful at a global batch of {global_batch_size}; "
            f"the YAML's own is not because {told}"
        )
    known = {division.candidate for division in lawful}
    foreign = next((candidate for candidate in dry_runs if candidate not in known), None)
    if foreign:
        raise JobError(
            f"the dry run of {name_candidate(foreign)} is of no lawful division of {pretrain.path}'s devices"
        )
    found = measure_divisions(pretrain, global_batch_size, scope, lawful, num_processes, should_stop)
    measured = {division: _searched(division, of_it) for division, of_it in found.items()}
    for candidate, peak_bytes in dry_runs.items():
        own = [
            entry
            for division, entry in measured.items()
            if division.candidate == candidate and entry.peak_bytes is not None
        ]
        if own:
            closest = min(own, key=lambda entry: _rank(entry, pretrain))
            measured[closest.division] = _with_dry_run(closest, peak_bytes)
    searched = [measured.get(division, Searched(division, "unlawful", reason or "")) for division, reason in divisions]
    return [entry for entry in searched if entry.peak_bytes is not None or entry.reason]  # less what a stop left out


def list_candidates(searched: Iterable[Searched], pretrain: Pretrain, is_whole: bool = True) -> list[Searched]:
    """For each (dp, tp, pp, ep) of which a division fits the one that stands for it: that with most of the YAML's own

    op, mbs and vp, and among those the smallest. Raises NoFeasiblePlan where none fits;
    Interrupted where, of divisions that are not the whole, none does.
    """
    found: dict[Candidate, Searched] = {}
    closest: Searched | None = None
    for entry in searched:
        if entry.peak_bytes is None or entry.limit_bytes is None:
            continue
        if closest is None or _excess_bytes(entry) < _excess_bytes(closest):
            closest = entry
        if entry.status == "fits":
            candidate = entry.division.candidate
            if candidate not in found or _rank(entry, pretrain) < _rank(found[candidate], pretrain):
                found[candidate] = entry
    if not found:
        if closest is None or not is_whole:
            raise Interrupted(f"{pretrain.path}: the search was interrupted before it found a division that fits")
        told = f"{name_candidate(closest.division.candidate)} comes closest: {closest.reason}"
        raise NoFeasiblePlan(f"{pretrain.path}: no division fits context.max_device_memory; {told}")
    return [found[candidate] for candidate in sorted(found)]


def choose_trials(
    candidates: Sequence[Searched],
    pretrain: Pretrain,
    global_batch_size: int,
    rank_num: int,
    profiled: Iterable[Candidate] = (),
    reserve_bytes: float | None = None,
) -> list[ToProfile]:
    """What becomes of each candidate: some twenty are profiled, on at most `rank_num` devices (see design.py).

    profiled: candidates whose profiles are at hand. Raises NoFeasiblePlan where none can be profiled on so few.
    """
    trials = [
        shrink(divide(pretrain, entry.division, global_batch_size), rank_num, reserve_bytes) for entry in candidates
    ]
    able = [index for index, trial in enumerate(trials) if isinstance(trial, Trial)]
    if not able:
        raise NoFeasiblePlan(f"{pretrain.path}: no candidate can be profiled; {trials[0]}; a larger rank_num would do")
    sizes = [_sizes(entry.division) for entry in candidates]
    known = [sizes[index] for index, entry in enumerate(candidates) if entry.division.candidate in set(profiled)]
    number = max(0, NUM_TO_PROFILE - len(known))
    chosen = {able[index] for index in choose_to_profile([sizes[index] for index in able], number, known)}
    found = []
    for index, (entry, trial) in enumerate(zip(candidates, trials, strict=True)):
        if sizes[index] in known:
            found.append(ToProfile(entry, None, "profiled already"))
        elif isinstance(trial, str):
            found.append(ToProfile(entry, None, trial))
        elif index in chosen:
            found.append(ToProfile(entry, trial))
        else:
            found.append(ToProfile(entry, None, "others tell more"))
    return found


def _searched(division: Division, found: Measured) -> Searched:
    if found.peak_bytes is None:
        return Searched(division, "unlawful", found.reason)
    status = "out of memory" if found.reason else "fits"
    return Searched(division, status, found.reason, found.peak_bytes, found.limit_bytes, found.layout, SIZES)


def _with_dry_run(entry: Searched, peak_bytes: float) -> Searched:
    assert entry.limit_bytes is not None
    if peak_bytes <= entry.limit_bytes:
        return replace(entry, status="fits", reason="", peak_bytes=peak_bytes, source=DRY_RUN)
    reason = f"memory: its dry run needs {format_bytes(peak_bytes)} of {format_bytes(entry.limit_bytes)}"
    return replace(entry, status="out of memory", reason=reason, peak_bytes=peak_bytes, source=DRY_RUN)


def _excess_bytes(entry: Searched) -> float:
    assert entry.peak_bytes is not None
    assert entry.limit_bytes is not None
    return entry.peak_bytes - entry.limit_bytes


def _rank(entry: Searched, pretrain: Pretrain) -> tuple[bool, bool, bool, float]:
    assert entry.peak_bytes is not None
    return (*_departures(entry.division, pretrain), entry.peak_bytes)


def _departures(division: Division, pretrain: Pretrain) -> tuple[bool, bool, bool]:
    """Whether op, mbs and vp are other than the YAML's; one rank of dp and cp has nothing to share."""
    shares = division.op is not None and division.op > 1
    return (
        shares != pretrain.optimizer_parallel and division.dp * division.cp > 1,
        division.mbs != pretrain.mbs,
        division.vp != pretrain.vp,
    )


def _sizes(division: Division) -> tuple[int, int, int, int, int]:
    dp, tp, pp, ep = division.candidate
    return dp, tp, pp, ep, division.cp
