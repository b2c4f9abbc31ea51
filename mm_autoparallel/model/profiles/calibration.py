"""What part of its peak figures a device reaches under one software stack, and how far predictions from it were off.

One number per class of operator, and what shapes, gaps and many ranks cost beside it (model/profiles/assumed.py). A
calibration is a data file with the rows it was fitted to, made by `mm-autoparallel
calibrate`; those of profiles/calibrations/ are shipped, `DEVICE.json` or `DEVICE.SOFTWARE.json`:

    {"schema": "mm-autoparallel/calibration/2", "name": "a100-80g", "device": "a100-80g", "software": "megatron-lm",
     "figures": {"matrix_fraction": 0.74, …}, "sources": {"matrix_fraction": "calibrated", …},
     "interval": {"low_factor": 0.95, "high_factor": 1.06, "source": "…"},
     "fitted": [{"table": "…", "row": 0, "content": {…}, "measured_ms": 1420.0, "error_fraction": 0.004}, …],
     "held_out": {"korthikanti2022.csv": {"1": -0.037, …}}}

Rows of several devices may be fitted together: `others` then has the figures of the further devices, which moved by the
same factors from what was assumed of each.

A device without one gets the assumed figures below: predictions then say `uncalibrated` and carry a wide interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal

from pydantic import Field, model_validator

from mm_autoparallel.errors import ProfileError
from mm_autoparallel.files import is_there, read_document
from mm_autoparallel.model.job.cluster import Cluster, Level
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.stacks import facts_of, software_of
from mm_autoparallel.model.profiles.assumed import (
    AMPERE,
    ASSUMED,
    ASSUMED_OF,
    CORE_ON_AMPERE,
    MODERN,
    MODERN_SOFTWARE,
    OF_OVERLAPPING_STACKS,
    ONLY_MODERN,
    PLAIN_FRACTIONS,
    PLAIN_OF,
    SHAPED,
    TENSOR_NETWORK_FRACTION,
    TENSOR_SHARDS,
)
from mm_autoparallel.model.profiles.figures import HOST_FIGURES, LATER_FIGURES, MEASURED, Figures
from mm_autoparallel.model.profiles.interval import NEAR, WIDE, Interval
from mm_autoparallel.records import (
    Name,
    Noun,
    Number,
    PositiveTime,
    Signed,
)
from mm_autoparallel.validation import nearest, parse_record

CALIBRATION_SCHEMA: Final = "mm-autoparallel/calibration/2"
SHIPPED = Path(__file__).parent / "calibrations"


ErrorFraction = Annotated[float, Field(strict=True, gt=-1, le=1e6, allow_inf_nan=False)]
"""Predicted / measured − 1."""


class CalibrationRow(Noun):
    """A row of a table, its content as it stood there, what was measured and how far the prediction was off.

    By its content it is known again, whatever table it stands in. error_fraction: predicted / measured − 1.
    """

    table: Name
    row: Number
    content: dict[str, str]
    measured_ms: PositiveTime
    error_fraction: ErrorFraction


LogProduct = Signed
"""Of two logarithms."""


class Posterior(Noun):
    """What is known of the rates that were fitted: their names (measurements/fit.py), and the covariance of their
    logarithms, of which one that the rows did not tell has its prior's."""

    names: tuple[str, ...]
    covariance: tuple[tuple[LogProduct, ...], ...]

    def log_spread(self, name: str) -> float:
        """Standard deviation of the logarithm of one rate."""
        at = self.names.index(name)
        return math.sqrt(max(0.0, self.covariance[at][at]))


