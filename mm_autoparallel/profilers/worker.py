"""Profile a list of configurations inside one child process, and write a file for each as soon as it is measured.

What is there already is skipped, so that a killed run continues. A configuration that runs out of memory is recorded as
such, and the rest goes on.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mm_autoparallel.errors import ProfileError
from mm_autoparallel.model.blocks.chain import Block
from mm_autoparallel.model.job.job import Job
from mm_autoparallel.model.profiles import store
from mm_autoparallel.model.profiles.calibration import calibration_of
from mm_autoparallel.model.profiles.collectives import Group, form_group
from mm_autoparallel.model.profiles.network import read_network
from mm_autoparallel.model.profiles.operators.base import OperatorBase, Sampled
from mm_autoparallel.profilers.blocks import Blocks, Figures, LiveModel, OnRound, Price, measure_optimizer
from mm_autoparallel.profilers.clock import Effort
from mm_autoparallel.profilers.device import claim_device, platform_at_hand, software_versions
from mm_autoparallel.profilers.kinds import FEW_LAYERS, MANY_LAYERS, check_parts, find_kinds, live_layout
from mm_autoparallel.profilers.layout import find_layout, layers_of
from mm_autoparallel.profilers.lockstep import Lockstep, PeerFailed, PeersStopped, join_ranks
from mm_autoparallel.profilers.observe import observe, owned_parameters
from mm_autoparallel.profilers.shard import Collective, fake_mesh
from mm_autoparallel.profilers.split import find_split
from mm_autoparallel.profilers.split_check import check_split
from mm_autoparallel.profilers.subject import Build, Subject
from mm_autoparallel.profilers.torch_releases import (
    DeviceMesh,
    device_module,
    is_out_of_device_memory,
    tensor_mesh,
)

Arrangement = Literal["group", "shard"]

BLOCKS_EFFORT = Effort(budget_s=6.0, min_rounds=7)
OPTIMIZER_EFFORT = Effort(budget_s=0.6, min_rounds=3, max_rounds=20, max_warm_up=2)

_OUT_OF_MEMORY, _FAILED = 1, 2


@dataclass(frozen=True)
class Configuration:
    """How one micro-batch of `mbs` samples is divided: tensor and context parallel sizes."""

    tp: int
    mbs: int
    cp: int = 1

    def __str__(self) -> str:
        return f"TP {self.tp} MBS {self.mbs}"


class _OutOfMemory(Exception):
    """This rank or another one ran out of memory; all know it."""


def profile(
    subject: Subject,
    job: Job,
    configurations: Sequence[store.Division],
    folder: Path,
    command: str,
    arrangement: Arrangement,
    on_progress: Callable[[str], None],
    effort: Effort = BLOCKS_EFFORT,
    on_round: OnRound | None = None,
    operators: Path | None = None,
) -> None:
    """Measures the blocks of `job` in each of `configurations` that has no file in `folder` yet; rank 0 writes it.

    Runs in every rank of an initialised process group, or in one process without. arrangement `group`: tensor parallel
    groups of real ranks, side by side. `shard`: each rank measures what the first of tp ranks would hold, and the
    group's collectives are added by formula, from a measured network where `folder` lies beside its file; the default
    process group is gone afterwards. command: what a person types to measure again. on_progress: told a line per block
    in rank 0. on_round: see Blocks.measure. operators: the base
    that the times of single operators are added to, where a device tells them (Blocks.clock_operators).
    Raises ProfileError where the model cannot be split or does not fit the job, where its loss is no number, where a
    file in `folder` is stale; PeerFailed in every other rank where one failed.
    """
    for configuration in configurations:
        if configuration.cp != 1:
            raise ProfileError(
                f"CP {configuration.cp} is asked for, and blocks are measured with CP 1 alone; leave CP out of what is "
                "profiled"
            )
    device = claim_device(int(os.environ.get("LOCAL_RANK", "0")))
    lockstep = join_ranks()
    if arrangement == "shard" and dist.is_initialized():
        dist.destroy_process_group()
    run = _Run(subject, job, folder, command, arrangement, on_progress, device, lockstep, effort, on_round)
    run.operators = operators
    missing = run.find_missing(configurations)
    for tp, group in groupby(sorted(missing, key=lambda one: (one.tp, one.mbs)), key=lambda one: one.tp):
        with run.open_mesh(tp) as mesh:
            run.profile_group(list(group), mesh)


class _Run:
    """What one call of `profile` knows throughout. operators: see there."""

    operators: Path | None = None

    def __init__(
        self,
        subject: Subject,
        job: Job,
        folder: Path,
        command: str,
        arrangement: Arrangement,
        on_progress: Callable[[str], None],
        device: torch.device,
        lockstep: Lockstep,
        effort: Effort,
        on_round: OnRound | None,
    ) -> None:
        self._effort, self._on_round = effort, on_round
        self._subject, self._job, self._folder, self._arrangement = subject, job, folder, arrangement
        self._on_progress, self._device, self._lockstep = on_progress, device, lockstep
        self._kinds = find_kinds(job, MANY_LAYERS if device.type == "cpu" else FEW_LAYERS, subject.lacks)
        software = software_versions()
        self._manifest = store.make_manifest(job.model, job.workload, job.cluster.device.name, software, command)
        self._checked = self._told_failure = False

    def find_missing(self, configurations: Sequence[store.Division]) -> list[Configuration]:
        """Those that rank 0 has no file of."""
        with self._together():
            missing = store.missing_configurations(self._folder, self._manifest, configurations, self._job.workload)
            first = self._lockstep.rank == 0
            return [
                Configuration(one.tp, one.mbs)
                for one in configurations
                if self._lockstep.largest(float(first and one in missing))
            ]

    @contextlib.contextmanager
    def open_mesh(self, tp: int) -> Iterator[DeviceMesh | None]:
        """The ranks that a layer is divided among; None where it is whole."""
        if tp == 1:
            yield None
        elif self._arrangement == "shard":
            with fake_mesh(tp, self._device.type) as mesh:
                yield mesh
        else:
            num_ranks = self._lockstep.num_ranks
            if num_ranks % tp:
                raise ProfileError(
                    f"TP {tp} is to be measured in groups of {tp} ranks, and there are {num_ranks}; start a multiple "
                    f'of {tp}, or measure it as a "shard"'
                )
            yield tensor_mesh(self._device.type, tp)

    def profile_group(self, configurations: Sequence[Configuration], mesh: DeviceMesh | None) -> None:
        """All of one tensor parallel size, with one live model as long as memory lasts."""
        live: LiveModel | None = None
        optimizer_ms: dict[str, store.Timing] | None = None
        for configuration in configurations:
            try:
                with self._together(configuration):
                    if live is None:
                        live = self._build(configuration, mesh)
                    figures = self._measure(live, configuration)
                    optimizer_ms = self._time_optimizers(live) if optimizer_ms is None else optimizer_ms
                    entries = [self._entry(configuration, *found, optimizer_ms) for found in figures.items()]
                    if self._lockstep.rank == 0:
                        self._write(configuration, entries)
                    self._lockstep.wait()
            except _OutOfMemory:
                live = None
                self._tell(f"{configuration}: out of memory")
            _collect_garbage(self._device)

    def _build(self, configuration: Configuration, mesh: DeviceMesh | None) -> LiveModel:
        model = self._subject.build_model(Build(self._kinds.depth, self._device, mesh))
        layout = live_layout(self._kinds, find_layout(model, self._subject.layout))
        step = self._step(model, configuration)
        split = find_split(model, layout, step)
        layers = layers_of(model, layout)
        check_parts(self._kinds, split.parts, layers)
        # in a group that is not there, collectives give no true numbers to compare
        if not self._checked and (mesh is None or self._arrangement == "group"):
            observe(model, layout, split, step, self._device)
            check_split(model, layout, step)
            self._checked = True
        return LiveModel(model, layout, split, layers, self._device)

    def _step(self, model: nn.Module, configuration: Configuration) -> Callable[[], Tensor]:
        return lambda: self._subject.forward_step(model, configuration.mbs, self._job.workload)

    def _measure(self, live: LiveModel, configuration: Configuration) -> dict[str, Figures]:
        step = self._step(live.model, configuration)
        real = configuration.tp == 1 or self._arrangement == "group"
        seen = observe(live.model, live.layout, live.split, step, self._device, check=real)
        blocks = Blocks(live, self._kinds, step, seen, self._lockstep)
        figures = blocks.measure(
            self._effort, configuration.tp, None if real else self._price(configuration.tp), self._on_round
        )
        if self.operators is not None:
            self._add_operators(self.operators, blocks.clock_operators())
        for kind, found in figures.items():
            backward_ms = found.backward_input_ms.median_ms + found.backward_weight_ms.median_ms
            self._tell(f"{configuration} {kind}: {found.forward_ms.median_ms:.3g} ms + {backward_ms:.3g} ms")
        return figures

    def _add_operators(self, path: Path, found: Sequence[Sampled]) -> None:
        if self._lockstep.rank == 0 and found:
            with OperatorBase.open_to_add(path) as base:
                base.add(platform_at_hand(self._job.cluster.device.name), "block profile", found)

    def _price(self, tp: int) -> Price:
        """What collectives take among `tp` neighbouring ranks, measured where the network was, else by formula."""
        path = self._folder.parent / "network.json"
        name = self._job.cluster.device.name
        found = read_network([path], name) if path.exists() else None
        network = found[1] if found else None
        cluster = calibration_of(self._job).reached(self._job.cluster)
        group = form_group(cluster.levels, tp, 1, network)
        return lambda collectives: sum(_time_ms(one, group) for one in collectives)

    def _time_optimizers(self, live: LiveModel) -> dict[str, store.Timing]:
        """Of one block of each kind that trains; nothing where its state does not fit beside the model."""
        owned = owned_parameters(live.split.parts)
        found: dict[str, store.Timing] = {}

        def time(block: Block, more: Sequence[nn.Parameter], fewer: Sequence[nn.Parameter], num_blocks: int) -> None:
            timing = measure_optimizer(
                self._subject.build_optimizer, more, fewer, num_blocks, self._device, OPTIMIZER_EFFORT, self._lockstep
            )
            if timing:
                found[block.kind] = timing

        try:
            with self._together():
                for layer_kind in self._kinds.layers:
                    modules = [live.layers[layer_kind.block.modality][index] for index in layer_kind.indices]
                    more = [parameter for module in modules for parameter in module.parameters()]
                    half = len(modules) // 2
                    fewer = [parameter for module in modules[:half] for parameter in module.parameters()]
                    time(layer_kind.block, more, fewer, len(modules) - half)
                for end in self._kinds.ends:
                    time(end.block, owned[end.part_name], [], 1)
        except _OutOfMemory:
            return {}
        return found

    def _entry(
        self, configuration: Configuration, kind: str, figures: Figures, optimizer_ms: dict[str, store.Timing]
    ) -> store.ProfileEntry:
        return self._blank_entry(configuration, kind).model_copy(
            update={**vars(figures), "optimizer_ms": optimizer_ms.get(kind), "out_of_memory": False}
        )

    def _blank_entry(self, configuration: Configuration, kind: str) -> store.ProfileEntry:
        """The entry of a block that was not measured for want of memory."""
        tokens = self._kinds.tokens[next(block.modality for block in self._kinds.blocks if block.kind == kind)]
        return store.ProfileEntry(
            kind=kind,
            tp=configuration.tp,
            mbs=configuration.mbs,
            tokens=tokens.layer_tokens,
            spans=tokens.num_spans,
            arrangement=self._arrangement,
            out_of_memory=True,
        )

    def _write(self, configuration: Configuration, entries: Sequence[store.ProfileEntry]) -> None:
        name = store.file_name(configuration.tp, configuration.cp, configuration.mbs, self._job.workload)
        store.write_profile(self._folder / name, self._manifest, entries)

    def _tell(self, line: str) -> None:
        if self._lockstep.rank == 0:
            self._on_progress(line)

    @contextlib.contextmanager
    def _together(self, configuration: Configuration | None = None) -> Iterator[None]:
        """What happens here happens to all ranks.

        Raises _OutOfMemory in all of them where one has no memory left, which is recorded of `configuration`, and
        PeerFailed in the others where one fails otherwise.
        """
        try:
            yield
            return
        except PeersStopped as stopped:
            reasons = stopped.reasons
        except (_OutOfMemory, PeerFailed):
            raise
        except Exception as failure:
            code = _OUT_OF_MEMORY if is_out_of_memory(failure) else _FAILED
            if code == _OUT_OF_MEMORY and configuration:
                self._record_out_of_memory(configuration)  # first of all: the others may wait for this rank elsewhere
            if not self._told_failure:
                self._told_failure = code == _FAILED
                with contextlib.suppress(RuntimeError):  # the others may be gone; this failure is the one to tell
                    self._lockstep.stop(code)
            if code == _FAILED:
                raise
            reasons = {self._lockstep.rank: code}
        failed = [rank for rank, reason in reasons.items() if reason == _FAILED]
        if failed:
            raise PeerFailed(f"profiling stopped because rank {failed[0]} failed, which says why") from None
        if configuration and self._lockstep.rank == 0:
            self._record_out_of_memory(configuration)
        raise _OutOfMemory from None

    def _record_out_of_memory(self, configuration: Configuration) -> None:
        self._write(configuration, [self._blank_entry(configuration, block.kind) for block in self._kinds.blocks])


def is_out_of_memory(failure: BaseException) -> bool:
    """Whether an allocator said no: an accelerator's, or the default one on CPU, which has no error of its own."""
    if is_out_of_device_memory(failure) or isinstance(failure, MemoryError):
        return True
    text = str(failure)
    return isinstance(failure, RuntimeError) and ("can't allocate memory" in text or "out of memory" in text)


def _time_ms(collective: Collective, group: Group) -> float:
    if collective.operation == "all_reduce":
        return group.all_reduce_ms(collective.size_bytes)
    if collective.operation == "reduce_scatter":
        return group.reduce_scatter_ms(collective.size_bytes)
    # an all-to-all moves as many bytes past each rank as an all-gather of its size
    return group.all_gather_ms(collective.size_bytes)


def _collect_garbage(device: torch.device) -> None:
    gc.collect()
    if device.type != "cpu":
        device_module(device.type).empty_cache()
