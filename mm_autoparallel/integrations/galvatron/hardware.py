"""What Galvatron measures of a cluster: collectives, hops between stages, and what overlap costs. ms and MiB."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mm_autoparallel.errors import JobError
from mm_autoparallel.files import read_document
from mm_autoparallel.integrations.galvatron.figures import Line, figure_at, measured_at

_MESSAGES = re.compile(r"(?P<op>allreduce|all2all)_size_(?P<group>\d{1,9})_(?P<mib>\d{1,9})MB_time")
_HOP = re.compile(r"pp_size_(\d{1,9})")


@dataclass(frozen=True)
class Messages:
    """Times of one collective in one group, ms by MiB, and the line through them."""

    times_ms: Mapping[int, float]
    line: Line

    def at(self, mib: float) -> float:
        """ms: as measured where this very size was, else by the line."""
        whole = int(mib)
        return self.times_ms[whole] if whole == mib and whole in self.times_ms else self.line.at(mib)


@dataclass(frozen=True)
class Hardware:
    """Of a cluster. Rings by devices and whether they are neighbours, hops by pipeline stages, ms/MiB each."""

    rings_ms: Mapping[tuple[int, bool], float]
    hops_ms: Mapping[int, float]
    overlap_factor: float
    """How much slower computation and communication are beside each other."""
    gathers: Mapping[int, Messages]
    """All-gather or reduce-scatter, by devices: half of the all-reduce that was measured."""
    exchanges: Mapping[int, Messages]
    """All-to-all, by devices."""
    where: Mapping[str, str] = field(default_factory=dict)

    def ring_ms(self, group: int, is_consecutive: bool) -> float:
        """ms/MiB of an all-reduce. Raises JobError where it was not measured."""
        if group == 1:
            return 0.0
        key = f"allreduce_size_{group}_consec_{int(is_consecutive)}"
        return measured_at(self.rings_ms, (group, is_consecutive), self.where["allreduce"], key)

    def hop_ms(self, stages: int) -> float:
        """ms/MiB between neighbouring stages. Raises JobError where it was not measured."""
        return measured_at(self.hops_ms, stages, self.where["p2p"], f"pp_size_{stages}")

    def gather_ms(self, group: int, mib: float) -> float:
        """ms of an all-gather of `mib` altogether. Raises JobError where it was not measured."""
        return measured_at(self.gathers, group, self.where["sp"], f"allreduce_size_{group}_…MB_time").at(mib)

    def gather_line(self, group: int) -> Line:
        """The line through all-gathers. Raises JobError where none was measured."""
        return measured_at(self.gathers, group, self.where["sp"], f"allreduce_size_{group}_…MB_time").line

    def exchange_ms(self, group: int, mib: float) -> float:
        """ms of an all-to-all of `mib`. Raises JobError where it was not measured."""
        return measured_at(self.exchanges, group, self.where["sp"], f"all2all_size_{group}_…MB_time").at(mib)


def read_hardware(allreduce: Path, p2p: Path, overlap: Path, sp_time: Path, num_devices: int) -> Hardware:
    """From the four files. Raises JobError that names file and key."""
    what = "Galvatron profile"
    rings_file, hops_file = read_document(allreduce, what), read_document(p2p, what)
    where = {"allreduce": f"{what} {allreduce}", "p2p": f"{what} {p2p}", "sp": f"{what} {sp_time}"}
    rings: dict[tuple[int, bool], float] = {}
    for group in powers_down(num_devices):
        for consecutive in (True, False):
            # all devices together are neighbours
            key = f"allreduce_size_{group}_consec_{int(consecutive or group == num_devices)}"
            if key not in rings_file and f"allreduce_size_{group}" in rings_file:
                key = f"allreduce_size_{group}"  # Paddle's does not tell them apart
            rings[group, consecutive] = 1.0 / figure_at(rings_file, key, where["allreduce"])
    stages = {key: _HOP.fullmatch(key) for key in hops_file}
    hops = {int(hop[1]): 1.0 / figure_at(hops_file, key, where["p2p"]) for key, hop in stages.items() if hop}
    coefficient = figure_at(read_document(overlap, what), "overlap_coe", f"{what} {overlap}")
    if coefficient < 1.0:
        raise JobError(
            f"overlap_coe is {coefficient:g}; a slow-down of at least 1 is expected",
            where=f"{what} {overlap}",
            key="overlap_coe",
        )
    times: dict[tuple[str, int], dict[int, float]] = {}
    document = read_document(sp_time, what)
    for key in document:
        found = _MESSAGES.fullmatch(key)
        if found:
            of = times.setdefault((found["op"], int(found["group"])), {})
            of[int(found["mib"])] = figure_at(document, key, where["sp"]) * (0.5 if found["op"] == "allreduce" else 1.0)
    gathers, exchanges = (
        {group: _messages(op, group, held, where["sp"]) for (of, group), held in times.items() if of == op}
        for op in ("allreduce", "all2all")
    )
    return Hardware(rings, hops, coefficient, gathers, exchanges, where)


def powers_down(most: int) -> list[int]:
    """`most`, its half … down to 2."""
    found = []
    while most >= 2:
        found.append(most)
        most //= 2
    return found


def _messages(op: str, group: int, times_ms: Mapping[int, float], where: str) -> Messages:
    if len(times_ms) < 2:
        raise JobError(
            f"{op}_size_{group}: one size only; a line needs two, Galvatron's profiler takes 11", where=where
        )
    return Messages(times_ms, Line.through(times_ms, times_ms.values()))
