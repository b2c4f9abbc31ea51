"""What Galvatron measures of a model, in the files of all its generations.

Times are ms, sizes MiB, as in the files. Of a model: the forward of a layer and of the rest (embedding, norm, head) by
the number of samples; a layer's parameters in fp32; what a layer keeps of one sample by the degree it is divided by; of
the rest, model states and activations, where it stands on one stage and where on the first and the last.

Generations: upstream's HEAD ends file names in `_all`; 2.1 to 2.4 do not, and number `layertype_other_0`; older ones
leave out the length of the sequence, and hold one figure where later ones hold one by degree.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mm_autoparallel.errors import JobError
from mm_autoparallel.files import read_document
from mm_autoparallel.integrations.galvatron.figures import Line, figure_at, measured_at, section_at

TimeMode = Literal["static", "batch", "sequence"]
MemoryMode = Literal["static", "sequence"]

MIN_SAMPLES = 8
"""Points that Galvatron asks of a line."""
_TIMES = re.compile(r"layertype_(?P<of>other|\d+)(?:_\d+)?(?:_bsz(?P<batch>\d{1,9}))?(?:_seq(?P<seq>[\d\[\],]+))?")
_RAW_MEMORY = re.compile(r"\d+_\d+_\d+(_\w+)?")
_DEGREE = re.compile(r"\d{1,9}")


@dataclass(frozen=True)
class Ends:
    """What embedding and head hold, MiB: model states by TP, activations of a sample by degree."""

    states_mib: Mapping[int, float]
    activation_mib: Mapping[int, float]
    where: str = ""
    key: str = ""

    def states(self, tp: int) -> float:
        """MiB at a TP. Raises JobError where it was not measured."""
        return measured_at(self.states_mib, tp, self.where, f"{self.key}.model_states.{tp}")

    def activation(self, degree: int) -> float:
        """MiB of a sample at a degree. Raises JobError where it was not measured."""
        return measured_at(self.activation_mib, degree, self.where, f"{self.key}.activation.{degree}")


@dataclass(frozen=True)
class ModelProfile:
    """Of a model at one length of sequence."""

    layer_ms: Line
    """Forward of one layer by samples."""
    ends_ms: Line
    """Forward of embedding, norm and head by samples."""
    parameter_mib: float
    """Of one layer, in the number type of the generation: fp32 upstream, bf16 Paddle's."""
    activation_mib: Mapping[int, float]
    """What one layer keeps of a sample, by degree."""
    checkpoint_mib: float
    """The same of a layer that computes it again."""
    alone: Ends
    first: Ends
    last: Ends
    where: str = ""

    def activation(self, degree: int) -> float:
        """MiB that a layer keeps of a sample at a degree. Raises JobError where it was not measured."""
        return measured_at(self.activation_mib, degree, self.where, f"tp_activation_per_bsz_dict.{degree}")

    @property
    def layer_degrees(self) -> frozenset[int]:
        """Those that a layer was measured at."""
        return frozenset(self.activation_mib)

    def ends_of(self, pp: int) -> tuple[tuple[int, Ends], ...]:
        """The stages that hold embedding and head, and what."""
        return ((0, self.alone),) if pp == 1 else ((0, self.first), (pp - 1, self.last))

    def ends_degrees(self, pp: int) -> tuple[frozenset[int], frozenset[int]]:
        """Those that embedding and head were measured at with `pp` stages: of states, of activations."""
        ends = [each for _, each in self.ends_of(pp)]
        return (
            frozenset.intersection(*(frozenset(each.states_mib) for each in ends)),
            frozenset.intersection(*(frozenset(each.activation_mib) for each in ends)),
        )


def read_model(
    time: Path,
    memory: Path,
    seq_length: int,
    time_mode: TimeMode,
    memory_mode: MemoryMode,
    is_sequence_parallel: bool = True,
    is_older: bool = False,
) -> ModelProfile:
    """From the files of computation and of memory. is_older: what embedding and head keep of a sequence is scaled to
    its length as 2.4.0 does. Raises JobError that names file and key."""
    what = "Galvatron profile"
    layer, ends = read_times(read_document(time, what), f"{what} {time}", seq_length, time_mode)
    document = read_document(memory, what)
    kept = _read_memory(document, f"{what} {memory}", seq_length, memory_mode, is_sequence_parallel, is_older)
    return replace(kept, layer_ms=layer, ends_ms=ends)


def read_times(document: Mapping[str, Any], where: str, seq_length: int, mode: TimeMode) -> tuple[Line, Line]:
    """The forward of a layer and of the rest, ms by samples."""
    if not any(key.startswith("layertype_") for key in document):
        raise JobError(
            "it holds only times of whole models (`layernum…`), no `layertype_…`: the processing step is missing, "
            "which Galvatron's profiler runs last (process_profiled_data)",
            where=where,
        )
    if any(key.startswith("layertype_1") for key in document):
        raise JobError("it is of several kinds of layers (layertype_1…); one kind is planned here", where=where)
    return tuple(_line_of(document, where, of, seq_length, mode) for of in ("0", "other"))  # type: ignore[return-value]


