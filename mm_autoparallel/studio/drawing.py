"""What the page shows of a moment: sizes to choose from, figures of the job that may be otherwise, files to save."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mm_autoparallel.model.job.devices import DEVICES
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.job.layer_modes import OTHER_MODES, mode_reason
from mm_autoparallel.model.job.strategy import Strategy
from mm_autoparallel.planner.explain.modules import LAYOUT, LAYOUTS, Own, format_key, list_beside, list_new
from mm_autoparallel.planner.explain.modules import SIZES as OWN_SIZES
from mm_autoparallel.studio.document import Knob, Offer, SizeChoices, Unit

SIZES = ("pp", "tp", "cp", "ep", "etp", "dp", "mbs", "vpp", "zero", "shard", "schedule")
"""Fields of a Strategy that a person may choose, as `--sizes` and `--why-not` name them."""
_ALWAYS = ("pp", "tp", "mbs")

_MEMORY_FACTOR, _LINK_FACTOR, _IMAGES_FACTOR = 4.0, 16.0, 8
"""How far from the file's figure a slider goes, both ways. Assumed."""
_DOUBLINGS = (0.25, 0.5, 1, 2, 4)

FILES = (
    Offer(name="plan.json", title="the plan, as `plan` writes it"),
    Offer(name="job.yaml", title="the job, with what was changed"),
    Offer(name="report.html", title="this page as one file"),
    Offer(name="timeline.svg", title="the timeline as a picture"),
    Offer(name="trace.json", title="the timeline for Perfetto"),
)


def list_values(job: Job) -> dict[str, set[Any]]:
    """What the lawful strategies of `job` have of each of SIZES, but for those of a module for each encoder."""
    found: dict[str, set[Any]] = {name: set() for name in SIZES}

    def is_new(strategy: Strategy) -> bool:
        return any(getattr(strategy, name) not in values for name, values in found.items())

    for strategy in list_new(job, is_new, with_several=False):
        for name, values in found.items():
            values.add(getattr(strategy, name))
    return found


def list_sizes(job: Job, values: Mapping[str, set[Any]], strategy: Strategy) -> tuple[SizeChoices, ...]:
    """The sizes of `strategy`, and what others have in their place (`list_values`); then those of each encoder, and
    what it may have beside the same decoder."""
    sizes = []
    for name in SIZES:
        value = getattr(strategy, name)
        choices = sorted({value, *values[name]})
        if len(choices) > 1 or name in _ALWAYS:
            sizes.append(SizeChoices(name=name.upper(), value=value, choices=tuple(choices)))
    return (*sizes, *_list_of_encoders(job, strategy))


def _list_of_encoders(job: Job, strategy: Strategy) -> Iterator[SizeChoices]:
    """How each encoder runs, and its sizes where it has some of its own: those that go with that way to run."""
    chain = {"chain"} if "chain" in job.search.kinds else set[str]()
    for name, every in list_beside(job, strategy.of_decoder()).items():
        own = Own.of(strategy, name)
        runs = {own.layout, *chain, *(one.layout for one in every)}
        if len(runs) > 1 or own.layout != "chain":
            key = format_key(f"{name}.{LAYOUT}")
            choices = tuple(word for word in LAYOUTS if word in runs)
            yield SizeChoices(name=key, value=own.layout, choices=choices)
        for size in OWN_SIZES if own.layout != "chain" else ():
            value = getattr(own, size)
            values = {value, *(getattr(one, size) for one in every if one.layout == own.layout)}
            if len(values) > 1 or size in _ALWAYS:
                yield SizeChoices(name=format_key(f"{name}.{size}"), value=value, choices=tuple(sorted(values)))


def list_modes(job: Job) -> dict[str, tuple[str, ...]]:
    """Modality → the modes that its layers may run in."""
    others = [mode for mode in OTHER_MODES if mode_reason(mode, job.workload, job.cluster.device) is None]
    return {modality.name: ("recompute", *others) for modality in job.model.modalities}


