"""The lines that Megatron-LM and what is built on it print while training: steps, peaks, parameters, throughput."""

from __future__ import annotations

import math
import re

from mm_autoparallel.files import describe_value
from mm_autoparallel.measurements.logs.log import Line, Log
from mm_autoparallel.measurements.logs.run import Step
from mm_autoparallel.units import MIB

_NUMBER = r"([0-9]+(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?)"
_ITERATION = re.compile(r"\biteration\s+(\d+)\s*/\s*(?:\d+|infinity)\s*\|(.*)$")
_ELAPSED = re.compile(r"elapsed time per iteration \((\w*)\):\s*([^\s|]+)")
_UNITS_MS = {"ms": 1.0, "s": 1e3}
_BATCH = re.compile(r"global batch size:\s*(\d+)")
_SKIPPED = re.compile(r"number of (?:skipped|nan) iterations:\s*([1-9]\d*)")
_SAMPLES_PER_S = re.compile(rf"samples per second:\s*{_NUMBER}")
_TFLOPS = re.compile(rf"(?:throughput per GPU \(TFLOP/s/GPU\)|TFLOPs):\s*{_NUMBER}")
_ENGINE_STEP = re.compile(rf"\bsteps: (\d+) loss: .*?iter time \(s\): {_NUMBER}")
_PEAK = re.compile(r"\[Rank (\d+)\] \(after (\d+) iterations\) memory \(MB\).*?max allocated: ([^\s|]+)")
_RESTING = re.compile(r"\[Rank (\d+)\] \(after \d+ iterations\) memory \(MB\) \| allocated: ([^\s|]+)")
_PARAMETERS = re.compile(r"number of parameters on \(tensor, pipeline\) model parallel rank \((\d+), (\d+)\): (\d+)")
_PADDED = re.compile(r"padded vocab \(size: \d+\) with \d+ dummy tokens \(new size: (\d+)\)")
_WORLD = re.compile(r"using world size: (\d+)")
_PER_NODE = re.compile(r"(?:--nproc[-_]per[-_]node[ =]|--num_gpus[ =]|\bnum_local_procs=)(\d+)")

_WHOLE_NUMBER = re.compile(rf"{_NUMBER}(?![\w.,+-])")
"""Nothing of a number stands behind it; what another process wrote may."""

_OUT_OF_MEMORY = re.compile(r"OutOfMemoryError|(?:CUDA|NPU) out of memory")

_CLOSE_FRACTION = 0.05
"""Two figures of one line that should be one. Assumed: both are rounded."""


def read_positive(log: Log, line: Line, text: str, what: str) -> float:
    """The number above zero that `text` is. Raises TableError, so that `1,234.5` is not taken for 1."""
    found = _WHOLE_NUMBER.match(text)
    value = float(found[1]) if found else math.nan
    if not 0 < value < math.inf:
        raise log.error(
            f"{what} {describe_value(text)}; a number above zero is expected, with a point for its decimals and "
            "nothing between its thousands",
            line,
        )
    return value


def read_steps(log: Log) -> tuple[Step, ...]:
    """One entry a line, in order; those with skipped or NaN iterations, which did less, are left out.

    DeepSpeed's pipeline engine prints lines of its own (`steps: 5 loss: … iter time (s): …`), which count where there
    are no others. Raises TableError where time and throughput of a line contradict.
    """
    steps = []
    for line, match in log.find(_ITERATION):
        elapsed, batch, rate = (pattern.search(match[2]) for pattern in (_ELAPSED, _BATCH, _SAMPLES_PER_S))
        if elapsed is None or _SKIPPED.search(match[2]):
            continue
        if elapsed[1] not in _UNITS_MS:
            raise log.error(f"the step is told in {elapsed[1]}; {' and '.join(_UNITS_MS)} are understood", line)
        step_ms = read_positive(log, line, elapsed[2], "the step takes") * _UNITS_MS[elapsed[1]]
        samples = int(batch[1]) if batch else None
        if rate and samples and float(rate[1]) > 0.1:  # below, three digits say too little
            told = samples / float(rate[1]) * 1e3
            if abs(told / step_ms - 1) > _CLOSE_FRACTION:
                raise log.error(
                    f"the step takes {step_ms:g} ms, and {samples} samples at {rate[1]} a second are {told:.6g} ms; "
                    "the two contradict",
                    line,
                )
        steps.append(Step(step_ms, int(match[1]), samples))
    if not steps:
        steps = [Step(float(match[2]) * 1e3, int(match[1])) for _, match in log.find(_ENGINE_STEP)]
    return tuple(steps)


def read_flops_per_s(log: Log) -> tuple[float, ...]:
    """What every line counts of a device."""
    return tuple(float(match[1]) * 1e12 for _, match in log.find(_TFLOPS))


def read_peaks(log: Log) -> tuple[dict[int, float], bool]:
    """Rank → peak allocated bytes, and whether they were told after one step (report_memory counts in MiB)."""
    peaks: dict[int, float] = {}
    after: set[int] = set()
    for line, match in log.find(_PEAK):
        peak_bytes = read_positive(log, line, match[3], "the peak is") * MIB
        peaks[int(match[1])] = max(peaks.get(int(match[1]), 0.0), peak_bytes)
        after.add(int(match[2]))
    return peaks, after == {1}


def read_resting(log: Log) -> dict[int, float]:
    """Rank → bytes that are allocated between two steps."""
    return {
        int(match[1]): read_positive(log, line, match[2], "what stays allocated is") * MIB
        for line, match in log.find(_RESTING)
    }


def read_stage_parameters(log: Log) -> dict[int, int]:
    """Pipeline stage → parameters of its first tensor parallel rank."""
    return {int(match[2]): int(match[3]) for _, match in log.find(_PARAMETERS) if match[1] == "0"}


def read_padded_vocabulary(log: Log) -> int | None:
    """What the vocabulary was padded to."""
    found = log.find_same(_PADDED, "the padded vocabulary")
    return None if found is None else int(found)


def read_world_size(log: Log) -> int | None:
    """What `using world size` says."""
    found = log.find_same(_WORLD, "the world size")
    return None if found is None else int(found)


def read_devices_per_node(log: Log) -> int | None:
    """What the launcher's own lines say (torchrun's command, DeepSpeed's launcher); None where they differ."""
    told = {int(match[1]) for _, match in log.find(_PER_NODE)}
    return told.pop() if len(told) == 1 else None


def ran_out_of_memory(log: Log) -> bool:
    """Whether a process ended so, by torch's own words."""
    return next(log.find(_OUT_OF_MEMORY), None) is not None