def _line_of(document: Mapping[str, Any], where: str, of: str, seq_length: int, mode: TimeMode) -> Line:
    points: dict[tuple[int | None, str | None], float] = {}
    for key in document:
        found = _TIMES.fullmatch(key)
        if found and found["of"] == of:
            value = figure_at(document, key, where, is_zero=of == "other")
            points[int(found["batch"]) if found["batch"] else None, _seq(found["seq"])] = value
    name = f"layertype_{of}"
    if mode == "static":
        if len(points) > 1:
            points = {(batch, seq): ms for (batch, seq), ms in points.items() if batch is None} or points
        if not points and of == "other":
            return Line(0.0)  # of the oldest generation, which did not measure it
        if len(points) != 1:
            raise JobError(
                f"{name} has {len(points)} times; time_profile_mode static takes one: use batch, or sequence",
                where=where,
                key=name,
            )
        return Line(*points.values())
    if mode == "batch":
        held = {batch: ms for (batch, seq), ms in points.items() if batch and seq in (None, str(seq_length))}
        if len(held) < MIN_SAMPLES:
            raise JobError(
                f"{name} has times of {len(held)} batches at seq_length {seq_length}; time_profile_mode batch draws a "
                f"line through {MIN_SAMPLES} at least",
                where=where,
                key=f"{name}_bsz…_seq{seq_length}",
            )
        return Line.through(held, (batch * ms for batch, ms in held.items()))
    held = {int(seq): ms for (batch, seq), ms in points.items() if batch == 1 and seq is not None and seq.isdigit()}
    needed = 3 if of == "0" else 2
    if len(held) < needed:
        raise JobError(
            f"{name} has times of {len(held)} lengths at a batch of 1; time_profile_mode sequence needs {needed}",
            where=where,
            key=f"{name}_bsz1_seq…",
        )
    curve = np.polyfit(np.array([*held], dtype=float), np.array([*held.values()]), needed - 1)
    return Line(float(np.polyval(curve, seq_length)))


def _seq(text: str | None) -> str | None:
    return text.strip("[]") if text else None


def _read_memory(
    document: Mapping[str, Any],
    where: str,
    seq_length: int,
    mode: MemoryMode,
    is_sequence_parallel: bool,
    is_older: bool,
) -> ModelProfile:
    """Without times."""
    suffix = "_sp" if is_sequence_parallel else ""
    if f"layertype_0{suffix}" not in document:
        if any(_RAW_MEMORY.fullmatch(key) for key in document) and not any(
            k.startswith("layertype_") for k in document
        ):
            raise JobError(
                "it holds only what runs reported (`1_1_8…`), no `layertype_…`: the processing step is missing, which "
                "Galvatron's profiler runs last (process_profiled_data)",
                where=where,
            )
        other = "false" if is_sequence_parallel else "true"
        there = "layertype_0" + ("" if is_sequence_parallel else "_sp") in document
        hint = f"; it was measured with sequence_parallel {other}" if there else ""
        raise JobError(f"layertype_0{suffix} is missing{hint}", where=where, key=f"layertype_0{suffix}")
    lengths = _by_length(document, f"layertype_0{suffix}", "parameter_size", where)
    least, most = _lengths(lengths, seq_length, mode, where, f"layertype_0{suffix}")
    scale = 1.0
    if mode == "sequence" and most:
        scale = seq_length / int(most)
    place = f"layertype_0{suffix}" + (f".{most}" if most else "")
    kept = section_at(lengths[most], "tp_activation_per_bsz_dict", where, place)
    activation = {int(key): figure_at(kept, key, where, place) * scale for key in kept if _DEGREE.fullmatch(key)}
    scales = (2 / 3 + scale / 3, 1.0, scale) if is_older else (scale,) * 3
    alone, first, last = (
        _ends(document, f"other_memory_pp_{part}{suffix}", most, each, where)
        for part, each in zip(("off", "on_first", "on_last"), scales, strict=True)
    )
    return ModelProfile(
        Line(0.0),
        Line(0.0),
        figure_at(lengths[least], "parameter_size", where, place),
        activation,
        figure_at(kept, "checkpoint", where, place) * scale,
        alone,
        first,
        last,
        where,
    )


def _by_length(document: Mapping[str, Any], key: str, inside: str, where: str) -> Mapping[str, Mapping[str, Any]]:
    """What stands under `key` by length of the sequence; the oldest generation, which has none, under no length."""
    found = section_at(document, key, where)
    if inside in found:
        return {"": found}
    return {str(seq).strip("[]"): section_at(found, seq, where, key) for seq in found}


def _lengths(held: Mapping[str, object], seq_length: int, mode: MemoryMode, where: str, key: str) -> tuple[str, str]:
    """The lengths that parameters and activations are taken from."""
    if [*held] == [""]:
        return "", ""
    if mode == "static":
        if str(seq_length) not in held:
            raise JobError(
                f"{key} has no seq_length {seq_length}; it has {', '.join(held) or 'none'} "
                "(memory_profile_mode sequence scales the longest)",
                where=where,
                key=f"{key}.{seq_length}",
            )
        return str(seq_length), str(seq_length)
    numbers = sorted(int(seq) for seq in held if _DEGREE.fullmatch(seq) and int(seq))
    if not numbers:
        raise JobError(f"{key} has no length of a sequence", where=where, key=key)
    return str(numbers[0]), str(numbers[-1])


def _ends(document: Mapping[str, Any], key: str, seq: str, scale: float, where: str) -> Ends:
    found = _by_length(document, key, "model_states", where)
    if seq not in found:
        raise JobError(f"{key} has no seq_length {seq}; it has {', '.join(found)}", where=where, key=f"{key}.{seq}")
    place = f"{key}.{seq}" if seq else key
    states = _by_degree(found[seq], "model_states", where, place)
    activation = _by_degree(found[seq], "activation", where, place)
    return Ends(states, {degree: mib * scale for degree, mib in activation.items()}, where, place)


def _by_degree(section: Mapping[str, Any], key: str, where: str, above: str) -> dict[int, float]:
    """Figures by degree; one figure alone is of degree 1."""
    if isinstance(section.get(key), (int, float)):
        return {1: figure_at(section, key, where, above, is_zero=True)}
    held, place = section_at(section, key, where, above), f"{above}.{key}"
    return {int(name): figure_at(held, name, where, place, is_zero=True) for name in held if _DEGREE.fullmatch(name)}