def list_knobs(job: Job, given: Job, values: Mapping[str, Any], document: Mapping[str, Any]) -> tuple[Knob, ...]:
    """What may be otherwise in `job`. given: as its file has it, whose content is `document`."""
    knobs = [
        _choice(
            "cluster.num_nodes",
            "nodes",
            job.cluster.num_nodes,
            given.cluster.num_nodes,
            _doubled(given.cluster.num_nodes),
        ),
        _choice("cluster.device", "device", _device(job, values), given.cluster.device.name, _devices(given)),
        _slider(
            "cluster.device.memory_bytes",
            "memory of a device",
            "bytes",
            job.cluster.device.memory_bytes,
            given.cluster.device.memory_bytes,
            _MEMORY_FACTOR,
        ),
        *_links(job, given, document),
        _choice(
            "workload.global_batch_size",
            "samples of a step",
            job.workload.global_batch_size,
            given.workload.global_batch_size,
            _doubled(given.workload.global_batch_size),
            "samples",
        ),
        _choice(
            "workload.seq_length",
            "tokens of a sample",
            job.workload.seq_length,
            given.workload.seq_length,
            _doubled(given.workload.seq_length),
            "tokens",
        ),
    ]
    images, of_file = job.workload.image_tokens_per_sample, given.workload.image_tokens_per_sample
    if of_file:
        choices = tuple(value for value in _doubled(of_file) if value <= given.workload.seq_length)
        knobs.append(
            _choice(
                "workload.image_tokens_per_sample", "tokens of a sample's images", images, of_file, choices, "tokens"
            )
        )
        per_sample = given.workload.images_per_sample
        knobs.append(
            _choice(
                "workload.images_per_sample",
                "images of a sample",
                job.workload.images_per_sample,
                per_sample,
                _doubled(per_sample),
            )
        )
    return tuple(knobs)


def _choice(key: str, title: str, value: Any, given: Any, choices: Sequence[Any], unit: Unit = "") -> Knob:
    return Knob(key=key, title=title, value=value, given=given, choices=tuple(choices), unit=unit)


def _slider(key: str, title: str, unit: Unit, value: float, given: float, factor: float) -> Knob:
    return Knob(
        key=key,
        title=title,
        value=value,
        given=given,
        low=given / factor,
        high=given * factor,
        unit=unit,
        whole=unit == "bytes",
    )


def _doubled(given: int) -> tuple[int, ...]:
    return tuple(
        sorted({int(given * factor) for factor in _DOUBLINGS if given * factor >= 1 and given * factor % 1 == 0})
    )


def _device(job: Job, values: Mapping[str, Any]) -> str:
    return str(values.get("cluster.device", job.cluster.device.name))


def _devices(given: Job) -> tuple[str, ...]:
    return tuple(dict.fromkeys([given.cluster.device.name, *DEVICES]))


def _links(job: Job, given: Job, document: Mapping[str, Any]) -> list[Knob]:
    """Bandwidths: of the levels where the file lists them, else of the device's links."""
    cluster = document.get("cluster")
    if isinstance(cluster, Mapping) and cluster.get("levels"):
        pairs = zip(job.cluster.levels, given.cluster.levels, strict=False)
        return [
            _slider(
                f"cluster.levels.{number}.bandwidth_bytes_per_s",
                f"link: {level.name}",
                "bytes/s",
                level.bandwidth_bytes_per_s,
                before.bandwidth_bytes_per_s,
                _LINK_FACTOR,
            )
            for number, (level, before) in enumerate(pairs)
        ]
    device, before = job.cluster.device, given.cluster.device
    return [
        _slider(
            f"cluster.device.{name}.bandwidth_bytes_per_s",
            title,
            "bytes/s",
            getattr(device, name).bandwidth_bytes_per_s,
            getattr(before, name).bandwidth_bytes_per_s,
            _LINK_FACTOR,
        )
        for name, title in (("node_link", "link inside a node"), ("network_link", "link between nodes"))
    ]


def describe_values(values: Mapping[str, Any]) -> str:
    """`cluster.num_nodes 8, workload.seq_length as in the file`."""
    return ", ".join(
        f"{key} {'as in the file' if value is None else json.dumps(value)}" for key, value in values.items()
    )
