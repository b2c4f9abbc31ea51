"""A config.json whose class nobody described, built, taken apart and traced: the one way there, for all who ask."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mm_autoparallel.errors import JobError, ProfileError
from mm_autoparallel.model.job.traced_model import TracedModel
from mm_autoparallel.model.job.workload import Workload
from mm_autoparallel.model.profiles.traced import is_traced, trace_origin, trace_path, write_trace
from mm_autoparallel.profilers.device import software_versions
from mm_autoparallel.profilers.huggingface_classes import build_class
from mm_autoparallel.profilers.trace.anatomy import find_anatomy
from mm_autoparallel.profilers.trace.generic import Sizes, describe_model, freeze_as, trace_parts

_DTYPES = {2.0: torch.bfloat16, 4.0: torch.float32}


class Undescribed:
    """The live class of a config.json without memory, and the model that it is.

    Raises ProfileError where transformers cannot build it, or where the structure is missing that dividing it needs.
    """

    def __init__(
        self, document: Mapping[str, Any], path: Path, workload: Workload, name: str, freeze: Mapping[str, bool]
    ) -> None:
        if workload.weight_bytes not in _DTYPES:
            raise ProfileError(
                f"workload.weight_bytes is {workload.weight_bytes:g}; a model is traced with 2 (bf16) or 4 (fp32) "
                "bytes a weight"
            )
        dtype = _DTYPES[workload.weight_bytes]
        attention = "sdpa" if workload.attention == "flash" else "eager"
        self._live, self._class = build_class(document, path, dtype, attention)
        try:
            self._anatomy = find_anatomy(self._live, dtype)
            own = describe_model(self._live, self._class, name, self._anatomy)
            self.model: TracedModel = own.with_freeze(freeze)
        except ProfileError as failure:
            raise ProfileError(f"model file {path}: {self._class} cannot be taken apart: {failure}") from None
        except JobError as failure:
            raise JobError(f"model file {path}: {failure}") from None
        self._path = path
        freeze_as(self._live, self.model, self._anatomy)

    def count_real_parameters(self) -> int:
        """Of the live class, each once."""
        return sum(parameter.numel() for parameter in self._live.parameters())

    def write_traces(self, folder: Path, mbs: int, workload: Workload, command: str, recompute: bool) -> Path:
        """The file in `folder` of micro-batches of `mbs` samples of `workload`; what is there already is kept."""
        path = trace_path(folder, 1, mbs, False, workload)
        origin = trace_origin(self.model, workload, f"transformers {self._class}", software_versions(), command)
        if is_traced(path, origin, recompute):
            return path
        try:
            entries = trace_parts(self._live, self.model, self._anatomy, Sizes(mbs, workload), recompute)
        except ProfileError as failure:
            raise ProfileError(f"model file {self._path}: {failure}") from None
        write_trace(path, origin, entries)
        return path
