"""NetworkProfile: measured communication, a line per operation, group and level of the network, and what compute hides.

Schema "mm-autoparallel/network/1", kept at <root>/<device>/network.json and named in a job's `profiles`:

    {"schema": "mm-autoparallel/network/1", "device": "h200-141g", "software": {"torch": "2.13.0"},
     "date": "2025-11-21", "command": "python pretrain_vlm.py --auto-parallel-mm",
     "fits": [{"operation": "all_reduce", "num_ranks": 8, "level": "node", "inside": 1, "latency_ms": 0.02,
               "bandwidth_bytes_per_s": 3.6e11, "residual_fraction": 0.04,
               "samples": [{"size_bytes": 65536, "time_ms": {"median_ms": …, "mad_ms": …, "num_samples": …}}, …]}, …],
     "overlaps": [{"hidden_fraction": 0.83, "operation": "all_reduce", "num_ranks": 8, "level": "node",
                   "traffic_ms": …, "compute_ms": …, "together_ms": …}, …]}

A line is latency + moved bytes / bandwidth; the bytes that move past a rank are those of a ring (`moved_bytes`). The
very group that was measured takes what its samples say, straight from one size to the next: real transports change
their algorithm with size, and no one line meets them all. Lines serve what is put together of several fits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, model_validator

from mm_autoparallel.errors import ProfileError
from mm_autoparallel.model.job.cluster import Level
from mm_autoparallel.model.profiles import store
from mm_autoparallel.model.profiles.cost import Source
from mm_autoparallel.model.profiles.disk import write_measurements
from mm_autoparallel.records import Bytes, Computed, Count, Name, Noun, Rate
from mm_autoparallel.validation import parse_record

Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"]

MOST_BYTES_PER_S = 1e15
"""Bandwidth of a fit whose times do not grow with size. Assumed: faster than any link."""

LEAST_MS = 1e-6
"""What a time of nothing counts as: a nanosecond, the resolution of the clock."""

_TWINS: dict[str, Operation] = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}
"""A ring moves the same bytes in as many steps for either."""


class SizeTiming(Noun):
    """How long one size took. size_bytes: of the whole tensor, as in collectives.Group."""

    size_bytes: Bytes
    time_ms: store.Timing


class Fit(Noun):
    """A line through measured times of one operation in a group of `num_ranks`, whose outermost level is `level`.

    inside: ranks of the group within one group of the level below. residual_fraction: the mean distance of a measured
    time from the line, relative to the time.
    """

    operation: Operation
    num_ranks: Annotated[int, Field(strict=True, ge=2, le=10**9)]
    level: Name
    inside: Count = 1
    latency_ms: Computed
    bandwidth_bytes_per_s: Rate
    residual_fraction: Computed
    samples: tuple[SizeTiming, ...] = ()


class Overlap(Noun):
    """Traffic and compute at once. hidden_fraction: the part of the shorter one that the longer one hides, below 0
    where both at once take longer than one after the other (lanes.py).

    traffic_ms, compute_ms: each alone; together_ms: both at once, until both had ended. What either slows the other
    down by is part of it.
    """

    hidden_fraction: Annotated[float, Field(strict=True, ge=-1e3, le=1, allow_inf_nan=False)]
    operation: Operation
    num_ranks: Count
    level: Name
    traffic_ms: store.Timing
    compute_ms: store.Timing
    together_ms: store.Timing


@dataclass(frozen=True)
class Line:
    """Time of an operation: latency_ms, and moved bytes over bandwidth_bytes_per_s. source: what it stands on.

    sampled_bytes, sampled_ms: where this very operation was measured, moved bytes in rising order and their times.
    level: of the network, of a line between two ranks.
    """

    latency_ms: float
    bandwidth_bytes_per_s: float
    source: Source
    sampled_bytes: tuple[float, ...] = ()
    sampled_ms: tuple[float, ...] = ()
    level: str = ""

    def time_ms(self, moved_bytes: float) -> float:
        """How long it takes when `moved_bytes` pass every rank.

        Between two samples straight from one to the other; before the first as long as it takes, after the last in
        proportion to bytes.
        """
        if not self.sampled_bytes:
            return self.latency_ms + moved_bytes / self.bandwidth_bytes_per_s * 1e3
        beyond_factor = max(1.0, moved_bytes / self.sampled_bytes[-1])
        return beyond_factor * float(np.interp(moved_bytes, self.sampled_bytes, self.sampled_ms))


class NetworkProfile(store.Origin):
    """All that was measured of the network between devices of one kind. overlaps: one for each kind of traffic; older
    files have one `overlap` for all."""

    schema_name: Literal["mm-autoparallel/network/1"] = Field(alias="schema")
    fits: Annotated[tuple[Fit, ...], Field(min_length=1)]
    overlaps: tuple[Overlap, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _take_one(cls, content: Any) -> Any:
        if isinstance(content, dict) and "overlap" in content and "overlaps" not in content:
            content = dict(content)
            one = content.pop("overlap")
            content["overlaps"] = [] if one is None else [one]
        return content

    def exact_line(self, operation: Operation, num_ranks: int, level: str, inside: int) -> Line | None:
        """The line of exactly this group; None where it was not measured."""
        for fit in self.fits:
            if (fit.operation, fit.num_ranks, fit.level, fit.inside) == (operation, num_ranks, level, inside):
                return _measured(fit)
        return None

    def line(self, operation: Operation, num_ranks: int, level: Level) -> Line | None:
        """The line of `num_ranks` ranks that have `level` alone between them; None where nothing was measured there.

        A size that was not measured lies between its neighbours. Beyond them latency grows with the steps of a ring,
        n − 1, and bandwidth as the links of the level say (pairwise links add up).
        """
        exact = self.exact_line(operation, num_ranks, level.name, 1)
        if exact:
            return exact
        known = sorted(
            (fit for fit in self.fits if (fit.operation, fit.level, fit.inside) == (operation, level.name, 1)),
            key=lambda fit: fit.num_ranks,
        )
        if not known:
            return self._twin_line(operation, num_ranks, level)
        index = bisect_left([fit.num_ranks for fit in known], num_ranks)
        if 0 < index < len(known):
            return _line_between(known[index - 1], known[index], num_ranks)
        near = known[min(index, len(known) - 1)]
        steps = 1.0 if operation == "send_recv" else (num_ranks - 1) / (near.num_ranks - 1)
        links = level.group_bandwidth_bytes_per_s(num_ranks) / level.group_bandwidth_bytes_per_s(near.num_ranks)
        return Line(near.latency_ms * steps, near.bandwidth_bytes_per_s * links, "interpolated")

    def _twin_line(self, operation: Operation, num_ranks: int, level: Level) -> Line | None:
        twin = _TWINS.get(operation)
        if twin is None or not any(
            (fit.operation, fit.level, fit.inside) == (twin, level.name, 1) for fit in self.fits
        ):
            return None
        line = self.line(twin, num_ranks, level)
        return line and replace(line, source="interpolated")


def moved_bytes(operation: Operation, num_ranks: int, size_bytes: float) -> float:
    """What of a tensor moves past every rank of a ring (Patarasu & Yuan 2009; collectives.py)."""
    if operation == "send_recv":
        return size_bytes
    part_bytes = size_bytes * (num_ranks - 1) / num_ranks
    return 2 * part_bytes if operation == "all_reduce" else part_bytes


def fit_line(operation: Operation, num_ranks: int, level: str, samples: Sequence[SizeTiming], inside: int = 1) -> Fit:
    """The line through `samples` that is nearest in relative terms, neither its latency nor its slope below nothing.

    Small messages count as much as large ones. Where the best line has a negative part, that part is nothing and the
    other is fitted alone. Raises ProfileError without samples.
    """
    if not samples:
        raise ProfileError(f"{operation} among {num_ranks} ranks of level {level}: there are no times to fit a line to")
    moved = np.array([moved_bytes(operation, num_ranks, sample.size_bytes) for sample in samples], dtype=np.float64)
    times_ms = np.maximum([sample.time_ms.median_ms for sample in samples], LEAST_MS)
    ones, slopes = 1.0 / times_ms, moved / times_ms
    latency_ms, ms_per_byte = _least_squares(ones, slopes)
    ms_per_byte = max(ms_per_byte, 1e3 / MOST_BYTES_PER_S)
    residuals = np.abs(latency_ms * ones + ms_per_byte * slopes - 1.0)
    return Fit(
        operation=operation,
        num_ranks=num_ranks,
        level=level,
        inside=inside,
        latency_ms=latency_ms,
        bandwidth_bytes_per_s=1e3 / ms_per_byte,
        residual_fraction=float(residuals.mean()),
        samples=tuple(samples),
    )


def hidden_part(traffic_ms: float, compute_ms: float, together_ms: float) -> float:
    """The part of the shorter of both that the longer one hid, below 0 where they slowed each other down by more; noise
    beyond all of it is cut off."""
    shorter_ms = min(traffic_ms, compute_ms)
    if shorter_ms <= 0:
        return 0.0
    return min(1.0, max(-1e3, (traffic_ms + compute_ms - together_ms) / shorter_ms))


def network_path(root: Path, device_name: str) -> Path:
    """Where the network between devices of this name is kept in the store at `root`."""
    return store.device_folder(root, device_name) / "network.json"


def write_network(path: Path, origin: store.Origin, fits: Sequence[Fit], overlaps: Sequence[Overlap]) -> None:
    """Writes a network file, whole or not at all. Raises ProfileError where the folder cannot be written."""
    document: dict[str, Any] = {"schema": store.NETWORK_SCHEMA}
    document |= origin.model_dump(mode="json", include=set(store.Origin.model_fields))
    document["fits"] = [fit.model_dump(mode="json") for fit in fits]
    if overlaps:
        document["overlaps"] = [overlap.model_dump(mode="json") for overlap in overlaps]
    parse_record(NetworkProfile, document, "network file", path, ProfileError)
    write_measurements(path, document)


def read_network(paths: Sequence[Path], device_name: str) -> tuple[Path, NetworkProfile] | None:
    """The network file among `paths` (files, or folders of files); None where there is none.

    Raises ProfileError where it is malformed or of another device, where there are two, or a path cannot be read.
    """
    found: tuple[Path, NetworkProfile] | None = None
    for path, document in store.read_documents(paths):
        if document.get("schema") != store.NETWORK_SCHEMA:
            continue
        network = parse_record(NetworkProfile, document, "network file", path, ProfileError)
        if network.device != device_name:
            raise ProfileError(
                f"device is {network.device} and the job's cluster has {device_name}; measure "
                "there, or leave this file out of the job's `profiles`",
                where=f"network file {path}",
            )
        if found:
            raise ProfileError(
                f"{found[0]} is one already; name one of the two in `profiles`", where=f"network file {path}"
            )
        found = path, network
    return found


def _measured(fit: Fit) -> Line:
    """The line of a fit, with its samples; of several of one size the last counts."""
    medians_ms = {
        moved_bytes(fit.operation, fit.num_ranks, sample.size_bytes): sample.time_ms.median_ms
        for sample in fit.samples
        if sample.size_bytes
    }
    sizes_bytes = tuple(sorted(medians_ms))
    times_ms = tuple(medians_ms[size_bytes] for size_bytes in sizes_bytes)
    return Line(fit.latency_ms, fit.bandwidth_bytes_per_s, "measured", sizes_bytes, times_ms)


def _line_between(below: Fit, above: Fit, num_ranks: int) -> Line:
    weight = (num_ranks - below.num_ranks) / (above.num_ranks - below.num_ranks)
    return Line(
        latency_ms=(1 - weight) * below.latency_ms + weight * above.latency_ms,
        bandwidth_bytes_per_s=(1 - weight) * below.bandwidth_bytes_per_s + weight * above.bandwidth_bytes_per_s,
        source="interpolated",
    )


def _least_squares(
    ones: np.ndarray[Any, np.dtype[np.float64]], slopes: np.ndarray[Any, np.dtype[np.float64]]
) -> tuple[float, float]:
    """a, b ≥ 0 with a · ones + b · slopes nearest to 1: the free optimum, or the better one on the two edges."""
    scale = float(slopes.max())
    if scale <= 0:  # nothing but empty messages
        return float(ones.sum() / (ones @ ones)), 0.0
    matrix = np.stack([ones / ones.max(), slopes / scale], axis=1)
    (a, b), _, rank, _ = np.linalg.lstsq(matrix, np.ones(len(ones)), rcond=None)
    if rank < 2:
        a = -1.0  # one size alone says nothing of latency: all of its time is put on its bytes
    if a < 0 or b < 0:
        edges = [np.array([0.0, matrix[:, 1].sum() / (matrix[:, 1] @ matrix[:, 1])])]
        if rank == 2:
            edges.append(np.array([matrix[:, 0].sum() / (matrix[:, 0] @ matrix[:, 0]), 0.0]))
        a, b = min(edges, key=lambda edge: float(np.square(matrix @ edge - 1.0).sum()))
    return float(a / ones.max()), float(b / scale)
