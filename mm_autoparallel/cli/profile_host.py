"""`profile JOB --host-constants`: what this host takes to launch a layer, as a calibration that a job names."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mm_autoparallel.cli.output import print_line
from mm_autoparallel.errors import JobError, ProfileError
from mm_autoparallel.reports.terminal import say, warn

if TYPE_CHECKING:
    from mm_autoparallel.integrations.framework import LiveModels
    from mm_autoparallel.model.job.job import Job
    from mm_autoparallel.model.profiles.calibration import Calibration
    from mm_autoparallel.profilers.host_constants import HostTimes

FILE = "host_constants.json"

_SPREAD_FRACTION = 0.3
"""Median deviation over the median from which on a measurement is doubted. Assumed."""

_OTHERS = ("seq_lengths", "tp", "mbs")


def profile_host(arguments: argparse.Namespace, job: Job, document: Mapping[str, Any], path: Path) -> int:
    """Measure in this process, on one device; write the calibration into the device's folder and print its path."""
    from mm_autoparallel.hooks.stored_device import stored_device
    from mm_autoparallel.integrations.catalog import live_models_of
    from mm_autoparallel.model.profiles.calibration import calibration_document
    from mm_autoparallel.model.profiles.disk import check_writable, write_measurements
    from mm_autoparallel.model.profiles.store import device_folder
    from mm_autoparallel.profilers.device import claim_device, software_versions
    from mm_autoparallel.profilers.host_constants import MORE_LAYERS, measure_host
    from mm_autoparallel.profilers.torch_releases import is_out_of_device_memory

    for name in _OTHERS:
        if getattr(arguments, name) is not None:
            raise JobError(
                f"--{name.replace('_', '-')} and --host-constants do not go together: samples are short and whole "
                "layers run on one device; leave it out"
            )
    trained = job.model.with_freeze(_nothing_frozen(job))
    models = live_models_of(document, f"model file {path}")
    subject = models.make_subject(document, trained, job.workload, path)
    num_layers = {modality.name: modality.layers.num_layers for modality in job.model.modalities}
    if max(num_layers.values()) < 2:
        raise JobError(f"model file {path}: no modality has two layers, and one layer is told as a difference of two")
    device = stored_device(arguments.out)
    check_writable(device_folder(arguments.out, device.name))
    if device.name != job.cluster.device.name:
        warn([f"the job's devices are {job.cluster.device.name}, and what is measured here holds for {device.name}"])
    live = claim_device(0)
    if live.type == "cpu":
        warn(["on a CPU launching and computing are one: these constants hold for models as narrow as this one"])
    try:
        found = measure_host(subject, _short(models, document, job), num_layers, live)
    except RuntimeError as failure:
        if not is_out_of_device_memory(failure):
            raise
        raise ProfileError(
            f"model file {path}: {len(num_layers) + 1} models of one to {1 + MORE_LAYERS} layers a modality do not fit "
            "on this device; give a config.json with a smaller vocabulary or smaller widths: launching takes as long"
        ) from None
    source = _source(software_versions())
    calibration = _calibration(job, device.name, found, source)
    target = device_folder(arguments.out, device.name) / FILE
    write_measurements(target, calibration_document(calibration))
    for name, times in found.items():
        forward, backward = times.forward_ms, times.backward_ms
        if forward.mad_ms > _SPREAD_FRACTION * forward.median_ms:
            warn([f"launches of {name} spread by {forward.mad_ms:.2g} ms: repeat when this machine is idle"])
        say(
            f"a layer of {name} takes {forward.median_ms:.4g} ms ± {forward.mad_ms:.2g} to launch in forward and "
            f"{backward.median_ms:.4g} ms ± {backward.mad_ms:.2g} in backward ({forward.num_samples} samples)"
        )
    say("name the file in a job: `calibration: <its path from the job's folder>`")
    print_line(str(target))
    return 0


def _nothing_frozen(job: Job) -> dict[str, bool]:
    """As Model.with_freeze takes it: a frozen layer has no backward to time."""
    towers = {encoder.name: False for encoder in job.model.encoders}
    return towers | {f"{name}_projector": False for name in towers} | {"text": False}


def _short(models: LiveModels, document: Mapping[str, Any], job: Job) -> Any:
    """The job's workload with one sample as short as its images allow."""
    from mm_autoparallel.profilers.host_constants import SAMPLE_TOKENS

    workload = models.scale_workload(document, job.workload, SAMPLE_TOKENS)
    least = workload.image_tokens_per_sample + SAMPLE_TOKENS // 2
    return workload.model_copy(update={"seq_length": max(workload.seq_length, least)})


def _source(versions: Mapping[str, str]) -> str:
    from mm_autoparallel.model.profiles.figures import MEASURED

    return f"{MEASURED} with {', '.join(f'{name} {version}' for name, version in sorted(versions.items()))}"


def _calibration(job: Job, device_name: str, found: Mapping[str, HostTimes], source: str) -> Calibration:
    """What the job's times stand on, or the assumed figures of the device that was measured, with the constants."""
    from mm_autoparallel.model.job.stacks import software_of
    from mm_autoparallel.model.profiles.calibration import assume_calibration, calibration_of, with_measured

    same = device_name == job.cluster.device.name
    base = calibration_of(job) if same else assume_calibration(device_name, software_of(job.workload.stack))
    figures: dict[str, float] = {}
    for name, times in found.items():
        forward_ms, factor = times.forward_ms.median_ms, times.backward_factor
        if not forward_ms or not factor:
            raise ProfileError(
                f"a layer of {name} took no time to launch ({forward_ms:g} ms forward, {times.backward_ms.median_ms:g} "
                "ms backward): other work on this machine drowned it; repeat when it is idle"
            )
        if name == "text":
            figures |= {"layer_launch_ms": forward_ms, "launch_backward_factor": factor}
            if job.model.text.layers.experts:
                figures["expert_launch_ms"] = forward_ms
        else:
            rotary = next(encoder.layers.rotary for encoder in job.model.encoders if encoder.name == name)
            figures[f"{'rotary_' if rotary else ''}vision_launch_ms"] = forward_ms
            figures["vision_launch_backward_factor"] = factor
    return with_measured(base, figures, source, f"host-{device_name}", "mm-autoparallel profile JOB --host-constants")