class Calibration(Noun):
    """The figures of one device under one software stack. sources: figure → where it came from.

    others: further devices → their figures, fitted together with these. fitted: rows that the figures were fitted to,
    which are never scored. held_out: table → row → error of those that were predicted, but not fitted to. note: what a
    person should know. command: what made it. calibrated: False for the assumed figures of a device without a file.
    """

    schema_name: Literal["mm-autoparallel/calibration/2"] = Field(alias="schema")
    name: Name
    device: Name
    software: Name
    note: str = ""
    command: str = ""
    figures: Figures
    others: dict[Name, Figures] = Field(default_factory=dict)
    sources: dict[str, str]
    interval: Interval
    posterior: Posterior | None = None
    fitted: tuple[CalibrationRow, ...] = ()
    held_out: dict[Name, dict[str, ErrorFraction]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> Calibration:
        known = list(Figures.model_fields)
        for figure in self.sources:
            if figure not in known:
                raise ValueError(f"sources names {figure}, which is no figure{nearest(figure, known)}")
        for name in LATER_FIGURES:
            self.sources.setdefault(name, "assumed")
        return self

    def of(self, device_name: str) -> Calibration | None:
        """It as that of one of its devices; None where it has no figures of that one."""
        if device_name == self.device:
            return self
        return self.as_of(device_name) if device_name in self.others else None

    def as_of(self, device_name: str) -> Calibration:
        """It with the figures of another of its devices in front."""
        others = {self.device: self.figures, **self.others}
        return self.model_copy(update={"device": device_name, "figures": others.pop(device_name), "others": others})

    def with_figures(self, change: Callable[[Figures], Figures]) -> Calibration:
        """It with the figures of each of its devices changed alike."""
        others = {name: change(figures) for name, figures in self.others.items()}
        return self.model_copy(update={"figures": change(self.figures), "others": others})

    @property
    def devices(self) -> tuple[str, ...]:
        """All that it has figures of, its own first."""
        return (self.device, *self.others)

    @property
    def calibrated(self) -> bool:
        """Whether anything was fitted or measured: the assumed figures of an unknown device were not."""
        return bool(self.fitted)

    @property
    def description(self) -> str:
        """What reports and provenance say of it, in a few words."""
        if not self.calibrated:
            measured = any(source.startswith(MEASURED) for source in self.sources.values())
            host = ", its host's measured" if measured else ""
            return f"uncalibrated, assumed figures of {self.device}{host}"
        return f"calibration {self.name}, {self.software}, fitted to {len(self.fitted)} published steps"

    def reached(self, cluster: Cluster) -> Cluster:
        """`cluster` with the bandwidth and latency of its levels as they are reached: what groups are formed of.

        A level that the node's link joins (Level.of_node_link) is reached as the innermost one is.
        """
        inner, figures = cluster.levels[0], self.figures

        def reach(level: Level) -> Level:
            if level is inner or level.of_node_link:
                return _reached_level(level, figures.node_fraction, figures.node_latency_ms)
            return _reached_level(level, figures.network_fraction, figures.network_latency_ms).model_copy(
                update={
                    "scale_ranks": level.scale_ranks or figures.scale_ranks or None,
                    "hop_bandwidth_bytes_per_s": level.hop_bandwidth_bytes_per_s
                    or (figures.hop_fraction and figures.hop_fraction * level.bandwidth_bytes_per_s),
                }
            )

        return cluster.model_copy(update={"levels": tuple(reach(level) for level in cluster.levels)})

    def reached_by_tensors(self, cluster: Cluster) -> Cluster:
        """As `reached`, for what ZeRO 3 moves tensor by tensor: beyond a node the network carries nearly all it states,
        whatever the number of ranks (TENSOR_NETWORK_FRACTION). What the ranks themselves take is shard_gigabyte_ms.
        """
        if not self.figures.shard_gigabyte_ms:
            return self.reached(cluster)
        whole = self.figures.model_copy(update={"network_fraction": TENSOR_NETWORK_FRACTION, "scale_ranks": 0})
        return self.model_copy(update={"figures": whole}).reached(cluster)


def _reached_level(level: Level, fraction: float, latency_ms: float | None) -> Level:
    pair_bytes_per_s = level.pair_bandwidth_bytes_per_s
    return level.model_copy(
        update={
            "bandwidth_bytes_per_s": level.bandwidth_bytes_per_s * fraction,
            "pair_bandwidth_bytes_per_s": pair_bytes_per_s and pair_bytes_per_s * fraction,
            "latency_ms": level.latency_ms if latency_ms is None else latency_ms,
        }
    )


_MEGATRON_LM = ("megatron-te", "megatron-local")
"""Stacks that a device's own calibration is of."""


def find_calibration(device_name: str, software: str | None = None) -> Calibration:
    """The shipped calibration of a device under a software stack; without `software` the one called like the device.

    A stack that nobody calibrated there gets the assumed figures, whose `calibrated` is False, with the facts of that
    stack; what a host takes is the stack's on another device, where nothing else is known of it.
    """
    shipped = shipped_calibrations()
    for found in shipped.values():
        own = found.of(device_name)
        if software is not None and own is not None and own.software == software:
            return own
    if software is None and device_name in shipped:
        return shipped[device_name]
    assumed = assume_calibration(device_name, software or "")
    return assumed if _is_modern(device_name, software or "") else _with_host(assumed, software)


def calibration_of(job: Job) -> Calibration:
    """The calibration that `job` names, that of its device and the stack that it names, or that of its device.

    Another stack's serves where both are Megatron-LM. A job that asks for low precision gets the figures of all
    precisions that are assumed of its device, since no shipped calibration was fitted to products of less than BF16.
    Raises ProfileError where it is of another device.
    """
    device_name, stack = job.cluster.device.name, job.workload.stack
    if job.calibration is None and job.asks_low:
        return assume_calibration(device_name, software_of(stack), modern=True)
    if job.calibration is None:
        own, usual = find_calibration(device_name, software_of(stack)), find_calibration(device_name)
        if stack in _MEGATRON_LM or ("stack" not in job.workload.model_fields_set and usual.calibrated):
            return usual if usual.calibrated else assume_calibration(device_name, software_of(stack))
        return own if own.calibrated else assume_calibration(device_name, software_of(stack))
    return resolve_calibration(job.calibration, job.path.parent, device_name, f"job file {job.path}: calibration")


def resolve_calibration(name: str, folder: Path, device_name: str, key: str) -> Calibration:
    """The shipped calibration called `name`, or that of a file, from `folder`; `key` is what messages call it.

    Raises ProfileError where there is none, or it is of another device than `device_name`.
    """
    shipped, path = shipped_calibrations(), folder / name
    if name in shipped:
        found = shipped[name]
    elif is_there(path):
        found = read_calibration(path)
    else:
        raise ProfileError(
            f"{key} is {name!r}, which is neither a shipped calibration{nearest(name, list(shipped))} nor the file "
            f"{path}; shipped are {', '.join(shipped)}"
        )
    own = found.of(device_name)
    if own is None:
        raise ProfileError(
            f"{key} {name!r} is of {', '.join(found.devices)}, and the device is {device_name}; name one of that "
            "device, or none for assumed figures"
        )
    return own


def read_calibration(path: Path) -> Calibration:
    """The calibration in the file at `path`. Raises ProfileError naming file, key and what would be right."""
    document = read_document(path, "calibration", ProfileError)
    return parse_record(Calibration, document, "calibration", path, ProfileError)


def calibration_document(calibration: Calibration) -> dict[str, Any]:
    """What is written to a calibration's file."""
    document = calibration.model_dump(mode="json", by_alias=True)
    for name in LATER_FIGURES:
        written = [document["figures"], *document["others"].values()]
        if all(figures[name] == Figures.model_fields[name].default for figures in written):
            document["sources"].pop(name, None)
            for figures in written:
                figures.pop(name)
    if not calibration.others:
        document.pop("others")
    document["interval"].pop("widened_by")
    return document


def with_measured(
    base: Calibration, measured: Mapping[str, float], source: str, name: str, command: str
) -> Calibration:
    """`base` with figures that were measured in place of its own; `source` says with what."""
    figures = Figures.model_validate(base.figures.model_dump() | dict(measured))
    sources = dict(base.sources) | dict.fromkeys(measured, source)
    return base.model_copy(update={"name": name, "command": command, "figures": figures, "sources": sources})


@lru_cache(maxsize=1)
def shipped_calibrations() -> Mapping[str, Calibration]:
    """All calibrations that come with the package, by name."""
    found = [read_calibration(path) for path in sorted(SHIPPED.glob("*.json"))]
    return MappingProxyType({calibration.name: calibration for calibration in found})


def assume_calibration(device_name: str, software: str = "", modern: bool = False) -> Calibration:
    """The assumed and published figures of a device that nobody calibrated under `software` (empty: any).

    modern: those of all precisions, where they are known (model/profiles/assumed.py, MODERN).
    """
    if _is_modern(device_name, software, modern):
        near = NEAR if software == MODERN_SOFTWARE[0] else WIDE
        return _assume(device_name, software, MODERN[device_name], {}, near)
    figures, published = ASSUMED_OF.get(device_name, (ASSUMED, {}))
    of_stack = OF_OVERLAPPING_STACKS if facts_of(software).hides_reduction else {}
    if software == "megatron-core" and device_name in AMPERE:
        of_stack = of_stack | CORE_ON_AMPERE
    return _assume(device_name, software, figures | of_stack, published)


def _assume(
    device_name: str,
    software: str,
    figures: Mapping[str, float],
    published: Mapping[str, str],
    interval: Interval = WIDE,
) -> Calibration:
    facts = facts_of(software)
    of_stack = {"hidden_fraction": 1.0 if facts.hides_sums else 0.0}
    if facts.shards == "tensor":
        of_stack, published = of_stack | TENSOR_SHARDS[0], dict(published) | TENSOR_SHARDS[1]
    return Calibration(
        schema=CALIBRATION_SCHEMA,
        name="uncalibrated",
        device=device_name,
        software=software or "any",
        figures=Figures.model_validate(dict(figures) | of_stack),
        sources={name: published.get(name, "assumed") for name in Figures.model_fields},
        interval=interval,
    )


def together(calibrations: Sequence[Calibration]) -> Calibration:
    """The first of several, each of another device, with the others' own figures and fitted rows beside its own."""
    first, *others = calibrations
    fitted = tuple(row for one in calibrations for row in one.fitted)
    return first.model_copy(update={"others": {one.device: one.figures for one in others}, "fitted": fitted})


def _is_modern(device_name: str, software: str, asked: bool = False) -> bool:
    """Whether the figures of all precisions hold: for a device or a stack without others, or where they are asked."""
    return device_name in MODERN and (asked or software in MODERN_SOFTWARE or device_name in ONLY_MODERN)


PLAIN = "plain"
"""What plain_calibration is called on command lines."""


def plain_calibration(device_name: str, software: str = "") -> Calibration:
    """The assumed figures without what shapes, gaps and many ranks cost: one number a class of operator alone.

    Stacks that are calibrated on many rows, or on few of one kind, carry those costs in their fractions.
    """
    assumed = _assume(device_name, software, *ASSUMED_OF.get(device_name, (ASSUMED, {})))
    matrix, forward, backward = PLAIN_OF.get(device_name, PLAIN_FRACTIONS)
    figures = {
        "matrix_fraction": matrix,
        "grouped_matrix_fraction": matrix,
        "attention_forward_fraction": forward,
        "attention_backward_fraction": backward,
        "unfused_attention_fraction": backward,
        "memory_fraction": 0.80,
        "node_fraction": 0.80,
        "network_fraction": 0.80,
    } | {name: Figures.model_fields[name].default for name in SHAPED}
    return assumed.model_copy(update={"figures": assumed.figures.model_copy(update=figures)})


def _with_host(assumed: Calibration, software: str | None) -> Calibration:
    """What a host takes to launch a layer and a collective depends on the stack: the least of it on other devices."""
    hosts = [found for found in shipped_calibrations().values() if found.software == software]
    figures: dict[str, float] = {}
    sources: dict[str, str] = {}
    for name in (*HOST_FIGURES, "node_latency_ms"):
        known = {getattr(host.figures, name): host.name for host in hosts if getattr(host.figures, name)}
        if known:
            figures[name] = min(known)
            sources[name] = f"that of {known[min(known)]}, the same stack"
    return assumed.model_copy(
        update={"figures": assumed.figures.model_copy(update=figures), "sources": assumed.sources | sources}
    )
